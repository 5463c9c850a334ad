"""What a person reads of a pool."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from zmqrl.broker.core import Broker
from zmqrl.broker.pool import Options
from zmqrl.telemetry.pool_view import pool_view, problems_of


def status(**changes: Any) -> dict[str, Any]:
    """That of a broker which nobody uses, with some fields changed."""
    return {**Broker(Options(), 1, 0.0).status(), **changes}


def worker(**changes: Any) -> dict[str, Any]:
    fields = {"name": "rollout-0", "policy": "", "host": "here", "pid": 1, "state": "idle"}
    return {**fields, "state_s": 0.0, "since_s": 0.0, "shards": 0, **changes}


def client(**changes: Any) -> dict[str, Any]:
    fields = {"name": "env-0", "host": "here", "pid": 2, "state": "wait", "state_s": 0.0}
    return {**fields, "open_requests": 0, "silent_s": 0.0, **changes}


def page(tree: dict[str, Any], width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(pool_view("ipc:///x", tree, problems_of(tree)))
    console.file.close()
    return console.export_text()


def test_a_pool_without_a_worker_is_a_problem() -> None:
    assert problems_of(status()) == ["no rollout worker is connected: nothing is answered"]
    assert problems_of(status(workers=[worker()])) == []


def test_requests_for_a_policy_that_nobody_serves_are_a_problem() -> None:
    tree = status(workers=[worker()], queues={"": 0, "reward": 3})
    assert problems_of(tree) == ["3 requests for the policy reward, which no rollout worker serves"]


def test_who_is_stuck_is_named_with_where_and_for_how_long() -> None:
    tree = status(
        workers=[
            worker(state="stuck", state_s=63.0),
            worker(name="rollout-1", state="busy", state_s=12),
        ],
        clients=[
            client(state="reset", state_s=42.0),
            client(name="env-1", state="step", state_s=3.0),
            client(name="env-2", state="wait", state_s=500.0),
        ],
        clients_connected=3,
    )
    assert problems_of(tree) == [
        "rollout-0 is stuck in a policy call for 63 s; others have taken over its requests",
        "rollout-1 has been in a policy call for 12 s",
        "env-0 has been in reset for 42 s",
    ]


def test_a_worker_that_is_stuck_alone_leaves_its_requests_to_nobody() -> None:
    tree = status(workers=[worker(state="stuck", state_s=63.0), worker(name="r", policy="reward")])
    left = "rollout-0 is stuck in a policy call for 63 s; nobody is left who could have taken over"
    assert problems_of(tree) == [f"{left} its requests"]


def test_the_page_shows_all_peers_in_their_natural_order_and_text_as_it_is() -> None:
    tree = status(
        workers=[worker()],
        clients=[client(name="env-10"), client(name="env-2"), client(name="[red]loud[/red]")],
        clients_connected=7,
    )
    text = page(tree)
    assert text.index("env-2") < text.index("env-10")
    assert "[red]loud[/red]" in text
    assert "and 4 more" in text


def test_a_worker_that_was_started_by_hand_has_its_whole_name_in_80_columns() -> None:
    tree = status(workers=[worker(name="rollout-265901", host="gpu-2", pid=265901)])
    assert "rollout-265901" in page(tree, 80)


def test_each_of_several_policies_has_a_line_with_what_its_workers_have_done() -> None:
    done = {"batches": 4, "shards": 8, "rows": 40, "predict_s": 0.1, "policy_version": 0}
    tree = status(
        workers=[
            worker(policy="base"),
            worker(name="r1", policy="base"),
            worker(name="r2", policy="new"),
        ],
        queues={"": 0, "base": 17},
        totals={"rollout-0": done, "r1": done},
    )
    lines = [line.split() for line in page(tree).splitlines()]
    assert ["base", "2", "17", "8", "10.00", "25.00"] in lines
    assert ["new", "1", "0", "0", "0.00", "0.00"] in lines
