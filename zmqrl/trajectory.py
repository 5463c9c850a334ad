"""What a learner gets: trajectories, and how they are put together step by step.

A trajectory is `T` steps of one shard of `N` simulators, with everything that an algorithm needs and
nothing twice: `T` observations, `T` replies of the policy, `T` rewards, the observation after the last
step to bootstrap from, and the final observations of the episodes that ended within.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, List, Tuple

import numpy as np

from zmqrl.errors import DecodeError
from zmqrl.transport.tree import is_row_list, leaves

_TEXT = (str, bytes, bytearray, type(None))
"""What text is made of; None stands for text that is not there."""


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
        except (TypeError, ValueError, KeyError) as error:
            raise DecodeError(f"not a trajectory: {error}") from None
        return trajectory

    def _check(self) -> None:
        steps, rows = _typed("reward", self.reward, np.float32, 2).shape
        if steps == 0 or rows == 0:
            raise ValueError("it has no steps or no rows")
        for name in ("terminated", "truncated", "valid"):
            if _typed(name, getattr(self, name), np.bool_, 2).shape != (steps, rows):
                raise ValueError(f"{name} is not [{steps}, {rows}]")
        versions = _typed("versions", self.versions, np.int64, 1)
        if versions.shape != (steps,) or versions.min() < 0:
            raise ValueError("versions are not a number for each step")
        layout = _layout(self.observation, (steps, rows), "observation")
        if _layout(self.bootstrap, (rows,), "bootstrap") != layout:
            raise ValueError("the bootstrap is unlike the observations")
        _layout(self.policy, (steps, rows), "policy")
        if not isinstance(self.policy, dict) or "actions" not in self.policy:
            raise ValueError("policy has no actions")
        if not isinstance(self.origin, str):
            raise ValueError("origin is no text")
        self._check_finals(layout)

    def _check_finals(self, layout: Any) -> None:
        index = _typed("final_index", self.final_index, np.int64, 2)
        done = (self.terminated | self.truncated) & self.valid
        if index.shape[1] != 2 or not np.array_equal(np.unique(index, axis=0), np.argwhere(done)):
            raise ValueError("final_index does not name the transitions that ended an episode")
        if len(index) != done.sum():
            raise ValueError("final_index names a transition twice")
        if len(index) == 0:
            if self.final_observation is not None:
                raise ValueError("there is a final observation, but no end of an episode")
        elif _layout(self.final_observation, (len(index),), "final_observation") != layout:
            raise ValueError("the final observations are unlike the observations")


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
        """Trajectories given up, because of numbers that are not finite for instance."""
        self.problem = ""
        """Why, in words; of the latest one."""
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
        return _rows(self.observation)

    @property
    def observation(self) -> Any:
        """The observations noted last: every leaf an array `[N, ...]` or a list of N str."""
        return self._segments[-1].observations[-1]

    @property
    def ended(self) -> np.ndarray:
        """bool `[N]`: the rows whose episode ended in the step noted last."""
        segment = self._segments[-1]
        ended: np.ndarray = segment.terminated[-1] | segment.truncated[-1]
        return ended

    @property
    def begins(self) -> bool:
        """Whether the next action would be the first of a trajectory."""
        return not self._segments[-1].replies

    def observe(self, observation: Any) -> None:
        """Note the observations, a tree of `[N, ...]`, that the next actions are asked for.

        Asked twice without an outcome in between, the later ones count.

        Raises:
            ValueError: They are unlike those before them in the trajectory.
        """
        observation = _owned(observation, _rows(observation), self._copy)
        segment = self._segments[-1]
        step = len(segment.rewards)
        if step and _is_unlike(observation, segment.observations[0]):
            raise ValueError("the observation has other rows, leaves, shapes or dtypes than before")
        problem = not_finite(observation, "observation")
        self._fill_finals(segment, observation)
        if step == self.steps:
            segment.bootstrap = observation
            segment.problem = segment.problem or problem
            segment = _Segment()
            self._segments.append(segment)
            self.leave = False
            self._finish()
            step = 0
        del segment.observations[step:], segment.replies[step:], segment.versions[step:]
        segment.observations.append(observation)
        segment.problem = segment.problem or problem

    def act(self, reply: dict[str, Any], version: int) -> None:
        """Note the policy's reply to them, arrays `[N, ...]`, and the version of its weights."""
        segment = self._segments[-1]
        step = len(segment.rewards)
        if len(segment.observations) != step + 1:
            return  # a reply that nobody steps with
        del segment.replies[step:], segment.versions[step:]
        segment.replies.append(_owned(reply, self.rows, self._copy))
        segment.versions.append(version)
        if _is_unlike(segment.replies[step], segment.replies[0]) and not segment.problem:
            segment.problem = "the policy's replies changed their form within a trajectory"

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
        checked, problem = (None, "") if reward is None else _checked_reward(reward, real)
        done = np.flatnonzero(ends | cuts)
        if len(done) and final_observation is None and not self._final_is_next:
            raise ValueError(
                f"row {done[0]} is done, so final_obs must hold the observation that ended its episode"
            )
        if final_observation is not None:
            self._add_finals(segment, final_observation, done)
        # From here on nothing raises: a step is noted as a whole or not at all.
        segment.problem = segment.problem or problem
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
        segment.rewards[step], problem = _checked_reward(reward, segment.valid[step])
        segment.problem = segment.problem or problem
        self._finish()

    def take(self) -> list[Trajectory]:
        """The trajectories that are complete."""
        taken, self._taken = self._taken, []
        return taken

    def _add_finals(self, segment: _Segment, tree: Any, rows: Any) -> None:
        finals = [_final_row(tree, int(row), segment.observations[-1]) for row in rows]
        for final in finals:
            segment.problem = segment.problem or not_finite(final, "final observation")
        segment.finals.extend(finals)

    def _fill_finals(self, segment: _Segment, observation: Any) -> None:
        """Take final observations that were not told from the observation that followed."""
        missing = segment.final_index[len(segment.finals) :]
        self._add_finals(segment, observation, [row for _, row in missing])

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
        ValueError: They have another shape, or are no such values; `what` names them.
    """
    try:
        with np.errstate(over="ignore"):  # it becomes inf, which is looked for
            array = np.array(_on_cpu(values), dtype=dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected {what} of shape ({rows},): {error}") from None
    if array.shape not in ((rows,), (rows, 1)):
        raise ValueError(f"expected {what} of shape ({rows},), got {array.shape}")
    return array.reshape(rows)


def _checked_reward(reward: Any, valid: Any) -> Tuple[np.ndarray, str]:
    """The rewards, 0 where there was no transition; and what is wrong with them, in words."""
    checked = np.where(valid, one_per_row("reward", reward, len(valid), np.float32), np.float32(0))
    bad = np.flatnonzero(~np.isfinite(checked))
    return checked, f"reward is {checked[bad[0]]} in row {bad[0]}" if len(bad) else ""


def _assemble(segment: _Segment, origin: str) -> Trajectory:
    index = np.array(segment.final_index, dtype=np.int64).reshape(-1, 2)
    like = segment.observations[0]
    return Trajectory(
        observation=_stacked(segment.observations, like),
        policy=_stacked(segment.replies, segment.replies[0]),
        reward=np.stack([reward for reward in segment.rewards if reward is not None]),
        terminated=np.stack(segment.terminated),
        truncated=np.stack(segment.truncated),
        valid=np.stack(segment.valid),
        versions=np.array(segment.versions, dtype=np.int64),
        bootstrap=segment.bootstrap,
        final_index=index,
        final_observation=_stacked(segment.finals, like) if segment.finals else None,
        origin=origin,
    )


# -- Trees: every leaf is an array `[N, ...]`, or text: a list of N str (or bytes, or None)


def _is_text(node: Any) -> bool:
    return isinstance(node, list) and all(isinstance(item, _TEXT) for item in node)


def _rows(observation: Any) -> int:
    for _, leaf in leaves(observation):
        if isinstance(leaf, (list, tuple)) or np.ndim(leaf):
            return len(leaf)
    raise ValueError("the observation has no rows")


def _on_cpu(leaf: Any) -> Any:
    """What numpy can read, of a torch tensor too, wherever it is."""
    if not hasattr(leaf, "detach"):
        return leaf
    leaf = leaf.detach().cpu()
    return (leaf.float() if "bfloat16" in str(leaf.dtype) else leaf).numpy()  # numpy has none


def _owned(tree: Any, rows: int, copy: bool) -> Any:
    """The tree with every leaf an array or a list of text, constants repeated for each row."""
    if isinstance(tree, dict):
        return {key: _owned(child, rows, copy) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)) and not is_row_list(tree):
        return [_owned(child, rows, copy) for child in tree]
    if isinstance(tree, (list, tuple)) and _is_text(list(tree)):
        return list(tree)
    if isinstance(tree, _TEXT):
        return [tree] * rows
    array = tree if isinstance(tree, np.ndarray) and not copy else np.array(_on_cpu(tree))
    return array if array.ndim else np.full(rows, array)


def _layout(tree: Any, axes: Tuple[int, ...], path: str) -> Any:
    """What is below the first axes of each leaf, to compare.

    Raises:
        ValueError: A leaf does not begin with `axes`.
    """
    if isinstance(tree, dict):
        return {key: _layout(child, axes, f"{path}.{key}") for key, child in tree.items()}
    if isinstance(tree, list):
        lists = tree if len(axes) == 2 else [tree]
        if not all(_is_text(rows) for rows in lists):
            return [_layout(child, axes, f"{path}[{i}]") for i, child in enumerate(tree)]
        if len(tree) != axes[0] or any(len(rows) != axes[-1] for rows in lists):
            raise ValueError(f"{path} is text that is not {list(axes)}")
        return "text"
    if not isinstance(tree, np.ndarray) or tree.shape[: len(axes)] != axes:
        found = list(tree.shape) if isinstance(tree, np.ndarray) else type(tree).__name__
        raise ValueError(f"{path} is {found}, not an array that begins with {list(axes)}")
    return tree.shape[len(axes) :], tree.dtype.kind if tree.dtype.kind in "US" else tree.dtype.str


def _is_unlike(tree: Any, other: Any) -> bool:
    return bool(_layout_of_rows(tree) != _layout_of_rows(other))


def _layout_of_rows(tree: Any) -> Any:
    rows = _rows(tree)
    return rows, _layout(tree, (rows,), "a leaf")


def _typed(name: str, array: Any, dtype: Any, dimensions: int) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != dimensions:
        raise ValueError(f"{name} is no {np.dtype(dtype)} array of {dimensions} dimensions")
    return array


def _stacked(trees: List[Any], like: Any) -> Any:
    """One tree of many; `like` has their structure."""
    if isinstance(like, dict):
        return {key: _stacked([tree[key] for tree in trees], child) for key, child in like.items()}
    if _is_text(like):
        return list(trees)
    if isinstance(like, list):
        return [_stacked([tree[i] for tree in trees], child) for i, child in enumerate(like)]
    return np.stack(trees)


def _next(now: Any, bootstrap: Any, final: Any, index: np.ndarray) -> Any:
    if isinstance(now, dict):
        return {
            key: _next(child, bootstrap[key], None if final is None else final[key], index)
            for key, child in now.items()
        }
    if _is_text(bootstrap):
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


def _final_row(tree: Any, row: int, like: Any) -> Any:
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
            return {key: _final_row(tree[key], row, child) for key, child in like.items()}
        if isinstance(like, list) and not _is_text(like) and _is_batched(tree, like):
            return [_final_row(child, row, like[i]) for i, child in enumerate(tree)]
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
        return is_row_list(tree) if _is_text(like) else _is_batched(tree[0], like[0])
    return bool(np.shape(_on_cpu(tree)) == like.shape)


def _single(item: Any, like: Any) -> Any:
    """An observation without an axis of rows, in the form of a row of `like`."""
    if isinstance(like, dict):
        return {key: _single(item[key], child) for key, child in like.items()}
    if _is_text(like):
        if not isinstance(item, _TEXT):
            raise TypeError(f"{type(item).__name__} in place of text")
        return item
    if isinstance(like, list):
        return [_single(item[i], child) for i, child in enumerate(like)]
    if item is None:
        raise TypeError("None in place of an array")
    array = np.array(_on_cpu(item))
    if array.shape != like.shape[1:]:
        raise TypeError(f"shape {list(array.shape)} in place of {list(like.shape[1:])}")
    with np.errstate(over="ignore"):
        return array.astype(like.dtype if like.dtype.kind not in "US" else array.dtype)


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
