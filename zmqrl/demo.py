"""The demo's policy: a rule, not a learned network."""

from __future__ import annotations

from typing import Any

import torch


class ReachPolicy(torch.nn.Module):
    """Steers the gripper of FetchReach straight to the goal.

    The action is the way from the gripper (`achieved_goal`) to the goal (`desired_goal`), times a gain,
    in the four numbers that Fetch takes: a displacement of the gripper in x, y and z, each in [-1, 1],
    and the opening of the fingers, which does not matter here.

    Args:
        gain: Action per metre of distance.
        noise: Standard deviation of the noise on sampled (`train`) actions.
    """

    def __init__(self, gain: float = 10.0, noise: float = 0.1) -> None:
        super().__init__()
        self.gain = gain
        self.noise = noise

    @property
    def example_observation(self) -> dict[str, Any]:
        """One observation for the warm-up."""
        return {key: torch.zeros(1, 3).numpy() for key in ("achieved_goal", "desired_goal")}

    def forward(
        self, observation: dict[str, torch.Tensor], eval_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Actions for a batch.

        Args:
            observation: `achieved_goal` and `desired_goal`, float [N, 3], metres.
            eval_mask: bool [N]; no noise where True.

        Returns:
            `actions`, float32 [N, 4].
        """
        way = observation["desired_goal"] - observation["achieved_goal"]
        displacement = self.gain * way + self.noise * torch.randn_like(way) * ~eval_mask[:, None]
        fingers = torch.zeros_like(displacement[:, :1])
        actions = torch.cat([displacement, fingers], dim=1).clamp(-1.0, 1.0)
        return {"actions": actions.to(torch.float32)}
