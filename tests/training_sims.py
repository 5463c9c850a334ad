"""Simulators of the training tests."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Line(gymnasium.Env[np.ndarray, np.ndarray]):
    """The reward of a step is its action; an episode has `length` steps of `seconds` each.

    Args:
        length: Steps of an episode.
        seconds: Of a step.
        nan_at: Steps whose observation, or reward, is no number; -1 for all.
        what: `observation` or `reward`.
        raise_at: The step at which it raises, counted over all episodes.
        once: A file: raise only if it is not there yet, and make it.
        hang_at: The step at which it hangs, counted over all episodes.
    """

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = spaces.Box(-1e9, 1e9, (1,), np.float32)

    def __init__(
        self,
        length: int = 8,
        seconds: float = 0.0,
        nan_at: int = 0,
        what: str = "observation",
        raise_at: int = 0,
        once: str = "",
        hang_at: int = 0,
    ) -> None:
        self.length, self.seconds = length, seconds
        self.nan_at, self.what = nan_at, what
        self.raise_at, self.once = raise_at, once
        self.hang_at = hang_at
        self.steps = self.all_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(self.seconds)
        self.steps += 1
        self.all_steps += 1
        if self.all_steps == self.hang_at:
            time.sleep(600)
        if self.all_steps == self.raise_at and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            raise ArithmeticError(f"the simulator exploded at step {self.all_steps} of {os.getpid()}")
        bad = self.nan_at in (-1, self.all_steps)
        observation = np.full(2, self.steps, np.float32)
        reward = float(action[0])
        if bad and self.what == "observation":
            observation[1] = np.nan
        if bad and self.what == "reward":
            reward = float("nan")
        return observation, reward, False, self.steps >= self.length, {}


def make(**kwargs: Any) -> Line:
    return Line(**kwargs)


def slow_in_evaluation(**kwargs: Any) -> Line:
    """Quick steps for training, half a second for those of an evaluation."""
    return Line(seconds=0.5 if "--mode=eval" in sys.argv else 0.01, **kwargs)


def rank_one_hangs(**kwargs: Any) -> Line:
    """The env worker of rank 1 hangs after some steps, each time that it is started."""
    return Line(hang_at=10 if "--rank=1" in sys.argv else 0, **kwargs)
