"""Every process comes to its end: on a signal, and after an exception whatever it has left open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TESTS, Pool, wait_for

OPEN = {
    "a client with requests unsent": """
from zmqrl import PolicyClient
client = PolicyClient(endpoint, timeout=100)
for _ in range(1000):
    client.submit({"x": np.zeros((1, 1000))})
""",
    "a client that records": """
from gymnasium.spaces import Discrete
from zmqrl import PolicyClient
client = PolicyClient(endpoint, learner=other, action_space=Discrete(2))
try:
    client.infer({"x": np.zeros((1, 1000))}, timeout=0.2)
except Exception as error:
    print(error)
""",
    "a recording with trajectories unsent": """
from gymnasium.spaces import Discrete
from zmqrl.recording import Recording
recording = Recording(endpoint, "env-0", 1, steps=1, action_space=Discrete(2))
for _ in range(50):
    recording.asked(0, {"x": np.zeros((1, 100_000))})
    recording.answered(0, {"actions": np.zeros(1, int)}, 1)
    recording.outcome(0, [0.0], [False], [False])
""",
    "reports unsent": """
from zmqrl.telemetry.report import Report, Reporter
reporter = Reporter(endpoint)
for _ in range(900):
    reporter.send(Report("env-0", 0))
""",
    "a status client": """
from zmqrl.broker.status import StatusClient
client = StatusClient(endpoint)
client.ask(0.1)
""",
    "an eval worker's orders": """
from zmqrl.env.orders import Orders
orders = Orders(endpoint, "eval-0")
orders.next(0.1)
""",
    "a learner's port": """
from zmqrl.learner.port import Learner
port = Learner(endpoint)
port.publish({"w": np.zeros(1000)})
""",
    "a download of weights": """
from zmqrl.rollout.download import WeightsDownload
download = WeightsDownload(endpoint, "rollout-0")
""",
    "a rollout worker": """
from zmqrl.rollout.worker import RolloutWorker
worker = RolloutWorker(None, endpoint, name="rollout-0")
""",
    "a broker": """
from zmqrl.broker.pool import Options
from zmqrl.broker.server import BrokerServer
server = BrokerServer(endpoint, other, Options())
""",
}


@pytest.mark.parametrize("name", OPEN)
def test_a_script_that_ends_in_an_exception_exits_whatever_it_has_left_open(
    name: str, folder: Path
) -> None:
    script = (
        f"import numpy as np\nendpoint, other = 'ipc://{folder}/a', 'ipc://{folder}/b'\n{OPEN[name]}\n"
        "raise KeyError('the mistake of a user')\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40)
    assert done.returncode == 1, done.stderr
    assert "the mistake of a user" in done.stderr
    assert time.monotonic() - begin < 20


def idle(folder: Path) -> dict[str, tuple[list[str], str]]:
    """By part: how it is started where nobody else is, and what it says when it is up."""
    ends = [f"broker.{leg}=ipc://{folder}/{leg}" for leg in ("frontend", "backend")]
    learner = [f"actor.endpoint=ipc://{folder}/learner", "algorithm.name=ppo"]
    policy = f"--policy={TESTS / 'policies.py'}:Echo"
    env = ["env.id=CartPole-v1", "env.request_timeout_s=100", "--rank=0"]
    return {
        "broker": (["start-broker", *ends], "serving"),
        "rollout worker": (["start-rollout-worker", *ends, policy, "--rank=0"], "no broker answers"),
        "learner": (["start-learner", *ends, *learner, "env.id=CartPole-v1"], "listens"),
        "env worker": (["start-env-worker", *ends, "--mode=eval", *env], "waiting for actions"),
        "training env worker": (["start-env-worker", *ends, *learner, "--mode=train", *env], "steps"),
    }


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
@pytest.mark.parametrize("part", idle(Path()))
def test_a_part_that_waits_for_the_others_ends_at_a_signal(
    pool: Pool, folder: Path, part: str, number: signal.Signals
) -> None:
    arguments, sign = idle(folder)[part]
    pool.launcher.start(part, arguments)
    wait_for(lambda: any(sign in line for line in pool.lines), f"{sign!r} in {pool.lines}", 40)
    process = pool.launcher.children[part].process
    process.send_signal(number)
    assert process.wait(10) == 0, pool.lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_env_worker_whose_whole_group_gets_a_signal_in_a_step_ends_in_order(
    pool: Pool, number: signal.Signals
) -> None:
    """As from a terminal, or from a service manager: its simulators' processes get it too."""
    pool.start(policy="Balance")
    simulator = [f"env.factory={TESTS / 'sims.py'}:Sleepy", "env.vectorization=async"]
    placement = ["cluster.component_placement.env=0-0", "env.eval.total_num_envs=2"]
    overrides = [*pool.overrides, *simulator, *placement]
    pool.launcher.start("eval-0", ["start-env-worker", *overrides, "--mode=eval", "--rank=0"])
    wait_for(lambda: pool.counters()["answered"] >= 2, f"steps: {pool.lines}")
    os.killpg(pool.pid("eval-0"), number)
    assert pool.wait_for_exit("eval-0") == 0, pool.lines
    assert not any("failed in step" in line for line in pool.lines if "was stopped in" not in line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_busy_broker_and_a_busy_worker_end_at_a_signal(pool: Pool, number: signal.Signals) -> None:
    pool.start(seconds=0.5)
    requests = [pool.client(timeout=30).submit({"x": [[1.0]] * 2}) for _ in range(4)]
    wait_for(lambda: pool.status()["workers"][0]["state"] == "busy", "the worker to compute")
    for name in ("rollout-0", "broker"):
        os.kill(pool.pid(name), number)
    for name in ("rollout-0", "broker"):
        assert pool.launcher.children[name].process.wait(10) == 0, pool.lines
    for request in requests:
        request.cancel()
