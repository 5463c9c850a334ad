"""Everything that waits ends at the time that it was given, and says in which error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Pool
from gymnasium.spaces import Discrete

from zmqrl import PolicyClient
from zmqrl.broker.status import StatusClient
from zmqrl.env.orders import Orders
from zmqrl.errors import BrokerUnreachable, LearnerTimeout, LearnerUnreachable, PolicyTimeout
from zmqrl.learner.gate import Gate
from zmqrl.learner.port import Learner
from zmqrl.recording import Recording
from zmqrl.telemetry.report import Collector

LIMIT = 0.4
OBSERVATION = {"x": np.ones((1, 3))}


@contextmanager
def takes_its_time() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert LIMIT - 0.01 <= time.monotonic() - begin < LIMIT + 5


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.infer(OBSERVATION, timeout=LIMIT),
        lambda client: client.infer_one({"x": np.ones(3)}, timeout=LIMIT),
        lambda client: client.submit(OBSERVATION, timeout=LIMIT).result(),
        lambda client: client.infer(OBSERVATION),
    ],
    ids=["infer", "infer_one", "submit", "of the client"],
)
@pytest.mark.parametrize("broker", [True, False], ids=["without a worker", "without a broker"])
def test_a_call_ends_at_its_time_limit(
    pool: Pool, call: Callable[[PolicyClient], Any], broker: bool
) -> None:
    if broker:
        pool.start(workers=0)
    client = pool.client(timeout=LIMIT)
    if broker:
        with pytest.raises(PolicyTimeout):  # by now it has heard of the broker
            client.infer(OBSERVATION, timeout=5)
    with takes_its_time(), pytest.raises(PolicyTimeout if broker else BrokerUnreachable):
        call(client)


def test_the_wait_for_a_pending_request_ends_at_its_time_limit(pool: Pool) -> None:
    pending = pool.start(workers=0).client().submit(OBSERVATION)
    with takes_its_time():
        assert not pending.wait(LIMIT)


class Shut(Gate):
    """Lets nothing begin."""

    def may_begin(self, progress: Any, env_steps: int) -> bool:
        return False


@pytest.mark.parametrize("listening", [True, False], ids=["shut", "away"])
def test_the_wait_for_a_learner_ends_at_the_time_limit_of_the_call(
    folder: Path, listening: bool
) -> None:
    learner = f"ipc://{folder}/learner"
    port = Learner(learner, gate=Shut()) if listening else None
    if port is not None:
        port.publish({"w": np.zeros(1)})
    client = PolicyClient(f"ipc://{folder}/f", learner=learner, action_space=Discrete(2))
    error = LearnerTimeout if listening else LearnerUnreachable
    if listening:
        with pytest.raises(error):
            client.infer(OBSERVATION, timeout=2)
    with takes_its_time(), pytest.raises(error):
        client.infer(OBSERVATION, timeout=LIMIT)
    client.close()
    if port is not None:
        port.close()


def test_a_goodbye_to_a_learner_that_is_away_ends_at_its_time_limit(folder: Path) -> None:
    recording = Recording(f"ipc://{folder}/l", "env-0", 1, steps=1, action_space=Discrete(2))
    for step in range(2):
        recording.asked(0, {"x": np.full((1, 3), float(step))})
        recording.answered(0, {"actions": np.zeros(1, int)}, 1)
        recording.outcome(0, [0.0], [False], [False])
    assert recording.unacknowledged == 1
    with takes_its_time():
        recording.close(LIMIT)


@pytest.mark.parametrize(
    ("make", "wait"),
    [
        (StatusClient, lambda client: client.ask(LIMIT)),
        (lambda endpoint: Orders(endpoint, "eval-0"), lambda orders: orders.next(LIMIT)),
        (Learner, lambda port: port.receive(LIMIT)),
        (Learner, lambda port: port.wait_for_spaces(LIMIT)),
        (Collector, lambda collector: collector.collect(LIMIT)),
    ],
    ids=["status", "orders", "trajectories", "spaces", "reports"],
)
def test_a_wait_for_what_does_not_come_ends_at_its_time_limit(
    folder: Path, make: Callable[[str], Any], wait: Callable[[Any], Any]
) -> None:
    waiting = make(f"ipc://{folder}/x")
    try:
        with takes_its_time():
            assert not wait(waiting)
    finally:
        waiting.close()
