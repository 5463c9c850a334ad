"""What a client remembers of its envs, for policies that keep a state of each.

Every request about an env has a number, one more than the one before it. A request that was not
answered, and is asked again, keeps its number: a worker that ran it after all does not run it twice.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from zmqrl.connection import Request
from zmqrl.errors import StateLost
from zmqrl.transport.header import FLAG_KEPT, FLAG_MEMORY
from zmqrl.transport.rows import layout, one_per_row
from zmqrl.transport.tree import rows_of

_MOST_IDS = 1 << 20


class Ask(NamedTuple):
    """A request about to be sent."""

    tree: Any
    """The observation; and beside it what a worker needs to know of the rows."""
    flags: int
    """Of the request."""
    lost: bool
    """Whether an earlier request was told that states are lost."""
    envs: Envs
    ids: Any = None
    steps: Any = None
    reset: Any = None

    def sent(self, request: Request) -> None:
        """Note that it was sent."""
        self.envs.note(request, self)


class Memory:
    """Of one client: a number that no other client has, and its envs."""

    def __init__(self) -> None:
        self._number = int.from_bytes(os.urandom(8), "little") >> 1
        self._envs: Dict[Tuple[str, int], Envs] = {}

    def ask(self, observation: Any, reset: Any, ids: Any, stage: int, policy: str) -> Ask:
        """Put beside an observation what a policy with memory needs to know.

        Args:
            observation: A tree; every array [N, ...].
            reset: bool, or [N]: True in rows whose observation begins an episode.
            ids: int [N], all different: which env each row is; None for 0 … N - 1.
            stage: The pipeline stage; each has envs of its own.
            policy: The name of the policy; it keeps states of its own.

        Raises:
            EncodeError: Rows differ.
            ValueError: Rows have no such ids, are asked about already, or have to begin an episode.
        """
        envs = self._envs.get((policy, stage))
        if envs is None:
            envs = self._envs[policy, stage] = Envs(self._number, stage)
        return envs.ask(observation, reset, ids)


class Envs:
    """The envs of one pipeline stage, and one policy.

    Args:
        number: The client's.
        stage: The pipeline stage.
    """

    def __init__(self, number: int, stage: int) -> None:
        self._number = number
        self._stage = stage
        self._is_needless = False
        """Whether the policy keeps no states, as far as is known."""
        self._steps = np.full(0, -1, np.int64)
        """The number of the last request about each env."""
        self._begun = np.zeros(0, bool)
        """Whether it has an episode that may go on."""
        self._answered = np.zeros(0, bool)
        """Whether that request was answered."""
        self._reset = np.zeros(0, bool)
        """Whether it began an episode."""
        self._is_asked = np.zeros(0, bool)
        """Whether it is under way."""
        self._open: List[Tuple[Request, Optional[np.ndarray]]] = []
        """Requests under way, and which envs they are about; None if they do not say it."""
        self._states: Any = None
        """Of each env, if the replies bring states: a tree of arrays."""
        self._is_shared = False
        """Whether a request may have these very arrays."""
        self._ids, self._keys = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
        """Of the last request."""

    def ask(self, observation: Any, reset: Any, ids: Any) -> Ask:
        """See `Memory.ask`."""
        lost = self._settle()
        if self._is_needless:
            return Ask(observation, 0, lost, self)
        rows = rows_of(observation)
        mask = np.full(rows, bool(reset)) if np.ndim(reset) == 0 else reset
        begins = one_per_row("reset", mask, rows, bool)
        self._take_ids(np.arange(rows) if ids is None else _checked_ids(ids, rows))
        numbers = self._ids
        twice = np.flatnonzero(self._is_asked[numbers])
        if len(twice):
            raise ValueError(
                f"env {numbers[twice[0]]} of stage {self._stage} is asked about already: take the "
                "result first, or give ids"
            )
        wrong = np.flatnonzero(~(begins | self._begun[numbers]))
        if len(wrong):
            raise ValueError(
                f"row {wrong[0]} (env {numbers[wrong[0]]}) has no episode that goes on: its first "
                "request, and one after StateLost, needs reset=True"
            )
        steps = self._steps[numbers]
        again = ~(begins | self._answered[numbers])
        steps += ~again
        begins |= again & self._reset[numbers]
        memory = {"key": self._keys, "reset": begins, "step": steps}
        if self._states is not None:
            every = _are_all(numbers, len(self._steps))
            self._is_shared |= every
            memory["state"] = self._states if every else _taken(self._states, numbers)
        tree = {"observation": observation, "memory": memory}
        return Ask(tree, FLAG_MEMORY, lost, self, numbers, steps, begins)

    def _take_ids(self, ids: np.ndarray) -> None:
        if len(ids) == len(self._ids) and (ids == self._ids).all():
            return
        more = int(ids.max(initial=-1)) + 1 - len(self._steps)
        if more > 0:
            self._steps = np.append(self._steps, np.full(more, -1, np.int64))
            self._begun = np.append(self._begun, np.zeros(more, bool))
            self._answered = np.append(self._answered, np.zeros(more, bool))
            self._reset = np.append(self._reset, np.zeros(more, bool))
            self._is_asked = np.append(self._is_asked, np.zeros(more, bool))
            if self._states is not None:
                self._states = _grown(self._states, len(self._steps))
        self._ids = ids
        self._keys = np.stack([np.full(len(ids), self._number), (self._stage << 32) | ids], axis=1)

    def note(self, request: Request, ask: Ask) -> None:
        """Note that a request was sent."""
        self._open.append((request, ask.ids))
        if ask.ids is None:
            request.leaves_memory_out = True
            return
        self._steps[ask.ids] = ask.steps
        self._reset[ask.ids] = ask.reset
        self._answered[ask.ids] = False
        self._begun[ask.ids] = self._is_asked[ask.ids] = True

    def _settle(self) -> bool:
        """Note how requests have ended; returns whether states were lost."""
        if not self._open:
            return False
        lost = False
        still_open = []
        for request, ids in self._open:
            if not request.done:
                still_open.append((request, ids))
                continue
            if ids is not None:
                self._is_asked[ids] = False
            if isinstance(request.error, StateLost):
                lost = True
                if ids is None:
                    self._is_needless = False
                    self._begun[:] = False
                else:
                    self._begun[ids[request.error.rows or slice(None)]] = False
            elif request.reply is not None and request.error is None and ids is not None:
                self._is_needless = not request.reply.flags & (FLAG_MEMORY | FLAG_KEPT)
                self._answered[ids] = True
                self._carry(ids, request.carried)
        self._open = still_open
        return lost

    def _carry(self, ids: np.ndarray, states: Any) -> None:
        """Keep states that came with a reply, or none if none came."""
        count = len(self._steps)
        if states is None or _are_all(ids, count):
            self._states, self._is_shared = states, True
            return
        if self._states is None or _form(self._states, count) != _form(states, len(ids)):
            if self._states is not None:
                self._begun[np.delete(np.arange(count), ids)] = False
            self._states = _grown(states, count, empty=True)
        elif self._is_shared:  # a request that was given up may still be on its way
            self._states = _grown(self._states, count)
        self._is_shared = False
        _put(self._states, ids, states)


def _checked_ids(ids: Any, rows: int) -> np.ndarray:
    array = np.atleast_1d(ids)
    if array.shape != (rows,) or array.dtype.kind not in "iu":
        raise ValueError(f"expected ids of shape ({rows},), int, got {array.dtype}{list(array.shape)}")
    array = array.astype(np.int64)
    if len(np.unique(array)) < rows or array.min(initial=0) < 0 or array.max(initial=0) >= _MOST_IDS:
        raise ValueError(f"ids must be different numbers in 0 … {_MOST_IDS - 1}")
    return array


def _are_all(ids: np.ndarray, count: int) -> bool:
    """Whether these are 0 … count - 1, in this order."""
    return len(ids) == count and bool((ids == np.arange(count)).all())


# -- States: dicts and lists of arrays


def _taken(tree: Any, rows: np.ndarray) -> Any:
    if isinstance(tree, dict):
        return {key: _taken(child, rows) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_taken(child, rows) for child in tree]
    return tree[rows]


def _put(tree: Any, rows: np.ndarray, values: Any) -> None:
    if isinstance(tree, (dict, list)):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            _put(tree[key], rows, values[key])
    else:
        tree[rows] = values


def _grown(tree: Any, count: int, empty: bool = False) -> Any:
    if isinstance(tree, dict):
        return {key: _grown(child, count, empty) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_grown(child, count, empty) for child in tree]
    array = np.zeros((count, *tree.shape[1:]), tree.dtype)
    if not empty:
        array[: len(tree)] = tree
    return array


def _form(tree: Any, rows: int) -> Optional[Any]:
    try:
        return layout(tree, (rows,), "state")
    except ValueError:
        return None
