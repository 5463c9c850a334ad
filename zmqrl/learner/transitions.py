"""Trajectories as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from zmqrl.errors import DataError, EncodeError
from zmqrl.learner.networks import features, observation_paths
from zmqrl.spaces import Spaces
from zmqrl.trajectory import Trajectory
from zmqrl.transport.tree import is_row_list, leaves


class TransitionReader:
    """Reads trajectories of simulators with the given spaces.

    A chunk of actions is one action, an option of Sutton, Precup and Singh (1999): its reward is the
    discounted sum of those of its sub-steps, and what follows is discounted once for each of them.

    Args:
        spaces: Of the simulators.
        gamma: The discount of one step of a simulator.

    Raises:
        ConfigError: The built-in networks cannot read their observations.
    """

    def __init__(self, spaces: Spaces, gamma: float) -> None:
        self._spaces = spaces
        self._gamma = gamma
        self._paths = observation_paths(spaces)

    def read(self, trajectory: Trajectory) -> TensorDict:
        """Turn a trajectory into a TensorDict `[T, N]`.

        Returns:
            `observation` float32 `[T, N, D]`, `action` (float32 `[T, N, A]`, or int64 `[T, N]` of a
            discrete space), `valid` bool `[T, N]`, `steps_to_next_obs` float32 `[T, N, 1]` (steps of
            the simulator), and under `next` `observation`, `reward` float32 `[T, N, 1]`, `terminated`
            and `done` bool `[T, N, 1]`.

        Raises:
            DataError: It does not fit the spaces.
        """
        rows = trajectory.terminated.shape
        observation = self._features(trajectory.observation, rows, "observation")
        self._check(trajectory.bootstrap, rows[1:], "observation after the last step,")
        if len(trajectory.final_index):
            self._check(
                trajectory.final_observation, (len(trajectory.final_index),), "final observation"
            )
        following = self._features(trajectory.next_observation(), rows, "next observation")
        action = self._action(trajectory.actions, rows)
        reward = _copied(self._rewards(trajectory.reward), torch.float32)
        sub_steps = _copied(trajectory.sub_steps, torch.float32)
        for name, tensor in (
            ("observation", observation),
            ("next observation", following),
            ("action", action),
            ("reward", reward),
        ):
            check_finite(name, tensor)
        terminated = _copied(trajectory.terminated, torch.bool)
        done = terminated | _copied(trajectory.truncated, torch.bool)
        after = {
            "observation": following,
            "reward": reward[..., None],
            "terminated": terminated[..., None],
            "done": done[..., None],
        }
        return TensorDict(
            {
                "observation": observation,
                "action": action,
                "valid": sub_steps > 0,
                "steps_to_next_obs": sub_steps[..., None],
                "next": TensorDict(after, batch_size=rows),
            },
            batch_size=rows,
        )

    def _rewards(self, reward: np.ndarray) -> np.ndarray:
        """One a step, `[T, N]`: of a chunk the discounted sum."""
        if reward.ndim == 2:
            return reward
        discounts: np.ndarray = self._gamma ** np.arange(reward.shape[2], dtype=np.float64)
        summed: np.ndarray = reward @ discounts
        return summed

    def _features(self, tree: Any, rows: tuple[int, ...], name: str) -> Tensor:
        found = self._check(tree, rows, name)
        tensors = {path: _copied(leaf, torch.float32) for path, leaf in found.items()}
        return features(tensors, self._paths, rows, torch.empty(0))

    def _check(self, tree: Any, rows: tuple[int, ...], name: str) -> dict[str, Any]:
        try:
            found = dict(leaves(tree))
        except EncodeError as error:
            raise DataError(f"the {name} is unreadable: {error}") from None
        for path in sorted({*self._spaces.observation, *found}):
            if path not in found:
                raise DataError(f"the {name} {path!r} is missing")
            if path not in self._spaces.observation:
                raise DataError(f"the {name} {path!r} is unknown: no simulator had it at the start")
            shape = self._spaces.observation[path][0]
            leaf = found[path]
            if is_row_list(leaf) or np.asarray(leaf).dtype.kind not in "biuf":
                raise DataError(f"the {name} {path!r} is not made of numbers")
            if np.shape(leaf) != (*rows, *shape):
                raise DataError(
                    f"the {name} {path!r} has shape {list(np.shape(leaf))}, not {[*rows, *shape]}"
                )
        return found

    def _action(self, actions: Any, rows: tuple[int, ...]) -> Tensor:
        space = self._spaces.action
        array = np.asarray(actions)
        if array.shape != (*rows, *space.shape) or array.dtype.kind not in (
            "iu" if space.kind == "discrete" else "iuf"
        ):
            raise DataError(
                f"the actions are {array.dtype} {list(array.shape)}, which does not fit {space.text} "
                f"in {list(rows)}"
            )
        if space.kind != "discrete":
            return _copied(array, torch.float32).reshape(*rows, -1)
        if array.size and not (array.min() >= 0 and array.max() < space.n):
            raise DataError(f"an action is {array.min()} or {array.max()}, outside of {space.text}")
        return _copied(array, torch.int64)


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse numbers that do not fit float32.

    Raises:
        DataError: One of them is not finite.
    """
    if not tensor.isfinite().all():
        raise DataError(f"the {name} holds a number that is not finite in float32")


def _copied(array: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of its own: arrays off the wire may be read-only, or overwritten."""
    return torch.tensor(np.asarray(array), dtype=dtype)
