"""How many requests a second a pool answers, and what each costs whom."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cases import AGAINST, CASES, REFERENCE, Stage, case_arguments, in_turn, medians, ratio

ABOUT = "Requests per second, and the CPU time of each by process, beside libzmq's own proxy."

COLUMNS = (
    "case",
    "clients",
    "requests_per_s",
    "to_c_proxy",
    "to_textbook_broker",
    "cpu_to_c_proxy",
    "broker_us",
    "io_us",
    "worker_us",
    "client_us",
    "p99_us",
    "ok",
)

CLIENTS = (1, 16, 64, 256)

BAR_AT = 64
"""Clients at which the bars hold."""

BARS = {
    "zmqrl_raw": {"to_c_proxy": 1.1, "to_textbook_broker": 2.0, "cpu_to_c_proxy": 0.85},
    "zmqrl": {"to_c_proxy": 0.8},
}
"""The least requests per second, in those of others; and the most CPU time of broker and worker."""

_SERVERS = ("broker", "io", "worker")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    case_arguments(parser, list(CASES), 9, 0.3)
    parser.add_argument(
        "--clients", nargs="+", type=int, metavar="N", default=list(CLIENTS), help="in a closed loop"
    )
    parser.add_argument("--payload", type=int, default=512, help="bytes of a request (default 512)")
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc")
    parser.add_argument(
        "--against",
        metavar="FOLDER",
        type=Path,
        help="a checkout of another version, whose broker is measured too",
    )


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the medians of each case and number of clients."""
    with Stage() as stage:
        middles = {case: stage.start(case, options.transport) for case in options.cases}
        if options.against is not None:
            source = options.against.resolve()
            middles[AGAINST] = stage.start(AGAINST, options.transport, source=source)
        for clients in options.clients:
            results = in_turn(
                {
                    case: partial(middle.measure, clients, options.payload, options.seconds)
                    for case, middle in middles.items()
                },
                options.rounds,
            )
            for case, rounds in results.items():
                figures = medians(rounds)
                cpu_us = {key: figures[key] for key in (*_SERVERS, "client")}
                row = {
                    "case": case,
                    "transport": options.transport,
                    "clients": clients,
                    "payload_bytes": options.payload,
                    **{key: figures[key] for key in ("requests_per_s", "p50_us", "p99_us")},
                    "cpu_us": cpu_us,
                    **{f"{key}_us": value for key, value in cpu_us.items()},
                }
                for other in (REFERENCE, "textbook_broker", AGAINST):
                    if other in results:
                        row[f"to_{other}"] = ratio(rounds, results[other], "requests_per_s")
                if REFERENCE in results:
                    row["cpu_to_c_proxy"] = ratio(rounds, results[REFERENCE], *_SERVERS)
                if clients == BAR_AT and case in BARS and all(key in row for key in BARS[case]):
                    row["ok"] = _meets(row, BARS[case])
                yield row


def _meets(row: dict[str, Any], bars: dict[str, float]) -> bool:
    return all(
        row[key] <= bar if key.startswith("cpu") else row[key] >= bar for key, bar in bars.items()
    )


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw requests per second over clients, and where the CPU time of a request goes at the most."""
    from pictures import colour_of, figure, save

    canvas, (rates, costs) = figure(1, 2, width=11)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for case in cases:
        own = [row for row in rows if row["case"] == case]
        clients = [row["clients"] for row in own]
        thousands = [row["requests_per_s"] / 1000 for row in own]
        rates.plot(clients, thousands, "o-", color=colour_of(case), label=case, markersize=4)
    every = sorted({row["clients"] for row in rows})
    rates.set_xscale("log", base=2)
    rates.set_xticks(every, [str(count) for count in every])
    rates.set(xlabel="clients in a closed loop", ylabel="thousand requests per second", ylim=(0, None))
    rates.legend(frameon=False, fontsize=8)
    at = BAR_AT if BAR_AT in every else every[-1]
    shown = {row["case"]: row["cpu_us"] for row in rows if row["clients"] == at}
    left = dict.fromkeys(shown, 0.0)
    for part, shade, name in (
        ("broker", "#0072B2", "broker, main thread"),
        ("io", "#56B4E9", "broker, I/O thread"),
        ("worker", "#E69F00", "worker"),
        ("client", "#CCCCCC", "client"),
    ):
        widths = [cpu_us[part] for cpu_us in shown.values()]
        costs.barh(list(shown), widths, left=list(left.values()), color=shade, label=name)
        left = {case: left[case] + cpu_us[part] for case, cpu_us in shown.items()}
    for case, total in left.items():
        costs.text(total, case, f" {total:.0f}", va="center", fontsize=8)
    costs.invert_yaxis()
    costs.margins(x=0.1)
    costs.set(xlabel="CPU time of a request (µs)", title=f"{at} clients")
    costs.legend(frameon=False, fontsize=8)
    save(canvas, folder / "throughput.png")
