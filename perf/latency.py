"""How long a request takes on its way through the pool and back, with nobody else on it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cases import CASES, REFERENCE, Stage, case_arguments, in_turn, medians, ratio

ABOUT = "Microseconds of a round trip, of one client, beside those of libzmq's own proxy."

CPU = ("broker_us", "io_us", "worker_us", "client_us")

COLUMNS = (
    "case",
    "transport",
    "payload_bytes",
    "p50_us",
    "p99_us",
    "p999_us",
    "to_c_proxy",
    "to_direct_echo",
    *CPU,
    "wakes",
    "ok",
)

TRANSPORTS = ("ipc", "tcp")
PAYLOADS = (100, 10_000, 200_000)

BARS = {"zmqrl_raw": 1.3, "zmqrl": 1.8}
"""The most that the median may be, in medians of the C proxy."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    case_arguments(parser, [case for case in CASES if not case.endswith("curve")], 15, 0.15)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument(
        "--payloads", nargs="+", type=int, metavar="BYTES", default=list(PAYLOADS), help="of a request"
    )


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the medians of each case, transport and payload."""
    for transport in options.transports:
        with Stage() as stage:
            middles = {case: stage.start(case, transport) for case in options.cases}
            for payload in options.payloads:
                results = in_turn(
                    {
                        case: partial(middle.measure, 1, payload, options.seconds)
                        for case, middle in middles.items()
                    },
                    options.rounds,
                )
                for case, rounds in results.items():
                    figures = medians(rounds)
                    row: dict[str, Any] = {
                        "case": case,
                        "transport": transport,
                        "payload_bytes": payload,
                        **{key: figures[key] for key in ("p50_us", "p99_us", "p999_us")},
                        **{key: figures[key.removesuffix("_us")] for key in CPU},
                        "wakes": None if math.isnan(figures["wakes"]) else figures["wakes"],
                    }
                    for other in (REFERENCE, "direct_echo"):
                        if other in results:
                            row[f"to_{other}"] = ratio(rounds, results[other], "p50_us")
                    if case in BARS and REFERENCE in results:
                        row["ok"] = row[f"to_{REFERENCE}"] <= BARS[case]
                    yield row


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw the median of each case, and its distance to the C proxy's; a picture for each transport."""
    from pictures import bars, colour_of, figure, save, size_text

    for transport in dict.fromkeys(row["transport"] for row in rows):
        own = [row for row in rows if row["transport"] == transport]
        payloads = list(dict.fromkeys(row["payload_bytes"] for row in own))
        canvas, axes = figure(1, 2)
        for one, key in zip(axes, ("p50_us", f"to_{REFERENCE}"), strict=True):
            heights = {
                case: [row.get(key) for row in own if row["case"] == case]
                for case in dict.fromkeys(row["case"] for row in own)
            }
            bars(one, heights, [size_text(payload) for payload in payloads])
        axes[0].set(xlabel="payload", ylabel="median round trip (µs)", title=f"1 client, {transport}")
        axes[1].set(
            xlabel="payload",
            ylabel="median round trip / that of c_proxy",
            title="ratio; dashed: the bars",
        )
        for case, bar in BARS.items():
            axes[1].axhline(bar, color=colour_of(case), linestyle="--", linewidth=1)
        axes[0].legend(frameon=False)
        save(canvas, folder / f"latency_{transport}.png")
