"""One group of an env worker's simulators, and the episodes that they play."""

from __future__ import annotations

from typing import Any

import numpy as np

from zmqrl.client import Pending
from zmqrl.env.adapters import ShardEnv, Step
from zmqrl.env.seeds import Seeds
from zmqrl.telemetry.report import Episode


class Stage:
    """A shard, its request in flight, its episodes.

    Args:
        shard: The simulators.
        index: The pipeline stage.
        first_env: Index, over all env workers, of the shard's first row.
        quota: Episodes that each row plays; None for no end.
        seeds: Of the shard's episodes; None if the simulators go on as they like.
    """

    def __init__(
        self,
        shard: ShardEnv,
        index: int,
        first_env: int,
        quota: int | None,
        seeds: Seeds | None = None,
    ) -> None:
        self.shard = shard
        self.index = index
        self.first_env = first_env
        self.observation: Any = None
        """What to act on next, as the simulators gave it."""
        self.reset = np.ones(shard.num_envs, dtype=bool)
        """The rows of which that begins an episode."""
        self.pending: Pending | None = None
        """The request for those actions; None while they may not be asked for yet."""
        self.sent = 0.0
        self.held_since: float | None = None
        """Since when the learner holds the next trajectory back, as far as it is not counted yet."""
        self._quota = quota
        self._seeds = seeds
        self.restart()

    def restart(self) -> None:
        """Begin anew: no row has played an episode."""
        rows = self.shard.num_envs
        self._played = np.zeros(rows, dtype=np.int64)  # episodes of each row
        self._return = np.zeros(rows)
        self._length = np.zeros(rows, dtype=np.int64)
        self._success_once = np.zeros(rows, dtype=bool)
        if self._seeds is not None:
            self._seeds.restart()

    def begin_again(self) -> int:
        """Drop what is counted of the episodes under way, which begin again, and return their number."""
        going_on = self._played < self._quota if self._quota is not None else self._played >= 0
        self._return[:] = self._length[:] = 0
        self._success_once[:] = False
        if self._seeds is not None:
            self._seeds.begin_again(self._played)
        return int(going_on.sum())

    def finished(self) -> bool:
        """Whether every row has played its episodes."""
        return self._quota is not None and bool((self._played >= self._quota).all())

    def account(self, step: Step) -> list[Episode]:
        """Count a step; rows that have played their episodes are stepped on but no longer counted.

        The length of an episode is that in steps of the simulator, whatever chunks of actions there are.
        A reward that is no number counts as 0 here.

        Returns:
            The episodes that it ended.
        """
        rows = step.rows
        rewards = np.where(step.valid & np.isfinite(step.reward), step.reward, 0.0)
        self._return[rows] += _over_sub_steps(rewards)
        self._length[rows] += _over_sub_steps(step.valid)
        if step.succeeded is not None:
            self._success_once[rows] |= step.succeeded
        ended = []
        for place in np.flatnonzero(step.terminated | step.truncated):
            row = int(rows[place])
            if self._quota is None or self._played[row] < self._quota:
                success = None if step.success is None else bool(step.success[place])
                ended.append(self._episode(row, success))
            self._played[row] += 1
            self._return[row] = self._length[row] = 0
            self._success_once[row] = False
        return ended

    def _episode(self, row: int, success: bool | None) -> Episode:
        return Episode(
            env=self.first_env + row,
            number=int(self._played[row]),
            total_return=float(self._return[row]),
            length=int(self._length[row]),
            success_once=None if success is None else bool(self._success_once[row]),
            success_at_end=success,
        )


def _over_sub_steps(values: Any) -> Any:
    """The sum over the sub-steps of each row, `[N]`, of `[N, k]`; or what has none, as it is."""
    return values if values.ndim == 1 else values.sum(1)
