"""What a client remembers of its envs, for policies that keep a state of each.

Every request about an env has a number, one more than the one before it. A request that was not
answered, and is asked again, keeps its number: a worker that ran it after all does not run it twice.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from zmqrl.client.asking import Request
from zmqrl.errors import StateLost
from zmqrl.transport.header import FLAG_BEGINS, FLAG_KEPT, FLAG_MEMORY
from zmqrl.transport.rows import layout, one_per_row
from zmqrl.transport.tree import rows_of

_MOST_IDS = 1 << 20

# What became of the last request about an env, in bits.
_BEGUN = 1  # there is an episode, which goes on
_ANSWERED = 2
_RESET = 4  # it began the episode, and was not answered yet
_ASKED = 8  # it is under way
_GOES_ON = _BEGUN | _ANSWERED


class Ask(NamedTuple):
    """A request about to be sent."""

    tree: Any
    """The observation; and beside it what a worker needs to know of the rows."""
    flags: int
    """Of the request."""
    lost: bool
    """Whether an earlier request was told that states are lost."""
    envs: Envs
    where: Any = None
    steps: Any = None
    reset: Any = None
    what: str = "the observation"
    """What an error calls `tree` that is about its size."""

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
        ask = envs.ask(observation, reset, ids)
        if ask.flags & FLAG_BEGINS:
            others = (e for (name, _), e in self._envs.items() if name == policy and e is not envs)
            if any(other.have_begun for other in others):
                ask = ask._replace(flags=ask.flags & ~FLAG_BEGINS)
        return ask


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
        self._lost = False
        """Whether a request was told that states are lost, and none was sent since."""
        self._steps = np.full(0, -1, np.int64)
        """The number of the last request about each env."""
        self._status = np.zeros(0, np.int8)
        """What became of that; 0 before the first one, and after `StateLost`."""
        self._open: List[Tuple[Request, Any]] = []
        """Requests under way, and which envs they are about; None if they do not say it."""
        self._states: Any = None
        """Of each env, if the replies bring states: a tree of arrays."""
        self._is_shared = False
        """Whether a request may have these very arrays."""
        self._where: Any = None
        """The envs of the last request: their numbers, or a slice if these are 0 … N - 1."""
        self._keys = np.zeros((0, 2), np.int64)

    @property
    def have_begun(self) -> bool:
        """Whether any of them is in an episode."""
        return bool(self._status.any())

    def ask(self, observation: Any, reset: Any, ids: Any) -> Ask:
        """See `Memory.ask`; `FLAG_BEGINS` is about these envs only."""
        self._settle()
        lost = self._lost
        if self._is_needless:
            return Ask(observation, 0, lost, self)
        rows = rows_of(observation)
        if not isinstance(reset, np.ndarray) or reset.dtype != bool or reset.shape != (rows,):
            reset = np.full(rows, bool(reset)) if np.ndim(reset) == 0 else reset
            reset = one_per_row("reset", reset, rows, bool)
        where = self._find(ids, rows)
        status = self._status[where]
        if (status == _GOES_ON).all():
            steps = self._steps[where] + 1
        else:
            self._check(status, reset)
            again = ~(reset | (status & _ANSWERED > 0))
            steps = self._steps[where] + ~again
            reset = reset | (again & (status & _RESET > 0))
        what = "the observation"
        memory = {"key": self._keys, "reset": reset, "step": steps}
        if self._states is not None:
            every = self._are_all(where)
            self._is_shared |= every
            memory["state"] = self._states if every else _taken(self._states, where)
            what = "the observation, with the states of its envs (see rollout.affinity),"
        tree = {"observation": observation, "memory": memory}
        flags = FLAG_MEMORY
        if reset.all() and np.count_nonzero(self._status) == np.count_nonzero(status):
            flags |= FLAG_BEGINS
        return Ask(tree, flags, lost, self, where, steps, reset, what)

    def _find(self, ids: Any, rows: int) -> Any:
        """Where the envs of a request are; the keys are theirs then."""
        where: Any = slice(0, rows) if ids is None else _checked_ids(ids, rows)
        if ids is None and where == self._where:
            return where
        numbers = np.arange(rows) if ids is None else where
        more = int(numbers.max(initial=-1)) + 1 - len(self._steps)
        if more > 0:
            self._steps = np.append(self._steps, np.full(more, -1, np.int64))
            self._status = np.append(self._status, np.zeros(more, np.int8))
            if self._states is not None:
                self._states = _grown(self._states, len(self._steps))
        self._keys = np.stack([np.full(rows, self._number), (self._stage << 32) | numbers], axis=1)
        self._where = where if ids is None else None
        return where

    def _check(self, status: np.ndarray, reset: np.ndarray) -> None:
        """Check that the envs of a request can be asked about."""
        for wrong, text in (
            (status & _ASKED > 0, "is asked about already: take the result first, or give ids"),
            (
                (status == 0) & ~reset,
                "has no episode that goes on: its first request, and one after StateLost, needs "
                "reset=True",
            ),
        ):
            if wrong.any():
                row = int(wrong.argmax())
                env = int(self._keys[row, 1]) & 0xFFFFFFFF
                raise ValueError(f"row {row} (env {env} of stage {self._stage}) {text}")

    def note(self, request: Request, ask: Ask) -> None:
        """Note that a request was sent."""
        self._open.append((request, ask.where))
        self._lost = False
        if ask.where is None:
            request.leaves_memory_out = True
            return
        self._steps[ask.where] = ask.steps
        self._status[ask.where] = np.where(ask.reset, _BEGUN | _ASKED | _RESET, _BEGUN | _ASKED)

    def _settle(self) -> None:
        """Note how requests have ended."""
        if not self._open:
            return
        still_open = []
        for request, where in self._open:
            error = request.error
            if not request.done:
                still_open.append((request, where))
            elif where is None:
                if isinstance(error, StateLost):
                    self._lost, self._is_needless = True, False
                    self._status[:] = 0
            elif error is None:
                flags = 0 if request.reply is None else request.reply.flags
                self._is_needless = not flags & (FLAG_MEMORY | FLAG_KEPT)
                self._status[where] = _GOES_ON
                self._carry(where, request.carried)
            else:
                self._status[where] &= ~_ASKED
                if isinstance(error, StateLost):
                    self._lost = True
                    self._status[np.arange(len(self._status))[where][error.rows or slice(None)]] = 0
        self._open = still_open

    def _carry(self, where: Any, states: Any) -> None:
        """Keep states that came with a reply, or none if none came."""
        if states is None or self._are_all(where):
            self._states, self._is_shared = states, True
            return
        count, rows = len(self._steps), len(self._steps[where])
        if self._states is None or _form(self._states, count) != _form(states, rows):
            if self._states is not None:
                self._status[np.delete(np.arange(count), where)] = 0
            self._states = _grown(states, count, empty=True)
        elif self._is_shared:  # a request that was given up may still be on its way
            self._states = _grown(self._states, count)
        self._is_shared = False
        _put(self._states, where, states)

    def _are_all(self, where: Any) -> bool:
        return isinstance(where, slice) and where.stop == len(self._steps)


def _checked_ids(ids: Any, rows: int) -> np.ndarray:
    array = np.atleast_1d(ids)
    if array.shape != (rows,) or array.dtype.kind not in "iu":
        raise ValueError(f"expected ids of shape ({rows},), int, got {array.dtype}{list(array.shape)}")
    array = array.astype(np.int64)
    if len(np.unique(array)) < rows or array.min(initial=0) < 0 or array.max(initial=0) >= _MOST_IDS:
        raise ValueError(f"ids must be different numbers in 0 … {_MOST_IDS - 1}")
    return array


# -- States: dicts and lists of arrays


def _taken(tree: Any, rows: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _taken(child, rows) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_taken(child, rows) for child in tree]
    return tree[rows]


def _put(tree: Any, rows: Any, values: Any) -> None:
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
