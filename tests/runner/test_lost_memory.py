"""Runs whose rollout workers are killed with the states of a policy with memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TESTS
from runner.evaluation import BOTH_MODES, SIM, Run, frontend, status_client

from zmqrl.broker.status import StatusClient

REMEMBERS = f"rollout.policy={TESTS / 'policies.py'}:Remembers"


broker = pytest.fixture(status_client)


@BOTH_MODES
@pytest.mark.parametrize("affinity", ["sticky", pytest.param("none", marks=pytest.mark.slow)])
def test_an_evaluation_is_complete_although_a_worker_is_killed_with_its_states(
    folder: Path, broker: StatusClient, affinity: str, decoupled: bool
) -> None:
    run = Run(
        folder,
        f"{SIM}:make",
        frontend(folder),
        f"rollout.affinity={affinity}",
        "rollout.policy_kwargs.seconds=0.01",
        "env.kwargs.length=40",
        "env.eval={total_num_envs: 4, rollout_epoch: 3, use_fixed_reset_state_ids: true}",
        "cluster.component_placement={env: 0-1, rollout: 0-1}",
        decoupled=decoupled,
        policy=REMEMBERS,
    )

    # Of each env worker an episode is over, and the next one is under way.
    run.wait_for_answers(broker, 100, 60)
    run.rollout(0).kill()
    assert run.wait() == 0, run.text()
    result = run.result()
    assert result["eval/num_trajectories"] == 12
    assert result["eval/missing_trajectories"] == 0
    assert result["eval/episode_len"] == 40
    # The policy raises where a state is not that of its env, which would end the run.
    if affinity == "none":
        assert "env/state_lost" not in result
        assert result["broker/errors"] == 0
    else:
        # The envs of one of both workers began again; those of the other did not. Fixed ranks move
        # back to the worker that is started again, where those envs begin once more.
        times = result["broker/errors"]
        assert times == 1 or (times == 2 and not decoupled)
        assert result["env/state_lost"] == 2 * times
        assert "its episodes begin again" in run.text()
