"""Simulators of the tests that misbehave on purpose."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env[np.ndarray, int]):
    """An episode of `length` steps; row 0 of the observation counts them.

    It can be made to raise or hang in a step of an episode, or to hang in its nth reset.
    """

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(
        self,
        length: int = 10,
        raise_at: int = -1,
        hang_in_step_at: int = -1,
        hang_in_reset_at: int = -1,
    ) -> None:
        self.length, self.raise_at = length, raise_at
        self.hang_in_step_at, self.hang_in_reset_at = hang_in_step_at, hang_in_reset_at
        self.steps = self.resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        self.resets += 1
        if self.resets == self.hang_in_reset_at:
            time.sleep(600)
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        if self.steps == self.raise_at:
            raise ArithmeticError(f"the simulator exploded at step {self.steps}")
        if self.steps == self.hang_in_step_at:
            time.sleep(600)
        done = self.steps >= self.length
        return np.full(2, self.steps, np.float32), 1.0, done, False, {"success": done}


class Paid(Counter):
    """The same, where a step is worth its action, and a success if that is 1."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        observation, _, *ends, _ = super().step(action)
        return observation, float(action), *ends, {"success": bool(action == 1)}


def make(**kwargs: Any) -> Counter:
    return Counter(**kwargs)


class Sleepy(Counter):
    """A step takes 0.3 s."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(0.3)
        return super().step(action)


def fails_to_start() -> Counter:
    raise OSError("the renderer has no display")


def asks() -> Counter:
    input("proceed? ")
    return Counter()


def starts_for_ever() -> Counter:
    time.sleep(600)
    return Counter()


_made = 0


def second_hangs(**kwargs: Any) -> Counter:
    """In each process, the first env is good and the second hangs in its third step."""
    return Counter(hang_in_step_at=3 if _is_second() else -1, **kwargs)


def second_hangs_in_reset(**kwargs: Any) -> Counter:
    """In each process, the first env is good and the second hangs when its second episode begins."""
    return Counter(hang_in_reset_at=2 if _is_second() else -1, **kwargs)


def _is_second() -> bool:
    global _made
    _made += 1
    return _made == 2


def shows_x() -> gymnasium.Env[Any, Any]:
    """A `Counter` whose observation is a dict, and which takes any vector of 30,000 numbers."""
    env: Any = gymnasium.wrappers.TransformObservation(
        Counter(), lambda seen: {"x": seen}, spaces.Dict({"x": Counter.observation_space})
    )
    many = spaces.Box(-1e9, 1e9, (30_000,), np.float32)
    return gymnasium.wrappers.TransformAction(env, lambda action: 0, many)
