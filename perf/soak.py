"""A pool that serves for long, with clients that die and a policy that fails: nothing may pile up."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

from zmqrl.broker.status import StatusClient
from zmqrl.runner.launcher import Launcher
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode, encode, encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op, unpack

ABOUT = "Serve millions of requests, some of which fail, to clients some of which die; watch the memory."

COLUMNS = (
    "part",
    "requests",
    "errors",
    "deaths",
    "rss_mb_first",
    "rss_mb_last",
    "files_first",
    "files_last",
    "ok",
)

_GROWTH = 1.1
_ROWS = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--requests", type=int, default=2_000_000, help="in all (default 2,000,000)")
    parser.add_argument("--clients", type=int, default=64, help="at a time (default 64)")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers (default 2)")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each process of the pool."""
    with tempfile.TemporaryDirectory(prefix="zb-") as folder, Launcher(_say) as launcher:
        frontend = f"ipc://{folder}/f"
        common = [f"broker.frontend={frontend}", f"broker.backend=ipc://{folder}/b"]
        launcher.start("broker", ["start-broker", *common, "runner.enable_decoupled_mode=true"])
        for rank in range(options.workers):
            policy = f"--policy={Path(__file__).resolve()}:FailsWhereTold"
            launcher.start(f"rollout-{rank}", ["start-rollout-worker", *common, policy])
        status = StatusClient(frontend)
        try:
            _wait_until(lambda: len((status.ask() or {}).get("workers", [])) == options.workers)
            crowd = _Crowd(frontend, options.clients)
            crowd.serve(options.requests // 20)
            pids = {name: child.process.pid for name, child in launcher.children.items()}
            first = {name: _sizes(pid) for name, pid in pids.items()}
            crowd.serve(options.requests)
            last = {name: _sizes(pid) for name, pid in pids.items()}
            crowd.close()
            _wait_until(lambda: (status.ask() or {"clients_connected": 1})["clients_connected"] == 0)
            tree = status.ask() or {}
        finally:
            status.close()
    counters = tree["counters"]
    closed = counters["answered"] + counters["errors"] + counters["cancelled"]
    balanced = counters["requests"] == closed and tree["open_requests"] == tree["open_bytes"] == 0
    for name in pids:
        grown = any(last[name][i] > _GROWTH * first[name][i] for i in (0, 1))
        yield {
            "part": name,
            "requests": crowd.answered + crowd.errors,
            "errors": crowd.errors,
            "deaths": crowd.deaths,
            "rss_mb_first": first[name][0] / 2**20,
            "rss_mb_last": last[name][0] / 2**20,
            "files_first": first[name][1],
            "files_last": last[name][1],
            "ok": balanced and not grown,
        }


class FailsWhereTold:
    """Answers with twice the observation; raises if a row has the mark."""

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray) -> dict[str, Any]:
        if observation["fail"].any():
            raise ArithmeticError("a row is marked")
        return {"actions": 2 * observation["x"]}


class _Crowd:
    """Clients in a closed loop, in one thread; one request in a hundred fails, as many clients die."""

    def __init__(self, endpoint: str, count: int) -> None:
        self.answered = self.errors = self.deaths = 0
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._open: dict[zmq.Socket[bytes], tuple[int, float, bool]] = {}
        self._random = random.Random(0)
        self._born = 0
        for _ in range(count):
            self._join()

    def serve(self, until: int) -> None:
        """Go on until so many requests have ended."""
        heard = time.monotonic()
        while self.answered + self.errors < until:
            for socket, _ in self._poller.poll(1000):
                heard = time.monotonic()
                self._take(socket)
            if time.monotonic() > heard + 30:
                sys.exit(f"no answer for 30 s; {self.answered} answered so far")

    def close(self) -> None:
        """Leave without a goodbye."""
        for socket in list(self._open):
            socket.close(0)
        self._context.term()

    def _join(self) -> None:
        socket = sockets.dealer(self._context, self._endpoint)
        self._born += 1
        hello = {"role": "client", "name": f"soak-{self._born}", "incarnation": 1, "pid": os.getpid()}
        socket.send(Header(Op.HELLO).pack() + encode_meta(hello))
        self._poller.register(socket, zmq.POLLIN)
        self._ask(socket, 1)

    def _ask(self, socket: zmq.Socket[bytes], number: int) -> None:
        value, fails = self._random.random(), self._random.random() < 0.01
        encoded = encode(
            {"x": np.full((_ROWS, 16), value), "fail": np.full(_ROWS, fails)},
        )
        header = Header(
            Op.INFER,
            request_id=number,
            frames=len(encoded.buffers),
            rows=_ROWS,
            budget_ms=60_000,
            signature=encoded.signature,
        )
        self._open[socket] = number, value, fails
        socket.send_multipart([header.pack() + encoded.meta, *encoded.buffers])

    def _take(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        header = unpack(frames[0])
        if header.op not in (Op.REPLY, Op.ERROR):
            return  # WELCOME, or a probe
        number, value, fails = self._open[socket]
        if header.request_id != number or fails != (header.op == Op.ERROR):
            sys.exit(f"request {number} got {Op(header.op).name} {header.request_id}")
        if header.op == Op.REPLY:
            actions = decode(frames[0][HEADER_SIZE:], frames[1:])["actions"]
            if not (actions == 2 * value).all():
                sys.exit("an answer was crossed")
            self.answered += 1
        else:
            self.errors += 1
        self._ask(socket, number + 1)
        if self._random.random() < 0.01:
            # What the broker sees of a process that is killed: a connection that ends.
            self.deaths += 1
            self._poller.unregister(socket)
            del self._open[socket]
            socket.close(0)
            self._join()


def _sizes(pid: int) -> tuple[int, int]:
    """Bytes of memory, and open files; the least of a second, in which the dead are found."""
    process = psutil.Process(pid)
    samples = []
    for _ in range(10):
        samples.append((process.memory_info().rss, process.num_fds()))
        time.sleep(0.1)
    return min(rss for rss, _ in samples), min(files for _, files in samples)


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        if time.monotonic() > until:
            sys.exit("the pool did not come up, or did not come to rest")
        time.sleep(0.05)


def _say(name: str, line: str) -> None:
    if "failed on" not in line and "joined" not in line:
        print(f"[{name}] {line}", file=sys.stderr)
