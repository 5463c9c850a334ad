"""A ManiSkill task that needs no renderer: a box without a robot falls for `max_episode_steps`."""

from __future__ import annotations

from typing import Any

import numpy as np
import sapien
import torch
from gymnasium import spaces
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.registration import register_env
from mani_skill.utils.structs import Pose


@register_env("Drop-v1", max_episode_steps=6)
class Drop(BaseEnv):
    """Ends when the box is low, or by the time limit."""

    SUPPORTED_ROBOTS = ("none",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, robot_uids="none", **kwargs)

    @property
    def single_action_space(self) -> spaces.Box:
        return spaces.Box(-1, 1, (2,), np.float32)

    def _load_scene(self, options: dict[str, Any]) -> None:
        builder = self.scene.create_actor_builder()
        builder.add_box_collision(half_size=[0.02] * 3)
        builder.initial_pose = sapien.Pose([0, 0, 1.0])
        self.box = builder.build("box")

    def _load_lighting(self, options: dict[str, Any]) -> None:
        pass

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        place = torch.rand(len(env_idx), 3)
        place[:, 2] = 0.9
        self.box.set_pose(Pose.create_from_pq(place))

    def _step_action(self, action: Any) -> None:
        assert isinstance(action, torch.Tensor)
        self.scene.step()

    def evaluate(self) -> dict[str, torch.Tensor]:
        return {"success": self.box.pose.p[:, 2] < 0.1}

    def _get_obs_agent(self) -> dict[str, Any]:
        return {}

    def _get_obs_extra(self, info: Any) -> dict[str, torch.Tensor]:
        return {"place": self.box.pose.p}

    def get_state_dict(self) -> Any:
        return self.scene.get_sim_state()

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: Any) -> torch.Tensor:
        return self.box.pose.p[:, 2]
