"""A policy for trying a simulator out: it needs no weights, and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class RandomPolicy:
    """Draws actions at random, whatever it sees.

    >>> RandomPolicy({"n": 4}).infer(None, np.ones(3, bool))["actions"].shape
    (3,)
    >>> policy = RandomPolicy({"arm": {"shape": [6], "low": -1, "high": 1}, "grip": {"n": 2}})
    >>> policy.infer(None, np.ones(3, bool))["actions"]["arm"].shape
    (3, 6)

    Args:
        actions: What it draws for each row. `{n: 4}` is one of four (Discrete), `{shape, low, high}` are
            numbers within bounds (Box; with a `dtype` of integers, both bounds are drawn as well), and a
            dict or list of these is a Dict or Tuple.
        seed: Of the generator. Each rollout worker has the same one; null makes them differ, and each
            run as well.
    """

    def __init__(self, actions: Any, seed: int | None = 0) -> None:
        self._actions = actions
        self._generator = np.random.default_rng(seed)
        self._draw(actions, 1)  # what cannot be drawn ends the worker here, and not at its first request

    def infer(self, observation: Any, eval_mask: np.ndarray) -> dict[str, Any]:
        """Actions for as many rows as `eval_mask` has."""
        return {"actions": self._draw(self._actions, len(eval_mask))}

    def _draw(self, actions: Any, rows: int) -> Any:
        if isinstance(actions, (list, tuple)):
            return [self._draw(part, rows) for part in actions]
        if not isinstance(actions, Mapping):
            raise TypeError(f"actions are a {type(actions).__name__}; see RandomPolicy")
        if "n" in actions:
            return self._generator.integers(actions["n"], size=rows)
        if "shape" not in actions:
            return {key: self._draw(part, rows) for key, part in actions.items()}
        shape, low, high = (rows, *actions["shape"]), actions["low"], actions["high"]
        dtype = np.dtype(actions.get("dtype", np.float32))
        if dtype.kind in "iu":
            return self._generator.integers(low, high, size=shape, dtype=dtype.type, endpoint=True)
        return self._generator.uniform(low, high, size=shape).astype(dtype)
