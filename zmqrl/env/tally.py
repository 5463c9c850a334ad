"""What an env worker has done, counted as it goes, and told to the runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from zmqrl.client import Pending
from zmqrl.env.adapters import Step
from zmqrl.env.delays import DelaySampler
from zmqrl.telemetry.report import Episode, Report, Reporter
from zmqrl.transport.rows import not_finite

log = logging.getLogger(__name__)


class Tally:
    """Counts what the simulators of an env worker do, and says so now and then.

    Args:
        report: Where it counts.
        reporter: Takes the report to the runner; without one there is a line of text in the log.
        delays: Their figures go with each report.
        broker: The address that actions come from, for that line.

    Attributes:
        totals: Those of the report.
    """

    def __init__(self, report: Report, reporter: Reporter, delays: DelaySampler, broker: str) -> None:
        self._report = report
        self.totals = report.totals
        self._reporter = reporter
        self._delays = delays
        self._broker = broker

    def tell(self, now: bool = False) -> None:
        """Report, if the last one is old enough, or `now`."""
        if not now and not self._reporter.due():
            return
        self._report.delays = self._delays.metrics()
        self._reporter.send(self._report)
        if not self._reporter.has_runner and not now:
            steps, episodes = self.totals.env_steps, self._reporter.count
            waiting = "" if self._report.began else f", waiting for actions from {self._broker}"
            log.info("%d steps, %d episodes%s", steps, episodes, waiting)

    def count_reply(self, pending: Pending, sent: float) -> None:
        """Count a reply.

        Args:
            pending: Its request.
            sent: When that was sent, of `time.monotonic()`.
        """
        now = time.monotonic()
        if self._report.began is None:
            self._report.began = now
        if sent >= self._report.began:
            self.totals.requests += 1
            self.totals.wait_s += now - sent
            self.totals.queue_s += pending.queue_seconds or 0.0
            self.totals.predict_s += pending.predict_seconds or 0.0

    def count_step(self, name: str, step: Step, delay: float) -> None:
        """Count a step.

        Args:
            name: Of the simulators, for what is wrong with their rewards.
            step: What it gave.
            delay: Seconds by which it was delayed.
        """
        totals = self.totals
        totals.shard_steps += 1
        totals.env_steps += int(step.valid.sum())
        totals.step_s += step.step_seconds
        totals.step_times.add(step.step_seconds + delay)
        if step.reset_seconds > 0:
            totals.count_reset(step.reset_seconds)
        self._report.ended = time.monotonic()
        problem = not_finite(step.reward, "reward", step.rows)
        if problem:
            self.count_problem(name, problem)

    def count_problem(self, name: str, problem: str) -> None:
        """Count a step of the simulators `name` with a number that is none, and warn of it."""
        self.totals.not_finite += 1
        count = self.totals.not_finite
        # The 1st, 2nd, 4th, 8th …: a broken simulator must not flood the log.
        if count & (count - 1) == 0:
            steps = self.totals.shard_steps
            log.warning("%s: %s at step %d (number %d of such steps)", name, problem, steps, count)

    def add(self, episodes: Iterable[Episode]) -> None:
        """Note finished episodes for the next report."""
        for episode in episodes:
            self._reporter.add(episode)
