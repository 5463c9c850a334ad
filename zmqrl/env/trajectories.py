"""What the simulators of an env worker do, for its learner."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from zmqrl.env.adapters import Step
from zmqrl.env.rewards import RewardRequests
from zmqrl.env.stage import Stage
from zmqrl.errors import ClientError, EnvironmentFailure, TrainingEnded
from zmqrl.recording import Recording
from zmqrl.telemetry.report import EnvTotals
from zmqrl.transport.rows import finite

_MOST_DROPPED = 5
"""Trajectories in a row that may be dropped before the simulator counts as broken."""


class Trajectories:
    """Records each step of each stage, with its rewards, wherever these come from.

    For each step: `asked`, `may_begin` until it says yes, `stepped`, `may_go_on` until it says yes.

    Args:
        recording: Sends them.
        rewards: Asks a model for rewards; None if those of the simulators count.
        totals: Where they are counted.
    """

    def __init__(self, recording: Recording, rewards: RewardRequests | None, totals: EnvTotals) -> None:
        self._recording = recording
        self._rewards = rewards
        self._totals = totals

    def asked(self, stage: Stage) -> None:
        """Note the observation that a stage asks actions for.

        Raises:
            EnvironmentFailure: The simulator is broken: it yields nothing but what has to be dropped.
        """
        recording = self._recording
        recording.asked(stage.index, stage.observation)
        self._count()
        if recording.dropped_in_a_row >= _MOST_DROPPED:
            raise EnvironmentFailure(
                f"{stage.shard.name}: {recording.problem(stage.index)}; the last "
                f"{recording.dropped_in_a_row} trajectories had to be dropped for such numbers "
                f"(step {self._totals.shard_steps})"
            )

    def may_begin(self, stage: Stage) -> bool:
        """Whether the actions may be asked for: yes within a trajectory, else as the learner says."""
        try:
            return self._recording.may_begin(stage.index)
        except TrainingEnded:
            return False  # whoever started this worker stops it, too

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a word from the learner.

        Raises:
            ClientError: Rewards did not come, with the reason.
        """
        self._recording.wait(timeout)
        self.collect()

    def stepped(self, stage: Stage, reply: dict[str, Any], version: int | None, step: Step) -> None:
        """Note a step of a stage.

        Args:
            stage: Its observation is that before the step.
            reply: The policy's, upon that observation.
            version: Of the weights that made it.
            step: What its actions gave.

        Raises:
            ClientError: Earlier rewards did not come, with the reason.
        """
        self._recording.answered(stage.index, reply, version)
        if self._rewards is not None:
            self._rewards.record(stage.index, finite(stage.observation), reply["actions"], step)
            return
        self._recording.outcome(
            stage.index,
            step.reward,
            step.terminated,
            step.truncated,
            step.final_observation,
            step.valid,
        )

    def may_go_on(self, timeout: float) -> bool:
        """Whether few enough rewards are on their way for another step; waits up to `timeout` seconds.

        Raises:
            ClientError: Rewards did not come, with the reason.
        """
        return self._rewards is None or self._rewards.may_go_on(timeout)

    def abandon(self, stage: Stage) -> None:
        """Drop the trajectory under way: the simulators of a stage are reset within their episodes."""
        self._recording.abandon(stage.index)

    def collect(self) -> None:
        """Take the rewards that have come, without waiting.

        Raises:
            ClientError: Rewards did not come, with the reason.
        """
        if self._rewards is not None:
            self._rewards.collect()

    def close(self) -> None:
        """Deliver what is complete, and say goodbye."""
        with suppress(ClientError):  # what lacks a reward is not complete; the run has its own end
            self.collect()
        self._recording.close()
        self._count()

    def _count(self) -> None:
        totals, recording = self._totals, self._recording
        totals.trajectories_sent = recording.sent + recording.dropped
        totals.trajectories_unacknowledged = recording.unacknowledged
        totals.trajectories_dropped = recording.dropped
