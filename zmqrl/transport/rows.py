"""Trees whose every leaf has one row a simulator: copied, stacked, compared, and their rows taken.

A leaf is an array `[N, ...]`, or text: a list of N str (or bytes, or None).
"""

from __future__ import annotations

from typing import Any, List, Tuple

import numpy as np

from zmqrl.transport.tree import is_row_list, leaves

_TEXT = (str, bytes, bytearray, type(None))
"""What text is made of; None stands for text that is not there."""


def one_per_row(what: str, values: Any, rows: int, dtype: Any) -> Any:
    """Copy `values`, of shape `[N]` or `[N, 1]`, to an array `[N]` of `dtype`.

    Raises:
        ValueError: They have another shape, or are no such values; `what` names them.
    """
    try:
        given = np.asarray(on_cpu(values))
        if given.dtype.kind not in "biufO":
            raise ValueError(f"got {given.dtype}")
        with np.errstate(over="ignore"):  # it becomes inf, which is looked for
            array = given.astype(dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"expected {what} of shape ({rows},): {error}") from None
    if array.shape not in ((rows,), (rows, 1)):
        raise ValueError(f"expected {what} of shape ({rows},), got {array.shape}")
    if array.dtype == bool and given.dtype.kind in "fO":
        # Python takes NaN for true, and any text.
        for row, item in enumerate(given.ravel().tolist()):
            if item != item or isinstance(item, str):
                raise ValueError(f"{what}: {item!r} in row {row} is neither true nor false")
    return array.reshape(rows)


def not_finite(tree: Any, path: str, rows: Any = None) -> str:
    """The first number in `tree` that is not finite, in words; empty if all are.

    Args:
        tree: Of arrays `[N, ...]`.
        path: What to call it.
        rows: int `[N]`: their numbers; None for 0 to N - 1.
    """
    for key, leaf in leaves(tree):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc" and not np.isfinite(leaf).all():
            at = np.argwhere(~np.isfinite(leaf))[0]
            where = f" in row {at[0] if rows is None else rows[at[0]]}" if leaf.ndim else ""
            name = f"{path} {key!r}" if key else path
            return f"{name} is {leaf[tuple(at)]}{where}"
    return ""


def finite(tree: Any) -> Any:
    """The same tree with 0 in place of what is no finite number: a policy would spread it over a row."""
    if isinstance(tree, dict):
        return {key: finite(child) for key, child in tree.items()}
    if isinstance(tree, np.ndarray) and tree.dtype.kind == "f" and not np.isfinite(tree).all():
        return np.nan_to_num(tree, nan=0.0, posinf=0.0, neginf=0.0)
    return tree


def is_text(node: Any) -> bool:
    """Whether a leaf is text."""
    return isinstance(node, list) and all(isinstance(item, _TEXT) for item in node)


def row_count(observation: Any) -> int:
    """The number of rows of the first leaf.

    Raises:
        ValueError: There is none.
    """
    for _, leaf in leaves(observation):
        if isinstance(leaf, (list, tuple)) or np.ndim(leaf):
            return len(leaf)
    raise ValueError("the observation has no rows")


def on_cpu(leaf: Any) -> Any:
    """What numpy can read, of a torch tensor too, wherever it is."""
    if not hasattr(leaf, "detach"):
        return leaf
    leaf = leaf.detach().cpu()
    return (leaf.float() if "bfloat16" in str(leaf.dtype) else leaf).numpy()  # numpy has none


def owned(tree: Any, rows: int, copy: bool) -> Any:
    """The tree with every leaf an array or a list of text, constants repeated for each row."""
    if isinstance(tree, dict):
        return {key: owned(child, rows, copy) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)) and not is_row_list(tree):
        return [owned(child, rows, copy) for child in tree]
    if isinstance(tree, (list, tuple)) and is_text(list(tree)):
        return list(tree)
    if isinstance(tree, _TEXT):
        return [tree] * rows
    array = tree if isinstance(tree, np.ndarray) and not copy else np.array(on_cpu(tree))
    return array if array.ndim else np.full(rows, array)


def layout(tree: Any, axes: Tuple[int, ...], path: str) -> Any:
    """What is below the first axes of each leaf, to compare.

    Raises:
        ValueError: A leaf does not begin with `axes`.
    """
    if isinstance(tree, dict):
        return {key: layout(child, axes, f"{path}.{key}") for key, child in tree.items()}
    if isinstance(tree, list):
        lists = tree if len(axes) == 2 else [tree]
        if not all(is_text(rows) for rows in lists):
            return [layout(child, axes, f"{path}[{i}]") for i, child in enumerate(tree)]
        if len(tree) != axes[0] or any(len(rows) != axes[-1] for rows in lists):
            raise ValueError(f"{path} is text that is not {list(axes)}")
        return "text"
    if not isinstance(tree, np.ndarray) or tree.shape[: len(axes)] != axes:
        found = list(tree.shape) if isinstance(tree, np.ndarray) else type(tree).__name__
        raise ValueError(f"{path} is {found}, not an array that begins with {list(axes)}")
    return tree.shape[len(axes) :], tree.dtype.kind if tree.dtype.kind in "US" else tree.dtype.str


def is_unlike(tree: Any, other: Any) -> bool:
    """Whether two trees differ in their structure, rows, shapes or dtypes."""
    return bool(_layout_of_rows(tree) != _layout_of_rows(other))


def _layout_of_rows(tree: Any) -> Any:
    rows = row_count(tree)
    return rows, layout(tree, (rows,), "a leaf")


def stacked(trees: List[Any], like: Any) -> Any:
    """One tree of many; `like` has their structure."""
    if isinstance(like, dict):
        return {key: stacked([tree[key] for tree in trees], child) for key, child in like.items()}
    if is_text(like):
        return list(trees)
    if isinstance(like, list):
        return [stacked([tree[i] for tree in trees], child) for i, child in enumerate(like)]
    return np.stack(trees)


def final_row(tree: Any, row: int, like: Any) -> Any:
    """The final observation of a row: of a tree of `[N, ...]`, or of a sequence of N trees.

    Args:
        tree: One of both.
        row: Which.
        like: Observations, whose structure, shapes and dtypes it gets.

    Raises:
        ValueError: There is none, or it does not fit.
    """
    try:
        if isinstance(like, dict) and isinstance(tree, dict):
            return {key: final_row(tree[key], row, child) for key, child in like.items()}
        if isinstance(like, list) and not is_text(like) and _is_batched(tree, like):
            return [final_row(child, row, like[i]) for i, child in enumerate(tree)]
        return _single(tree[row], like)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"final_obs has nothing that fits the observation in row {row}, which is done ({error!r})"
        ) from None


def _is_batched(tree: Any, like: Any) -> bool:
    """Whether `tree` has an axis of rows in its leaves, like `like`; looks at the first leaf."""
    if isinstance(like, dict):
        return isinstance(tree, dict)
    if isinstance(like, list):
        if not isinstance(tree, (list, tuple)) or len(tree) != len(like):
            return False
        return is_row_list(tree) if is_text(like) else _is_batched(tree[0], like[0])
    return bool(np.shape(on_cpu(tree)) == like.shape)


def _single(item: Any, like: Any) -> Any:
    """An observation without an axis of rows, in the form of a row of `like`."""
    if isinstance(like, dict):
        return {key: _single(item[key], child) for key, child in like.items()}
    if is_text(like):
        if not isinstance(item, _TEXT):
            raise TypeError(f"{type(item).__name__} in place of text")
        return item
    if isinstance(like, list):
        return [_single(item[i], child) for i, child in enumerate(like)]
    if item is None:
        raise TypeError("None in place of an array")
    array = np.array(on_cpu(item))
    if array.shape != like.shape[1:]:
        raise TypeError(f"shape {list(array.shape)} in place of {list(like.shape[1:])}")
    with np.errstate(over="ignore"):
        return array.astype(like.dtype if like.dtype.kind not in "US" else array.dtype)


def merged(tree: Any, other: Any, rows: np.ndarray) -> Any:
    """`tree` with the rows of `other` where `rows`, bool `[N]`, is True."""
    if isinstance(tree, dict):
        return {key: merged(child, other[key], rows) for key, child in tree.items()}
    if isinstance(tree, np.ndarray):
        return np.where(rows.reshape(-1, *[1] * (tree.ndim - 1)), other, tree)
    if isinstance(tree, (list, tuple)) and len(tree) == len(rows) and isinstance(tree[0], str):
        return [theirs if chosen else mine for mine, theirs, chosen in zip(tree, other, rows)]
    if isinstance(tree, (list, tuple)):
        return [merged(child, other[i], rows) for i, child in enumerate(tree)]
    return tree
