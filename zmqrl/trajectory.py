"""What a learner gets: trajectories, and how they are put together step by step.

A trajectory is `T` steps of one shard of `N` simulators, with everything that an algorithm needs and
nothing twice: `T` observations, `T` replies of the policy, `T` rewards, the observation after the last
step to bootstrap from, and the final observations of the episodes that ended within.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from zmqrl.errors import DecodeError
from zmqrl.transport.tree import is_row_list, leaves


@dataclass
class Trajectory:
    """`T` steps of `N` simulators.

    Attributes:
        observation: Tree of `[T, N, ...]`: what was acted on. Text is `T` lists of `N` str.
        policy: What the policy replied, each array `[T, N, ...]`: `actions` as they were asked for
            (before clipping and scaling), and whatever else, such as `prev_logprobs`.
        reward: float32 `[T, N]`.
        terminated: bool `[T, N]`.
        truncated: bool `[T, N]`.
        valid: bool `[T, N]`; False where the simulator spent the step on a reset: no transition.
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
        """The number of transitions."""
        return int(self.valid.sum())

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
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            raise DecodeError(f"not a trajectory: {error}") from None
        return trajectory

    def _check(self) -> None:
        steps, rows = self.reward.shape
        if steps == 0 or rows == 0:
            raise DecodeError("a trajectory without steps or rows")
        for name in ("reward", "terminated", "truncated", "valid"):
            array = getattr(self, name)
            kind = "f" if name == "reward" else "b"
            if array.shape != (steps, rows) or array.dtype.kind != kind:
                raise DecodeError(f"{name} is {array.dtype} {list(array.shape)}, not [{steps}, {rows}]")
        if self.versions.shape != (steps,) or self.versions.dtype.kind != "i":
            raise DecodeError("versions do not fit the steps")
        _check_axes(self.observation, (steps, rows), "observation")
        _check_axes(self.policy, (steps, rows), "policy")
        _check_axes(self.bootstrap, (rows,), "bootstrap")
        self.policy["actions"]
        index = self.final_index
        if index.ndim != 2 or index.shape[1] != 2 or index.dtype.kind != "i":
            raise DecodeError("final_index is not [K, 2]")
        if len(index):
            _check_axes(self.final_observation, (len(index),), "final_observation")
            if index.min() < 0 or index[:, 0].max() >= steps or index[:, 1].max() >= rows:
                raise DecodeError("final_index points outside of the trajectory")
        done = np.zeros((steps, rows), dtype=bool)
        done[index[:, 0], index[:, 1]] = True
        if not np.array_equal(done, (self.terminated | self.truncated) & self.valid):
            raise DecodeError("final_index does not name the transitions that ended an episode")


class _Segment:
    """A trajectory under construction."""

    def __init__(self) -> None:
        self.observations: list[Any] = []
        self.replies: list[dict[str, Any]] = []
        self.versions: list[int] = []
        self.rewards: list[np.ndarray | None] = []
        self.terminated: list[np.ndarray] = []
        self.truncated: list[np.ndarray] = []
        self.valid: list[np.ndarray] = []
        self.finals: list[Any] = []
        self.final_index: list[list[int]] = []
        self.bootstrap: Any = None
        self.problem = ""

    def complete(self) -> bool:
        return self.bootstrap is not None and all(reward is not None for reward in self.rewards)


class TrajectoryBuilder:
    """Puts trajectories together from what happens to one shard.

    The order of calls, for each step: `observe`, `act`, `outcome`. The observation that follows the last
    step completes a trajectory and begins the next one.

    Args:
        steps: In a trajectory, T.
        origin: Who makes it.
        copy: Copy observations and replies, because their owner may overwrite them.
        final_is_next: Where no final observation is told, it is the one that is observed next, as in a
            vector env that spends the next step on the reset.
    """

    def __init__(
        self, steps: int, origin: str = "", copy: bool = True, final_is_next: bool = False
    ) -> None:
        self.steps = steps
        self.dropped = 0
        """Trajectories given up because of numbers that are not finite."""
        self.problem = ""
        """Which, in words; of the latest one."""
        self.leave = False
        """Whether the trajectory that begins has been allowed."""
        self._origin = origin
        self._copy = copy
        self._final_is_next = final_is_next
        self._segments: list[_Segment] = [_Segment()]
        self._taken: list[Trajectory] = []

    @property
    def rows(self) -> int:
        """Rows of the observations noted last, N."""
        return _rows(self._segments[-1].observations[-1])

    @property
    def begins(self) -> bool:
        """Whether the next action would be the first of a trajectory."""
        return not self._segments[-1].replies

    def observe(self, observation: Any) -> None:
        """Note the observations, a tree of `[N, ...]`, that the next actions are asked for.

        Asked twice without an outcome in between, the later ones count.
        """
        observation = _copied(observation) if self._copy else observation
        segment = self._segments[-1]
        problem = not_finite(observation, "observation")
        self._fill_finals(segment, observation)
        if len(segment.rewards) == self.steps:
            segment.bootstrap = observation
            segment.problem = segment.problem or problem
            segment = _Segment()
            self._segments.append(segment)
            self.leave = False
            self._finish()
        del segment.observations[len(segment.rewards) :], segment.replies[len(segment.rewards) :]
        del segment.versions[len(segment.rewards) :]
        segment.observations.append(observation)
        segment.problem = segment.problem or problem

    def act(self, reply: dict[str, Any], version: int) -> None:
        """Note the policy's reply to them, arrays `[N, ...]`, and the version of its weights."""
        segment = self._segments[-1]
        if len(segment.observations) != len(segment.rewards) + 1:
            return  # a reply that nobody steps with
        segment.replies.append(_copied(reply) if self._copy else reply)
        segment.versions.append(version)

    def outcome(
        self,
        reward: Any,
        terminated: Any,
        truncated: Any,
        final_observation: Any = None,
        valid: Any = None,
    ) -> Any:
        """Note what the step with these actions gave.

        Args:
            reward: Numbers `[N]` or `[N, 1]`; None if they come later, through `late_reward`.
            terminated: Truth values `[N]` or `[N, 1]`.
            truncated: The same.
            final_observation: A tree of `[N, ...]` in which the rows that are done hold the observation
                that ended the episode; or a sequence of N with a tree `[...]` in those rows.
            valid: Truth values; False in rows where the step was a reset. None: all are transitions.

        Returns:
            What `late_reward` wants.

        Raises:
            ValueError: A shape is wrong, a final observation is missing, or no action was asked for.
        """
        segment = self._segments[-1]
        step = len(segment.rewards)
        if len(segment.replies) != step + 1:
            raise ValueError("there is no step to record: infer(observation) comes first, once a step")
        rows = _rows(segment.observations[step])
        real = np.ones(rows, dtype=bool) if valid is None else one_per_row("valid", valid, rows, bool)
        ends = one_per_row("terminated", terminated, rows, bool) & real
        cuts = one_per_row("truncated", truncated, rows, bool) & real
        checked = None if reward is None else self._checked_reward(segment, step, reward, real)
        done = np.flatnonzero(ends | cuts)
        if len(done) and final_observation is None and not self._final_is_next:
            raise ValueError(
                f"row {done[0]} is done, so final_obs must hold the observation that ended its episode"
            )
        if final_observation is not None:
            self._add_finals(segment, final_observation, done)
        segment.final_index.extend([step, int(row)] for row in done)
        segment.rewards.append(checked)
        segment.terminated.append(ends)
        segment.truncated.append(cuts)
        segment.valid.append(real)
        return segment, step

    def late_reward(self, handle: Any, reward: Any) -> None:
        """Add the reward of an earlier step, numbers `[N]` or `[N, 1]`.

        Raises:
            ValueError: The shape is wrong.
        """
        segment, step = handle
        segment.rewards[step] = self._checked_reward(segment, step, reward, segment.valid[step])
        self._finish()

    def take(self) -> list[Trajectory]:
        """The trajectories that are complete."""
        taken, self._taken = self._taken, []
        return taken

    def _add_finals(self, segment: _Segment, tree: Any, rows: Any) -> None:
        for row in rows:
            final = _copied(_row(tree, int(row)))
            segment.problem = segment.problem or not_finite(final, "final observation")
            segment.finals.append(final)

    def _fill_finals(self, segment: _Segment, observation: Any) -> None:
        """Take final observations that were not told from the observation that followed."""
        missing = segment.final_index[len(segment.finals) :]
        self._add_finals(segment, observation, [row for _, row in missing])

    def _checked_reward(self, segment: _Segment, step: int, reward: Any, valid: Any) -> np.ndarray:
        checked = np.where(valid, one_per_row("reward", reward, len(valid), np.float32), 0)
        bad = np.flatnonzero(~np.isfinite(checked))
        if len(bad) and not segment.problem:
            segment.problem = f"reward is {checked[bad[0]]} in row {bad[0]}"
        return checked.astype(np.float32)

    def _finish(self) -> None:
        while self._segments[0].complete():
            segment = self._segments.pop(0)
            if segment.problem:
                self.dropped += 1
                self.problem = segment.problem
            else:
                self._taken.append(_assemble(segment, self._origin))


def one_per_row(what: str, values: Any, rows: int, dtype: Any) -> Any:
    """Copy `values`, of shape `[N]` or `[N, 1]`, to an array `[N]` of `dtype`.

    Raises:
        ValueError: They have another shape; `what` names them.
    """
    array = np.array(values, dtype=dtype)
    if array.shape not in ((rows,), (rows, 1)):
        raise ValueError(f"expected {what} of shape ({rows},), got {array.shape}")
    return array.reshape(rows)


def _assemble(segment: _Segment, origin: str) -> Trajectory:
    index = np.array(segment.final_index, dtype=np.int64).reshape(-1, 2)
    return Trajectory(
        observation=_stacked(segment.observations),
        policy=_stacked(segment.replies),
        reward=np.stack([reward for reward in segment.rewards if reward is not None]),
        terminated=np.stack(segment.terminated),
        truncated=np.stack(segment.truncated),
        valid=np.stack(segment.valid),
        versions=np.array(segment.versions, dtype=np.int64),
        bootstrap=segment.bootstrap,
        final_index=index,
        final_observation=_stacked(segment.finals) if segment.finals else None,
        origin=origin,
    )


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(child) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return list(tree) if is_row_list(tree) else [_copied(child) for child in tree]
    return tree if isinstance(tree, str) else np.array(tree)


def _stacked(trees: list[Any]) -> Any:
    first = trees[0]
    if isinstance(first, dict):
        return {key: _stacked([tree[key] for tree in trees]) for key in first}
    if isinstance(first, (list, tuple)):
        if is_row_list(first):
            return [list(tree) for tree in trees]
        return [_stacked([tree[i] for tree in trees]) for i in range(len(first))]
    return list(trees) if isinstance(first, str) else np.stack(trees)


def _row(tree: Any, row: int) -> Any:
    """One row of a tree, or of a sequence with a tree for each row."""
    if isinstance(tree, np.ndarray) and tree.dtype == object and tree[row] is not None:
        return tree[row]
    if isinstance(tree, dict):
        return {key: _row(child, row) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)) and not is_row_list(tree):
        if isinstance(tree, list) and any(child is None for child in tree):
            return tree[row]
        return [_row(child, row) for child in tree]
    return tree[row] if np.ndim(tree) or isinstance(tree, (list, tuple)) else tree


def _next(now: Any, bootstrap: Any, final: Any, index: np.ndarray) -> Any:
    if isinstance(now, dict):
        return {
            key: _next(child, bootstrap[key], None if final is None else final[key], index)
            for key, child in now.items()
        }
    if isinstance(now, list) and not isinstance(bootstrap, np.ndarray) and not is_row_list(bootstrap):
        return [
            _next(child, bootstrap[i], None if final is None else final[i], index)
            for i, child in enumerate(now)
        ]
    if isinstance(now, list):
        text = [list(rows) for rows in now[1:]] + [list(bootstrap)]
        for k, (step, row) in enumerate(index):
            text[step][row] = final[k]
        return text
    moved = np.concatenate([now[1:], np.asarray(bootstrap)[None]])
    if len(index) and now.ndim > 1:
        moved[index[:, 0], index[:, 1]] = final
    return moved


def _rows(observation: Any) -> int:
    for _, leaf in leaves(observation):
        if isinstance(leaf, (list, tuple)):
            return len(leaf)
        if np.ndim(leaf):
            return len(leaf)
    raise ValueError("the observation has no rows")


def _check_axes(tree: Any, axes: Any, path: str) -> None:
    if isinstance(tree, dict):
        for key, child in tree.items():
            _check_axes(child, axes, f"{path}.{key}")
    elif isinstance(tree, list):
        if len(axes) == 2 and len(tree) == axes[0] and all(is_row_list(rows) for rows in tree):
            if any(len(rows) != axes[1] for rows in tree):
                raise DecodeError(f"{path} does not have {axes[1]} rows")
        elif is_row_list(tree):
            if len(tree) != axes[0]:
                raise DecodeError(f"{path} does not have {axes[0]} rows")
        else:
            for child in tree:
                _check_axes(child, axes, path)
    elif tree.shape[: len(axes)] != tuple(axes) and tree.ndim >= len(axes):
        raise DecodeError(f"{path} has shape {list(tree.shape)}, which does not begin with {list(axes)}")


def not_finite(tree: Any, path: str) -> str:
    """The first number in `tree` that is not finite, in words; empty if all are.

    Args:
        tree: Of arrays `[N, ...]`.
        path: What to call it.
    """
    for key, leaf in leaves(tree):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc" and not np.isfinite(leaf).all():
            at = np.argwhere(~np.isfinite(leaf))[0]
            where = f" in row {at[0]}" if leaf.ndim else ""
            name = f"{path} {key!r}" if key else path
            return f"{name} is {leaf[tuple(at)]}{where}"
    return ""
