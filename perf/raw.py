"""Peers of a broker that do as little as possible: the cost that remains is the broker's.

    python perf/raw.py worker BACKEND [KEYS]
    python perf/raw.py clients FRONTEND COUNT BYTES SECONDS [KEYS]

The worker answers each shard with its own observation. The clients are in a closed loop, all in this one
thread; they print a line of JSON: the answers that they counted, the seconds, and their CPU seconds.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
import time
from typing import Any

import zmq

from zmqrl.transport import sockets
from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import (
    Entry,
    Header,
    Op,
    Table,
    unpack,
    unpack_table,
)

_WARM_UP_S = 0.5
_QUEUE = struct.Struct("<I")


def worker(endpoint: str, *keys: str) -> None:
    """Serve until SIGTERM."""
    socket = _dealer(endpoint, "worker", keys)
    socket.send(Header(Op.HELLO).pack() + encode_meta({"name": "raw", "role": "worker"}))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    number = 0
    while True:
        if not socket.poll(500):
            socket.send(Header(Op.READY, request_id=number).pack())
            continue
        frames: list[Any] = socket.recv_multipart()
        op = frames[0][5]
        if op == Op.BATCH:
            table = unpack_table(frames[0])
            number = table.number
            joined = bytearray(frames[1])  # the replies are the requests, but for two fields
            begin, entries = 0, []
            for slot, length, large, attempt, _, queue_us in table.entries:
                joined[begin + 5] = Op.REPLY
                _QUEUE.pack_into(joined, begin + 32, queue_us)
                begin += length
                entries.append(Entry(slot, length, large, attempt, 0, queue_us))
            head = Table(table.epoch, number, entries).pack(Op.RESULT)
            socket.send_multipart([head, joined, *frames[2:]], copy=True)
        elif op == Op.WELCOME:
            socket.send(Header(Op.READY).pack())


def clients(endpoint: str, count: str, payload: str, seconds: str, *keys: str) -> None:
    """Ask as fast as answers come, and print what that gave."""
    hello = {"role": "client", "incarnation": 1}
    body = bytes(int(payload))
    crowd = [_dealer(endpoint, "client", keys) for _ in range(int(count))]
    poller = zmq.Poller()
    for index, socket in enumerate(crowd):
        poller.register(socket, zmq.POLLIN)
        socket.send(Header(Op.HELLO).pack() + encode_meta({**hello, "name": f"raw-{index}"}))
        if not socket.poll(10_000):
            sys.exit(f"{endpoint} does not answer")
        socket.recv()
    ids = dict.fromkeys(crowd, 1)
    for socket in crowd:
        _ask(socket, 1, body)
    answered = -1
    begin = end = cpu = 0.0
    warm = time.perf_counter() + _WARM_UP_S
    while True:
        now = time.perf_counter()
        if answered < 0 and now >= warm:
            answered, begin, end, cpu = 0, now, now + float(seconds), time.process_time()
            print("begin", flush=True)
        if answered >= 0 and now >= end:
            break
        for socket, _ in poller.poll(1000):
            first = socket.recv_multipart()[0]
            if first[5] != Op.REPLY:
                continue  # a probe
            if unpack(first).request_id != ids[socket]:
                sys.exit("an answer was crossed")
            ids[socket] += 1
            _ask(socket, ids[socket], body)
            answered += answered >= 0
    told = {"answered": answered, "seconds": now - begin, "cpu_s": time.process_time() - cpu}
    print(json.dumps(told), flush=True)
    for socket in crowd:
        socket.send(Header(Op.BYE).pack())


def _ask(socket: zmq.Socket[bytes], request_id: int, body: bytes) -> None:
    socket.send(Header(Op.INFER, request_id=request_id, rows=1, budget_ms=60_000).pack() + body)


def _dealer(endpoint: str, role: str, keys: tuple[str, ...]) -> zmq.Socket[bytes]:
    if not keys:
        return sockets.dealer(zmq.Context.instance(), endpoint)
    from zmqrl.transport.security import Keys

    return sockets.dealer(zmq.Context.instance(), endpoint, keys=Keys.load(keys[0], role))


if __name__ == "__main__":
    {"worker": worker, "clients": clients}[sys.argv[1]](*sys.argv[2:])
