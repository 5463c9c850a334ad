"""Values on their way to and from a simulator: actions, observations, and one number a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

Array: TypeAlias = npt.NDArray[Any]
Tree: TypeAlias = Any
"""A dict, list or tuple of trees, or a leaf: an array `[N, ...]`, or a list of N str."""


def actions_for(space: spaces.Space[Any], rows: int, actions: Any, *, rescale: bool = False) -> Any:
    """Make `actions` fit for a batch of simulators.

    Args:
        space: The action space of one row.
        rows: The number of rows, N.
        actions: Array `[N, *space.shape]`. For a space without numbers of its own (Dict, Tuple, Text)
            anything, which is passed on as it is.
        rescale: Map from [-1, 1] to the bounds of a Box.

    Returns:
        The actions in the dtype of the space, and within the bounds of a Box.

    Raises:
        ValueError: The shape or dtype is wrong, or an action is NaN.
    """
    numeric = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, numeric):
        return actions
    array = np.asarray(actions)
    shape = (rows, *(space.shape or ()))
    if array.dtype.kind not in "biuf" or array.shape != shape:
        raise ValueError(
            f"expected shape {shape} and dtype {space.dtype}, "
            f"got shape {array.shape} and dtype {array.dtype}"
        )
    if array.dtype.kind == "f" and np.isnan(array).any():
        bad = np.unique(np.argwhere(np.isnan(array))[:, 0]).tolist()
        raise ValueError(f"they hold NaN in rows {bad}")
    if isinstance(space, spaces.Box):
        array = _into_box(array, space, rescale)
    return array.astype(space.dtype, copy=False)


def observation_tree(node: Any, rows: int, *, copy: bool, path: str = "observation") -> Tree:
    """Bring the batched observation of a vector env into the form of a tree.

    Args:
        node: Dicts, lists and tuples of arrays; text as N str, in whatever holds them.
        rows: The number of rows, N.
        copy: Whether arrays are copied, because the simulator may overwrite them.
        path: What errors call the node.

    Raises:
        ValueError: A leaf is neither numbers nor text, or has not N rows.
    """
    if isinstance(node, Mapping):
        return {
            key: observation_tree(child, rows, copy=copy, path=f"{path}.{key}")
            for key, child in node.items()
        }
    if isinstance(node, (tuple, list)) and not all(isinstance(item, str) for item in node):
        children = [
            observation_tree(child, rows, copy=copy, path=f"{path}[{index}]")
            for index, child in enumerate(node)
        ]
        return children if isinstance(node, list) else tuple(children)
    # As objects, because arrays of str would drop what they take for padding.
    dtype = object if isinstance(node, (tuple, list)) else None
    leaf = np.array(node, dtype) if copy else np.asarray(node, dtype)
    text = leaf.dtype.kind in "UO" and all(isinstance(item, str) for item in leaf.flat)
    if leaf.shape[:1] != (rows,) or (leaf.dtype.kind in "UO" and not (text and leaf.ndim == 1)):
        raise ValueError(
            f"expected {rows} rows of numbers or text in {path}, "
            f"got shape {leaf.shape} and dtype {leaf.dtype}"
        )
    return leaf.tolist() if text else leaf


def put_row(tree: Tree, row: int, item: Any) -> None:
    """Replace `row` in every leaf of `tree` by what the unbatched `item` has there."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            put_row(child, row, item[key])
    elif isinstance(tree, np.ndarray) or isinstance(tree[0], str):
        tree[row] = item
    else:
        for child, part in zip(tree, item, strict=True):
            put_row(child, row, part)


def has_text(space: spaces.Space[Any]) -> bool:
    """Whether text is anywhere in `space`."""
    if isinstance(space, spaces.Dict):
        return any(has_text(child) for child in space.values())
    if isinstance(space, spaces.Tuple):
        return any(has_text(child) for child in space.spaces)
    return isinstance(space, spaces.Text)


def _into_box(actions: Array, box: spaces.Box, rescale: bool) -> Array:
    if rescale:
        low, high = box.low.astype(np.float64), box.high.astype(np.float64)
        actions = low + (np.clip(actions, -1.0, 1.0) + 1.0) / 2.0 * (high - low)
    if actions.dtype.kind == "f" and np.issubdtype(box.dtype, np.integer):
        actions = np.rint(actions)
    clipped: Array = np.clip(actions, box.low, box.high)
    return clipped
