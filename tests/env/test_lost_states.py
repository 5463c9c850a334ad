"""The env loop and policies with memory: resets are told, and lost states are no end."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TESTS, Pool

from zmqrl import config
from zmqrl.env.worker import EnvWorker
from zmqrl.errors import StateLost
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


@pytest.mark.slow
def test_the_module_of_the_docs_plays_alike_wherever_its_states_are(pool: Pool, folder: Path) -> None:
    page = (TESTS.parent / "docs" / "policies.md").read_text()
    code = page.split("## Policies with memory")[1].split("```python\n")[1].split("```")[0]
    (folder / "recurrent.py").write_text(f"import torch\n\ntorch.manual_seed(3)\n{code}")
    lengths = []
    for rank, affinity in enumerate([STICKY, "rollout.affinity=none"]):
        if rank:
            pool.kill("broker")
            pool.kill("rollout-0")
        pool.start_broker(affinity)
        policy = f"--policy={folder}/recurrent.py:Recurrent"
        pool.launcher.start("rollout-0", ["start-rollout-worker", *pool.overrides, policy, affinity])
        worker = env_worker(
            pool,
            "env.id=CartPole-v1",
            "env.eval={total_num_envs: 3, rollout_epoch: 2, use_fixed_reset_state_ids: true}",
        )
        assert worker.run()
        lengths.append({(e.env, e.number): e.length for e in worker.reporter.episodes})
    assert lengths[0] == lengths[1]
    assert len(lengths[0]) == 6


def test_states_that_are_lost_all_the_time_end_the_worker(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the states of one request only, and two stages that take it from each other."""
    monkeypatch.setattr("zmqrl.env.loop._MOST_LOST", 5)
    overrides = (STICKY, "rollout.state_mb=1")
    pool.start_broker()
    pool.start_worker(0, "Counting", overrides=overrides, width=30_000)
    worker = env_worker(
        pool,
        SIM.replace(":make", ":shows_x"),
        "env.eval={total_num_envs: 4, rollout_epoch: 1}",
        "env.pipeline_stages=2",
    )
    with pytest.raises(StateLost):
        worker.run()
    assert worker.report.totals.state_lost == 5 * 2
    assert any("fill rollout.state_mb" in line for line in pool.lines)
