"""Who is on the other side of the learner's socket: who is let in, and the way to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from zmqrl.errors import DecodeError
from zmqrl.transport import sockets
from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import Header, Op
from zmqrl.transport.security import CLIENTS, WORKERS, Door, key_of

MOST_NAMES = 10_000
"""Workers of one kind that are known by name, and senders that wait for the learner to be ready."""

_WHO_MAY = {Op.HELLO: CLIENTS, Op.EVALUATE: CLIENTS, Op.WANT: WORKERS}
"""On which allow-list a peer must be. Whatever else a peer says, it must have said HELLO before."""


class Peers:
    """Sends to the peers, and knows the keys of those that are known.

    Args:
        socket: A ROUTER.
        door: Whose keys are let in.
        on_gone: Is told when a peer turns out to be gone.
    """

    def __init__(self, socket: zmq.Socket[bytes], door: Door, on_gone: Callable[[bytes], None]) -> None:
        self._send_to = sockets.sender(socket)
        self._door = door
        self._on_gone = on_gone
        self._keys: dict[bytes, str] = {}

    def let_in(self, identity: zmq.Frame, op: int) -> str:
        """The key of a peer that says this, if what it says depends on its key.

        Raises:
            DecodeError: Its key does not allow it.
        """
        if self._door.keys is None or op not in _WHO_MAY:
            return ""
        key = key_of(self._door, identity)
        if not self._door.lets_in(key, _WHO_MAY[Op(op)]):
            raise DecodeError("the key of this peer does not allow that, or has been revoked")
        return key

    def keep(self, peer: bytes, key: str) -> None:
        """Remember the key of a peer that is known by now."""
        self._keys[peer] = key

    def forget(self, peer: bytes) -> None:
        """Forget its key."""
        self._keys.pop(peer, None)

    def revoked(self) -> list[bytes]:
        """Those whose keys are let in no longer."""
        return [peer for peer, key in self._keys.items() if not self._door.lets_in(key)]

    def send(self, peer: bytes, frames: list[Any]) -> bool:
        """Send without waiting for the peer; whether that was possible."""
        try:
            self._send_to(peer, frames)
        except zmq.Again:
            return False  # it does not read; it asks again when it does
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._on_gone(peer)
            return False
        return True

    def say(self, peer: bytes, header: Header, fields: dict[str, Any] | None = None) -> None:
        """Send a header, with these fields if there are any."""
        self.send(peer, [header.pack() + (b"" if fields is None else encode_meta(fields))])

    def refuse(self, peer: bytes, code: str, why: str, request_id: int = 0) -> None:
        """Send an ERROR."""
        self.say(peer, Header(Op.ERROR, request_id=request_id), {"code": code, "message": why})


def number(what: str, value: Any, least: int = 0, bits: int = 63) -> int:
    """A number that a peer says.

    Raises:
        DecodeError: It is none, too small, or too large.
    """
    if type(value) is not int or not least <= value < 2**bits:
        raise DecodeError(f"{what} must be a number of at least {least} that has {bits} bits at most")
    return value
