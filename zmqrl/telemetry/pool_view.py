"""What `bin/status` shows of a pool, and what is wrong with it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_PATIENCE_S = 10.0
"""Seconds in one reset, step or policy call after which it is pointed out."""

_TEXTS = ("worker", "client", "policy", "serves", "does", "where")
"""Columns of text; the others are numbers."""

_PATIENT = ("wait", "rest", "connected")
"""What a client may do for as long as it likes: it waits for others."""


def problems_of(status: dict[str, Any]) -> list[str]:
    """What a person should look at, the worst first.

    Args:
        status: See `Broker.status`.
    """
    problems = []
    if not status["workers"]:
        problems.append("no rollout worker is connected: nothing is answered")
    served = {worker["policy"] for worker in status["workers"]}
    for policy, waiting in status["queues"].items():
        if status["workers"] and waiting and policy not in served:
            name = f"the policy {policy}" if policy else "the default policy"
            problems.append(f"{_count(waiting, 'request')} for {name}, which no rollout worker serves")
    in_order = {worker["policy"] for worker in status["workers"] if worker["state"] != "stuck"}
    for worker in status["workers"]:
        if worker["state"] == "stuck":
            others = "others have" if worker["policy"] in in_order else "nobody is left who could have"
            problems.append(
                f"{worker['name']} is stuck in a policy call for {_duration(worker['state_s'])}; "
                f"{others} taken over its requests"
            )
        elif worker["state"] == "busy" and worker["state_s"] >= _PATIENCE_S:
            problems.append(
                f"{worker['name']} has been in a policy call for {_duration(worker['state_s'])}"
            )
    for client in status["clients"]:
        if client["state"] not in _PATIENT and client["state_s"] >= _PATIENCE_S:
            problems.append(
                f"{client['name']} has been in {client['state']} for {_duration(client['state_s'])}"
            )
    return problems


def pool_view(endpoint: str, status: dict[str, Any], problems: list[str]) -> RenderableType:
    """A page about the broker, its rollout workers and its clients.

    Args:
        endpoint: The broker's frontend.
        status: See `Broker.status`.
        problems: Of `problems_of`.
    """
    parts: list[RenderableType] = [_broker(endpoint, status), _workers(status)]
    if len({worker["policy"] for worker in status["workers"]}) > 1:
        parts.append(_policies(status))
    if status["clients"]:
        parts.append(_clients(status))
    parts += [Text(problem, style="bold red") for problem in problems]
    return Group(*parts)


def _broker(endpoint: str, status: dict[str, Any]) -> Text:
    counters = status["counters"]
    mode = "decoupled" if status["decoupled"] else "normal"
    open_now = f"{_count(status['open_requests'], 'request')}, {status['open_bytes'] / 2**20:.1f} MiB"
    if status["open_requests"]:
        open_now += f", the oldest for {_duration(status['oldest_request_s'])}"
    lines = [
        f"broker at {endpoint}: {mode} mode, up for {_duration(status['uptime_s'])}",
        f"answered {counters['answered']:,} of {counters['requests']:,} requests; "
        f"{counters['errors']:,} errors, {counters['requeued']:,} run again, "
        f"{counters['overloaded']:,} turned away, {counters['dropped']:,} undeliverable",
        f"open now: {open_now}",
    ]
    return Text("\n".join(lines))


def _workers(status: dict[str, Any]) -> Table:
    at_home = any(worker.get("homes") for worker in status["workers"])
    homes = ["homes"] if at_home else []
    table = _table("worker", "serves", "does", "since", "shards", *homes, "batches", "weights", "where")
    for worker in status["workers"]:
        totals = status["totals"].get(worker["name"], {})
        table.add_row(
            Text(worker["name"]),
            Text(worker["policy"] or "default"),
            worker["state"],
            _duration(worker["state_s"]),
            str(worker["shards"]),
            *([str(worker["homes"])] if at_home else []),
            f"{totals.get('batches', 0):,}",
            str(totals.get("policy_version", 0)),
            Text(f"{worker['host']}:{worker['pid']}"),
            style="red" if worker["state"] == "stuck" else None,
        )
    return table


def _policies(status: dict[str, Any]) -> Table:
    """What has been done for each policy, by the workers that are connected now."""
    table = _table("policy", "workers", "waiting", "batches", "obs/batch", "ms/batch")
    for name in dict.fromkeys(worker["policy"] for worker in status["workers"]):
        workers = [worker["name"] for worker in status["workers"] if worker["policy"] == name]
        totals = [status["totals"].get(worker, {}) for worker in workers]
        batches = sum(t.get("batches", 0) for t in totals)
        table.add_row(
            Text(name or "default"),
            str(len(workers)),
            f"{status['queues'].get(name, 0):,}",
            f"{batches:,}",
            f"{sum(t.get('rows', 0) for t in totals) / max(1, batches):.2f}",
            f"{1000 * sum(t.get('predict_s', 0) for t in totals) / max(1, batches):.2f}",
        )
    return table


def _clients(status: dict[str, Any]) -> Table:
    table = _table("client", "does", "since", "open", "where")
    for client in sorted(status["clients"], key=lambda client: _natural(client["name"])):
        late = client["state"] not in _PATIENT and client["state_s"] >= _PATIENCE_S
        table.add_row(
            Text(client["name"]),
            Text(client["state"]),
            _duration(client["state_s"]),
            str(client["open_requests"]),
            Text(f"{client['host']}:{client['pid']}"),
            style="red" if late else None,
        )
    more = status["clients_connected"] - len(status["clients"])
    if more:
        table.caption = f"and {more:,} more, each in what it does for a shorter time"
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)  # fits into 80 columns, mostly
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXTS else "right", overflow="fold")
    return table


def _natural(name: str) -> tuple[str, int, str]:
    """Sorts env-2 before env-10."""
    stem = name.rstrip("0123456789")
    number = name[len(stem) :]
    return stem, int(number or 0), name


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
