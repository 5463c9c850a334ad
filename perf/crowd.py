"""The client process of the benches: the same for every case, so that only what answers it differs.

    python perf/crowd.py FORM FRONTEND [KEYS]

Clients in a closed loop, each with one request open, all in this one thread. FORM is what they are:

* `bare`: a DEALER; request and answer are one frame, `payload` bytes with a number in them;
* `raw`: the same DEALER in zmqrl's protocol: `payload` bytes behind a header;
* `policy`: a PolicyClient; its observation is an array of `payload` bytes, as are the actions.

It reads orders from its standard input, a line of JSON each: `clients`, `payload`, `seconds`, `warm_s`
(before anything is counted), and `every_s`: if above 0, the mean of the random time from a client's
request to its next, unless the answer takes longer. It connects them, prints `ready`, and waits for a
line; it prints `begin` when it begins to count, and then what it counted, as JSON.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import select
import signal
import sys
import time
from typing import Any

import numpy as np
import zmq
from peers import MAX_SOCKETS, dealer

from zmqrl import PolicyClient
from zmqrl.process import allow_connections
from zmqrl.transport.codec import INLINE, encode_meta
from zmqrl.transport.header import Header, Op

# Plain ints, see zmqrl.transport.sockets.
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_REPLY = int(Op.REPLY)

_PATIENCE = 20.0
"""Seconds without any answer after which the bench is given up."""

_ID = slice(8, 16)
"""Where a header has its request id."""


class Bare:
    """A client of what has no protocol but an envelope.

    Args:
        endpoint: Of what answers.
        payload: Bytes of a request, at least 8.
        keys: A folder with keys, or nothing.
    """

    def __init__(self, endpoint: str, payload: int, keys: list[str]) -> None:
        self.socket = dealer(endpoint, "client", keys)
        self.socket.setsockopt(zmq.RCVTIMEO, int(1000 * _PATIENCE))
        self.asked = 0.0
        self.due = 0.0
        self.answered = 0
        self._number = 0
        self._id = b""
        self._at = slice(0, 8)
        self._large = payload >= INLINE
        self._message = bytearray(payload)
        self._rest = bytes(payload - 8)

    def greet(self) -> None:
        """Introduce itself where that is asked for."""

    def ask(self) -> None:
        """Send the next request."""
        self._number += 1
        self._id = self._number.to_bytes(8, "little")
        self.asked = time.perf_counter()
        if self._large:
            self._message[:8] = self._id
            self.socket.send(self._message)
        else:
            self.socket.send(self._id + self._rest)

    def fileno(self) -> int:
        """A file that is readable when there is something new."""
        return int(self.socket.getsockopt(zmq.FD))

    def has_news(self) -> bool:
        """Whether there is something to take."""
        return bool(self.socket.getsockopt(_EVENTS) & _POLLIN)

    def take(self, flags: int = _NOBLOCK) -> bool:
        """Read one message; whether it is the answer."""
        if not self._large:
            return self._is_answer(self.socket.recv(flags))
        frame: Any = self.socket.recv(flags, copy=False)
        first = frame.buffer[: self._at.stop].tobytes()
        while frame.more:
            frame = self.socket.recv(copy=False)
        return self._is_answer(first)

    def wait(self) -> None:
        """Read until the answer is here."""
        while not self.take(0):
            pass

    def close(self) -> None:
        """Leave."""
        self.socket.close(0)

    def _is_answer(self, first: bytes) -> bool:
        if first[self._at] == self._id:
            return True
        sys.exit("an answer was crossed")


class Raw(Bare):
    """A client of zmqrl that does as little as the protocol lets it."""

    def __init__(self, endpoint: str, payload: int, keys: list[str]) -> None:
        super().__init__(endpoint, payload, keys)
        self._at = _ID
        frames = int(self._large)
        header = Header(Op.INFER, frames=frames, rows=1, budget_ms=60_000).pack()
        self._left, self._right = header[: _ID.start], header[_ID.stop :]
        self._body = bytes(payload)
        self._rest = self._right + self._body

    def greet(self) -> None:
        name = f"raw-{id(self):x}-{random.random()}"
        hello = {"role": "client", "incarnation": 1, "name": name}
        self.socket.send(Header(Op.HELLO).pack() + encode_meta(hello))

    def ask(self) -> None:
        self._number += 1
        self._id = self._number.to_bytes(8, "little")
        self.asked = time.perf_counter()
        if self._large:
            self.socket.send(self._left + self._id + self._right, _SNDMORE)
            self.socket.send(self._body)
        else:
            self.socket.send(self._left + self._id + self._rest)

    def close(self) -> None:
        self.socket.send(Header(Op.BYE).pack())
        self.socket.close(1000)

    def _is_answer(self, first: bytes) -> bool:
        if first[_ID] == self._id and first[5] == _REPLY:
            return True
        if first[5] not in (Op.WELCOME, Op.PROBE):
            sys.exit(f"request {self._number} got {Op(first[5]).name}")
        return False


class Policy:
    """A PolicyClient; arguments as for `Bare`."""

    def __init__(self, endpoint: str, payload: int, keys: list[str]) -> None:
        self._client = PolicyClient(endpoint, timeout=_PATIENCE, keys=keys[0] if keys else None)
        self.asked = 0.0
        self.due = 0.0
        self.answered = 0
        self._observation = {"x": np.zeros((1, payload), np.uint8)}
        self._pending: Any = None

    def greet(self) -> None:
        """Nothing: it has said HELLO."""

    def ask(self) -> None:
        self.asked = time.perf_counter()
        self._pending = self._client.submit(self._observation)

    def fileno(self) -> int:
        return self._client.fileno()

    def has_news(self) -> bool:
        if self._pending is not None:
            return self._pending.done()
        self._client.catch_up()  # nothing is awaited; else its file would go on to call
        return False

    def take(self) -> bool:
        pending, self._pending = self._pending, None
        pending.result()
        return True

    def wait(self) -> None:
        self.take()

    def close(self) -> None:
        self._client.close()


FORMS: dict[str, Any] = {"bare": Bare, "raw": Raw, "policy": Policy}


class Crowd:
    """Some clients, and what they have counted."""

    def __init__(self, clients: list[Any], every_s: float) -> None:
        self._clients = clients
        self._every_s = every_s
        self._due: list[tuple[float, int, Any]] = []
        self.times: list[float] = []
        self._poll = select.epoll()
        # A poll over many sockets looks at each of them; this one at those that have something to say.
        self._by_file = {client.fileno(): client for client in clients}
        for file in self._by_file:
            self._poll.register(file, select.EPOLLIN)

    def begin(self) -> None:
        """Let all ask; with time between requests, spread over it."""
        now = time.perf_counter()
        for client in self._clients:
            if self._every_s:
                self._plan(client, now + random.random() * self._every_s)
            else:
                self._ask(client)

    def serve(self, seconds: float) -> float:
        """Ask as fast as answers come, or when it is time; returns the seconds that it took."""
        self.times = []
        for client in self._clients:
            client.answered = 0
        begin = heard = time.perf_counter()
        now, answered = begin, 0
        if len(self._clients) == 1 and not self._every_s:
            client = self._clients[0]
            while now < begin + seconds:
                client.wait()
                now = time.perf_counter()
                self.times.append(now - client.asked)
                client.answered += 1
                client.ask()
            return now - begin
        while now < begin + seconds:
            pause = 1.0 if not self._due else max(0.0, min(1.0, self._due[0][0] - now))
            for file, _ in self._poll.poll(pause):
                self._look(self._by_file[file])
            now = time.perf_counter()
            while self._due and self._due[0][0] <= now:
                self._ask(heapq.heappop(self._due)[2])
            if len(self.times) > answered:
                answered, heard = len(self.times), now
            elif now > heard + _PATIENCE:
                sys.exit(f"no answer for {_PATIENCE:.0f} s")
        return now - begin

    def close(self) -> None:
        """Let all leave."""
        self._poll.close()
        for client in self._clients:
            client.close()

    def _plan(self, client: Any, due: float) -> None:
        """Let a client ask at some time, not at once."""
        client.due = due
        heapq.heappush(self._due, (due, id(client), client))

    def _ask(self, client: Any) -> None:
        client.ask()
        # Its file tells of what comes from now on; a send reads, and so hides, what has come already.
        self._look(client)

    def _look(self, client: Any) -> None:
        """Take what is there."""
        while client.has_news():
            if not client.take():
                continue
            now = time.perf_counter()
            self.times.append(now - client.asked)
            client.answered += 1
            if self._every_s:
                due = client.due + random.uniform(0.5, 1.5) * self._every_s
                self._plan(client, max(now, due))
            else:
                client.ask()

    def shares(self) -> list[int]:
        """How many requests each client had answered."""
        return [client.answered for client in self._clients]


def quantile(ordered: list[float], part: float) -> float:
    """The value below which `part` of the ordered values are; nan if there is none."""
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else math.nan


def main(form: str, endpoint: str, *keys: str) -> None:
    """Follow orders until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends it
    allow_connections()
    zmq.Context.instance().set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    while line := sys.stdin.readline():
        order = json.loads(line)
        clients = [FORMS[form](endpoint, order["payload"], list(keys)) for _ in range(order["clients"])]
        for client in clients:
            client.greet()
        for client in clients:
            client.ask()
            client.wait()
        crowd = Crowd(clients, order["every_s"])
        print("ready", flush=True)
        if not sys.stdin.readline():
            return
        crowd.begin()
        crowd.serve(order["warm_s"])
        print("begin", flush=True)
        cpu = time.process_time()
        seconds = crowd.serve(order["seconds"])
        cpu = time.process_time() - cpu
        times = sorted(crowd.times)
        shares = crowd.shares()
        told = {
            "answered": len(times),
            "seconds": seconds,
            "cpu_s": cpu,
            "p50_us": 1e6 * quantile(times, 0.5),
            "p99_us": 1e6 * quantile(times, 0.99),
            "p999_us": 1e6 * quantile(times, 0.999),
            "least": min(shares),
        }
        print(json.dumps(told), flush=True)
        crowd.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
