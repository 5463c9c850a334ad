"""A simulator that asks what `faults.policies` answers, and notes each action that answers another."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

if __package__:
    from faults.policies import is_answer_to, observation
else:  # it was named by its path, as `env.factory` does
    from policies import is_answer_to, observation

_CROSSED = "crossed-"
_STUCK = "stuck-in-reset"
_WIDTH = 16
_INT64 = np.iinfo(np.int64)
_made = itertools.count()


class Asking(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """An episode of `length` steps of `seconds` each; every observation is another.

    Args:
        folder: Where the notes go.
        length: Steps of an episode.
        seconds: Of a step.
        hangs: The first simulator of all that comes to its second reset never returns from it.
    """

    observation_space = spaces.Dict(
        {
            "tag": spaces.Box(_INT64.min, _INT64.max, (4,), np.int64),
            "values": spaces.Box(-np.inf, np.inf, (_WIDTH,), np.float32),
        }
    )
    action_space = spaces.Box(_INT64.min, _INT64.max, (4,), np.int64)

    def __init__(self, folder: str, length: int = 20, seconds: float = 0.0, hangs: bool = False) -> None:
        self._folder, self._length, self._seconds, self._hangs = Path(folder), length, seconds, hangs
        self._number = os.getpid() * 1000 + next(_made)
        self._sequence = self._steps = self._resets = 0
        self._asked: dict[str, np.ndarray] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._steps = 0
        self._resets += 1
        if self._hangs and self._resets == 2 and self._is_first():
            time.sleep(600)
        return self._ask(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        time.sleep(self._seconds)
        answer = {"actions": action[None], "values": self._asked["values"] + 1}
        if not is_answer_to(self._asked, answer):
            with (self._folder / f"{_CROSSED}{os.getpid()}").open("ab") as notes:
                notes.write(b"x")
        self._steps += 1
        done = self._steps >= self._length
        return self._ask(), 1.0, done, False, {"success": done}

    def _ask(self) -> dict[str, np.ndarray]:
        self._asked = observation(self._number, self._sequence, 1, _WIDTH)
        self._sequence += 1
        return {key: rows[0] for key, rows in self._asked.items()}

    def _is_first(self) -> bool:
        try:
            (self._folder / _STUCK).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def make(**kwargs: Any) -> Asking:
    """For `env.factory`."""
    return Asking(**kwargs)


def crossed(folder: Path) -> int:
    """Actions that answered another observation."""
    return sum(file.stat().st_size for file in folder.glob(f"{_CROSSED}*"))
