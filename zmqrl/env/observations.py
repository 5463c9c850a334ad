"""What the policy gets to see of a shard: observations, with the infos and the task that it asks for."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from zmqrl.env.actions import bounds_of
from zmqrl.env.conversion import NUMERIC, Array, Tree, observation_tree, put_row
from zmqrl.errors import ConfigError
from zmqrl.transport.rows import on_cpu

log = logging.getLogger(__name__)

TASK = "task_descriptions"
"""Under which the policy finds `env.task_description`."""

_SAMPLE = 4096
"""Numbers of a leaf that are held against the bounds in one step."""


class Observations:
    """Brings the observations of one shard into the form of a tree, and looks at them.

    With infos or a task the tree is a dict: that of the simulator with further keys, or one with what
    it shows under `observation`.

    Args:
        name: What messages call the simulator.
        space: The observation space of one row.
        rows: The number of rows, N.
        copy: Whether arrays are copied, because the simulator may overwrite them.
        info_keys: Infos that the observation gets, for each row.
        task: For every row, under `task_descriptions`.
        number_of: The number of the row that is at a place of the batch, where the two differ.

    Raises:
        ConfigError: The space has such a key already.
    """

    def __init__(
        self,
        name: str,
        space: spaces.Space[Any] | None,
        rows: int,
        *,
        copy: bool,
        info_keys: Sequence[str] = (),
        task: str | None = None,
        number_of: Callable[[int], int] = int,
    ) -> None:
        self._name = name
        self._number_of = number_of
        self._rows = rows
        self._copy = copy
        self._info_keys = info_keys
        self._task = task
        self._form: Any = None
        self._is_dict = True
        self._bounds = [] if space is None else _bounds(space)
        if isinstance(space, spaces.Dict):
            self._look_for_doubles(space.spaces)

    def of_reset(self, observation: Any, infos: Any, before: Tree = None, rows: Any = None) -> Tree:
        """The tree of what `reset` returned.

        Args:
            observation: Of all rows.
            infos: Of those that were reset.
            before: The tree of the step before, which the infos of the other rows are taken from.
            rows: bool `[N]`: which rows were reset; None for all.

        Raises:
            ValueError: Something is not as it should be, or was; names the key, and the row.
        """
        return self._taken(observation, infos, "reset", before, rows)

    def of_step(self, observation: Any, infos: Any) -> Tree:
        """The tree of what `step` returned.

        Raises:
            ValueError: See `of_reset`.
        """
        return self._taken(observation, infos, "step", None, None)

    def of_the_end(self, observation: Tree, infos: Mapping[str, Any], done: Array) -> Tree:
        """The tree whose `done` rows hold what a vector env that reset at once tells in its infos.

        Args:
            observation: The tree after that reset.
            infos: Those of the step.
            done: bool `[N]`.

        Raises:
            ValueError: See `of_reset`.
        """
        final = infos["final_obs"]
        if isinstance(final, np.ndarray) and final.dtype == object:
            tree = copy.deepcopy(observation)
            shown = tree if self._is_dict else tree["observation"]
            if self._is_dict and self._more:
                shown = {key: child for key, child in tree.items() if key not in self._more}
            for row in np.flatnonzero(done):
                put_row(shown, int(row), final[row])
        else:
            tree = observation_tree(final, self._rows, copy=self._copy)
            tree = self._with_more(tree, observation)
        told = infos.get("final_info", {})
        for key in self._info_keys:
            tree[key] = self._info(told, key, "step", observation[key], done)
        return tree

    @property
    def _more(self) -> list[str]:
        return [*self._info_keys, *([TASK] if self._task is not None else [])]

    def _taken(self, observation: Any, infos: Any, where: str, before: Tree, rows: Any) -> Tree:
        tree = observation_tree(observation, self._rows, copy=self._copy)
        shown = tree
        if self._more:
            self._is_dict = isinstance(tree, dict)
            self._look_for_doubles(tree)
            further = {
                key: self._info(infos, key, where, None if before is None else before[key], rows)
                for key in self._info_keys
            }
            if self._task is not None:
                further[TASK] = [self._task] * self._rows
            tree = self._with_more(tree, further)
        form = _form(tree)
        if self._form is None:
            self._form = form
        elif form != self._form:
            raise ValueError(_difference(self._form, form, "observation"))
        if self._bounds:
            self._look_at_bounds(shown)
        return tree

    def _with_more(self, tree: Tree, further: Mapping[str, Any]) -> Tree:
        if not self._more:
            return tree
        tree = tree if self._is_dict else {"observation": tree}
        return {**tree, **{key: further[key] for key in self._more}}

    def _look_for_doubles(self, tree: Mapping[str, Any]) -> None:
        for key in self._more:
            if key in (tree if self._is_dict else ("observation",)):
                option = "env.task_description" if key == TASK else "env.info_keys"
                raise ConfigError(f"{option}: the observation of {self._name} has a {key!r} of its own")

    def _info(self, infos: Mapping[str, Any], key: str, where: str, others: Any, rows: Any) -> Tree:
        """The info `key` of each row; of those that `rows` leaves out, what `others` has."""
        wanted = np.ones(self._rows, np.bool_) if rows is None else rows
        told = _is_told(infos, key, self._rows)
        missing = np.flatnonzero(wanted & ~told)
        if missing.size:
            has = ", ".join(repr(name) for name in infos if not name.startswith("_")) or "nothing"
            raise ValueError(
                f"the infos of {where} have no {key!r} in row {self._number_of(missing[0])} "
                f"(env.info_keys); they have {has}"
            )
        return self._info_tree(infos[key], f"info {key!r}", wanted, others)

    def _info_tree(self, node: Any, path: str, wanted: Array, others: Any) -> Tree:
        """The `wanted` rows of one batched info, the rest from the tree `others`."""
        if isinstance(node, Mapping):
            tree = {}
            for key, child in node.items():
                if key.startswith("_") and key[1:] in node:
                    continue  # a mask
                missing = np.flatnonzero(wanted & ~_is_told(node, key, self._rows))
                if missing.size:
                    raise ValueError(f"{path} has no {key!r} in row {self._number_of(missing[0])}")
                theirs = None if others is None else others[key]
                tree[key] = self._info_tree(child, f"{path}.{key}", wanted, theirs)
            return tree
        items = on_cpu(node)
        if isinstance(items, (list, tuple)) or getattr(items, "dtype", np.dtype(bool)).kind == "O":
            # Objects: text, and whatever else each row tells; rows that tell nothing hold None.
            told = [on_cpu(item) for item in items]
            if len(told) == self._rows and not wanted.all():
                filler = told[int(np.flatnonzero(wanted)[0])]
                told = [item if w else filler for item, w in zip(told, wanted, strict=True)]
            items = told if all(isinstance(item, str) for item in told) else np.array(told)
        leaf = observation_tree(items, self._rows, copy=True, path=path)
        if others is None or wanted.all():
            return leaf
        if isinstance(leaf, list):
            return [mine if w else other for mine, other, w in zip(leaf, others, wanted, strict=True)]
        leaf[~wanted] = others[~wanted]
        return leaf

    # -- Bounds

    def _look_at_bounds(self, tree: Tree) -> None:
        for bounds in list(self._bounds):
            leaf = bounds.leaf_of(tree)
            if leaf is not None and bounds.are_left_by(leaf, self._number_of):
                self._bounds.remove(bounds)  # said once
                log.warning("%s: %s; this is said once, and the run goes on", self._name, bounds.words)


class _Bounds:
    """The bounds of one leaf of the observation, and a look at it.

    Of a large leaf a sample is looked at, in each step another one.
    """

    def __init__(self, path: tuple[Any, ...], name: str, space: spaces.Space[Any]) -> None:
        self._path = path
        self._name = f"observation {name!r}" if name else "observation"
        self._space = space
        # In the leaf's own precision: a bound of 0.1 is another number in float32.
        low, high = (np.asarray(bound).ravel() for bound in bounds_of(space))
        self._low = low[:1] if (low == low[0]).all() else low
        self._high = high[:1] if (high == high[0]).all() else high
        self._turn = 0
        self.words = ""
        """What was wrong."""

    def leaf_of(self, tree: Tree) -> Array | None:
        """The leaf; None where a batched simulator shows something else than it declares."""
        for key in self._path:
            try:
                tree = tree[key]
            except (LookupError, TypeError):
                return None
        fits = isinstance(tree, np.ndarray) and tree.shape[1:] == self._space.shape
        return tree if fits else None

    def are_left_by(self, leaf: Array, number_of: Callable[[int], int]) -> bool:
        flat = leaf.reshape(len(leaf), -1)
        stride = -(-leaf.size // _SAMPLE)
        first = self._turn % stride
        self._turn += 1
        low, high = (b[first::stride] if len(b) > 1 else b for b in (self._low, self._high))
        part = flat[:, first::stride] if stride > 1 else flat
        if not (part.size and ((part < low).any() or (part > high).any())):
            return False
        row, at = np.argwhere((part < low) | (part > high))[0]
        element = np.unravel_index(first + int(at) * stride, leaf.shape[1:]) if leaf.ndim > 1 else ()
        index = f"[{', '.join(map(str, element))}]" if element else ""
        bounds = [b[at] if len(b) > 1 else b[0] for b in (low, high)]
        self.words = (
            f"{self._name}{index} is {part[row, at]} in row {number_of(row)}, outside the declared "
            f"[{bounds[0]}, {bounds[1]}]"
        )
        return True


def _bounds(space: spaces.Space[Any], path: tuple[Any, ...] = (), name: str = "") -> list[_Bounds]:
    """Of every leaf that can leave them."""
    if isinstance(space, spaces.Dict):
        children: list[tuple[Any, str, spaces.Space[Any]]] = [
            (key, f"{name}.{key}" if name else str(key), child) for key, child in space.items()
        ]
    elif isinstance(space, spaces.Tuple):
        children = [(index, f"{name}[{index}]", child) for index, child in enumerate(space.spaces)]
    else:
        return [_Bounds(path, name, space)] if _can_be_left(space) else []
    return [found for key, of, child in children for found in _bounds(child, (*path, key), of)]


def _can_be_left(space: spaces.Space[Any]) -> bool:
    if not isinstance(space, NUMERIC) or 0 in (space.shape or ()):
        return False
    if not isinstance(space, spaces.Box):
        return True
    if np.issubdtype(space.dtype, np.integer):
        of_type = np.iinfo(space.dtype)
        return bool((space.low > of_type.min).any() or (space.high < of_type.max).any())
    return bool(np.isfinite(space.low).any() or np.isfinite(space.high).any())


# -- Infos


def _is_told(infos: Mapping[str, Any], key: str, rows: int) -> Array:
    """bool `[N]`: the rows that tell the info `key`."""
    if key not in infos:
        return np.zeros(rows, np.bool_)
    mask: Array = np.broadcast_to(np.asarray(infos.get(f"_{key}", True), np.bool_), (rows,))
    return mask


# -- Form


class _Leaf(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


def _form(tree: Tree) -> Any:
    """Structure, shapes and dtypes of a tree, to compare."""
    if isinstance(tree, np.ndarray):
        return _Leaf(tree.shape, tree.dtype)
    if isinstance(tree, dict):
        return {key: _form(child) for key, child in tree.items()}
    if isinstance(tree, list) and all(isinstance(item, str) for item in tree):
        return "text"
    return [_form(child) for child in tree]


def _difference(before: Any, now: Any, path: str) -> str:
    """The first difference between two forms, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *now]:
            if key not in now or key not in before:
                what = "is not there any more" if key in before else "was not there before"
                return f"{path}.{key} {what}"
            if before[key] != now[key]:
                return _difference(before[key], now[key], f"{path}.{key}")
    if type(before) is list and type(now) is list and len(before) == len(now):
        index = next(i for i, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
        return _difference(before[index], now[index], f"{path}[{index}]")
    return f"{path} is now {_say(now)} in place of {_say(before)}"


def _say(form: Any) -> str:
    if isinstance(form, _Leaf):
        return f"{form.dtype} {list(form.shape)}"
    if isinstance(form, dict):
        return f"a dict with {', '.join(map(repr, form))}"
    return "text" if form == "text" else f"a list of {len(form)}"
