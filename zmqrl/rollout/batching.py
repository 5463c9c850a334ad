"""Shards to batches and back: rows of several env workers in one policy call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from zmqrl.errors import PolicyOutputError
from zmqrl.rollout.memory import BatchMemory
from zmqrl.transport.tree import is_row_list


def merge(trees: Sequence[Any], memory: BatchMemory | None = None, padding: int = 0) -> Any:
    """One tree with the rows of all, in order.

    The signature in a request's header says which trees go together, but it is the client's word: here
    it is checked, so that a false one changes nothing in the rows of others.

    Args:
        trees: Trees of one structure; arrays [N_i, ...].
        memory: Where the arrays are made; None to have each allocated.
        padding: Rows to add, copies of the last one: what a policy does with them cannot be stranger
            than with that one.

    Returns:
        A tree of writable arrays [sum of N_i + padding, ...]; constants as in all of them. Arrays of a
        single tree that can be written to are not copied, unless `memory` is pinned.

    Raises:
        ValueError, KeyError, TypeError: The trees differ in structure, dtypes or constants after all.
    """
    first = trees[0]
    if len(trees) == 1 and not padding:
        return _own(first, memory)
    kind = type(first)
    for tree in trees:
        if type(tree) is not kind:
            raise TypeError(f"the types differ: {', '.join(sorted({type(t).__name__ for t in trees}))}")
    if isinstance(first, dict):
        keys = first.keys()
        for tree in trees:
            if tree.keys() != keys:
                raise KeyError("the keys differ")
        return {key: merge([tree[key] for tree in trees], memory, padding) for key in first}
    if isinstance(first, np.ndarray) and any(tree.ndim for tree in trees):
        return _join(trees, memory, padding)
    if isinstance(first, list):
        if all(is_row_list(tree) for tree in trees):
            joined = [item for tree in trees for item in tree]
            return joined + joined[-1:] * padding
        return [merge(children, memory, padding) for children in zip(*trees, strict=True)]
    if not all(_is_same(tree, first) for tree in trees):
        raise ValueError("the constants differ")
    return first.copy() if isinstance(first, np.ndarray) else first


def _own(tree: Any, memory: BatchMemory | None) -> Any:
    """A single tree, with arrays that may be written to; `merge` without what it checks of several."""
    if isinstance(tree, dict):
        return {key: _own(child, memory) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_own(child, memory) for child in tree]
    if not isinstance(tree, np.ndarray):
        return tree
    if tree.ndim and tree.flags.writeable and not (memory and memory.pinned):
        return tree
    if memory is None or not tree.ndim:
        return tree.copy()
    batch = memory.take(tree.shape, tree.dtype)
    batch[...] = tree
    return batch


def _join(arrays: Sequence[np.ndarray], memory: BatchMemory | None, padding: int) -> np.ndarray:
    first = arrays[0]
    dtype = first.dtype
    for array in arrays:
        if array.dtype is not dtype and array.dtype != dtype:
            raise TypeError("the dtypes differ")
    if memory is None and not padding:
        return np.concatenate(arrays)
    rows = sum(map(len, arrays))
    shape = (rows + padding, *first.shape[1:])
    batch = np.empty(shape, dtype) if memory is None else memory.take(shape, dtype)
    np.concatenate(arrays, out=batch[:rows] if padding else batch)
    if padding:
        batch[rows:] = batch[rows - 1]
    return batch


def _is_same(one: Any, other: Any) -> bool:
    """Whether two constants of one type are equal to the last bit."""
    if isinstance(one, (np.ndarray, np.generic)):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return bool(one == other) or (one != one and other != other)  # NaN differs from itself


def split(tree: Any, rows: Sequence[int]) -> list[Any]:
    """The reverse of `merge`: one tree for each number of rows; constants go to all.

    Args:
        tree: Arrays [sum of rows, ...].
        rows: Rows of each part.
    """
    return [select(tree, slice(a, b)) for a, b in pairwise(accumulate(rows, initial=0))]


def select(tree: Any, rows: slice | np.ndarray) -> Any:
    """The same tree with some of its rows.

    Args:
        tree: Arrays, or tensors, [N, ...].
        rows: A slice, or row numbers int64 [M].
    """
    if isinstance(tree, dict):
        return {key: select(child, rows) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        if not is_row_list(tree):
            return [select(child, rows) for child in tree]
        return list(tree[rows]) if isinstance(rows, slice) else [tree[i] for i in rows]
    return tree[rows] if getattr(tree, "ndim", 0) else tree


def check_output(output: Any, rows: int, key: str = "actions") -> dict[str, Any]:
    """What a policy returned, as a reply.

    Args:
        output: A dict of arrays, or one array of actions, [rows, ...].
        rows: How many observations the policy was given.
        key: What the dict must hold, and a bare array is called: `actions`, or `rewards`.

    Returns:
        The dict; a bare array stands under `key`.

    Raises:
        PolicyOutputError: It is no array, or one has another number of rows; names the key.
    """
    if isinstance(output, np.ndarray):
        output = {key: output}
    if not isinstance(output, dict):
        raise PolicyOutputError(
            f"the policy returned a {type(output).__name__}; it must return an array of {key}, or a "
            f"dict with them under {key!r}"
        )
    for name, value in output.items():
        _check_rows(value, rows, str(name))
    if key not in output:
        keys = ", ".join(map(repr, output)) or "nothing"
        raise PolicyOutputError(f"the policy returned no {key!r}; its dict has {keys}")
    if key == "rewards" and np.shape(output[key]) not in ((rows,), (rows, 1)):
        raise PolicyOutputError(
            f"the reward model returned rewards of shape {list(np.shape(output[key]))} for {rows} "
            f"transitions; expected [{rows}]"
        )
    return output


def _check_rows(value: Any, rows: int, path: str) -> None:
    if isinstance(value, dict):
        for key, child in value.items():
            _check_rows(child, rows, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and not is_row_list(value):
        for index, child in enumerate(value):
            _check_rows(child, rows, f"{path}[{index}]")
    elif isinstance(value, (np.ndarray, list, tuple)):
        shape = value.shape if isinstance(value, np.ndarray) else (len(value),)
        if not shape or shape[0] != rows:
            raise PolicyOutputError(
                f"the policy returned {path!r} of shape {list(shape)} for {rows} observations; "
                "its first axis must count them"
            )
    else:
        raise PolicyOutputError(
            f"the policy returned a {type(value).__name__} under {path!r}, not an array"
        )
