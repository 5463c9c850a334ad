"""ManiSkill, whose simulators step many rows of tensors."""

from __future__ import annotations

import pytest
from conftest import Pool
from env.test_worker import env_worker

from zmqrl.errors import EnvironmentFailure

pytest.importorskip("mani_skill", reason="ManiSkill is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # it and its packages warn of much
    pytest.mark.timeout(300),
]


def test_pick_cube_plays_its_episodes(pool: Pool) -> None:
    pool.start(policy="Noop", size=8)
    try:
        worker = env_worker(
            pool,
            "env.id=mani_skill.envs:PickCube-v1",
            "env.vectorization=batched",
            "env.kwargs={obs_mode: state, render_backend: none}",
            "env.eval={total_num_envs: 1, rollout_epoch: 2}",
        )
    except EnvironmentFailure as error:
        if "rendering device" in str(error) or "vk::" in str(error):
            pytest.skip(f"there is no Vulkan device: {error}")
        raise
    assert worker.run()
    assert [episode.length for episode in worker.reporter.episodes] == [50, 50]
    assert all(episode.success_once is False for episode in worker.reporter.episodes)


def test_a_task_of_ones_own_starts_where_the_seeds_say(pool: Pool) -> None:
    pool.start(policy="Noop", size=2)
    returns = []
    for _ in range(2):
        worker = env_worker(
            pool,
            "env.id=maniskill_drop:Drop-v1",
            "env.vectorization=batched",
            "env.kwargs={obs_mode: state, render_backend: none, sim_backend: physx_cpu}",
            "env.eval={total_num_envs: 1, rollout_epoch: 3, use_fixed_reset_state_ids: true, seed: 4}",
        )
        assert worker.run()
        assert [episode.length for episode in worker.reporter.episodes] == [6, 6, 6]
        assert all(episode.success_at_end is False for episode in worker.reporter.episodes)
        returns.append([episode.total_return for episode in worker.reporter.episodes])
    assert returns[0] == returns[1]
