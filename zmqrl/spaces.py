"""What a learner and its policy must know of a simulator: the shapes of observations and actions.

The fields are plain, so that they can be sent and saved. A Gymnasium space is read by its attributes, so
that nothing here needs Gymnasium.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zmqrl.errors import DecodeError
from zmqrl.transport.tree import is_row_list, leaves


@dataclass(frozen=True)
class ActionSpace:
    """The actions of one simulator."""

    kind: str
    """`box`: numbers within bounds. `discrete`: one of `n`. `other`: anything else."""
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
        text = str(space)[:200]
        if hasattr(space, "low") and hasattr(space, "high"):
            bounds = [np.asarray(b, dtype=np.float64).ravel().tolist() for b in (space.low, space.high)]
            return cls("box", tuple(space.shape), bounds[0], bounds[1], text=text)
        if hasattr(space, "n") and getattr(space, "shape", None) == ():
            return cls("discrete", n=int(space.n), text=text)
        return cls("other", text=text)


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
            if is_row_list(leaf):
                found[path] = ((), "text")
            else:
                array = np.asarray(leaf)
                found[path] = (tuple(array.shape[1:]), str(array.dtype))
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
                str(path): (tuple(int(n) for n in shape), str(dtype))
                for path, (shape, dtype) in fields["observation"].items()
            }
            action = dict(fields["action"])
            action["shape"] = tuple(int(n) for n in action["shape"])
            return cls(observation, ActionSpace(**action))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DecodeError(f"not the spaces of a simulator: {error}") from None

    def difference(self, other: Spaces) -> str:
        """What differs between these spaces and `other`, in words; empty if nothing does."""
        for path in sorted({*self.observation, *other.observation}):
            mine, theirs = self.observation.get(path), other.observation.get(path)
            if mine != theirs:
                return f"the observation {path!r} is {_say(theirs)} in place of {_say(mine)}"
        if self.action != other.action:
            return f"the action space is {other.action.text} in place of {self.action.text}"
        return ""


def _say(leaf: Any) -> str:
    return "missing" if leaf is None else f"{leaf[1]} {list(leaf[0])}"
