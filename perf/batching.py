"""What `rollout.prefetch` and `rollout.max_wait_ms` give, with policies of different speed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from cases import Stage, in_turn, medians, ratio

ABOUT = "Requests per second with and without early batches (prefetch) and held ones (max_wait_ms)."

COLUMNS = ("case", "policy", "queue_size", "requests_per_s", "to_plain", "p50_us", "p99_us", "worker_us")

PLAIN = "plain"

CASES = {
    PLAIN: ("rollout.prefetch=false", "rollout.max_wait_ms=0"),
    "prefetch": ("rollout.prefetch=true", "rollout.max_wait_ms=0"),
    "prefetch_auto": ("rollout.prefetch=auto", "rollout.max_wait_ms=0"),
    "max_wait_auto": ("rollout.prefetch=false", "rollout.max_wait_ms=auto"),
}

POLICIES = {"0.5 ms": (0.0005, 0.0), "5 ms": (0.005, 0.0), "60 ms + 4 ms/row": (0.06, 0.004)}
"""Seconds of a batch, and of each of its rows."""

QUEUE_SIZES = (0, 8)
"""`rollout.rollout_queue_size`: a worker's share of the clients, or few of those that wait."""


class Slow:
    """A policy that takes its time, but not the processor's."""

    def __init__(self, base: float, per_row: float) -> None:
        self._base = base
        self._per_row = per_row

    def infer(self, observation: dict[str, Any], eval_mask: Any) -> dict[str, Any]:
        rows = len(eval_mask)
        time.sleep(self._base + self._per_row * rows)
        return {"actions": np.zeros((rows, 4), np.float32)}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--clients", type=int, default=64, help="in a closed loop (default 64)")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which all take turns")
    parser.add_argument("--seconds", type=float, default=0.6, help="of a case in a round (default 0.6)")
    parser.add_argument("--only", nargs="+", metavar="POLICY", choices=[*POLICIES], default=[*POLICIES])


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the medians of each case, policy and size of the queue."""
    for name, queue_size in product(options.only, QUEUE_SIZES):
        base, per_row = POLICIES[name]
        common = (
            f"rollout.policy_kwargs={{base: {base}, per_row: {per_row}}}",
            f"rollout.rollout_queue_size={queue_size}",
        )
        with Stage() as stage:
            middles = {
                case: stage.start(
                    "zmqrl",
                    workers=options.workers,
                    policy=f"{Path(__file__).resolve()}:Slow",
                    settings=(*common, *settings),
                )
                for case, settings in CASES.items()
            }
            results = in_turn(
                {
                    case: partial(middle.measure, options.clients, 64, options.seconds)
                    for case, middle in middles.items()
                },
                options.rounds,
            )
        for case, rounds in results.items():
            figures = medians(rounds)
            yield {
                "case": case,
                "policy": name,
                "queue_size": queue_size,
                "clients": options.clients,
                "to_plain": ratio(rounds, results[PLAIN], "requests_per_s"),
                "worker_us": figures["worker"],
                **{key: figures[key] for key in ("requests_per_s", "p50_us", "p99_us")},
            }
