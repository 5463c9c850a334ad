"""The books that a client of a drill keeps of its envs, if it asks a policy with memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from faults.policies import traced

_EVERY = 13


class Told(NamedTuple):
    """That a pool has lost states."""

    text: str
    """Of the error."""
    rows: list[int]
    """The rows that it names."""
    holders: dict[int, int]
    """Of the rows whose episodes go on: the process that had the state, as far as the client knows."""


class Envs:
    """What `faults.policies.Remembering` must have in mind of each env.

    A request is about some of the envs, in turn, so that each is now in this row and now in another.
    Their episodes begin at different times.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._steps, self._traces = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._have_begun = np.zeros(count, bool)
        self._holders = np.zeros(count, np.int64)
        self._asked, self._reset = np.zeros(0, np.int64), np.zeros(0, bool)

    def ask(self, sequence: int, rows: int) -> dict[str, Any]:
        """The `ids` and `reset` of a request."""
        self._asked = (sequence + np.arange(rows)) % self._count
        ends = (sequence + self._asked) % _EVERY == 0
        self._reset = ends | ~self._have_begun[self._asked]
        # Until it is answered: what fails has begun nothing.
        self._have_begun[self._asked[self._reset]] = False
        return {"ids": self._asked, "reset": self._reset}

    def take(self, tag: np.ndarray, answer: dict[str, Any], stay: bool) -> bool:
        """Note the answer to the last request; whether it is of the right states.

        Args:
            tag: Of the request.
            answer: To it.
            stay: Whether the process that has a state must be the same in all of an episode.
        """
        envs, reset = self._asked, self._reset
        steps = np.where(reset, 0, self._steps[envs]) + 1
        traces = traced(np.where(reset, 0, self._traces[envs]), tag)
        moved = ~reset & (self._holders[envs] != answer["pid"])
        is_right = np.array_equal(answer["count"], steps) and np.array_equal(answer["trace"], traces)
        # From here on as it is: one wrong state is one error, not one in each later step.
        self._steps[envs], self._traces[envs] = answer["count"], answer["trace"]
        self._have_begun[envs] = True
        self._holders[envs] = answer["pid"]
        return is_right and not (stay and moved.any())

    def lose(self, text: str, rows: list[int]) -> Told:
        """Note that the last request was told that the states of some of its rows are lost."""
        self._have_begun[self._asked[rows]] = False
        holders = {
            int(row): int(self._holders[self._asked[row]]) for row in np.flatnonzero(~self._reset)
        }
        return Told(text, rows, holders)
