"""What simulators show, in the form of a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from zmqrl.errors import EnvironmentFailure

Array: TypeAlias = npt.NDArray[Any]
Tree: TypeAlias = Any
"""A dict, list or tuple of trees, or a leaf: an array `[N, ...]`, or a list of N str."""

NUMERIC = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""The kinds of spaces that are made of numbers."""

_UNBATCHED = (spaces.Graph, spaces.Sequence, spaces.OneOf)


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
    return any(isinstance(leaf, spaces.Text) for _, leaf in space_leaves(space))


def space_leaves(space: spaces.Space[Any], path: str = "") -> Iterator[tuple[str, spaces.Space[Any]]]:
    """The spaces that `space` is made of, with their paths, such as `images.wrist`."""
    if isinstance(space, spaces.Dict):
        for key, child in space.items():
            yield from space_leaves(child, f"{path}.{key}" if path else str(key))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from space_leaves(child, f"{path}[{index}]")
    else:
        yield path, space


def check_batchable(name: str, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
    """Look whether rows with these spaces can stand in one array.

    Raises:
        EnvironmentFailure: One cannot; names simulator and key.
    """
    for what, space in (("observation", observation), ("action", action)):
        for path, leaf in space_leaves(space):
            if isinstance(leaf, _UNBATCHED):
                where = f"{what} {path!r}" if path else what
                raise EnvironmentFailure(
                    f"{name} has the space {leaf!s:.100} for its {where}: its rows differ in size, so "
                    "they cannot be batched; wrap it to give a Box of the largest size, or text"
                )
