"""Asks a broker how it is."""

from __future__ import annotations

import time
from typing import Any

import zmq

from zmqrl.errors import AuthenticationFailed, DecodeError, RequestRefused, VersionMismatch
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op, unpack
from zmqrl.transport.refusal import refusal_of
from zmqrl.transport.security import Keys

_MAX_STATUS = 16 << 20
"""Bytes. It names a thousand clients, and all workers; names may be long."""


class StatusClient:
    """Reads a broker's counters and peers through its frontend.

    Args:
        endpoint: The broker's frontend.
        keys: Of a client.
    """

    def __init__(self, endpoint: str, keys: Keys | None = None) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._socket = sockets.dealer(zmq.Context.instance(), endpoint, keys=keys)
        self._next_id = 1

    def ask(self, timeout: float = 1.0) -> dict[str, Any] | None:
        """The broker's status (see `Broker.status`), or None if it does not answer in time.

        Args:
            timeout: Seconds.

        Raises:
            AuthenticationFailed: The key of this part has been revoked.
            RequestRefused: The broker speaks another version of the protocol.
        """
        request_id, self._next_id = self._next_id, self._next_id + 1
        try:
            self._socket.send(Header(Op.STATUS, request_id=request_id).pack(), sockets.NOBLOCK)
        except zmq.Again:
            return None
        until = time.monotonic() + timeout
        while self._socket.poll(max(0, int((until - time.monotonic()) * 1000))):
            frames = self._socket.recv_multipart()
            try:
                header = unpack(frames[0])
                if header.op == Op.STATUS and header.request_id == request_id:
                    return _checked(decode_meta(frames[0][HEADER_SIZE:], _MAX_STATUS))
                if header.op == Op.ERROR and header.request_id == 0:
                    fields = decode_meta(frames[0][HEADER_SIZE:])
                    if fields.get("code") in ("refused", "revoked"):
                        raise AuthenticationFailed(f"{self._endpoint}: {fields.get('message')}")
            except VersionMismatch as error:
                raise RequestRefused(f"{self._endpoint}: {error}") from None
            except DecodeError:
                continue
        return None

    def raise_refusal(self, timeout: float = 3.0) -> None:
        """Look whether keys are the reason that the broker does not answer.

        Args:
            timeout: Seconds.

        Raises:
            AuthenticationFailed: They are.
        """
        refusal = refusal_of(self._endpoint, self._keys, timeout)
        if refusal is not None:
            raise AuthenticationFailed(f"the broker at {self._endpoint} {refusal.reason}")

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)


def _checked(status: dict[str, Any]) -> dict[str, Any]:
    """The status, if what others count with is there and made of numbers.

    Raises:
        DecodeError: It is not.
    """
    totals = status.get("totals")
    counted = [status.get("counters"), *(totals.values() if isinstance(totals, dict) else [None])]
    for numbers in counted:
        if not isinstance(numbers, dict) or any(type(n) not in (int, float) for n in numbers.values()):
            raise DecodeError("not a status: a counter is no number")
    for peers in (status.get("workers"), status.get("clients")):
        if not isinstance(peers, list) or not all(isinstance(peer, dict) for peer in peers):
            raise DecodeError("not a status: it tells no peers")
    return status
