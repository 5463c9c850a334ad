"""Whole trainings with an env worker that is ten times slower than the other."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from runner.training import COUNTING, Training

pytestmark = pytest.mark.timeout(200)

UNEVEN = [
    *COUNTING,
    "env.delay_sampler={type: constant, delay: 0.012, per_worker: {1: 10.0}}",
    "algorithm.kwargs.seconds=0.05",
]
"""Env worker 0 makes a trajectory of 16 env steps in 0.1 seconds, env worker 1 in 1; both
in more on a busy machine."""


def shares(metrics: dict[str, Any]) -> tuple[float, float]:
    fast, slow = metrics["train/share/env-0"], metrics["train/share/env-1"]
    assert fast + slow == pytest.approx(1.0)
    assert (metrics["train/share_max"], metrics["train/share_min"]) == (max(fast, slow), min(fast, slow))
    return fast, slow


@pytest.mark.slow
def test_the_share_of_each_env_worker_is_reported(folder: Path) -> None:
    run = Training(folder, *UNEVEN, "runner.max_env_steps=700")
    assert run.wait() == 0, run.text()
    fast, slow = shares(run.result())
    assert 3 < fast / slow < 15
    assert "train/share/env-0" in run.records()[-1]
    assert "max share: env-0" in run.text()
    assert "share of env-1" in run.text()


def test_a_fast_env_worker_has_no_more_than_the_cap_in_all_its_stages(folder: Path) -> None:
    run = Training(
        folder,
        *UNEVEN,
        "runner.max_env_steps=320",
        "algorithm.max_env_share=0.6",
        "env.pipeline_stages=2",
    )
    assert run.wait() == 0, run.text()
    fast, _ = shares(run.result())
    assert fast == pytest.approx(0.6, abs=0.08)


@pytest.mark.parametrize(
    ("workers", "share"),
    [(1, 0.5), (2, 0.6)],
    ids=["one barrier", "a barrier for each"],
)
@pytest.mark.slow
def test_in_normal_mode_a_barrier_makes_shares_equal_and_a_cap_is_for_those_at_several(
    folder: Path, workers: int, share: float
) -> None:
    run = Training(
        folder,
        *UNEVEN,
        f"cluster.component_placement={{env: 0-1, eval: 0, rollout: 0-{workers - 1}}}",
        "runner.max_env_steps=320",
        "algorithm.max_env_share=0.6",
        decoupled=False,
    )
    assert run.wait() == 0, run.text()
    fast, _ = shares(run.result())
    assert fast == pytest.approx(share, abs=0.08)


@pytest.mark.slow
def test_nobody_hangs_when_the_slow_env_worker_is_frozen(folder: Path) -> None:
    run = Training(folder, *UNEVEN, "algorithm.max_env_share=0.6")
    run.wait_for_record("env_steps", 150, 90)
    slow = run.part("start-env-worker", "--rank=1")
    slow.suspend()
    try:
        run.wait_for_record("env_steps", run.records()[-1]["env_steps"] + 300, 90)
        assert run.records()[-1]["train/share/env-0"] > 0.7
    finally:
        slow.resume()
    run.stop(signal.SIGTERM)
    run.wait()
