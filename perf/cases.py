"""The cases that the benches of speed compare: what is between a client and its answer.

All are real processes on real sockets, with one echo worker unless a bench wants more. The client
process is the same program, `crowd`, for each. Everything of a case runs from `start` to the end of the
bench, and costs next to nothing while another one is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zmqrl.transport.bundles import make_bundles

ROOT = Path(__file__).resolve().parent.parent
PERF = ROOT / "perf"

REFERENCE = "c_proxy"
"""What the others are compared with."""

CASES = {
    "direct_echo": "no broker: a ROUTER that answers",
    "c_proxy": "libzmq's own zmq.proxy, and a worker that does the least that Python can",
    "c_proxy_multipart": "the same with a worker of recv_multipart and send_multipart",
    "textbook_broker": "the least-recently-used queue of the ZeroMQ guide, in Python",
    "zmqrl_raw": "the broker of bin/start-broker, and peers that do as little as its protocol lets them",
    "zmqrl": "PolicyClient, the broker of bin/start-broker, and a RolloutWorker with a trivial policy",
    "zmqrl_raw_curve": "as zmqrl_raw, encrypted",
}

AGAINST = "zmqrl_raw_against"
"""As zmqrl_raw, with the broker and the raw worker of another version."""


class Echo:
    """The policy of the case `zmqrl`: the actions are the observation."""

    def infer(self, observation: dict[str, Any], eval_mask: Any) -> dict[str, Any]:
        return {"actions": observation["x"]}


@dataclass
class Middle:
    """The processes of a case."""

    case: str
    broker: subprocess.Popen[str]
    workers: list[subprocess.Popen[str]]
    crowds: list[subprocess.Popen[str]] = field(default_factory=list)

    def measure(
        self, clients: int, payload: int, seconds: float, warm_s: float = 0.1, every_s: float = 0.0
    ) -> dict[str, float]:
        """Let the clients ask.

        Args:
            clients: In all; the client processes share them.
            payload: Bytes of a request.
            seconds: Of asking that are counted.
            warm_s: Seconds of asking before that.
            every_s: Seconds, in the mean, from a client's request to its next; 0: it asks when answered.

        Returns:
            `requests_per_s`; `p50_us`, `p99_us` and `p999_us` of the worst client process; `fairness`:
            the requests of the client that had the fewest, of the mean of all; the broker's memory in
            bytes, `connected_rss` when each client has had one answer, and `rss` at the end; CPU
            microseconds for a request, of `broker` (its main thread), `io` (its other threads), `worker`
            and `client`; and `wakes`, how often for a request the kernel woke another core (nan where it
            does not tell; of the whole machine).
        """
        order = {"payload": payload, "seconds": seconds, "warm_s": warm_s, "every_s": every_s}
        count = len(self.crowds)
        for number, crowd in enumerate(self.crowds):
            share = clients // count + (number < clients % count)
            self._tell(crowd, json.dumps({**order, "clients": share}))
        for crowd in self.crowds:
            self._hear(crowd, "ready")
        connected_rss = float(_rss(self.broker.pid))
        for crowd in self.crowds:
            self._tell(crowd, "go")
        for crowd in self.crowds:
            self._hear(crowd, "begin")
        before, wakes = self._cpu(), _wakes()
        told = [json.loads(self._hear(crowd)) for crowd in self.crowds]
        after, wakes = self._cpu(), _wakes() - wakes
        spent = {key: after[key] - before[key] for key in after}
        spent["client"] = sum(one["cpu_s"] for one in told)
        answered = max(1, sum(one["answered"] for one in told))
        return {
            "requests_per_s": sum(one["answered"] / one["seconds"] for one in told),
            **{key: max(one[key] for one in told) for key in ("p50_us", "p99_us", "p999_us")},
            "fairness": min(one["least"] for one in told) * clients / answered,
            "connected_rss": connected_rss,
            "rss": float(_rss(self.broker.pid)),
            **{key: 1e6 * cpu_s / answered for key, cpu_s in spent.items()},
            "wakes": wakes / answered,
        }

    def _tell(self, crowd: subprocess.Popen[str], line: str) -> None:
        assert crowd.stdin is not None
        crowd.stdin.write(line + "\n")
        crowd.stdin.flush()

    def _hear(self, crowd: subprocess.Popen[str], expected: str = "") -> str:
        assert crowd.stdout is not None
        line = crowd.stdout.readline().strip()
        if not line or (expected and line != expected):
            sys.exit(f"{self.case}: the clients ended, or said {line!r} in place of {expected!r}")
        return line

    def _cpu(self) -> dict[str, float]:
        """CPU seconds until now."""
        workers = sum(sum(_threads(worker.pid).values()) for worker in self.workers)
        if self.broker in self.workers:
            return {"broker": 0.0, "io": 0.0, "worker": workers}
        threads = _threads(self.broker.pid)
        main = threads.pop(self.broker.pid)
        return {"broker": main, "io": sum(threads.values()), "worker": workers}


class Stage:
    """Starts cases, and ends their processes with itself: a context manager."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Stage:
        self._temporary = tempfile.TemporaryDirectory(prefix="zb-")
        self._folder = Path(self._temporary.name)
        make_bundles(str(self._folder / "keys"))
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            _reap(process)
        self._temporary.cleanup()

    def start(
        self,
        case: str,
        transport: str = "ipc",
        workers: int = 1,
        crowds: int = 1,
        source: Path = ROOT,
        policy: str = f"{Path(__file__).resolve()}:Echo",
        settings: Sequence[str] = (),
    ) -> Middle:
        """Start all processes of a case.

        Args:
            case: One of `CASES`, or `AGAINST`.
            transport: `ipc` or `tcp`.
            workers: How many answer.
            crowds: How many client processes share the clients.
            source: The checkout whose broker and raw worker run.
            policy: Of the case `zmqrl`.
            settings: Of zmqrl's processes, `key=value`.
        """
        front, back = self._endpoints(transport)
        keys = [str(self._folder / "keys")] if case.endswith("curve") else []
        references = str(PERF / "references.py")
        form, worker = "bare", [references, "echo-worker", back]
        if case == "direct_echo":
            middle = Middle(case, self._run(references, "echo-server", front), [])
            middle.workers.append(middle.broker)
            workers = 0
        elif case.startswith("c_proxy"):
            middle = Middle(case, self._run(references, "proxy", front, back), [])
            if case == "c_proxy_multipart":
                worker[1] = "multipart-worker"
        elif case == "textbook_broker":
            middle = Middle(case, self._run(references, "textbook-broker", front, back), [])
            worker[1] = "textbook-worker"
        else:
            common = [f"broker.frontend={front}", f"broker.backend={back}"]
            common += [*(f"security.keys={folder}" for folder in keys), *settings]
            mode = "runner.enable_decoupled_mode=true"  # the other mode has no clients without a rank
            broker = self._run("-m", "zmqrl", "start-broker", *common, mode, source=source)
            middle = Middle(case, broker, [])
            form, worker = "raw", [str(source / "perf" / "raw.py"), "worker", back, *keys]
            if case == "zmqrl":
                form = "policy"
                worker = ["-m", "zmqrl", "start-rollout-worker", *common]
                worker.append(f"--policy={policy}")
        middle.workers += [self._run(*worker, source=source) for _ in range(workers)]
        clients = (str(PERF / "crowd.py"), form, front, *keys)
        middle.crowds += [self._run(*clients, stderr=None) for _ in range(crowds)]
        return middle

    def _endpoints(self, transport: str) -> tuple[str, str]:
        if transport == "ipc":
            number = len(list(self._folder.iterdir()))
            folder = self._folder / str(number)
            folder.mkdir()
            return f"ipc://{folder}/f", f"ipc://{folder}/b"
        with socket.socket() as first, socket.socket() as second:
            for listener in (first, second):
                listener.bind(("127.0.0.1", 0))
            front, back = (listener.getsockname()[1] for listener in (first, second))
        return f"tcp://127.0.0.1:{front}", f"tcp://127.0.0.1:{back}"

    def _run(
        self, *arguments: str, source: Path = ROOT, stderr: int | None = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=source,
            env={**os.environ, "PYTHONPATH": str(source)},
        )
        self._processes.append(process)
        return process


def in_turn(
    measurements: dict[Any, Callable[[], dict[str, float]]], rounds: int
) -> dict[Any, list[dict[str, float]]]:
    """Take all measurements in each round, in one order and then in the other."""
    results: dict[Any, list[dict[str, float]]] = {key: [] for key in measurements}
    for number in range(rounds):
        for key in list(measurements)[:: 1 if number % 2 == 0 else -1]:
            results[key].append(measurements[key]())
    return results


def medians(rounds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    listed = list(rounds)
    return {key: statistics.median(one[key] for one in listed) for key in listed[0]}


def ratio(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]], *keys: str) -> float:
    """The median over the rounds of the ratio in each; of the sums, where there are several keys."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(
        sum(one[key] for key in keys) / max(sum(other[key] for key in keys), 1e-9)
        for one, other in pairs
    )


def case_arguments(
    parser: argparse.ArgumentParser, cases: Sequence[str], rounds: int, seconds: float
) -> None:
    """Add the options that the benches of speed share."""
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="CASE",
        choices=[*CASES],
        default=list(cases),
        help=f"of {', '.join(cases)} (default all)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help=f"in each of which all take turns (default {rounds})",
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"of a case in a round (default {seconds})"
    )


def _threads(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process, to the nanosecond."""
    spent = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent


def _wakes() -> float:
    """Interrupts from one core to another since the machine started; nan if the kernel does not tell.

    Most of them wake a core that sleeps. On x86 Linux calls them RES and CAL, by the way it does that.
    """
    try:
        lines = [line.split() for line in Path("/proc/interrupts").read_text().splitlines()]
    except OSError:
        return math.nan
    told = [line[1:] for line in lines if line and line[0] in ("RES:", "CAL:")]
    return sum(float(word) for words in told for word in words if word.isdigit()) if told else math.nan


def _rss(pid: int) -> int:
    """Bytes of memory that a process has resident."""
    resident = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


def _reap(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
