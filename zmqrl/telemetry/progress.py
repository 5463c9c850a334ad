"""What the runner of a training knows of its parts, and the metrics that follow from it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from zmqrl.config import Config
from zmqrl.telemetry.epochs import BrokerEpochs
from zmqrl.telemetry.metrics import (
    EnvView,
    Metrics,
    Sample,
    broker_metrics,
    delay_metrics,
    episode_metrics,
    pool_metrics,
    summed,
)
from zmqrl.telemetry.report import Episode, LearnerReport, Report

_WINDOW = 10.0
"""Seconds over which rates and times are averaged."""

_TOLD_BY_ENV_WORKERS = ("time/env/", "time/broker/", "time/rollout/predict")

_EPISODES = 100
"""The most recent episodes, over which `env/*` is averaged."""


class Evaluations:
    """Puts the episodes of eval workers together to evaluations.

    Args:
        config: How many workers and episodes there are.
    """

    def __init__(self, config: Config) -> None:
        self._episodes = {
            f"eval-{rank}": config.envs_of("eval", rank) * config.env.eval.rollout_epoch
            for rank in range(config.env_workers("eval"))
        }
        self._views: dict[int, dict[str, EnvView]] = {}
        self._began: dict[int, float] = {}
        self._done = 0

    def take(self, report: Report, now: float) -> None:
        """Add a report."""
        if report.evaluation <= self._done or report.name not in self._episodes:
            return
        self._began.setdefault(report.evaluation, now)
        views = self._views.setdefault(report.evaluation, {})
        if report.name not in views:
            views[report.name] = EnvView(report.name, self._episodes[report.name])
        views[report.name].take(report, now)

    def finished(self) -> list[Metrics]:
        """The metrics of the evaluations that are complete since the last call."""
        complete = []
        for number, views in sorted(self._views.items()):
            if len(views) == len(self._episodes) and all(view.ended() for view in views.values()):
                complete.append(self._metrics(number, list(views.values())))
                self._done = number
        for number in [number for number in self._views if number <= self._done]:
            del self._views[number]
        return complete

    def _metrics(self, number: int, views: list[EnvView]) -> Metrics:
        reports = [view.report for view in views if view.report is not None]
        return {
            "eval/number": number,
            "eval/policy_version": reports[0].version,
            "eval/env_steps": reports[0].env_steps_before,
            **episode_metrics(views),
            "time/eval": max(view.heard for view in views) - self._began[number],
        }


class TrainingProgress:
    """Everything that the runner is told, and the metrics of the moment.

    Args:
        config: Of the run.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.envs = {
            f"env-{rank}": EnvView(f"env-{rank}") for rank in range(config.env_workers("train"))
        }
        self.heard: dict[str, float] = {}
        """By worker, `time.monotonic()` of its last report."""
        self.learner: LearnerReport | None = None
        self.learner_heard: float | None = None
        self.moved = time.monotonic()
        """When env steps or updates were last seen to go on."""
        self.evaluations = Evaluations(config)
        self.latest_evaluation: Metrics = {}
        self._episodes: deque[Episode] = deque(maxlen=_EPISODES)
        self._samples: deque[tuple[float, Sample, dict[str, Any]]] = deque()
        self._broker = BrokerEpochs()

    def take(self, report: Report | LearnerReport) -> None:
        """Add a report."""
        now = time.monotonic()
        if isinstance(report, LearnerReport):
            before = {} if self.learner is None else self.learner.metrics
            if any(report.metrics.get(k) != before.get(k) for k in ("env_steps", "learner_updates")):
                self.moved = now
            self.learner, self.learner_heard = report, now
            return
        self.heard[report.name] = now
        if report.name in self.envs:
            self.envs[report.name].take(report, now)
            self.envs[report.name].episodes.clear()  # only the most recent ones are kept
            self._episodes.extend(report.episodes)
        else:
            self.evaluations.take(report, now)

    def sample(self, status: dict[str, Any] | None) -> None:
        """Note the moment, with the broker's status, or None if it did not answer."""
        self._broker.take(status)
        now = time.monotonic()
        learner = {} if self.learner is None else self.learner.metrics
        self._samples.append((now, Sample.of(summed(self.envs.values()), self.status), dict(learner)))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _WINDOW:
            self._samples.popleft()

    @property
    def status(self) -> dict[str, Any]:
        """Of the broker, over all its restarts."""
        return self._broker.status()

    def stepping(self) -> bool:
        """Whether any simulator has made a step for training."""
        learned = self.learner is not None and self.learner.metrics.get("env_steps", 0) > 0
        return learned or any(view.stepped() for view in self.envs.values())

    def metrics(self) -> Metrics:
        """All metrics of the moment; rates and times over the last seconds."""
        metrics: Metrics = {}
        learner = {} if self.learner is None else dict(self.learner.metrics)
        if len(self._samples) >= 2:
            (began, first, earlier), (ended, last, _) = self._samples[0], self._samples[-1]
            workers = self._config.rollout_workers
            metrics.update(pool_metrics(last.since(first), ended - began, workers))
            metrics.update(_learner_rates(earlier, learner, ended - began))
        if self._episodes:
            view = EnvView("", 0, None, list(self._episodes))
            metrics.update(episode_metrics([view], "env"))
            del metrics["env/missing_trajectories"]
        metrics.update(broker_metrics(self.status))
        metrics.update(delay_metrics(self.envs.values()))
        books = {key: learner.pop(f"trajectories_{key}", 0) for key in ("before", "arrived")}
        for key in [key for key in learner if key.endswith("_total")]:
            del learner[key]
        metrics.update(learner)
        totals = summed(self.envs.values())
        # The last report of an env worker that was killed may be missing; what has arrived was sent.
        metrics["trajectories_sent"] = max(
            totals.trajectories_sent + books["before"], books["arrived"] + totals.trajectories_dropped
        )
        dropped = learner.get("trajectories_dropped", 0)
        metrics["trajectories_dropped"] = totals.trajectories_dropped + dropped
        if len(self._samples) >= 2 and all(view.report is None for view in self.envs.values()):
            # A loop of the user's own does not report; what the learner counts is all that is known.
            began, _, earlier = self._samples[0]
            steps = learner.get("env_steps", 0) - earlier.get("env_steps", 0)
            metrics["env_steps_per_s"] = steps / (self._samples[-1][0] - began)
            del metrics["bottleneck"]
            for key in [key for key in metrics if key.startswith(_TOLD_BY_ENV_WORKERS)]:
                del metrics[key]
        metrics.setdefault("env_steps", 0)
        metrics.update(self.latest_evaluation)
        return metrics


def _learner_rates(earlier: dict[str, Any], now: dict[str, Any], seconds: float) -> Metrics:
    """The learner's times, over the seconds between two of its reports."""

    def done(key: str) -> float:
        return float(now.get(key, 0) - earlier.get(key, 0))

    rates: Metrics = {"time/actor/gate_wait": min(1.0, done("time/actor/gate_wait_total") / seconds)}
    if done("learner_updates") > 0:
        rates["time/actor/update"] = done("time/actor/update_total") / done("learner_updates")
    if done("global_step") > 0:
        rates["time/step"] = seconds / done("global_step")
    return rates
