"""What a person sees: the tables at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zmqrl.telemetry.metrics import EnvView, Metrics, span, summed
from zmqrl.telemetry.sections import Unit, written


def summary(
    metrics: Metrics, envs: Sequence[EnvView], status: dict[str, Any], cut_short: bool = False
) -> RenderableType:
    """The tables of an evaluation: results, each part, the time split, and what limits the run.

    One that was cut short was limited by what ended it.
    """
    # The results near the end: what a small terminal still shows.
    policies = list(dict.fromkeys(env.policy for env in envs if env.policy))
    shown = results(metrics, policies=policies)
    parts = [_env_table(envs), _rollout_table(envs, status), _time_split(envs), shown]
    return Group(*parts) if cut_short else Group(*parts, _limit(metrics))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _value(metrics: Metrics, key: str, form: str | None) -> str:
    """A metric in a form, or as a time if there is none; empty if it is missing."""
    value = metrics.get(key)
    if value is None:
        return ""
    return written(value, Unit.SECONDS) if form is None else form.format(value)


def results(metrics: Metrics, group: str = "eval", policies: Sequence[str] = ()) -> Table:
    """The table of what the episodes gave.

    Args:
        metrics: Of the run.
        group: What the metrics of episodes begin with.
        policies: The names of several, which have a column each.
    """
    table = _table("Results", "metric", "all" if policies else "value", *policies)
    rows = [
        ("episodes", f"{group}/num_trajectories", "{:,}"),
        ("success at any step", f"{group}/success_once", "{:.1%}"),
        ("success at the end", f"{group}/success_at_end", "{:.1%}"),
        ("return, mean", f"{group}/return", "{:.3f}"),
        ("episode length, mean", f"{group}/episode_len", "{:.1f}"),
        ("env steps", "env_steps", "{:,}"),
        ("env steps/s", "env_steps_per_s", "{:,.0f}"),
        ("step, p50", "time/env/step_p50", None),
        ("step, p99", "time/env/step_p99", None),
        ("reset, p50", "time/env/reset_p50", None),
        ("reset, p99", "time/env/reset_p99", None),
        ("requests a batch, mean", "rollout/mean_shards_per_batch", "{:.2f}"),
        ("observations a batch, mean", "rollout/mean_rows_per_batch", "{:.2f}"),
        ("requests", "broker/requests", "{:,}"),
        ("  answered", "broker/answered", "{:,}"),
        ("  run again", "broker/requeued", "{:,}"),
    ]
    for label, key, form in rows:
        if metrics.get(key) is not None:
            head, _, tail = key.rpartition("/")
            own = [_value(metrics, f"{head}/{name}/{tail}", form) for name in policies]
            table.add_row(label, _value(metrics, key, form), *own)
    return table


def _time_split(envs: Sequence[EnvView]) -> Table:
    totals = summed(envs)
    on_the_way = max(0.0, totals.wait_s - totals.queue_s - totals.predict_s)
    parts = [
        ("env: step, reset and delay", totals.step_s + totals.reset_s + totals.delay_s),
        ("queue: waiting for a rollout worker", totals.queue_s),
        ("inference: the policy's batch", totals.predict_s),
        ("transport: all the rest of the wait", on_the_way),
    ]
    whole = sum(seconds for _, seconds in parts) or 1.0
    table = _table("Where an env worker's time goes", "part", "share", "ms a request")
    for label, seconds in parts:
        per_step = 1000 * seconds / max(1, totals.shard_steps)
        table.add_row(label, f"{seconds / whole:.1%}", f"{per_step:.2f}")
    return table


def _rollout_table(envs: Sequence[EnvView], status: dict[str, Any]) -> Table:
    seconds = span(envs)
    connected = {worker["name"] for worker in status.get("workers", [])}
    table = _table(
        "Rollout workers", "worker", "batches", "requests/batch", "obs/batch", "ms/batch", "busy"
    )
    for name, totals in sorted(status.get("totals", {}).items()):
        batches = max(1, totals["batches"])
        table.add_row(
            name if name in connected else f"{name} (lost)",
            f"{totals['batches']:,}",
            f"{totals['shards'] / batches:.2f}",
            f"{totals['rows'] / batches:.2f}",
            f"{1000 * totals['predict_s'] / batches:.2f}",
            f"{totals['predict_s'] / seconds:.0%}" if seconds else "-",
        )
    return table


def _env_table(envs: Sequence[EnvView]) -> Table:
    table = _table("Env workers", "worker", "episodes", "env steps", "ms in step", "ms waiting")
    for env in envs:
        label = f"{env.name} ({env.policy})" if env.policy else env.name
        label += " (lost)" if env.missing() else ""
        episodes = f"{len(env.episodes)} of {env.expected_episodes}"
        if env.report is None:
            table.add_row(label, episodes, "-", "-", "-")
            continue
        totals = env.totals()
        steps = max(1, totals.shard_steps)
        table.add_row(
            label,
            episodes,
            f"{totals.env_steps:,}",
            f"{1000 * (totals.step_s + totals.delay_s) / steps:.1f}",
            f"{1000 * totals.wait_s / max(1, totals.requests):.1f}",
        )
    return table


_MEANING = {
    "env": "env workers spend most of their time in the simulator; more of them would help",
    "rollout": "env workers wait for busy rollout workers; more of those would help",
    "queue": "env workers wait, for each other or on the way, although rollout workers have time; "
    "see Bottleneck in docs/metrics.md",
}


def _limit(metrics: Metrics) -> Text:
    limit = str(metrics.get("bottleneck"))
    return Text.assemble(("Limited by ", "bold"), (limit, "bold cyan"), f": {_MEANING.get(limit, '')}.")
