"""How many requests a second a pool answers, and what each costs whom."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from zmqrl.transport.bundles import make_bundles

ABOUT = "Requests per second, and the CPU time of each by process."

COLUMNS = (
    "case",
    "clients",
    "payload_bytes",
    "requests_per_s",
    "to_plain",
    "broker_us",
    "io_us",
    "worker_us",
    "client_us",
)

CASES = ("zmqrl_raw", "zmqrl_raw_curve")
"""Peers that do as little as possible, without and with keys; the first is what others compare with."""

OTHER = "zmqrl_raw_against"
"""As the first, with the broker of another version."""

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "perf" / "raw.py"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--clients", type=int, default=64, help="in a closed loop (default 64)")
    parser.add_argument("--payload", type=int, default=512, help="bytes of a request (default 512)")
    parser.add_argument("--rounds", type=int, default=5, help="of each case, in turn (default 5)")
    parser.add_argument(
        "--against",
        metavar="FOLDER",
        type=Path,
        help="a checkout of another version, whose broker is measured too",
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round (default 2)")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the median of each case."""
    names = [*CASES, OTHER] if options.against else CASES
    cases: dict[str, list[dict[str, float]]] = {case: [] for case in names}
    with tempfile.TemporaryDirectory(prefix="zk-") as folder:
        make_bundles(f"{folder}/keys")
        for _ in range(options.rounds):
            for case, rounds in cases.items():
                keys = [f"{folder}/keys"] if case.endswith("curve") else []
                rounds.append(
                    _round(options, keys, options.against.resolve() if case == OTHER else ROOT)
                )
    for case, rounds in cases.items():
        medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        plain = [one["requests_per_s"] for one in cases[CASES[0]]]
        ratios = [one["requests_per_s"] / p for one, p in zip(rounds, plain, strict=True)]
        yield {
            "case": case,
            "transport": "ipc",
            "clients": options.clients,
            "payload_bytes": options.payload,
            "requests_per_s": medians.pop("requests_per_s"),
            "to_plain": statistics.median(ratios),
            "cpu_us": medians,
            **{f"{key}_us": value for key, value in medians.items()},
        }


def _round(options: argparse.Namespace, keys: list[str], source: Path) -> dict[str, float]:
    """Requests per second, and microseconds of CPU time for a request, by thread or process."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zb-"))
        frontend, backend = f"ipc://{folder}/f", f"ipc://{folder}/b"
        broker = _start(
            stack,
            *("-m", "zmqrl", "start-broker", "runner.enable_decoupled_mode=true"),
            *(f"broker.frontend={frontend}", f"broker.backend={backend}"),
            *(f"security.keys={folder}" for folder in keys),
            source=source,
        )
        worker = _start(stack, str(RAW), "worker", backend, *keys)
        crowd = _start(
            stack,
            str(RAW),
            "clients",
            frontend,
            str(options.clients),
            str(options.payload),
            str(options.seconds),
            *keys,
        )
        assert crowd.stdout is not None
        if crowd.stdout.readline().strip() != "begin":
            sys.exit("the clients did not begin")
        before = _cpu(broker.pid, worker.pid)
        told = json.loads(crowd.stdout.readline())
        after = _cpu(broker.pid, worker.pid)
        spent = {key: after[key] - before[key] for key in after} | {"client": told["cpu_s"]}
        answered = told["answered"]
        rate = answered / told["seconds"]
        return {"requests_per_s": rate, **{key: 1e6 * s / answered for key, s in spent.items()}}


def _start(stack: ExitStack, *arguments: str, source: Path = ROOT) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    stack.callback(process.wait, 10)
    stack.callback(process.terminate)
    return process


def _cpu(broker: int, worker: int) -> dict[str, float]:
    """CPU seconds of the broker's main thread, of its I/O threads, and of the worker."""
    main = others = 0.0
    for thread in psutil.Process(broker).threads():
        seconds = thread.user_time + thread.system_time
        if thread.id == broker:
            main += seconds
        else:
            others += seconds
    times = psutil.Process(worker).cpu_times()
    return {"broker": main, "io": others, "worker": times.user + times.system}
