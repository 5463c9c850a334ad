"""Bytes of observations a second: over sockets, through shared memory, and what the machine can copy.

    python perf/large.py FRONTEND

is a client of the bench: for each line `BYTES SECONDS` on its stdin it asks in a closed loop, with an
observation that is one array changed in place, and prints how often it was answered, and in what time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

ABOUT = "Gigabytes of observations per second, over sockets and through shared memory."

COLUMNS = ("case", "clients", "payload_bytes", "gb_per_s", "to_socket", "to_memcpy", "ok")

CASES = ("socket", "shared_memory", "memcpy")
"""The last is the machine's own rate: one thread that copies arrays of this size, beyond its caches."""

PAYLOADS = (64_000, 600_000, 2_400_000, 10_000_000)
CLIENTS = (1, 3)

BARRED = (2_400_000, 3)
"""Where the bars are: bytes and clients."""

TO_SOCKET, TO_MEMCPY = 4.0, 0.5

_ROTATED = 256 << 20
_WARM_UP_S = 0.2


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=5, help="of each case, in turn (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round (default 1)")
    parser.add_argument(
        "--payload", type=int, action="append", help="bytes of an observation (default: four sizes)"
    )
    parser.add_argument("--clients", type=int, action="append", help="(default: 1 and 3)")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the median of each case, for each size and number of clients."""
    counts = options.clients or CLIENTS
    with ExitStack() as stack:
        pools = {
            case: _Pool(stack, max(counts), shared_memory=case == "shared_memory") for case in CASES[:2]
        }
        for payload in options.payload or PAYLOADS:
            for count in counts:
                before = {case: pool.lane_requests() for case, pool in pools.items()}
                rounds: dict[str, list[float]] = {case: [] for case in CASES}
                for _ in range(options.rounds):
                    for case, pool in pools.items():
                        rounds[case].append(pool.rate(payload, count, options.seconds))
                    rounds["memcpy"].append(memcpy(payload, options.seconds))
                lane = {case: pool.lane_requests() - before[case] for case, pool in pools.items()}
                yield from _rows(payload, count, rounds, lane)


def _rows(
    payload: int, clients: int, rounds: dict[str, list[float]], lane: dict[str, int]
) -> Iterator[dict[str, Any]]:
    for case, rates in rounds.items():
        row = {
            "case": case,
            "transport": "ipc",
            "clients": clients,
            "payload_bytes": payload,
            "gb_per_s": statistics.median(rates) / 1e9,
            **{
                f"to_{other}": statistics.median(
                    a / b for a, b in zip(rates, rounds[other], strict=True)
                )
                for other in ("socket", "memcpy")
            },
            "ok": case == "memcpy" or bool(lane[case]) == (case == "shared_memory"),
        }
        if not row["ok"]:
            row["note"] = f"{lane[case]} requests went through shared memory"
        elif case == "shared_memory" and (payload, clients) == BARRED:
            row["ok"] = row["to_socket"] >= TO_SOCKET and row["to_memcpy"] >= TO_MEMCPY
            if not row["ok"]:
                row["note"] = f"expected {TO_SOCKET:g} times the socket, {TO_MEMCPY:g} of memcpy"
        yield row


def memcpy(payload: int, seconds: float) -> float:
    """Bytes per second that one thread copies, from and to memory that is in no cache."""
    count = max(2, _ROTATED // payload)
    sources, copies = (np.ones((count, payload), np.uint8) for _ in range(2))
    copied, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + seconds:
        np.copyto(copies[copied % count], sources[copied % count])
        copied += 1
    return copied * payload / (time.perf_counter() - begin)


class _Pool:
    """A broker, a rollout worker, and clients that wait for their orders; each a process."""

    def __init__(self, stack: ExitStack, clients: int, shared_memory: bool) -> None:
        from faults.pool import Pool

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zb-")))
        self._pool = Pool(folder, Path(__file__).resolve(), "First")
        stack.callback(self._pool.close)
        self._pool.start(1, "", f"broker.shared_memory={str(shared_memory).lower()}", world_size=1)
        self._clients = []
        for _ in range(clients):
            client = subprocess.Popen(
                [sys.executable, __file__, self._pool.frontend],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(client)  # which waits for its end, once its stdin is closed
            self._clients.append(client)

    def lane_requests(self) -> int:
        """Requests so far that went through shared memory."""
        return int(self._pool.counters()["lane_requests"])

    def rate(self, payload: int, clients: int, seconds: float) -> float:
        """Bytes per second that so many clients got answered."""
        asking = self._clients[:clients]
        for client in asking:
            assert client.stdin is not None
            print(payload, seconds, file=client.stdin, flush=True)
        rate = 0.0
        for client in asking:
            assert client.stdout is not None
            words = client.stdout.readline().split()
            if len(words) != 2:
                sys.exit("a client failed")
            rate += int(words[0]) * payload / float(words[1])
        return rate


class First:
    """The policy: the first bytes of each observation."""

    def infer(self, observation: dict[str, np.ndarray], eval_mask: np.ndarray) -> np.ndarray:
        """Actions uint8 `[N, 8]`."""
        return observation["image"][:, :8].copy()


def client(frontend: str) -> None:
    """Ask as often as stdin says, and print what that gave."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from zmqrl import PolicyClient

    with PolicyClient(frontend) as policy:
        for line in sys.stdin:
            payload, seconds = int(line.split()[0]), float(line.split()[1])
            image = np.zeros((1, payload), np.uint8)
            answered, step = 0, 0
            begin = time.perf_counter() + _WARM_UP_S
            while True:
                image[0, 0] = step = (step + 1) % 256
                if policy.infer({"image": image})["actions"][0, 0] != step:
                    sys.exit("an answer belongs to another observation")
                now = time.perf_counter()
                if now < begin:
                    continue
                answered += 1
                if now >= begin + seconds:
                    break
            print(answered, now - begin, flush=True)


def plot(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw the rates, as `large.png`."""
    from pictures import bars, figure, save, size_text

    counts = sorted({row["clients"] for row in rows})
    payloads = sorted({row["payload_bytes"] for row in rows})
    rates = {(row["case"], row["clients"], row["payload_bytes"]): row["gb_per_s"] for row in rows}
    canvas, axes = figure(1, len(counts), width=10)
    for ax, count in zip(axes if len(counts) > 1 else [axes], counts, strict=True):
        heights = {case: [rates.get((case, count, payload)) for payload in payloads] for case in CASES}
        ax.set_ylim(0, 1.25 * max(rates.values()))
        bars(ax, heights, [size_text(payload) for payload in payloads])
        ax.set_title(f"{count} client{'s' if count > 1 else ''}, ipc")
        ax.set_ylabel("GB of observations per second")
        ax.legend(frameon=False, loc="upper left", ncols=3)
    save(canvas, folder / "large.png")


if __name__ == "__main__":
    client(*sys.argv[1:])
