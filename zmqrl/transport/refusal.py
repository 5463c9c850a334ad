"""Finds out why nobody answers: whether keys are the reason."""

from __future__ import annotations

import contextlib
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

_STEP = 0.02
"""Seconds from one glance to the next while a look goes on."""


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
        self._handshake: Optional[_Handshake] = None  # one that a glance waits for
        self.begin()

    def begin(self, after: float = _AFTER) -> None:
        """There is a new socket, or a first question on it: look after so many seconds."""
        self.due = time.monotonic() + after

    def end(self) -> None:
        """Something was heard: there is nothing to suspect."""
        self.due = float("inf")
        self.reason = ""
        if self._handshake is not None:
            self._break_off()

    def rest(self) -> None:
        """Nothing is awaited, so that silence means nothing."""
        if self.due < float("inf"):
            self.begin()
        if self._handshake is not None:
            self._break_off()

    def look(self, patience: float = _PATIENCE) -> Optional[Refusal]:
        """The refusal, if it is time to look and there is one.

        Args:
            patience: Seconds that it may take.
        """
        if time.monotonic() < self.due:
            return None
        return self._note(refusal_of(self._endpoint, self._keys, patience))

    def glance(self) -> Optional[Refusal]:
        """As `look`, for those who must not wait: several calls, each when `due`, make one look."""
        now = time.monotonic()
        if now < self.due:
            return None
        if self._handshake is None:
            if _of_this_process().one_at_a_time.locked():
                self.due = now + _STEP  # another client looks
                return None
            self._until = now + _PATIENCE
            self._handshake = _shake_hands(self._endpoint, self._keys, 0.0)
        if self._handshake is None:
            return self._note(None)
        if not self._handshake.has_ended(now) and now < self._until:
            self.due = now + _STEP
            return None
        refusal = self._handshake.refusal
        self._break_off()
        return self._note(refusal)

    def _note(self, refusal: Optional[Refusal]) -> Optional[Refusal]:
        self.reason = "" if refusal is None else refusal.reason
        self.due = time.monotonic() + _AGAIN
        return refusal

    def _break_off(self) -> None:
        if self._handshake is not None:
            self._handshake.close()
            self._handshake = None


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
    handshake = _shake_hands(endpoint, keys, timeout)
    if handshake is None:
        return None
    try:
        handshake.has_ended(until)
        return handshake.refusal
    finally:
        handshake.close()


def _shake_hands(endpoint: str, keys: Optional[Keys], timeout: float) -> Optional[_Handshake]:
    """Begin to; None if nothing can be found out now, because too many files are open, for instance."""
    process = _of_this_process()
    if not process.one_at_a_time.acquire(timeout=max(0.0, timeout)):
        return None
    try:
        return _Handshake(process, endpoint, keys)
    except zmq.ZMQError:
        process.one_at_a_time.release()
        return None


class _Handshake:
    """One with whoever listens at an endpoint, on a socket of its own."""

    def __init__(self, process: _Process, endpoint: str, keys: Optional[Keys]) -> None:
        self._process = process
        self._keys = keys
        self._broken_off = False
        self._refusal: Optional[Refusal] = None
        self._closed = True  # in case that this fails
        with contextlib.ExitStack() as stack:
            self._socket = stack.enter_context(process.context.socket(zmq.DEALER))
            self._socket.setsockopt(zmq.LINGER, 0)
            if keys is not None:
                keys.connect(self._socket)
            self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
            self._socket.setsockopt(zmq.IPV6, 1)
            # An address that is new: that of a socket just closed may be in use for a moment still.
            address = f"inproc://{os.urandom(8).hex()}"
            self._monitor = stack.enter_context(self._socket.get_monitor_socket(_OUTCOMES, address))
            # First, because the I/O thread waits for ever with an event that nobody takes.
            stack.callback(self._socket.disable_monitor)
            self._socket.connect(endpoint)
            self._resources = stack.pop_all()
        self._closed = False

    def has_ended(self, until: float) -> bool:
        """Whether it has, by `until` (of `time.monotonic()`)."""
        while self._monitor.poll(max(0, int((until - time.monotonic()) * 1000))):
            event = struct.unpack("=hi", self._monitor.recv_multipart()[0])[0]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refusal = Refusal(
                    f"does not let the key of {_name(self._keys)} in: it is of another role, was "
                    "revoked, or was never on the server's allow-list",
                    final=True,
                )
                return True
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                reason = (
                    "lets nobody in without a key: give keys (security.keys, or keys=…)"
                    if self._keys is None
                    else f"uses no keys, but this part has some ({self._keys.folder})"
                )
                self._refusal = Refusal(reason, final=True)
                return True
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                # Which of both it is shows in one of the next attempts, if it is one.
                self._broken_off = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED or not self._broken_off:
                self._broken_off = False
                return True
        return False

    @property
    def refusal(self) -> Optional[Refusal]:
        """What is known so far."""
        if not self._broken_off or self._refusal is not None:
            return self._refusal
        if self._keys is None:
            reason = "breaks connections off: it needs a key, perhaps (security.keys)"
        else:
            reason = (
                f"breaks connections off: its key is not the server.key of {self._keys.folder}, or what "
                "listens there is not a server of zmqrl"
            )
        return Refusal(reason, final=False)

    def close(self) -> None:
        """Let the next one begin."""
        if not self._closed and self._process.pid == os.getpid():
            self._closed = True
            self._resources.close()
            self._process.one_at_a_time.release()

    __del__ = close  # a client that nobody closed must not keep all others from looking


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


def _name(keys: Optional[Keys]) -> str:
    return "this part" if keys is None else keys.folder
