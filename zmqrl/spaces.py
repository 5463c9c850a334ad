"""What a learner and its policy must know of a simulator: the shapes of observations and actions.

The fields are plain, so that they can be sent and saved. A Gymnasium space is read by its attributes, so
that nothing here needs Gymnasium.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zmqrl.errors import DecodeError
from zmqrl.transport.tree import is_row_list, leaves


@dataclass(frozen=True)
class ActionSpace:
    """The actions of one simulator."""

    kind: str
    """`box`: numbers within bounds. `discrete`: one of `n`, from 0. `other`: anything else."""
    shape: tuple[int, ...] = ()
    low: list[float] = field(default_factory=list)
    """Bounds of a box, flat."""
    high: list[float] = field(default_factory=list)
    n: int = 0
    text: str = ""
    """The space in its own words."""

    @classmethod
    def of(cls, space: Any) -> ActionSpace:
        """Read a Gymnasium space (`single_action_space` of a vector env); None is `other`."""
        text = " ".join(str(space).split())[:200]  # arrays are printed in several lines
        if hasattr(space, "low") and hasattr(space, "high"):
            bounds = [np.asarray(b, dtype=np.float64).ravel().tolist() for b in (space.low, space.high)]
            return cls("box", tuple(space.shape), bounds[0], bounds[1], text=text)
        begins_at_0 = getattr(space, "start", 0) == 0
        if hasattr(space, "n") and getattr(space, "shape", None) == () and begins_at_0:
            return cls("discrete", n=int(space.n), text=text)
        return cls("other", text=text)

    def numbers(self) -> Any:
        """What makes two of them equal; libraries print one space in different words."""
        if self.kind == "other":
            return self.text
        return self.kind, self.shape, self.low, self.high, self.n

    def check(self) -> None:
        """Look at fields that came from elsewhere.

        Raises:
            TypeError, ValueError: One of them is not what it should be.
        """
        if self.kind not in ("box", "discrete", "other"):
            raise ValueError(f"an action space of the kind {self.kind!r}")
        _typed(str, self.text)
        if _typed(int, self.n) < (self.kind == "discrete"):
            raise ValueError("a discrete action space without actions")
        size = math.prod(self.shape) if self.kind == "box" else 0
        for bounds in (self.low, self.high):
            if len(_typed(list, bounds)) != size or any(type(bound) is not float for bound in bounds):
                raise ValueError("the bounds of an action space do not fit its shape")


@dataclass(frozen=True)
class Spaces:
    """The observations and actions of one simulator."""

    observation: dict[str, tuple[tuple[int, ...], str]]
    """By path in the observation's tree, such as `images.wrist` (empty for a bare array): the shape
    without the first axis, and the dtype; text has the dtype `text`."""
    action: ActionSpace

    @classmethod
    def of(cls, observation: Any, action_space: Any) -> Spaces:
        """Read a batch of observations, a tree of `[N, ...]`, and a Gymnasium action space."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for path, leaf in leaves(observation):
            if leaf is None or isinstance(leaf, (str, bytes)) or (is_row_list(leaf) and _is_text(leaf)):
                found[path] = ((), "text")
                continue
            array = np.asarray(leaf)
            # Arrays of text are as wide as the longest one: no two batches need be alike.
            dtype = "text" if array.dtype.kind in "US" else str(array.dtype)
            found[path] = (tuple(array.shape[1:]), dtype)
        return cls(found, ActionSpace.of(action_space))

    def fields(self) -> dict[str, Any]:
        """As plain dicts and lists."""
        action = self.action
        return {
            "observation": {path: [list(s), dtype] for path, (s, dtype) in self.observation.items()},
            "action": {
                "kind": action.kind,
                "shape": list(action.shape),
                "low": action.low,
                "high": action.high,
                "n": action.n,
                "text": action.text,
            },
        }

    @classmethod
    def of_fields(cls, fields: Any) -> Spaces:
        """The reverse of `fields`.

        Raises:
            DecodeError: They are no such fields.
        """
        try:
            observation = {
                _typed(str, path): (_lengths(shape), _typed(str, dtype))
                for path, (shape, dtype) in fields["observation"].items()
            }
            action = ActionSpace(**{**fields["action"], "shape": _lengths(fields["action"]["shape"])})
            action.check()
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DecodeError(f"not the spaces of a simulator: {error}") from None
        return cls(observation, action)

    def difference(self, other: Spaces) -> str:
        """What differs between these spaces and `other`, in words; empty if nothing does."""
        for path in sorted({*self.observation, *other.observation}):
            mine, theirs = self.observation.get(path), other.observation.get(path)
            if mine != theirs:
                return f"the observation {path!r} is {_say(theirs)} in place of {_say(mine)}"
        if self.action.numbers() != other.action.numbers():
            return f"the action space is {other.action.text} in place of {self.action.text}"
        return ""


def _is_text(rows: Any) -> bool:
    return all(row is None or isinstance(row, (str, bytes, bytearray)) for row in rows)


def _typed(kind: Any, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _lengths(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (list, tuple)) or len(shape) > 32:
        raise TypeError("a shape is a short list")
    lengths = tuple(_typed(int, length) for length in shape)
    if any(not 0 <= length < 2**40 for length in lengths):
        raise ValueError("a shape is made of lengths")
    return lengths


def _say(leaf: Any) -> str:
    return "missing" if leaf is None else f"{leaf[1]} {list(leaf[0])}"
