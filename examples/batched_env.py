"""A simulator that steps many rows in one call, with torch tensors: carts that are to stop at 0."""

import numpy as np
import torch
from gymnasium import spaces


class Carts:
    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, num_envs: int, limit: int = 200, device: str = "cpu"):
        self.num_envs, self.device, self._limit = num_envs, torch.device(device), limit
        self._carts = torch.zeros(num_envs, 2, device=device)  # place, speed
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def reset(self, seed=None, options=None):
        rows = (options or {}).get("env_idx", torch.arange(self.num_envs))
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._carts[rows] = torch.rand(len(rows), 2, generator=generator).to(self.device) - 0.5
        self._steps[rows] = 0
        return self._carts, {}

    def step(self, actions):
        self._carts[:, 1] += 0.1 * actions[:, 0]
        self._carts[:, 0] += 0.1 * self._carts[:, 1]
        self._steps += 1
        far = self._carts[:, 0].abs() > 2
        return self._carts, -self._carts[:, 0].abs(), far, ~far & (self._steps >= self._limit), {}
