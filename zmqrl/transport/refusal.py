"""Finds out why nobody answers: whether keys are the reason."""

from __future__ import annotations

import os
import struct
import threading
import time
from typing import Any, NamedTuple, Optional

import zmq

from zmqrl.transport.security import Keys

_OUTCOMES = (
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    | int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    | int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    | int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    | int(zmq.EVENT_CONNECT_RETRIED)
)


_AFTER = 0.3
"""Seconds of silence on a new socket, after which there is reason to look."""

_AGAIN = 2.0
"""Seconds from one look to the next."""

_PATIENCE = 0.3
"""Seconds that a look may take."""


class Refusal(NamedTuple):
    """Why a peer does not talk to this one."""

    reason: str
    """The end of a sentence that begins with the peer's endpoint."""
    final: bool
    """Whether it will be so the next time, unless somebody changes the keys."""


class Suspicion:
    """Looks whether keys are the reason, while nothing is heard on a new socket.

    Args:
        endpoint: Where the socket connects.
        keys: Those of this part.
    """

    def __init__(self, endpoint: str, keys: Optional[Keys]) -> None:
        self.reason = ""
        """What the latest look has found; empty if keys are not the reason."""
        self._endpoint = endpoint
        self._keys = keys
        self.begin()

    def begin(self, after: float = _AFTER) -> None:
        """There is a new socket, or a first question on it: look after so many seconds."""
        self.due = time.monotonic() + after

    def end(self) -> None:
        """Something was heard: there is nothing to suspect."""
        self.due = float("inf")
        self.reason = ""

    def rest(self) -> None:
        """Nothing is awaited, so that silence means nothing."""
        if self.due < float("inf"):
            self.begin()

    def look(self, patience: float = _PATIENCE) -> Optional[Refusal]:
        """The refusal, if it is time to look and there is one.

        Args:
            patience: Seconds that it may take.
        """
        if time.monotonic() < self.due:
            return None
        refusal = refusal_of(self._endpoint, self._keys, patience)
        self.reason = "" if refusal is None else refusal.reason
        self.due = time.monotonic() + _AGAIN
        return refusal


def refusal_of(endpoint: str, keys: Optional[Keys], timeout: float) -> Optional[Refusal]:
    """Shake hands with whoever listens at `endpoint`, once more, and look how that ends.

    A connected socket does not tell why it stays silent; libzmq even gives it up when it was refused. So
    this asks with a socket of its own, when there is reason to, and costs nothing before.

    Args:
        endpoint: Where to connect.
        keys: Those of this part.
        timeout: Seconds that it may take.

    Returns:
        None if keys are not the reason: nobody listens, no answer came in time, or all is well.
    """
    until = time.monotonic() + timeout
    process = _of_this_process()
    if not process.one_at_a_time.acquire(timeout=max(0.0, timeout)):
        return None
    try:
        return _look(process.context, endpoint, keys, until)
    except zmq.ZMQError:  # no more files can be opened, for instance: nothing can be found out now
        return None
    finally:
        process.one_at_a_time.release()


def _look(
    context: zmq.Context[Any], endpoint: str, keys: Optional[Keys], until: float
) -> Optional[Refusal]:
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.connect(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.IPV6, 1)
        # An address that is new: that of a socket just closed may be in use for a moment still.
        with socket.get_monitor_socket(_OUTCOMES, f"inproc://{os.urandom(8).hex()}") as monitor:
            try:
                socket.connect(endpoint)
                return _outcome(monitor, keys, until)
            finally:
                # First, because the I/O thread waits for ever with an event that nobody takes.
                socket.disable_monitor()


class _Process(NamedTuple):
    """What all looks of a process share."""

    pid: int
    context: zmq.Context[Any]
    """Never terminated, which would wait for a name to be looked up, however long that takes."""
    one_at_a_time: threading.Lock
    """Many clients in one process must not run out of files because their broker is silent."""


_process: Optional[_Process] = None


def _of_this_process() -> _Process:
    global _process
    if _process is None or _process.pid != os.getpid():  # after a fork the context is the parent's
        _process = _Process(os.getpid(), zmq.Context(), threading.Lock())
    return _process


def _outcome(monitor: zmq.Socket[bytes], keys: Optional[Keys], until: float) -> Optional[Refusal]:
    broken_off = False
    while monitor.poll(max(0, int((until - time.monotonic()) * 1000))):
        event = struct.unpack("=hi", monitor.recv_multipart()[0])[0]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return Refusal(
                f"does not let the key of {_name(keys)} in: it is of another role, was revoked, or was "
                "never on the server's allow-list",
                final=True,
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if keys is None:
                return Refusal(
                    "lets nobody in without a key: give keys (security.keys, or keys=…)", final=True
                )
            return Refusal(f"uses no keys, but this part has some ({keys.folder})", final=True)
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            broken_off = True  # which of both it is shows in one of the next attempts, if it is one
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED or not broken_off:
            return None
    if not broken_off:
        return None
    if keys is None:
        return Refusal("breaks connections off: it needs a key, perhaps (security.keys)", final=False)
    return Refusal(
        f"breaks connections off: its key is not the server.key of {keys.folder}, or what listens there "
        "is not a server of zmqrl",
        final=False,
    )


def _name(keys: Optional[Keys]) -> str:
    return "this part" if keys is None else keys.folder
