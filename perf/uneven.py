"""Env workers that are forked from one process; a simulator that counts its steps; policies that sleep.

    python perf/uneven.py JSON

JSON is a list: for each env worker its rank and the overrides of its configuration. They run until
SIGTERM. Nothing here computes, so that a small machine has time for as many as a large pool has.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class Sleeping:
    """Takes `base` seconds for a batch, and `per_row` for each row of it."""

    def __init__(self, base: float, per_row: float = 0.0) -> None:
        self._base, self._per_row = base, per_row

    def infer(self, observation: np.ndarray, eval_mask: np.ndarray) -> np.ndarray:
        time.sleep(self._base + self._per_row * len(eval_mask))
        return np.zeros(len(eval_mask), np.int64)


def counting(file: str, place: int, seconds: float = 0.0) -> Any:
    """A CartPole, for `env.factory`.

    Args:
        file: Holds the counters, uint64.
        place: Of the counter that goes up at each step.
        seconds: Of a step.
    """
    import gymnasium

    class Counting(gymnasium.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            if seconds:
                time.sleep(seconds)
            counters[place] += 1
            return self.env.step(action)

    counters = np.memmap(file, np.uint64, "r+")
    return Counting(gymnasium.make("CartPole-v1"))


def main() -> None:
    """Fork the env workers, and wait for them."""
    import gymnasium  # noqa: F401 (once, not in each process)
    from forked import fork_each

    from zmqrl import config
    from zmqrl.env.worker import EnvWorker

    def step(part: tuple[int, list[str]], stop: Callable[[], bool]) -> None:
        rank, overrides = part
        EnvWorker(config.load(None, overrides), "train", rank, stop).run()

    fork_each(json.loads(sys.argv[1]), step)


if __name__ == "__main__":
    main()
