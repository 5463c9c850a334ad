"""The names of all metrics, and how they follow from what the parts report.

Names that RLinf has are kept. Seconds and means are per call unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from zmqrl.telemetry.durations import Durations
from zmqrl.telemetry.report import EnvTotals, Episode, Report

Metrics = dict[str, "float | int | str | None"]

EVALUATION = tuple(
    f"eval/{name}"
    for name in ("success_once", "success_at_end", "fail_once", "return", "episode_len", "reward")
)
"""What evaluations tell; success only where the simulator does."""

_BATCHES = ("batches", "shards", "rows", "predict_s")
"""What the broker counts of a rollout worker."""

_SATURATED = 0.7
"""Busy share of the rollout workers from which waiting in the queue is their doing."""


@dataclass(slots=True)
class EnvView:
    """What the runner knows of one env worker, over all its restarts: its totals, and its episodes."""

    name: str
    expected_episodes: int = 0
    report: Report | None = None
    episodes: list[Episode] = field(default_factory=list)
    heard: float = 0.0
    """`time.monotonic()` of its last report."""
    gave_up: str | None = None
    """Why no more is expected of it."""
    policy: str = ""
    """The name of the one that it asks, of several."""
    _before: EnvTotals = field(default_factory=EnvTotals)
    """Of the processes that had its name earlier."""
    _first_began: float | None = None
    """When the first of them had its first actions."""

    def take(self, report: Report, now: float) -> None:
        """Add a report; a worker that was restarted plays all its episodes anew."""
        if self.report is not None and report.incarnation != self.report.incarnation:
            self._first_began = self.began()
            totals = self.report.totals
            # What it had on its way has arrived, and is counted there, or counts as never sent.
            sent = totals.trajectories_sent - totals.trajectories_unacknowledged
            totals = replace(totals, trajectories_sent=sent, trajectories_unacknowledged=0)
            self._before = added(self._before, totals)
            self.episodes.clear()
        self.report, self.heard = report, now
        self.episodes.extend(report.episodes)

    def totals(self) -> EnvTotals:
        """Everything that was done under its name."""
        return self._before if self.report is None else added(self._before, self.report.totals)

    def began(self) -> float | None:
        """`time.monotonic()` when the first actions came; None before."""
        return self._first_began or (None if self.report is None else self.report.began)

    def stepped(self) -> bool:
        """Whether a simulator has made a step."""
        return self.totals().shard_steps > 0

    def ended(self) -> bool:
        """Whether nothing more is expected."""
        return self.gave_up is not None or (self.report is not None and self.report.finished)

    def missing(self) -> int:
        """Episodes that it owes."""
        return max(0, self.expected_episodes - len(self.episodes))


def span(envs: Sequence[EnvView]) -> float:
    """Seconds from the first actions to the last step; 0 before."""
    began = [at for env in envs if (at := env.began()) is not None]
    ended = [e.report.ended for e in envs if e.report is not None and e.report.ended is not None]
    return max(ended) - min(began) if began and ended else 0.0


def added(one: EnvTotals, other: EnvTotals) -> EnvTotals:
    """The sum of both."""
    return EnvTotals(
        **{f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(EnvTotals)}
    )


def summed(envs: Iterable[EnvView]) -> EnvTotals:
    """The totals of all env workers together."""
    totals = EnvTotals()
    for env in envs:
        totals = added(totals, env.totals())
    return totals


def episode_metrics(envs: Sequence[EnvView], group: str = "eval") -> Metrics:
    """Means over all counted episodes; a success rate only if the simulator reports one.

    Args:
        envs: All env workers.
        group: What the names begin with: `eval`, or `env` for train mode.
    """
    episodes = [episode for env in envs for episode in env.episodes]
    metrics: Metrics = {
        f"{group}/num_trajectories": len(episodes),
        f"{group}/missing_trajectories": sum(env.missing() for env in envs),
    }
    if not episodes:
        return metrics
    metrics[f"{group}/return"] = float(np.mean([e.total_return for e in episodes]))
    metrics[f"{group}/episode_len"] = float(np.mean([e.length for e in episodes]))
    steps = sum(e.length for e in episodes)
    metrics[f"{group}/reward"] = sum(e.total_return for e in episodes) / max(1, steps)
    judged = [e for e in episodes if e.success_once is not None]
    if judged:
        once = float(np.mean([bool(e.success_once) for e in judged]))
        metrics[f"{group}/success_once"] = once
        metrics[f"{group}/success_at_end"] = float(np.mean([bool(e.success_at_end) for e in judged]))
        metrics[f"{group}/fail_once"] = 1.0 - once
    return metrics


@dataclass(slots=True)
class Sample:
    """What all parts have done up to a moment."""

    totals: EnvTotals
    """Of all env workers together."""
    counters: dict[str, float]
    """Of the broker."""
    predict_s: float
    """Seconds that rollout workers have spent in the policy."""

    @classmethod
    def of(cls, totals: EnvTotals, status: dict[str, Any]) -> Sample:
        """The moment at which the broker had this status, see `Broker.status`."""
        workers = status.get("totals", {}).values()
        return cls(totals, dict(status.get("counters", {})), sum(w["predict_s"] for w in workers))

    def since(self, earlier: Sample) -> Sample:
        """What was done between the two."""
        totals = EnvTotals(
            **{
                f.name: getattr(self.totals, f.name) - getattr(earlier.totals, f.name)
                for f in fields(EnvTotals)
            }
        )
        counters = {key: value - earlier.counters.get(key, 0) for key, value in self.counters.items()}
        return Sample(totals, counters, self.predict_s - earlier.predict_s)


def pool_metrics(done: Sample, seconds: float, rollout_workers: int) -> Metrics:
    """`rollout/*`, `time/*`, and what limits the run.

    Args:
        done: What was done.
        seconds: In how many seconds.
        rollout_workers: How many there are.
    """
    totals, counters = done.totals, done.counters
    batches = max(1, counters.get("batches", 0))
    busy = done.predict_s / (seconds * rollout_workers) if seconds else 0.0
    requests = max(1, totals.requests)
    lost = {"env/state_lost": totals.state_lost} if totals.state_lost else {}
    return {
        "env_steps_per_s": totals.env_steps / seconds if seconds else 0.0,
        "rollout/mean_shards_per_batch": counters.get("shards", 0) / batches,
        "rollout/mean_rows_per_batch": counters.get("rows", 0) / batches,
        "rollout/busy": min(1.0, busy),
        "time/env/step": (totals.step_s + totals.delay_s) / max(1, totals.shard_steps),
        **quantiles("time/env/step", totals.step_times),
        "time/env/reset": totals.reset_s / max(1, totals.resets),
        **quantiles("time/env/reset", totals.reset_times),
        "time/env/wait": totals.wait_s / requests,
        "time/env/gate_wait": totals.gate_s / max(1, totals.shard_steps),
        "time/broker/queue": totals.queue_s / requests,
        "time/rollout/predict": totals.predict_s / requests,
        "bottleneck": bottleneck(totals, busy),
        **lost,
    }


def quantiles(name: str, durations: Durations) -> Metrics:
    """The median and the 99th percentile of `durations`, in seconds; nothing without calls."""
    found = {f"{name}_p50": durations.quantile(0.5), f"{name}_p99": durations.quantile(0.99)}
    return {key: value for key, value in found.items() if value is not None}


def run_metrics(envs: Sequence[EnvView], status: dict[str, Any], rollout_workers: int) -> Metrics:
    """Everything about a pool from its start, but for the episodes.

    Args:
        envs: All env workers.
        status: Of the broker, see `Broker.status`.
        rollout_workers: How many there are.
    """
    sample = Sample.of(summed(envs), status)
    return {
        "env_steps": sample.totals.env_steps,
        **pool_metrics(sample, span(envs), rollout_workers),
        **broker_metrics(status),
        **delay_metrics(envs),
    }


def policy_metrics(
    envs: Sequence[EnvView], status: dict[str, Any], serves: Mapping[str, str]
) -> Metrics:
    """`eval/NAME/*` and `rollout/NAME/*`: the same for each of several policies alone.

    Args:
        envs: All env workers.
        status: Of the broker, see `Broker.status`.
        serves: By rollout worker, the name of its policy; "" if there is only one.
    """
    metrics: Metrics = {}
    for name in dict.fromkeys(filter(None, serves.values())):
        metrics.update(episode_metrics([env for env in envs if env.policy == name], f"eval/{name}"))
        workers = [worker for worker, policy in serves.items() if policy == name]
        totals = [status.get("totals", {}).get(worker, {}) for worker in workers]
        done = {key: sum(t.get(key, 0) for t in totals) for key in _BATCHES}
        batches, seconds = max(1, done["batches"]), span(envs) * len(workers)
        metrics[f"rollout/{name}/mean_shards_per_batch"] = done["shards"] / batches
        metrics[f"rollout/{name}/mean_rows_per_batch"] = done["rows"] / batches
        metrics[f"rollout/{name}/busy"] = min(1.0, done["predict_s"] / seconds) if seconds else 0.0
    return metrics


def broker_metrics(status: dict[str, Any]) -> Metrics:
    """`broker/*`: what has become of all requests.

    Args:
        status: Of the broker, see `Broker.status`.
    """
    names = ("requests", "answered", "errors", "cancelled", "requeued", "dropped", "malformed")
    counters = status.get("counters", {})
    return {f"broker/{name}": counters.get(name, 0) for name in names}


def delay_metrics(envs: Iterable[EnvView]) -> Metrics:
    """`env/time/*_delay`: the emulated delays of all env workers, in seconds."""
    delays = [env.report.delays for env in envs if env.report is not None and env.report.delays]
    if not any(delay["max"] for delay in delays):
        return {}
    return {
        f"env/time/{name}_delay": float(combine([delay[name] for delay in delays]))
        for name, combine in (("average", np.mean), ("median", np.median), ("max", max), ("min", min))
    }


def bottleneck(totals: EnvTotals, busy: float) -> str:
    """What an env worker's time is spent on, in a word.

    Args:
        totals: Over all env workers.
        busy: The share of the rollout workers' time that is spent in the policy.

    Returns:
        `env`: mostly in the simulator. `rollout`: mostly waiting, and the rollout workers are busy.
        `queue`: mostly waiting, although they are not: at a barrier, for a batch to fill, or on the way.
        `learner`: mostly held back by the learner, whose updates have to catch up.
    """
    env_s = totals.step_s + totals.reset_s + totals.delay_s
    if totals.gate_s > max(env_s, totals.wait_s):
        return "learner"
    if env_s >= totals.wait_s:
        return "env"
    computing = totals.predict_s >= totals.wait_s - totals.predict_s
    return "rollout" if busy >= _SATURATED or computing else "queue"
