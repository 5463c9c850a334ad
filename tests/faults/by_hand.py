"""Peers of a broker by hand: they say what they are told to."""

from __future__ import annotations

import time
from typing import Any

import zmq

from zmqrl.transport import sockets
from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import Header, Op, join_batch, split_batch, unpack, unpack_table


def hello(name: str, **fields: Any) -> bytes:
    return Header(Op.HELLO).pack() + encode_meta({"name": name, "incarnation": 1, **fields})


def introduced(endpoint: str, name: str = "odd", **fields: Any) -> zmq.Socket[bytes]:
    """The socket of a peer that has said HELLO, and was welcomed."""
    socket = sockets.dealer(zmq.Context.instance(), endpoint)
    socket.send(hello(name, **fields))
    assert socket.poll(10_000)
    assert unpack(socket.recv()).op == Op.WELCOME
    return socket


class RawWorker:
    """A rollout worker.

    Args:
        endpoint: The broker's backend.
        flags: Of its READY.
    """

    def __init__(self, endpoint: str, flags: int = 0) -> None:
        self._socket = introduced(endpoint, "raw", role="worker")
        self._socket.send(Header(Op.READY, flags).pack())

    def answer(self, header: Header, body: bytes) -> Header:
        """Take one request, and give this reply; returns the header of the request."""
        frames = self._batch()
        table = unpack_table(frames[0])
        ((entry, message),) = split_batch(table, frames)
        asked = unpack(message[0])
        reply = [header._replace(request_id=asked.request_id).pack() + body]
        entry = entry._replace(length=len(reply[0]), frames=0, origin_length=0)
        self._socket.send_multipart(
            join_batch(table._replace(entries=[entry], origins=b""), Op.RESULT, [reply])
        )
        return asked

    def _batch(self) -> list[bytes]:
        until = time.monotonic() + 10
        while True:
            assert self._socket.poll(10_000)
            assert time.monotonic() < until
            frames: list[bytes] = self._socket.recv_multipart()
            if frames[0][5] == Op.BATCH:
                return frames

    def close(self) -> None:
        self._socket.close(0)
