"""A rollout worker that does as little as the protocol lets it: the cost that remains is the broker's.

    python perf/raw.py worker BACKEND [KEYS]

It answers each shard with its own observation.
"""

from __future__ import annotations

import struct
import sys

import zmq
from peers import dealer

from zmqrl.allocator import keep_freed
from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op

# Where docs/protocol.md says that things are: a batch becomes its own result by a few changed bytes.
_TABLE = struct.Struct("<QQII")
_ENTRY = struct.Struct("<QIHBBI")
_ENTRIES_AT = HEADER_SIZE + _TABLE.size
_ORIGIN_AT = 15
_OP_AT, _ATTEMPT_AT, _QUEUE_AT = 5, 16, 32
_QUEUE = struct.Struct("<I")
# Plain ints, see zmqrl.transport.sockets.
_BATCH, _RESULT, _REPLY = int(Op.BATCH), int(Op.RESULT), int(Op.REPLY)
_SNDMORE = int(zmq.SNDMORE)


def worker(endpoint: str, *keys: str) -> None:
    """Serve until SIGTERM."""
    keep_freed()  # as a rollout worker does
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
            number = 0
            socket.send(Header(Op.READY).pack())
        elif first[_OP_AT] != Op.PROBE:
            sys.exit(f"the broker says {Op(first[_OP_AT]).name}")


def _answer(socket: zmq.Socket[bytes], first: bytes) -> int:
    """Send a batch back as its own result; returns its number."""
    joined = bytearray(socket.recv())
    _, number, count, _ = _TABLE.unpack_from(first, HEADER_SIZE)
    table = bytearray(first[: _ENTRIES_AT + count * _ENTRY.size])  # the identities follow
    table[_OP_AT] = _RESULT
    start = large = 0
    put_queue = _QUEUE.pack_into
    for index, entry in enumerate(_ENTRY.iter_unpack(memoryview(table)[_ENTRIES_AT:])):
        _, length, frames, attempt, _, queue_us = entry
        table[_ENTRIES_AT + index * _ENTRY.size + _ORIGIN_AT] = 0
        joined[start + _OP_AT] = _REPLY
        joined[start + _ATTEMPT_AT] = attempt
        put_queue(joined, start + _QUEUE_AT, queue_us)
        start += length
        large += frames
    bodies = [socket.recv(copy=False) for _ in range(large)]
    socket.send(table, _SNDMORE)
    socket.send(joined, _SNDMORE if bodies else 0)
    for index, body in enumerate(bodies, 1):
        socket.send(body, _SNDMORE if index < large else 0, copy=False)
    return int(number)


if __name__ == "__main__":
    {"worker": worker}[sys.argv[1]](*sys.argv[2:])
