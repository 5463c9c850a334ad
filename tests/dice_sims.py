"""A simulator whose episodes its seed decides, and chunks of actions in it by the definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Dice(gymnasium.Env[Any, Any]):
    """Ends after 1 to 11 steps, terminated, truncated or both, or when its number is a multiple of 13.

    All it says is made of whole numbers, which come out the same wherever they are computed.
    """

    observation_space = spaces.Dict(
        {"seed": spaces.Box(-1e9, 1e9, (), np.int64), "now": spaces.Box(-1e9, 1e9, (2,), np.float64)}
    )
    action_space = spaces.Box(-1, 1, (2,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        assert seed is not None
        self.seed, self.steps, self.number = seed, 0, 1 + 7 * seed % 12
        self.now = np.array([0.0, self.number])
        draw = np.random.default_rng(seed)
        self.length, self.end = int(draw.integers(1, 12)), int(draw.integers(3))
        return self._shown(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.steps >= 0, "stepped past its end"
        self.steps += 1
        pushed = round(8 * float(action[0]) + 64 * float(action[1]))
        self.number += pushed
        self.now[:] = self.steps, self.number  # the array that it showed before
        over = self.steps == self.length
        terminated = (over and self.end != 1) or self.number % 13 == 0
        truncated = over and self.end != 0
        shown, info = self._shown(), self._info()
        reward = self.number / 4 + self.steps
        if terminated or truncated:
            self.steps = -1
        return shown, reward, terminated, truncated, info

    def _shown(self) -> Any:
        return {"seed": np.int64(self.seed), "now": self.now}

    def _info(self) -> dict[str, Any]:
        return {
            "success": self.number % 3 == 0,
            "told": np.float64(self.number + 0.5),
            "say": f"step {self.steps} of {self.seed}",
        }


def planned(now: Any, told: Any, chunk: int) -> Any:
    """Chunks `[N, C, 2]`, made of what is shown; step by step one would act otherwise."""
    base = (np.asarray(now)[:, 1] + 3 * np.asarray(now)[:, 0] + 2 * np.asarray(told))[:, None]
    ahead = np.arange(chunk)
    return np.stack([(base + 5 * ahead) % 17 // 1 - 8, (2 * base + 3 * ahead) % 9 // 1 - 4], -1) / 8


class Planner:
    """A policy that plans so."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk

    def infer(self, observation: Any, eval_mask: np.ndarray) -> dict[str, Any]:
        return {"actions": planned(observation["now"], observation["told"], self._chunk)}


@dataclass
class Chunk:
    """What one chunk came to."""

    acted_on: Any
    actions: Any
    rewards: list[float] = field(default_factory=list)
    led_to: Any = None
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    succeeded: bool = False


def episode(seed: int, chunk: int, sub_steps: int) -> list[Chunk]:
    """One episode, by the definition: a simulator alone, and one action after another."""
    env, made = Dice(), []
    shown = _alone(*env.reset(seed=seed))
    while not (made and (made[-1].terminated or made[-1].truncated)):
        actions = planned(shown["now"][None], shown["told"][None], chunk)[0]
        made.append(Chunk(shown, actions))
        for action in actions[:sub_steps]:
            now, reward, terminated, truncated, info = env.step(action)
            shown = _alone(now, info)
            made[-1].rewards.append(reward)
            made[-1].terminated, made[-1].truncated = terminated, truncated
            made[-1].success = bool(info["success"])
            made[-1].succeeded |= made[-1].success
            if terminated or truncated:
                break
        made[-1].led_to = shown
    return made


def _alone(now: Any, info: dict[str, Any]) -> dict[str, Any]:
    return {"seed": int(now["seed"]), "now": now["now"].copy(), "told": info["told"], "say": info["say"]}


def make() -> Dice:
    return Dice()
