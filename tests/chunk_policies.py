"""Policies of the tests that give chunks of actions."""

from __future__ import annotations

from typing import Any

import numpy as np


class Planned:
    """Knows that the observation counts the steps of the episode, and plans so many actions ahead.

    The action at step s is `step_action(s)`; without `chunk` it is given alone.
    """

    def __init__(self, chunk: int = 0) -> None:
        self._chunk = chunk

    def infer(self, observation: np.ndarray, eval_mask: np.ndarray) -> np.ndarray:
        steps = observation[:, :1].astype(np.float64)
        actions = step_action(steps + np.arange(max(1, self._chunk)))
        return actions[:, :, None] if self._chunk else actions


class First:
    """Balances CartPole with the first action of each chunk; the others would make it fall."""

    def __init__(self, chunk: int = 0) -> None:
        self._chunk = chunk

    def infer(self, observation: np.ndarray, eval_mask: np.ndarray) -> np.ndarray:
        action = (observation[:, -2] > 0).astype(np.int64)
        return np.stack([action, *[1 - action] * (self._chunk - 1)], 1) if self._chunk else action


class Hold:
    """Gives the same action, `width` numbers made of the observation, `chunk` times."""

    def __init__(self, chunk: int, width: int = 1) -> None:
        self._chunk, self._width = chunk, width

    def infer(self, observation: Any, eval_mask: np.ndarray) -> np.ndarray:
        numbers = observation["observation"] if isinstance(observation, dict) else observation
        action = np.sin(numbers[:, : self._width])
        return np.repeat(action[:, None], self._chunk, axis=1)


class Remembers:
    """Has a memory: knows how many steps of its episode each env has made, in chunks of `chunk`.

    It raises where the observation, which counts them, says otherwise.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk

    def initial_state(self, rows: int) -> np.ndarray:
        return np.zeros(rows, np.int64)

    def infer(self, observation: np.ndarray, eval_mask: np.ndarray, state: np.ndarray) -> Any:
        if (observation[:, 0] != state).any():
            raise RuntimeError(f"the envs were stepped {observation[:, 0]} times, I know of {state}")
        return np.zeros((len(state), self._chunk), np.int64), state + self._chunk


class Judge:
    """A reward model: the actions in a chunk, plus ten times the first number that it led to."""

    def infer(self, transitions: Any, eval_mask: np.ndarray) -> dict[str, Any]:
        chunk = transitions["actions"].shape[1]
        return {"rewards": chunk + 10.0 * transitions["next_observation"][:, 0]}


def step_action(step: Any) -> Any:
    """What is done at a step of an episode, between -1 and 1, float32."""
    return np.sin(0.7 * np.asarray(step, np.float64) + 0.1).astype(np.float32)
