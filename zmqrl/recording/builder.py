"""Puts trajectories together, step by step."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from zmqrl.trajectory import Trajectory
from zmqrl.transport.rows import (
    final_row,
    is_unlike,
    not_finite,
    one_per_row,
    owned,
    row_count,
    stacked,
)


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
        return row_count(self.observation)

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
        observation = owned(observation, row_count(observation), self._copy)
        segment = self._segments[-1]
        step = len(segment.rewards)
        if step and is_unlike(observation, segment.observations[0]):
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
        segment.replies.append(owned(reply, self.rows, self._copy))
        segment.versions.append(version)
        if is_unlike(segment.replies[step], segment.replies[0]) and not segment.problem:
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
        rows = row_count(segment.observations[step])
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

    def abandon(self) -> None:
        """Drop the steps of the trajectory under way; the leave to make one stays."""
        segment = self._segments[-1]
        if segment.rewards:
            self._segments[-1] = _Segment()
            self._segments[-1].observations = segment.observations[-1:]  # to go on with, until `observe`
            self.leave = True

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
        finals = [final_row(tree, int(row), segment.observations[-1]) for row in rows]
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


def _checked_reward(reward: Any, valid: Any) -> Tuple[np.ndarray, str]:
    """The rewards, 0 where there was no transition; and what is wrong with them, in words."""
    checked = np.where(valid, one_per_row("reward", reward, len(valid), np.float32), np.float32(0))
    bad = np.flatnonzero(~np.isfinite(checked))
    return checked, f"reward is {checked[bad[0]]} in row {bad[0]}" if len(bad) else ""


def _assemble(segment: _Segment, origin: str) -> Trajectory:
    index = np.array(segment.final_index, dtype=np.int64).reshape(-1, 2)
    like = segment.observations[0]
    return Trajectory(
        observation=stacked(segment.observations, like),
        policy=stacked(segment.replies, segment.replies[0]),
        reward=np.stack([reward for reward in segment.rewards if reward is not None]),
        terminated=np.stack(segment.terminated),
        truncated=np.stack(segment.truncated),
        valid=np.stack(segment.valid),
        versions=np.array(segment.versions, dtype=np.int64),
        bootstrap=segment.bootstrap,
        final_index=index,
        final_observation=stacked(segment.finals, like) if segment.finals else None,
        origin=origin,
    )
