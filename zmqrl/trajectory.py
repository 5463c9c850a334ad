"""What a learner gets: trajectories.

A trajectory is `T` steps of one shard of `N` simulators, with everything that an algorithm needs and
nothing twice: `T` observations, `T` replies of the policy, `T` rewards, the observation after the last
step to bootstrap from, and the final observations of the episodes that ended within.

Where the policy gives chunks of actions, a step carries out `k` of them, in `k` *sub-steps*, or fewer if
the episode ends before.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from zmqrl.errors import DecodeError
from zmqrl.transport.rows import is_text, layout
from zmqrl.transport.tree import leaves


@dataclass
class Trajectory:
    """`T` steps of `N` simulators.

    Attributes:
        observation: Tree of `[T, N, ...]`: what was acted on. Text is `T` lists of `N` str.
        policy: What the policy replied, each array `[T, N, ...]`: `actions` as they were asked for
            (before clipping and scaling), and whatever else, such as `prev_logprobs`.
        reward: float32 `[T, N]`; with chunks `[T, N, k]`, 0 in sub-steps after the end of an episode.
        terminated: bool `[T, N]`.
        truncated: bool `[T, N]`.
        valid: bool `[T, N]`; False where the simulator spent the step on a reset: no transition. With
            chunks `[T, N, k]`; False in sub-steps after the end of an episode, which were none.
        versions: int64 `[T]`: of the weights that chose the actions.
        bootstrap: Tree of `[N, ...]`: the observations after the last step.
        final_index: int64 `[K, 2]`: the (step, row) of every transition that ended an episode.
        final_observation: Tree of `[K, ...]`: the observation in which it ended.
        origin: Who made it.
    """

    observation: Any
    policy: dict[str, Any]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    versions: np.ndarray
    bootstrap: Any
    final_index: np.ndarray
    final_observation: Any
    origin: str = ""

    @property
    def actions(self) -> Any:
        """The actions, `[T, N, ...]`."""
        return self.policy["actions"]

    @property
    def env_steps(self) -> int:
        """Steps that the simulators made: the number of transitions, or of all their sub-steps."""
        return int(self.valid.sum())

    @property
    def sub_steps(self) -> np.ndarray:
        """int64 `[T, N]`: steps that the simulator made in each step; 0 where it is no transition.

        Without chunks it is 1 elsewhere.
        """
        steps: np.ndarray = self.valid.reshape(*self.terminated.shape, -1).sum(-1, dtype=np.int64)
        return steps

    @property
    def size(self) -> int:
        """Bytes of all its arrays."""
        return sum(getattr(leaf, "nbytes", 0) for _, leaf in leaves(self.tree()))

    def next_observation(self) -> Any:
        """Tree of `[T, N, ...]`: what each transition led to.

        That is the next observation, but the final one where an episode ended.
        """
        return _next(self.observation, self.bootstrap, self.final_observation, self.final_index)

    def tree(self) -> dict[str, Any]:
        """All fields, for the codec."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of_tree(cls, tree: Any) -> Trajectory:
        """Read what `tree` gave, from an untrusted sender.

        Raises:
            DecodeError: A field is missing, or its shape does not fit the others.
        """
        try:
            trajectory = cls(**tree)
            trajectory._check()
        except (TypeError, ValueError, KeyError) as error:
            raise DecodeError(f"not a trajectory: {error}") from None
        return trajectory

    def _check(self) -> None:
        dimensions = 3 if np.ndim(self.reward) == 3 else 2
        shape = _typed("reward", self.reward, np.float32, dimensions).shape
        steps, rows = shape[:2]
        if 0 in shape:
            raise ValueError("it has no steps or no rows")
        for name in ("terminated", "truncated"):
            if _typed(name, getattr(self, name), np.bool_, 2).shape != (steps, rows):
                raise ValueError(f"{name} is not [{steps}, {rows}]")
        if _typed("valid", self.valid, np.bool_, dimensions).shape != shape:
            raise ValueError(f"valid is not {list(shape)}")
        if dimensions == 3:
            self._check_chunks()
        versions = _typed("versions", self.versions, np.int64, 1)
        if versions.shape != (steps,) or versions.min() < 0:
            raise ValueError("versions are not a number for each step")
        expected = layout(self.observation, (steps, rows), "observation")
        if layout(self.bootstrap, (rows,), "bootstrap") != expected:
            raise ValueError("the bootstrap is unlike the observations")
        layout(self.policy, (steps, rows), "policy")
        if not isinstance(self.policy, dict) or "actions" not in self.policy:
            raise ValueError("policy has no actions")
        if not isinstance(self.origin, str):
            raise ValueError("origin is no text")
        self._check_finals(expected)

    def _check_chunks(self) -> None:
        if (self.valid[..., 1:] > self.valid[..., :-1]).any():
            raise ValueError("a chunk goes on after a sub-step that was none")
        cut = self.valid[..., 0] & ~self.valid[..., -1]
        if (cut & ~(self.terminated | self.truncated)).any():
            raise ValueError("a chunk ends early, but no episode with it")

    def _check_finals(self, expected: Any) -> None:
        index = _typed("final_index", self.final_index, np.int64, 2)
        done = (self.terminated | self.truncated) & (self.sub_steps > 0)
        if index.shape[1] != 2 or not np.array_equal(np.unique(index, axis=0), np.argwhere(done)):
            raise ValueError("final_index does not name the transitions that ended an episode")
        if len(index) != done.sum():
            raise ValueError("final_index names a transition twice")
        if len(index) == 0:
            if self.final_observation is not None:
                raise ValueError("there is a final observation, but no end of an episode")
        elif layout(self.final_observation, (len(index),), "final_observation") != expected:
            raise ValueError("the final observations are unlike the observations")


def _typed(name: str, array: Any, dtype: Any, dimensions: int) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != dimensions:
        raise ValueError(f"{name} is no {np.dtype(dtype)} array of {dimensions} dimensions")
    return array


def _next(now: Any, bootstrap: Any, final: Any, index: np.ndarray) -> Any:
    if isinstance(now, dict):
        return {
            key: _next(child, bootstrap[key], None if final is None else final[key], index)
            for key, child in now.items()
        }
    if is_text(bootstrap):
        text = [list(rows) for rows in now[1:]] + [list(bootstrap)]
        for k, (step, row) in enumerate(index):
            text[step][row] = final[k]
        return text
    if isinstance(now, list):
        return [
            _next(child, bootstrap[i], None if final is None else final[i], index)
            for i, child in enumerate(now)
        ]
    moved = np.concatenate([now[1:], bootstrap[None]])
    if len(index):
        # An array of text may have to become wider.
        moved = moved.astype(np.result_type(moved, final), copy=False)
        moved[index[:, 0], index[:, 1]] = final
    return moved
