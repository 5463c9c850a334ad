"""Whole trainings with chunks of actions."""

from __future__ import annotations

from pathlib import Path

import pytest
from runner.training import SMALL, Training

CHUNKS = [
    "env.id=Pendulum-v1",
    "env.num_action_chunks=3",
    "env.clip_actions=true",
    "actor={global_batch_size: 16, model: {hidden_sizes: [16]}}",
]
SAC = ["algorithm={name: sac, updates_per_env_step: 0.25, update_epoch: 4}"]
PPO = ["algorithm={name: ppo, update_epoch: 2}"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [SAC, PPO], ids=["sac", "ppo"])
def test_a_training_in_chunks_runs_and_counts_steps_of_the_simulators(
    folder: Path, algorithm: list[str]
) -> None:
    end = "runner={max_env_steps: 900, val_check_interval: 5}"
    run = Training(folder, *algorithm, *CHUNKS, *SMALL, end)
    assert run.wait() == 0, run.text()
    result = run.result()
    names = ("received", "dropped", "rolled_back")
    assert result["trajectories_sent"] == sum(result[f"trajectories_{name}"] for name in names)
    assert result["trajectories_dropped"] == 0
    # Two envs in each trajectory, three chunks of each: 9 steps for the 8 that were asked for.
    assert 900 <= result["env_steps"] <= result["trajectories_received"] * 2 * 9
    assert result["env_steps"] > result["trajectories_received"] * 2 * 6
    assert result["eval/episode_len"] == 200
    assert result["eval/return"] < 0
    if algorithm is SAC:
        kept = result["train/replay_buffer/num_trajectories"]
        assert result["train/replay_buffer/total_samples"] == kept * 2 * 3
        assert result["achieved_updates_per_env_step"] == pytest.approx(0.25, abs=0.02)


@pytest.mark.slow
def test_chunks_of_a_discrete_action_end_the_training_with_the_reason(folder: Path) -> None:
    run = Training(folder, *PPO, *SMALL, "env.id=CartPole-v1", "env.num_action_chunks=2")
    assert run.wait() == 2, run.text()
    assert "ppo learns chunks of actions in a Box only" in run.text()
