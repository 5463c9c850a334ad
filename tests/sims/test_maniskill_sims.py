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
