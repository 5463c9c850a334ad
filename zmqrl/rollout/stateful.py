"""Policies with memory: the state of each env row goes into a call, and what comes out is kept.

A request for such a policy has, beside the observation, a *memory*: the key of each row, the number of
its step, and whether it begins an episode. With `rollout.affinity: sticky` the worker keeps the states
in a `StateBank`; with `none` the client carries them, from each reply into its next request.

Nothing is kept before a call, the check of its output, and its encoding have succeeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from zmqrl.errors import DecodeError, PolicyOutputError
from zmqrl.rollout.bank import (
    Found,
    Mask,
    Slots,
    StateBank,
    copied,
    form_of,
    mapped,
    put,
    taken,
)
from zmqrl.rollout.batching import merge
from zmqrl.transport.tree import rows_of


class Memory(NamedTuple):
    """What a request says of its rows."""

    keys: list[bytes]
    """Each names an env of a client."""
    steps: Slots
    """int64 [N]: numbers of the row's requests; those of a row follow each other."""
    reset: Mask
    """bool [N]: True where an episode begins."""
    state: Any
    """A tree of arrays [N, ...]; None if the client carries none."""

    @classmethod
    def of(cls, memory: dict[str, Any], rows: int) -> Memory:
        """Read what came.

        Args:
            memory: As `split_off` gives it.
            rows: That it should have.

        Raises:
            DecodeError: It is no memory.
        """
        for name, kind, shape in _FIELDS:
            array = memory.get(name)
            if not isinstance(array, np.ndarray) or array.dtype != kind or array.shape != (rows, *shape):
                raise DecodeError(f"memory.{name} is no array of {kind.__name__} {[rows, *shape]}")
        joined_keys = memory["key"].tobytes()
        keys = [joined_keys[i : i + 16] for i in range(0, len(joined_keys), 16)]
        if len(set(keys)) < rows:
            raise DecodeError("two rows of a request have the same memory.key")
        if (memory["step"] < 0).any():
            raise DecodeError("memory.step is below 0")
        state = memory.get("state")
        if state is not None and rows_of(state) != rows:
            raise DecodeError("memory.state has other rows than the observation")
        return cls(keys, memory["step"], memory["reset"], state)


def split_off(tree: Any) -> tuple[Any, dict[str, Any]]:
    """The observation in a request with a memory, and the memory.

    Raises:
        DecodeError: It is no such tree.
    """
    if not isinstance(tree, dict) or tree.keys() != {"observation", "memory"}:
        raise DecodeError("a request with a memory has 'observation' and 'memory', nothing else")
    if not isinstance(tree["memory"], dict):
        raise DecodeError("the memory is no map")
    return tree["observation"], tree["memory"]


NO_MEMORY = (
    "the policy keeps a state for each env, so a request must tell which rows begin an episode: call "
    "infer(observation, reset=…)"
)


def are_apart(memories: Iterable[Memory | None]) -> bool:
    """Whether no two of some requests are about the same row."""
    keys = [key for memory in memories if memory is not None for key in memory.keys]
    return len(set(keys)) == len(keys)


_T = TypeVar("_T")


def turns(requests: Sequence[_T], memories: Sequence[Memory | None]) -> list[list[_T]]:
    """Some requests, in as many groups as needed for none to have two about the same row.

    Args:
        requests: In their order; those about one row keep it.
        memories: Of each.
    """
    groups: list[list[_T]] = []
    begun: dict[bytes, int] = {}  # by row, the first group that comes after its latest request
    for request, memory in zip(requests, memories, strict=True):
        keys = [] if memory is None else memory.keys
        number = max((begun.get(key, 0) for key in keys), default=0)
        if number == len(groups):
            groups.append([])
        groups[number].append(request)
        begun.update(dict.fromkeys(keys, number + 1))
    return groups


_FIELDS: tuple[tuple[str, type, tuple[int, ...]], ...] = (
    ("key", np.int64, (2,)),
    ("step", np.int64, ()),
    ("reset", np.bool_, ()),
)


_NO_ROWS = np.zeros(0, np.int64)


class Recall(Protocol):
    """What is remembered of the rows of a batch, from before the call until its replies are made."""

    lost: Mask
    """bool [N]: the rows whose state is not here."""

    def state(self, policy: Any, padding: int) -> Any:
        """The state to call a policy with: a tree of [N + padding, ...] that is the policy's own."""

    def answer(self, output: dict[str, Any], version: int, new_state: Any) -> dict[str, Any]:
        """What to send, of an output of N rows or more, made by weights of that version."""

    def versions(self, rows: Sequence[int]) -> list[int]:
        """The versions of the weights that made the answer, of each part of so many rows."""

    def commit(self) -> None:
        """The replies are made: keep what has to be kept."""


class States:
    """Recalls the states of rows.

    Args:
        most_mb: Mebibytes of states that are kept here; None to have the clients carry them.
    """

    def __init__(self, most_mb: int | None) -> None:
        self.travel = most_mb is None
        """Whether the clients carry them."""
        self._bank = None if most_mb is None else StateBank(most_mb << 20)

    def recall(self, memories: Sequence[Memory]) -> Recall:
        """What is remembered of the rows of some requests of one structure, whose keys all differ.

        Raises:
            ValueError, KeyError, TypeError: The states that they carry differ in structure after all.
        """
        if len(memories) == 1:
            keys, steps, reset, _ = memories[0]
        else:
            keys = [key for memory in memories for key in memory.keys]
            steps = np.concatenate([memory.steps for memory in memories])
            reset = np.concatenate([memory.reset for memory in memories])
        if self._bank is not None:
            return _Kept(self._bank, keys, steps, reset)
        states = [memory.state for memory in memories]
        return _Carried(reset, None if states[0] is None else merge(states))


class _Kept:
    """Of rows whose states are in the bank."""

    def __init__(self, bank: StateBank, keys: list[bytes], steps: Slots, reset: Mask) -> None:
        self._bank = bank
        self._keys = keys
        self._steps = steps
        self._found: Found = bank.find(keys, steps, reset)
        self.lost = self._found.lost
        self._goes_on = not (reset.any() or self._found.repeated.any())
        """Whether no row needs another treatment than the others."""
        self._fresh = self._again = _NO_ROWS
        if not self._goes_on:
            self._fresh = np.flatnonzero(reset & ~self._found.repeated)
            self._again = np.flatnonzero(self._found.repeated)
        self._padding = 0
        self._result: tuple[Any, int, Any] = ({}, 0, None)

    def state(self, policy: Any, padding: int) -> Any:
        count, fresh = len(self._keys), self._fresh
        self._padding = padding
        if self._goes_on:
            state = self._bank.states(self._found.slots)
        elif len(fresh) == count:
            state = mapped(copied, self._initial_state(policy, count))
        else:
            slots = self._found.slots
            if len(fresh):
                slots = np.where(slots < 0, slots.max(), slots)  # any will do: they are written over
            state = self._bank.states(slots)
            if len(fresh):
                put(state, fresh, self._initial_state(policy, len(fresh)))
        return _padded(state, count, padding)

    def _initial_state(self, policy: Any, rows: int) -> Any:
        state, kept = initial_state(policy, rows), self._bank.one_state()
        if kept is not None:
            # What has another shape may fit all the same, into another place.
            _check_form(state, kept, "initial_state", "the states that are kept have")
        return state

    def answer(self, output: dict[str, Any], version: int, new_state: Any) -> dict[str, Any]:
        self._result = (output, version, new_state)
        if len(self._again) == 0:
            return output
        count, again = len(self._keys), self._again
        own = mapped(lambda leaf: leaf[:count], output)
        answer: dict[str, Any] = self._bank.with_outputs(own, again, self._found.slots[again])
        return answer

    def versions(self, rows: Sequence[int]) -> list[int]:
        version = self._result[1]
        if len(self._again) == 0:
            return [version] * len(rows)
        each = np.full(len(self._keys), version, np.int64)
        each[self._again] = self._bank.versions(self._found.slots[self._again])
        return [int(part.min()) for part in np.split(each, np.cumsum(rows)[:-1])]

    def commit(self) -> None:
        output, version, state = self._result
        count = len(self._keys)
        if len(self._again) == 0:
            if self._padding:
                output, state = (mapped(lambda leaf: leaf[:count], tree) for tree in (output, state))
            slots = self._found.slots if self._goes_on else None
            self._bank.keep(self._keys, self._steps, version, output, state, slots)
            return
        run = np.flatnonzero(~self._found.repeated)
        if len(run):
            keys = [self._keys[row] for row in run]
            parts = [taken(tree, run) for tree in (output, state)]
            self._bank.keep(keys, self._steps[run], version, *parts)


class _Carried:
    """Of rows whose states came with their requests, and go with the replies."""

    def __init__(self, reset: Mask, state: Any) -> None:
        self._reset = reset
        self._state = state
        self._version = 0
        self.lost = ~reset if state is None else np.zeros_like(reset)

    def state(self, policy: Any, padding: int) -> Any:
        count, fresh = len(self._reset), np.flatnonzero(self._reset)
        if self._state is None or len(fresh) == count:
            state = mapped(copied, initial_state(policy, count))
        else:
            initial = initial_state(policy, max(1, len(fresh)))
            state = _restored(self._state, initial)
            if len(fresh):
                put(state, fresh, initial)
        return _padded(state, count, padding)

    def answer(self, output: dict[str, Any], version: int, new_state: Any) -> dict[str, Any]:
        self._version = version
        return {"output": output, "state": mapped(_as_array, new_state)}

    def versions(self, rows: Sequence[int]) -> list[int]:
        return [self._version] * len(rows)

    def commit(self) -> None:
        pass


def initial_state(policy: Any, rows: int) -> Any:
    """The state of rows that begin an episode.

    Raises:
        PolicyOutputError: It is no tree of arrays or tensors with so many rows.
    """
    state = policy.initial_state(rows)
    mapped(lambda leaf: _check_rows(leaf, rows, "initial_state"), state)
    return state


def check_state(state: Any, before: Any, rows: int) -> None:
    """Check a state that a policy returned.

    Args:
        state: What it returned.
        before: What it was given.
        rows: Of the call.

    Raises:
        PolicyOutputError: It is no tree of the same form with so many rows; says where.
    """
    if _is_alike(state, before):
        return
    mapped(lambda leaf: _check_rows(leaf, rows, "new state"), state)
    _check_form(state, before, "new state", "it was given one with")


def _check_form(state: Any, like: Any, what: str, others: str) -> None:
    form, right = form_of(state), form_of(like)
    for path in [*right, *form]:
        here, there = form.get(path), right.get(path)
        if here != there:
            raise PolicyOutputError(
                f"the policy's {what} has {here or 'nothing'} {_at(path)}, but {others} "
                f"{there or 'nothing'} there"
            )


def _is_alike(state: Any, before: Any) -> bool:
    """Whether two states are of one form and as many rows."""
    if type(state) is not type(before):
        return False
    if isinstance(state, dict):
        return state.keys() == before.keys() and all(_is_alike(state[k], before[k]) for k in state)
    if isinstance(state, (list, tuple)):
        return len(state) == len(before) and all(map(_is_alike, state, before))
    return bool(hasattr(state, "dtype") and state.dtype == before.dtype and state.shape == before.shape)


def _check_rows(leaf: Any, rows: int, what: str) -> None:
    shape = getattr(leaf, "shape", None)
    if shape is None or not hasattr(leaf, "dtype"):
        raise PolicyOutputError(f"the policy's {what} holds a {type(leaf).__name__}, not an array")
    if len(shape) == 0 or shape[0] != rows:
        raise PolicyOutputError(
            f"the policy's {what} has an array of shape {list(shape)} for {rows} rows; its first axis "
            "must count them"
        )


def _padded(state: Any, rows: int, padding: int) -> Any:
    """The state with copies of its last row behind it, as many as the observations have."""
    if not padding:
        return state
    return taken(state, np.minimum(np.arange(rows + padding), rows - 1))


def _as_array(leaf: Any) -> np.ndarray:
    if isinstance(leaf, np.ndarray):
        return leaf
    if str(leaf.dtype).startswith(("torch.bfloat16", "torch.float8")):
        leaf = leaf.float()  # numpy has neither; float32 holds the same values
    array: np.ndarray = leaf.numpy(force=True)
    return array


def _restored(carried: Any, like: Any, path: str = "") -> Any:
    """A state that travelled, as the policy made it.

    Args:
        carried: Arrays [N, ...], in dicts and lists.
        like: A state of the policy.
        path: Of this part of it.

    Raises:
        DecodeError: It is another one.
    """
    wrong = DecodeError(f"memory.state is not a state of this policy {_at(path)}")
    if isinstance(like, dict):
        if not isinstance(carried, dict) or carried.keys() != like.keys():
            raise wrong
        return {key: _restored(carried[key], like[key], f"{path}.{key}") for key in like}
    if isinstance(like, (list, tuple)):
        if not isinstance(carried, (list, tuple)) or len(carried) != len(like):
            raise wrong
        children = [_restored(carried[i], like[i], f"{path}[{i}]") for i in range(len(like))]
        return tuple(children) if isinstance(like, tuple) else children
    if not isinstance(carried, np.ndarray) or carried.shape[1:] != tuple(like.shape[1:]):
        raise wrong
    if carried.dtype != _as_array(like[:0]).dtype:
        raise wrong
    if isinstance(like, np.ndarray):
        return carried
    import torch

    return torch.from_numpy(carried).to(like.device, like.dtype)


def _at(path: str) -> str:
    return f"at {path.lstrip('.')!r}" if path else "as a whole"
