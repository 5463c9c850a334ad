"""What thousands of clients, and several workers, cost the broker."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cases import CASES, REFERENCE, Stage, case_arguments, in_turn, medians, ratio

from zmqrl.transport.sockets import HEARTBEAT_S

ABOUT = "Up to 2,000 clients and 16 workers: rate, CPU time and memory of the broker, each one's share."

COLUMNS = (
    "case",
    "load",
    "clients",
    "workers",
    "requests_per_s",
    "broker_us",
    "io_us",
    "cpu_to_fewest",
    "rss_mb",
    "bytes_per_client",
    "bytes_above_c_proxy",
    "p99_us",
    "fairness",
    "ok",
)

CLIENTS = (16, 256, 1000, 2000)
WORKERS = (4, 16)
"""Beside one; with `WORKERS_AT` clients."""

WORKERS_AT = 256

PAYLOAD = 512
CROWDS = 2
"""Client processes."""

RATE = 2000
"""Requests per second of all clients together where they are paced: the more they are, the less often
each asks. Then what differs between two rows is their number alone, not the load."""

MAX_CPU = 1.3
"""Of the broker for a request, in that with the fewest clients."""

MAX_BYTES = 20_000
"""Of memory of the broker for a client, beyond what libzmq takes for it."""

MIN_FAIRNESS = 0.5
"""Requests of the client that had the fewest, of the mean, where all ask as fast as they can."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    case_arguments(parser, [case for case in CASES if case in (REFERENCE, "zmqrl_raw")], 5, 0.8)
    parser.add_argument(
        "--paced-seconds",
        type=float,
        default=HEARTBEAT_S,
        help="the same for paced clients (default: so long that each has had a heartbeat)",
    )
    parser.add_argument("--clients", nargs="+", type=int, metavar="N", default=list(CLIENTS))
    parser.add_argument(
        "--workers",
        nargs="*",
        type=int,
        metavar="N",
        default=list(WORKERS),
        help=f"beside one; with {WORKERS_AT} clients",
    )


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the medians of each load, case, and number of clients or workers.

    In the load `closed` a client asks again as soon as it is answered, in `paced` when it is time.
    """
    counts = sorted(options.clients)
    with Stage() as stage:
        # A broker for each number of clients, so that its memory is that of so many.
        middles = {
            (case, count): stage.start(case, crowds=CROWDS) for case in options.cases for count in counts
        }
        for load in ("closed", "paced"):
            results = in_turn(
                {
                    (case, count): partial(
                        middle.measure,
                        count,
                        PAYLOAD,
                        options.paced_seconds if load == "paced" else options.seconds,
                        every_s=count / RATE if load == "paced" else 0.0,
                    )
                    for (case, count), middle in middles.items()
                },
                options.rounds,
            )
            for case, count in results:
                row = _row(case, load, count, 1, results[case, count])
                if count > counts[0]:
                    row["cpu_to_fewest"] = ratio(
                        results[case, count], results[case, counts[0]], "broker", "io"
                    )
                    if load == "closed":
                        row |= _memory(results, case, count, counts[0])
                yield _judged(row)
    with Stage() as stage:
        many = {
            (case, workers): stage.start(case, workers=workers, crowds=CROWDS)
            for case in options.cases
            for workers in options.workers
        }
        results = in_turn(
            {
                key: partial(middle.measure, WORKERS_AT, PAYLOAD, options.seconds)
                for key, middle in many.items()
            },
            options.rounds,
        )
        for (case, workers), rounds in results.items():
            yield _judged(_row(case, "closed", WORKERS_AT, workers, rounds))


def _row(
    case: str, load: str, clients: int, workers: int, rounds: Sequence[dict[str, float]]
) -> dict[str, Any]:
    figures = medians(rounds)
    return {
        "case": case,
        "load": load,
        "transport": "ipc",
        "clients": clients,
        "workers": workers,
        "payload_bytes": PAYLOAD,
        "requests_per_s": figures["requests_per_s"],
        "cpu_us": {key: figures[key] for key in ("broker", "io", "worker", "client")},
        "broker_us": figures["broker"],
        "io_us": figures["io"],
        "rss_mb": figures["rss"] / 1e6,
        "p50_us": figures["p50_us"],
        "p99_us": figures["p99_us"],
        # Of paced clients each has a request or two in a round.
        "fairness": figures["fairness"] if load == "closed" else None,
    }


def _memory(
    results: dict[Any, list[dict[str, float]]], case: str, count: int, fewest: int
) -> dict[str, float]:
    """The broker's memory for a client, when all have connected for the first time.

    Afterwards libzmq's queues grow with the messages that pass, up to a fixed size: a broker that is
    asked more often would look as if it kept more.
    """
    each = {
        one: (results[one, count][0]["connected_rss"] - results[one, fewest][0]["connected_rss"])
        / (count - fewest)
        for one in {case, REFERENCE}
        if (one, count) in results
    }
    told = {"bytes_per_client": each[case]}
    if case != REFERENCE and REFERENCE in each:
        told["bytes_above_c_proxy"] = each[case] - each[REFERENCE]
    return told


def _judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row; one of zmqrl says whether it keeps to the bars."""
    if row["case"] != REFERENCE:
        row["ok"] = (
            row.get("cpu_to_fewest", 0) <= MAX_CPU
            and row.get("bytes_above_c_proxy", 0) < MAX_BYTES
            and (row["fairness"] is None or row["fairness"] >= MIN_FAIRNESS)
        )
    return row


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw rate, cost and memory over clients, and the rate over workers."""
    from pictures import colour_of, figure, save

    canvas, axes = figure(2, 2, width=10, height=3.4)
    rate, cost, memory, workers = axes.flat
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        look = {"color": colour_of(case), "markersize": 4}
        closed = [row for row in own if row["workers"] == 1 and row["load"] == "closed"]
        paced = [row for row in own if row["workers"] == 1 and row["load"] == "paced"]
        clients = [row["clients"] for row in closed]
        rate.plot(clients, [row["requests_per_s"] / 1000 for row in closed], "o-", label=case, **look)
        for some, line, load in ((closed, "o-", "closed loop"), (paced, "s--", f"{RATE:,} requests/s")):
            spent = [row["broker_us"] + row["io_us"] for row in some]
            cost.plot([row["clients"] for row in some], spent, line, label=f"{case}, {load}", **look)
        memory.plot(clients, [row["rss_mb"] for row in closed], "o-", label=case, **look)
        several = [row for row in own if row["clients"] == WORKERS_AT and row["load"] == "closed"]
        several.sort(key=lambda row: row["workers"])
        thousands = [row["requests_per_s"] / 1000 for row in several]
        workers.plot([row["workers"] for row in several], thousands, "o-", label=case, **look)
    for one in (rate, cost, memory):
        one.set_xscale("log")
        every = sorted({row["clients"] for row in rows})
        one.set_xticks(every, [f"{count:,}" for count in every], minor=False)
        one.minorticks_off()
        one.set_xlabel("clients")
    workers.set_xlabel(f"workers ({WORKERS_AT} clients)")
    rate.set_ylabel("thousand requests per second")
    workers.set_ylabel("thousand requests per second")
    cost.set_ylabel("CPU time of the broker\nfor a request (µs)")
    memory.set_ylabel("memory of the broker (MB)")
    for one in axes.flat:
        one.set_ylim(0, None)
    rate.legend(frameon=False, fontsize=8)
    cost.legend(frameon=False, fontsize=7)
    save(canvas, folder / "scale.png")
