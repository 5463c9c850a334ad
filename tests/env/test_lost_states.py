"""The env loop and policies with memory: resets are told, and lost states are no end."""

from __future__ import annotations

import pytest
from conftest import TESTS, Pool

from zmqrl import config
from zmqrl.env.worker import EnvWorker
from zmqrl.process import StopSignal

SIM = f"env.factory={TESTS / 'sims.py'}:make"
STICKY = "rollout.affinity=sticky"


def env_worker(pool: Pool, *overrides: str) -> EnvWorker:
    loaded = config.load(None, [*pool.overrides, "cluster.component_placement.env=0-0", *overrides])
    return EnvWorker(loaded, "eval", 0, StopSignal())


@pytest.mark.parametrize("autoreset", ["disabled", "next_step", "same_step"])
@pytest.mark.parametrize("affinity", [STICKY, "rollout.affinity=none"])
def test_a_policy_knows_in_every_autoreset_mode_when_episodes_begin(
    pool: Pool, autoreset: str, affinity: str
) -> None:
    """The policy counts the steps of each env, and raises where its count is not that of the env."""
    pool.start_broker(affinity)
    pool.start_worker(0, "Remembers", overrides=(affinity,))
    worker = env_worker(
        pool,
        SIM,
        "env.kwargs.length=5",
        "env.eval={total_num_envs: 4, rollout_epoch: 3}",
        f"env.autoreset_mode={autoreset}",
        "env.pipeline_stages=2",
    )
    assert worker.run()
    assert [e.length for e in worker.reporter.episodes] == [5] * 12
    assert worker.report.totals.state_lost == 0
    assert pool.counters()["errors"] == 0
