"""The client's socket to the broker: messages out and in, without waiting longer than it is told."""

from __future__ import annotations

import contextlib
import select
import time
from typing import Any, Dict, List, Optional, Set

import zmq

from zmqrl.transport import sockets
from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import Header, Op
from zmqrl.transport.refusal import Suspicion
from zmqrl.transport.security import Keys

_TICK = 0.2
"""Seconds for which `recv` waits at most: as one call it costs less than a poll and a look before it."""


class Link:
    """A socket to the broker, which can be made anew.

    What each new one must tell the broker is kept here: who this is, and which stages rest.

    Args:
        endpoint: The broker's frontend.
        introduction: The fields of HELLO.
        keys: Of a client.

    Attributes:
        suspicion: Whether keys are why nothing is heard.
        reached: Whether the broker has said anything on this socket.
        asked: Since when a question is unanswered, of `time.monotonic()`; None if none is.
        said_hello: When HELLO was said last, likewise.

    Raises:
        EndpointError: The endpoint is malformed.
    """

    def __init__(self, endpoint: str, introduction: Dict[str, Any], keys: Optional[Keys] = None) -> None:
        self._endpoint = endpoint
        self._introduction = introduction
        self._keys = keys
        self._resting: Set[int] = set()
        self._watch: Optional[select.epoll] = None
        self.reached = False
        self.asked: Optional[float] = None
        self.suspicion = Suspicion(endpoint, keys)
        self._connect()

    def renew(self) -> None:
        """Make the socket anew, and say HELLO; what was not sent yet is lost."""
        self._disconnect()
        self._connect()

    def hello(self) -> None:
        """Tell the broker who this is."""
        self.said_hello = time.monotonic()
        self.send([Header(Op.HELLO).pack() + encode_meta(self._introduction)])
        for stage in self._resting:
            self.send([Header(Op.REST, stage=stage).pack()])

    def rest(self, stage: int) -> None:
        """Say that a pipeline stage asks no more for now; said again to every new broker."""
        self._resting.add(stage)
        self.send([Header(Op.REST, stage=stage).pack()])

    def goes_on(self, stage: int) -> None:
        """Note that a pipeline stage asks again."""
        self._resting.discard(stage)

    def send(self, frames: List[Any]) -> None:
        """Send a message without waiting; where there is no room it is lost, and to be asked after."""
        try:
            sockets.send(self._socket, frames)
        except BaseException:
            had_none = self._socket.closed  # since it could not be made anew
            # Ctrl-C between two frames: what is sent next would become part of this message.
            self.renew()
            if not had_none:
                raise
            sockets.send(self._socket, frames)

    def heard(self) -> None:
        """Note that the broker has said something."""
        self.reached = True
        self.asked = None
        self.suspicion.end()

    def first(self, seconds: float) -> Optional[bytes]:
        """The first frame of the next message; None if none comes within so many seconds, or earlier."""
        flags = sockets.NOBLOCK
        try:
            if seconds >= _TICK:
                flags = 0
            elif seconds > 0:
                self._poller.poll(int(seconds * 1000 + 0.999))
            elif not sockets.has_input(self._socket):
                return None  # who looks again and again should not pay for an exception each time
            return self._socket.recv(flags)
        except zmq.Again:
            return None
        except zmq.ZMQError:
            if not self._socket.closed:
                raise
            self.renew()  # which failed before, or was interrupted
            return None

    def others(self) -> List[Any]:
        """The other frames of the message in hand; most messages have none, and are not asked."""
        frames: List[Any] = []
        more = bool(self._socket.getsockopt(zmq.RCVMORE))
        while more:
            frames.append(self._socket.recv(sockets.NOBLOCK, copy=False))
            more = frames[-1].more
        return frames

    def fileno(self) -> int:
        """A file that is readable when there may be a message; the same until `close`."""
        if self._watch is None:
            # A file around libzmq's: that is another one for each socket, be it of the same number.
            self._watch = select.epoll()
            self._watch.register(self._file, select.EPOLLIN)
        return self._watch.fileno()

    def close(self) -> None:
        """Close the socket; what was sent has a moment to leave."""
        self.suspicion.end()
        self._disconnect(linger=None)
        if self._watch is not None:
            self._watch.close()

    @property
    def _file(self) -> int:
        """libzmq's file of the socket of now."""
        return int(self._socket.getsockopt(zmq.FD))

    def _connect(self) -> None:
        # Few heartbeats: it asks after each request that is silent, and a broker may have thousands.
        socket = sockets.dealer(
            zmq.Context.instance(),
            self._endpoint,
            keys=self._keys,
            heartbeat_every_s=sockets.HEARTBEAT_S,
        )
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * _TICK))
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._socket = socket  # not before: Ctrl-C must not leave one that waits for ever
        if self._watch is not None:
            self._watch.register(self._file, select.EPOLLIN)
        self.reached, self.asked = False, None
        self.suspicion.begin()
        self.hello()

    def _disconnect(self, linger: Optional[int] = 0) -> None:
        if self._watch is not None:
            # A forked process may hold the file open, and a closed one be readable for ever.
            with contextlib.suppress(OSError, zmq.ZMQError):
                self._watch.unregister(self._file)
        self._socket.close(linger)
