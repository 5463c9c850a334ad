"""The gates that keep learner and env workers at one pace.

*Ratio* (`algorithm.updates_per_env_step`): the learner makes no more updates than the env steps allow,
and the env workers begin no trajectory that would put them ahead of the updates by more than the slack.
The slack is at least all trajectories under way, and a gate closes only between trajectories: else both
sides could wait for each other. While the learner may not update, it is the one that waits, so that the
slack counts from the env steps that are there (they may be up to one update ahead); and with nothing
under way then, a trajectory of whatever size may begin.

*Staleness* (`algorithm.staleness_threshold`, S): with V versions published after the first one, at most
`(S + V + 1) x trajectories per version` are begun in all. V is that of the time when the oldest one
under way began, so that the learner cannot get further than S versions ahead of a slow one.

*Share* (`algorithm.max_env_share`): an env worker begins no trajectory while it holds more than this
share of the recent env steps and those under way. An equal share is everybody's right: with n active env
workers the cap is 1/n at least, and whoever holds least is never above that. So one of them may always
begin, and one that is alone, because the others are stuck or gone, may as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zmqrl.config import Config


@dataclass(frozen=True, slots=True)
class Progress:
    """How far both sides are."""

    updates: int = 0
    """Gradient updates done."""
    env_steps: int = 0
    """Env steps that have arrived."""
    trajectories: int = 0
    """Trajectories that have arrived and were not dropped."""
    versions: int = 0
    """Publications after the first one."""
    under_way: int = 0
    """Trajectories under way."""
    env_steps_under_way: int = 0
    oldest_under_way: int | None = None
    """`versions` when the oldest trajectory under way began."""
    waiting: int = 0
    """Trajectories that have arrived but were not looked at yet."""
    hungry: bool = True
    """Whether the algorithm needs more data before it can do anything at all."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The rules; None switches one off."""

    updates_per_env_step: float | None = None
    slack_steps: int = 0
    staleness_threshold: int | None = None
    trajectories_per_version: int = 1
    max_env_share: float | None = None

    def may_update(self, progress: Progress) -> bool:
        """Whether the learner may make one more update."""
        ratio = self.updates_per_env_step
        return ratio is None or progress.updates + 1 <= progress.env_steps * ratio

    def may_begin(self, progress: Progress, env_steps: int) -> bool:
        """Whether an env worker may begin a trajectory of so many env steps."""
        return self._within_ratio(progress, env_steps) and self._fresh_enough(progress)

    def within_share(self, name: str, held: Mapping[str, int], active: int) -> bool:
        """Whether an env worker may add to its share.

        Args:
            name: Of it.
            held: Recent env steps by env worker, with those under way.
            active: How many env workers take part now.
        """
        if self.max_env_share is None:
            return True
        cap = max(self.max_env_share, 1 / max(1, active))
        return held.get(name, 0) <= cap * sum(held.values()) * (1 + 1e-9)

    def _within_ratio(self, progress: Progress, env_steps: int) -> bool:
        ratio = self.updates_per_env_step
        if ratio is None or progress.hungry:
            return True
        paid = progress.updates / ratio
        if not self.may_update(progress):
            if progress.under_way == 0:
                return True
            paid = max(paid, progress.env_steps)
        ahead = progress.env_steps + progress.env_steps_under_way + env_steps
        return ahead <= paid + self.slack_steps

    def _fresh_enough(self, progress: Progress) -> bool:
        if self.staleness_threshold is None:
            return True
        waits = progress.hungry or not self.may_update(progress)
        if waits and progress.under_way == 0 and progress.waiting == 0:
            return True  # the next version needs more than the threshold lets in: no faster than that
        oldest = progress.oldest_under_way
        versions = progress.versions if oldest is None else min(progress.versions, oldest)
        capacity = (self.staleness_threshold + versions + 1) * self.trajectories_per_version
        return progress.trajectories + progress.under_way < capacity


def gate_of(config: Config) -> Gate:
    """The gate that the section `algorithm` asks for."""
    algorithm = config.algorithm
    per_step = config.env_workers("train") * config.env.pipeline_stages * config.env.train.rollout_epoch
    return Gate(
        updates_per_env_step=algorithm.updates_per_env_step,
        slack_steps=algorithm.ratio_slack_steps or 2 * config.least_slack_steps,
        staleness_threshold=algorithm.staleness_threshold,
        trajectories_per_version=per_step * config.runner.weight_sync_interval,
        max_env_share=algorithm.max_env_share,
    )
