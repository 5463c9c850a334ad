"""A simulator of one's own: a corridor whose end is to be found."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Corridor(gymnasium.Env):
    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)  # back, forth

    def __init__(self, length: int = 6):
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place = int(self.np_random.integers(0, 2))
        return self._seen(), {}

    def step(self, action):
        self._place = max(0, self._place + (1 if action else -1))
        arrived = self._place >= self._length
        return self._seen(), float(arrived), arrived, False, {"success": arrived}

    def _seen(self):
        return np.array([self._place], np.float32)
