"""Actions on their way to a simulator: checked against its action space, and brought into its dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from zmqrl.env.conversion import NUMERIC, Array
from zmqrl.transport.rows import on_cpu

Numbers: TypeAlias = npt.NDArray[np.int64]

_ROUNDING = 1e-6
"""How far beyond a bound an action may be, as a part of the bound, and counts as on it."""


def actions_for(
    space: spaces.Space[Any],
    rows: Numbers,
    actions: Any,
    *,
    rescale: bool = False,
    clip: bool = False,
    path: str = "",
) -> Any:
    """Make `actions` fit for a batch of simulators.

    Args:
        space: The action space of one row.
        rows: The numbers of the rows, int64 `[N]`, which errors call them by.
        actions: For a Dict a dict with its keys, for a Tuple a list, for Text N str, else an array
            `[N, *space.shape]`.
        rescale: Map from [-1, 1] to the bounds of a Box.
        clip: Take what is outside a Box to its bounds.
        path: Where in the action space that is, for errors.

    Returns:
        The same tree; every array has the dtype of its space, and is within it. What a space of
        another kind is for is not looked at.

    Raises:
        ValueError: A key is missing, a shape or dtype is wrong, or an action is NaN or outside; names
            the key and the row.
    """
    deeper = {"rescale": rescale, "clip": clip}
    if isinstance(space, spaces.Dict):
        if not isinstance(actions, Mapping):
            raise ValueError(f"expected a dict{_for(path)} with {_listed(space)}, got {_kind(actions)}")
        missing = [key for key in space if key not in actions]
        if missing:
            raise ValueError(
                f"the policy gave no {_join(path, missing[0])!r} (in any row); its dict has "
                f"{_listed(actions)}"
            )
        return {
            key: actions_for(child, rows, actions[key], **deeper, path=_join(path, key))
            for key, child in space.items()
        }
    if isinstance(space, spaces.Tuple):
        if not isinstance(actions, (list, tuple)) or len(actions) != len(space.spaces):
            raise ValueError(
                f"expected a list of {len(space.spaces)} parts{_for(path)}, got {_kind(actions)}"
            )
        return tuple(
            actions_for(child, rows, part, **deeper, path=f"{path}[{index}]")
            for index, (child, part) in enumerate(zip(space.spaces, actions, strict=True))
        )
    if isinstance(space, spaces.Text):
        return _text(space, rows, actions, path)
    if not isinstance(space, NUMERIC):
        return actions
    if isinstance(actions, Mapping):
        raise ValueError(f"expected an array{_for(path)}, got {_kind(actions)}")
    array = np.asarray(on_cpu(actions))
    shape = (len(rows), *(space.shape or ()))
    if array.dtype.kind not in "biuf" or array.shape != shape:
        raise ValueError(
            f"expected shape {shape} and dtype {space.dtype}{_for(path)}, "
            f"got shape {array.shape} and dtype {array.dtype}"
        )
    if array.dtype.kind == "f" and np.isnan(array).any():
        bad = rows[np.unique(np.argwhere(np.isnan(array))[:, 0])].tolist()
        raise ValueError(f"they hold NaN in rows {bad}{_for(path)}")
    if isinstance(space, spaces.Box):
        return _into_box(space, rows, array, path, rescale, clip)
    return _one_of(space, rows, array, path)


def bounds_of(space: spaces.Space[Any]) -> tuple[Any, Any]:
    """The least and greatest values of a space of numbers, which both are in it."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    assert isinstance(space, (spaces.Discrete, spaces.MultiDiscrete))
    count = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return space.start, space.start + count - 1


def _into_box(
    box: spaces.Box, rows: Numbers, actions: Array, path: str, rescale: bool, clip: bool
) -> Array:
    if rescale:
        actions = _within(rows, actions, -1.0, 1.0, "[-1, 1] (env.rescale_actions)", path, clip)
        low, high = box.low.astype(np.float64), box.high.astype(np.float64)
        actions, clip = low + (actions + 1.0) / 2.0 * (high - low), True
    if actions.dtype.kind == "f" and np.issubdtype(box.dtype, np.integer):
        actions = np.rint(actions)
    within = _within(rows, actions, box.low, box.high, box, path, clip)
    return within.astype(box.dtype, copy=False)


def _within(
    rows: Numbers, actions: Array, low: Any, high: Any, bounds: object, path: str, clip: bool
) -> Array:
    outside = (actions < low) | (actions > high)
    if not outside.any():
        return actions
    if not clip:
        reach = np.maximum(*(np.where(np.isfinite(bound), np.abs(bound), 0.0) for bound in (low, high)))
        far = (actions < low - _ROUNDING * reach) | (actions > high + _ROUNDING * reach)
        if far.any():
            hint = "set env.clip_actions to have actions clipped"
            raise ValueError(f"{_first(rows, actions, far, path)}, outside {bounds}; {hint}")
    clipped: Array = np.clip(actions, low, high)
    return clipped


def _one_of(space: spaces.Space[Any], rows: Numbers, actions: Array, path: str) -> Array:
    low, high = bounds_of(space)
    outside = (actions < low) | (actions > high)
    if actions.dtype.kind == "f":
        outside |= actions != np.rint(actions)
    if outside.any():
        raise ValueError(f"{_first(rows, actions, outside, path)}, which is not in {space}")
    return actions.astype(space.dtype, copy=False)


def _text(space: spaces.Text, rows: Numbers, actions: Any, path: str) -> tuple[str, ...]:
    if isinstance(actions, np.ndarray):
        actions = actions.tolist()
    if not isinstance(actions, (list, tuple)) or len(actions) != len(rows):
        raise ValueError(f"expected {len(rows)} str{_for(path)}, got {_kind(actions)}")
    for row, text in zip(rows, actions, strict=True):
        if not space.contains(text):
            raise ValueError(f"the action{_at(path)} is {text!r:.80} in row {row}, outside {space}")
    return tuple(actions)


def _first(rows: Numbers, actions: Array, bad: Array, path: str) -> str:
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    element = f"[{', '.join(map(str, index[1:]))}]" if len(index) > 1 else ""
    return f"the action{_at(path)}{element} is {actions[index]!s} in row {rows[index[0]]}"


def _at(path: str) -> str:
    return f" {path!r}" if path else ""


def _for(path: str) -> str:
    return f" for {path!r}" if path else ""


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _listed(keys: Any) -> str:
    return ", ".join(map(repr, keys)) or "nothing"


def _kind(actions: Any) -> str:
    if isinstance(actions, Mapping):
        return f"a dict with {_listed(actions)}"
    if isinstance(actions, (list, tuple)):
        return f"a list of {len(actions)}"
    if isinstance(actions, np.ndarray):
        return f"an array of shape {actions.shape}"
    return f"a {type(actions).__name__}"
