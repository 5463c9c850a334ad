"""Trees of arrays: what an observation, and a reply, is made of.

A tree is a dict with str keys, a list or tuple of trees, or a leaf. A leaf is an array, a scalar, or
a *row list*: a list of scalars, one a row, such as the instructions in `task_descriptions`. The first
axis of every array, and the length of every row list, counts rows: one a simulator. Arrays of no
dimension and scalars are constants of the whole tree.
"""

from __future__ import annotations

from typing import Any, Iterator, Tuple

import numpy as np

from zmqrl.errors import EncodeError

MAX_DEPTH = 32

_SCALARS = (str, bytes, bytearray, bool, int, float, complex, type(None), np.generic)


def is_row_list(node: Any) -> bool:
    """Whether `node` is a list of scalars, one a row."""
    return isinstance(node, (list, tuple)) and all(isinstance(item, _SCALARS) for item in node)


def leaves(tree: Any, path: str = "", depth: int = 0) -> Iterator[Tuple[str, Any]]:
    """The leaves of `tree` with their paths, such as `images.wrist`.

    Raises:
        EncodeError: The tree is deeper than `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise EncodeError(f"the tree is nested deeper than {MAX_DEPTH} at {path[:80]!r}")
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from leaves(child, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(tree, (list, tuple)) and not is_row_list(tree):
        for index, child in enumerate(tree):
            yield from leaves(child, f"{path}[{index}]", depth + 1)
    else:
        yield path, tree


def rows_of(tree: Any) -> int:
    """The number of rows that all leaves of `tree` share.

    Raises:
        EncodeError: Leaves differ in their rows, or none has any.
    """
    rows, first = -1, ""
    for path, leaf in leaves(tree):
        if isinstance(leaf, (list, tuple)):
            count = len(leaf)
        else:
            shape: Tuple[int, ...] = getattr(leaf, "shape", ())
            if len(shape) == 0:
                continue
            count = int(shape[0])
        if rows < 0:
            rows, first = count, path
        elif count != rows:
            raise EncodeError(
                f"{_name(path)} has {count} rows, but {_name(first)} has {rows}: "
                "the first axis of every array counts the observations of the batch"
            )
    if rows < 0:
        raise EncodeError(
            "nothing in the tree has a first axis that counts observations; "
            "give arrays of shape [N, ...], or use infer_one() for a single observation"
        )
    return rows


def _name(path: str) -> str:
    return repr(path) if path else "the array"


def with_axis(tree: Any) -> Any:
    """A batch of one: the same tree with a first axis of length 1."""
    if isinstance(tree, dict):
        return {key: with_axis(child) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [with_axis(child) for child in tree]
    if isinstance(tree, (str, bytes, bytearray)) or tree is None:
        return [tree]
    if hasattr(tree, "unsqueeze"):
        return tree.unsqueeze(0)
    return np.asarray(tree)[None]


def without_axis(tree: Any) -> Any:
    """The reverse of `with_axis`."""
    if isinstance(tree, dict):
        return {key: without_axis(child) for key, child in tree.items()}
    if isinstance(tree, list):
        return tree[0] if tree and is_row_list(tree) else [without_axis(child) for child in tree]
    if isinstance(tree, np.ndarray) and tree.ndim:
        return tree[0]
    return tree
