"""What a learner finds wrong with an algorithm of the user's own before it learns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqrl import config
from zmqrl.errors import ConfigError, RunFailed
from zmqrl.learner.algorithm import Update
from zmqrl.learner.worker import LearnerWorker
from zmqrl.process import StopSignal

torch = pytest.importorskip("torch")


@dataclass
class Own:
    """An algorithm; its state is what the test says."""

    state: Any
    on_policy: bool = False

    def __post_init__(self) -> None:
        self.actor = torch.nn.Linear(1, 1)

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> Any:
        return self.state


@pytest.fixture
def worker(folder: Path) -> Iterator[LearnerWorker]:
    overrides = [f"actor.endpoint=ipc://{folder}/learner", "algorithm.factory=own:Own"]
    worker = LearnerWorker(config.load(None, overrides), StopSignal())
    yield worker
    worker._port.close()


@pytest.mark.parametrize("state", [{"mean": np.float64(0.5)}, {"buffer": [np.zeros(3)]}, {1: Own}])
def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_start(
    worker: LearnerWorker, state: Any
) -> None:
    with pytest.raises(ConfigError, match=r"own:Own cannot be saved: state_dict\(\).* is a "):
        worker._check(Own(state))
    worker._check(Own({"weights": torch.zeros(2), "step": 3}))


def test_an_algorithm_that_lacks_something_is_refused_at_the_start(worker: LearnerWorker) -> None:
    algorithm = Own({})
    del algorithm.on_policy
    del Own.on_policy
    try:
        with pytest.raises(ConfigError, match=r"own:Own: .* has no attribute 'on_policy'"):
            worker._check(algorithm)
    finally:
        Own.on_policy = False


def test_updates_may_be_any_int_and_what_is_none_is_named(worker: LearnerWorker) -> None:
    worker._count(Own({}), Update(updates=np.int64(4), ends_step=False))
    worker._count(Own({}), Update(updates=torch.tensor(2), ends_step=False))
    assert type(worker._updates) is int
    assert worker._updates == 6
    for wrong in ("an update", Update(updates=1.5, ends_step=False)):  # type: ignore[arg-type]
        with pytest.raises(RunFailed, match=r"update\(\) returned"):
            worker._count(Own({}), wrong)  # type: ignore[arg-type]
