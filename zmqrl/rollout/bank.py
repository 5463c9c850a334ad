"""The states of env rows that a rollout worker keeps from one request to the next."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zmqrl.errors import PolicyOutputError
from zmqrl.transport.tree import is_row_list

log = logging.getLogger(__name__)

_LEAST = 64
"""Rows that there is room for at first, if the bound allows; twice as many each time that more come."""

_NONE = -2
"""The last step of a slot in which nothing is kept: none from 0 on follows it."""

_TEXT_BYTES = 100
"""What a text in a row of an output is taken to have."""

_MOST_KINDS = 4
"""Forms of outputs that are kept: a policy of several kinds of simulators has a few."""

Slots = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Found(NamedTuple):
    """What a bank knows of the rows of a request."""

    slots: Slots
    """Where each row is kept; -1 for one that is not."""
    repeated: Mask
    """[N]: the row's step was run already, and its output is kept."""
    lost: Mask
    """[N]: the row continues a state that is not here."""


class StateBank:
    """Keeps a state for each row, with the number of its last step and the output of that.

    Step k of a row follows step k - 1. A step that is asked for again was run already, but its reply got
    lost: it is answered with the output that is kept. Of a row that begins an episode nothing need be
    here.

    All rows lie in the same arrays, or tensors on the policy's device. There is room for twice as many
    each time that more come, up to a bound; then those that were not asked for the longest go.

    Args:
        most_bytes: Of states and outputs; one batch is kept whatever it takes.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by key, the one used last at the end
        self._free: list[int] = []
        self._steps = np.full(1, _NONE, np.int64)
        self._versions = np.zeros(1, np.int64)
        self._kinds = np.full(1, -1, np.int64)  # of the outputs
        self._states: Rows | None = None
        self._outputs: dict[int, Rows] = {}  # by kind
        self._kinds_of_forms: dict[Hashable, int] = {}
        self._next_kind = 0
        self._said_full = False

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def most_rows(self) -> int:
        """The most rows that are kept; those of a batch may be more for a moment."""
        stores = [*self._outputs.values(), *([] if self._states is None else [self._states])]
        size = sum(store.row_bytes for store in stores)
        return max(1, self._most_bytes // max(1, size))

    def find(self, keys: Sequence[bytes], steps: Slots, reset: Mask) -> Found:
        """What is known of some rows; changes nothing.

        Args:
            keys: Of the rows.
            steps: int64 [N]: which step of each row is asked for.
            reset: bool [N]: True where it begins an episode.
        """
        get = self._slots.get
        slots = np.array([get(key, -1) for key in keys])
        behind = steps - self._steps[slots]
        is_kept = slots >= 0
        if is_kept.all() and (behind == 1).all():
            return Found(slots, ~is_kept, ~is_kept)  # as nearly always
        repeated = is_kept & (behind == 0) & (self._kinds[slots] >= 0)
        lost = ~(repeated | reset | (is_kept & (behind == 1)))
        return Found(slots, repeated, lost)

    def one_state(self) -> Any:
        """A row, whatever is in it, of the form that all states have; None before the first is kept."""
        return None if self._states is None else self._states.take(np.zeros(1, np.int64))

    def states(self, slots: Slots) -> Any:
        """The states of rows that are kept, a tree of copies [N, ...]."""
        assert self._states is not None
        return self._states.take(slots)

    def versions(self, slots: Slots) -> Slots:
        """The versions of the weights that made the outputs of rows that are kept."""
        return self._versions[slots]

    def with_outputs(self, output: Any, rows: Slots, slots: Slots) -> Any:
        """A copy of `output` whose `rows` are the outputs that are kept in `slots`."""
        output = mapped(copied, output)
        for kind, store in self._outputs.items():
            chosen = self._kinds[slots] == kind
            if chosen.any():
                try:
                    kept = store.take(slots[chosen])
                    output = mapped(_wide_enough, output, kept)
                    put(output, rows[chosen], kept)
                except (KeyError, ValueError, TypeError) as error:
                    raise PolicyOutputError(f"the output of a repeated step differs: {error}") from error
        return mapped(lambda leaf: leaf.tolist() if _is_text(leaf) else leaf, output)

    def keep(
        self,
        keys: Sequence[bytes],
        steps: Slots,
        version: int,
        output: Any,
        state: Any,
        slots: Slots | None = None,
    ) -> None:
        """Keep what a step gave.

        Args:
            keys: Of the rows, which all differ.
            steps: int64 [N].
            version: Of the weights that made it.
            output: A tree of arrays [N, ...].
            state: A tree of arrays or tensors [N, ...], of one form always.
            slots: Where they are kept already, if all of them are.
        """
        if self._states is None:
            self._states = Rows(state, len(self._steps))
        kind = self._kind_of(output)
        if slots is None:
            slots = self._take_slots(keys)
        else:
            for key in keys:
                self._slots.move_to_end(key)
        self._steps[slots] = _NONE  # should it stop half way
        self._states.put(slots, state)
        self._outputs[kind].put(slots, output)
        self._kinds[slots] = kind
        self._versions[slots] = version
        self._steps[slots] = steps

    def _kind_of(self, output: Any) -> int:
        form = quick_form_of(output)
        known = self._kinds_of_forms.get(form)
        if known is not None:
            return known
        if len(self._outputs) >= _MOST_KINDS:
            oldest = next(iter(self._outputs))
            del self._outputs[oldest]
            self._kinds[self._kinds == oldest] = -1
            self._kinds_of_forms = {f: k for f, k in self._kinds_of_forms.items() if k != oldest}
        kind = self._next_kind
        self._outputs[kind] = Rows(output, len(self._steps))
        self._kinds_of_forms[form] = kind
        self._next_kind += 1
        return kind

    def _take_slots(self, keys: Sequence[bytes]) -> Slots:
        """The slots of rows, which become those used last."""
        known = self._slots
        new = 0
        for key in keys:
            if key in known:
                known.move_to_end(key)
            else:
                new += 1
        if new:
            self._make_room(new, len(keys))
        slots = []
        for key in keys:
            slot = known.get(key)
            if slot is None:
                slot = known[key] = self._free.pop() if self._free else len(known)
            slots.append(slot)
        return np.array(slots, np.int64)

    def _make_room(self, new: int, batch: int) -> None:
        most = max(self.most_rows, batch)
        count = len(self._slots) + new
        if count > most and not self._said_full:
            self._said_full = True
            log.warning(
                "the states of %d env rows fill rollout.state_mb; those that were not asked for the "
                "longest go",
                most,
            )
        for _ in range(count - most):
            _, slot = self._slots.popitem(last=False)
            self._steps[slot] = _NONE
            self._free.append(slot)
        count = len(self._slots) + new
        if count > len(self._steps):
            capacity = max(count, min(most, max(_LEAST, 2 * len(self._steps))))
            for store in [self._states, *self._outputs.values()]:
                if store is not None:
                    store.grow(capacity)
            more = capacity - len(self._steps)
            self._steps = np.append(self._steps, np.full(more, _NONE, np.int64))
            self._versions = np.append(self._versions, np.zeros(more, np.int64))
            self._kinds = np.append(self._kinds, np.full(more, -1, np.int64))


class Rows:
    """Arrays or tensors, a tree of them, with a row for each slot.

    Args:
        like: A tree of arrays, tensors and row lists [N, ...]: what will be kept.
        capacity: Slots.
    """

    def __init__(self, like: Any, capacity: int) -> None:
        self._tree = mapped(lambda leaf: _empty(leaf, capacity), like)
        sizes: list[int] = []
        mapped(lambda leaf: sizes.append(_row_bytes(leaf)), like)
        self.row_bytes = sum(sizes)
        """Bytes of a row."""

    def put(self, slots: Slots, tree: Any) -> None:
        """Keep rows."""
        put(self._tree, slots, tree)

    def take(self, slots: Slots) -> Any:
        """Copies of rows."""
        return taken(self._tree, slots)

    def grow(self, capacity: int) -> None:
        """Make room for so many rows."""

        def larger(leaf: Any) -> Any:
            new = _empty(leaf, capacity)
            new[: len(leaf)] = leaf
            return new

        self._tree = mapped(larger, self._tree)


# -- Trees of arrays, tensors and row lists, whose tuples stay tuples


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The tree of what a function makes of each leaf, and of those in its place in other trees."""
    if isinstance(tree, dict):
        return {key: mapped(function, tree[key], *(other[key] for other in others)) for key in tree}
    if isinstance(tree, (list, tuple)) and not (tree and is_row_list(tree)):
        children = [mapped(function, *nodes) for nodes in zip(tree, *others, strict=True)]
        return tuple(children) if isinstance(tree, tuple) else children
    return function(tree, *others)


def taken(tree: Any, rows: Slots) -> Any:
    """Copies of some rows of a tree."""
    return mapped(lambda leaf: [leaf[i] for i in rows] if _is_list(leaf) else leaf[rows], tree)


def put(tree: Any, rows: Slots, values: Any) -> None:
    """Write rows of `values` over some of a tree's own."""

    def write(leaf: Any, value: Any) -> None:
        # A policy may begin its states in main memory, and return them from a GPU.
        leaf[rows] = value.detach().to(leaf.device) if hasattr(value, "detach") else value

    mapped(write, tree, values)


def joined(trees: Sequence[Any]) -> Any:
    """One tree with the rows of all, in order."""

    def join(*leaves: Any) -> Any:
        if isinstance(leaves[0], np.ndarray):
            return np.concatenate(leaves)
        import torch

        return torch.cat(leaves)

    return mapped(join, *trees)


def copied(leaf: Any) -> Any:
    """A leaf in memory of its own; a row list becomes an array, so that rows can be written over."""
    if _is_list(leaf):
        return np.array([*leaf, None], object)[:-1]
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone()


def _wide_enough(leaf: np.ndarray, other: Any) -> np.ndarray:
    """An array of a dtype that holds another's values as well: longer texts, for instance."""
    if _is_list(other) or leaf.dtype == other.dtype:
        return leaf
    return leaf.astype(np.result_type(leaf, other))


def form_of(tree: Any, path: str = "") -> dict[str, str]:
    """The leaves of a tree, by path, and what a row of each is, in words."""
    if isinstance(tree, dict):
        form = {}
        for key in sorted(tree):
            form.update(form_of(tree[key], f"{path}.{key}" if path else str(key)))
        return form
    if isinstance(tree, (list, tuple)) and not (tree and is_row_list(tree)):
        form = {}
        for index, child in enumerate(tree):
            form.update(form_of(child, f"{path}[{index}]"))
        return form
    if _is_list(tree):
        return {path: "text"}
    return {path: f"{tree.dtype}{list(tree.shape[1:])}"}


def quick_form_of(tree: Any) -> Hashable:
    """What two trees of rows that are kept together have in common."""
    if isinstance(tree, dict):
        return tuple([(key, quick_form_of(tree[key])) for key in sorted(tree)])
    if isinstance(tree, (list, tuple)):
        return None if tree and is_row_list(tree) else tuple([quick_form_of(child) for child in tree])
    return tree.dtype, tree.shape[1:]


def _is_list(leaf: Any) -> bool:
    return isinstance(leaf, (list, tuple))


def _is_text(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype == object


def _row_bytes(leaf: Any) -> int:
    return _TEXT_BYTES if _is_list(leaf) else int(leaf.nbytes) // len(leaf)


def _empty(leaf: Any, rows: int) -> Any:
    if _is_list(leaf):
        return np.empty(rows, object)
    if isinstance(leaf, np.ndarray):
        return np.empty((rows, *leaf.shape[1:]), leaf.dtype)
    return leaf.new_empty((rows, *leaf.shape[1:]))
