"""A rollout worker that does as little as the protocol lets it: the cost that remains is the broker's.

    python perf/raw.py BACKEND [KEYS]

It answers each shard with its own observation.
"""

from __future__ import annotations

import struct
import sys
from typing import Any

import zmq
from peers import dealer

from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op

# What docs/protocol.md says of the table of a batch; the header's fields are changed where they lie.
_TABLE = struct.Struct("<QQII")
_ENTRY = struct.Struct("<QIHBBI")
_ATTEMPT, _QUEUE = 16, struct.Struct("<I")
_QUEUE_AT = 32
_OP_AT = 5
_BATCH, _REPLY = int(Op.BATCH), int(Op.REPLY)
_SNDMORE = int(zmq.SNDMORE)


def serve(endpoint: str, *keys: str) -> None:
    """Serve until SIGTERM."""
    socket = dealer(endpoint, "worker", keys)
    socket.setsockopt(zmq.RCVTIMEO, 500)
    socket.send(Header(Op.HELLO).pack() + encode_meta({"name": "raw", "role": "worker"}))
    number = 0
    while True:
        try:
            first = socket.recv()
        except zmq.Again:
            socket.send(Header(Op.READY, request_id=number).pack())
            continue
        if first[_OP_AT] == _BATCH:
            number = _answer(socket, first)
        elif first[_OP_AT] == Op.WELCOME:
            socket.send(Header(Op.READY).pack())


def _answer(socket: zmq.Socket[bytes], first: bytes) -> int:
    """Send the batch back as its own result; returns its number."""
    joined = bytearray(socket.recv())
    epoch, number, count, _ = _TABLE.unpack_from(first, HEADER_SIZE)
    table = [Header(Op.RESULT).pack(), _TABLE.pack(epoch, number, count, 0)]
    at, start, large = HEADER_SIZE + _TABLE.size, 0, 0
    for _ in range(count):
        slot, length, frames, attempt, origin, queue_us = _ENTRY.unpack_from(first, at)
        at += _ENTRY.size + origin
        table.append(_ENTRY.pack(slot, length, frames, attempt, 0, queue_us))
        joined[start + _OP_AT] = _REPLY
        joined[start + _ATTEMPT] = attempt
        _QUEUE.pack_into(joined, start + _QUEUE_AT, queue_us)
        start += length
        large += frames
    bodies: list[Any] = [socket.recv(copy=False) for _ in range(large)]
    socket.send(b"".join(table), _SNDMORE)
    socket.send(joined, _SNDMORE if bodies else 0)
    for body in bodies:
        socket.send(body, _SNDMORE if body is not bodies[-1] else 0, copy=False)
    return int(number)


if __name__ == "__main__":
    serve(*sys.argv[1:])
