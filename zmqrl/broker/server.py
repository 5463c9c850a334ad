"""The loop that owns the broker's two ROUTER sockets."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import zmq

from zmqrl.allocator import KeptMemory
from zmqrl.broker.core import Broker
from zmqrl.broker.lane import BrokerLane
from zmqrl.broker.pool import Options
from zmqrl.transport import sharedmem, sockets
from zmqrl.transport.codec import LARGE
from zmqrl.transport.header import MAX_FRAMES, Op, op_of
from zmqrl.transport.security import CLIENTS, WORKERS, Door, Keys, answer_handshakes, key_of
from zmqrl.transport.sockets import NOBLOCK, POLLIN

log = logging.getLogger(__name__)

_RESULT_FRAMES = 1 << 20
"""Frames that a worker's message may have: those of all replies of a batch."""

_POLL_STEP = 0.001
_SHORT_STEP = 0.0001
"""Seconds: what a poll can wait at least, and the looks of a broker that waits for less."""

_BURST = 256
"""Messages read from one socket before the other, and the timers, have their turn."""


class BrokerServer:
    """Binds the frontend and the backend, and runs a `Broker` between them.

    One thread owns the sockets and the state.

    Args:
        frontend: Where clients connect.
        backend: Where rollout workers connect.
        options: How the broker behaves.
        max_message_mb: Mebibytes; libzmq cuts a peer that sends more.
        heartbeat_s: Seconds of silence of a peer's I/O thread after which it counts as gone; a client
            of the shared queue, for which nobody waits, after up to twice as many.
        keys: The server's; None lets in whoever reaches the sockets.
        insecure: Without keys: whether other machines may reach them.
        shared_memory: Whether peers on this host may share memory.
        memory: What this process keeps of freed memory, to be given back when there is little to do.

    Raises:
        EndpointError: An endpoint is malformed, in use, cannot be bound, or is open to strangers.
    """

    def __init__(
        self,
        frontend: str,
        backend: str,
        options: Options,
        max_message_mb: int = sockets.MAX_MESSAGE_MB,
        heartbeat_s: float = sockets.HEARTBEAT_S,
        keys: Keys | None = None,
        insecure: bool = False,
        shared_memory: bool = True,
        memory: KeptMemory | None = None,
    ) -> None:
        self._memory = memory
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._locks = [sockets.lock_endpoint(endpoint) for endpoint in (frontend, backend)]
        self._front_door = Door(keys, [CLIENTS], insecure)
        self._back_door = Door(keys, [WORKERS], insecure)
        self._authenticator = answer_handshakes(self._context, self._front_door, self._back_door)
        try:
            # A client that reads never has more replies on the way than it may have requests open.
            unread = options.max_client_open
            # libzmq walks over all connections at each heartbeat, and of clients there may be thousands.
            # Only the barrier of normal mode waits for one that has fallen silent.
            every_s = heartbeat_s if options.decoupled else None
            self._frontend = sockets.router(
                self._context, frontend, unread, max_message_mb, heartbeat_s, self._front_door, every_s
            )
            self._backend = sockets.router(
                self._context, backend, 1000, max_message_mb, heartbeat_s, self._back_door
            )
        except Exception:
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(0)
            raise
        self._send_to_client = sockets.sender(self._frontend)
        self._send_to_worker = sockets.sender(self._backend)
        self.frontend = sockets.bound_endpoint(self._frontend)
        self.backend = sockets.bound_endpoint(self._backend)
        epoch = int.from_bytes(os.urandom(7), "little")
        proof = sharedmem.proof() if shared_memory else None
        self._lane = None if proof is None else BrokerLane(proof)
        self.core = Broker(options, epoch, time.monotonic(), self._lane, self._send_now)

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping` says so, then answer what is open with an ERROR and close.

        Args:
            stopping: Asked a few times a second.
        """
        both = [(self._frontend, POLLIN), (self._backend, POLLIN)]
        core = self.core
        if self._memory is not None:
            self._memory.begin()
        try:
            while True:
                ready = _wait(both, core.timeout())
                core.advance(time.monotonic())
                # Results first: they free workers for what the frontend brings.
                if self._backend in ready:
                    self._receive_results()
                if self._frontend in ready:
                    self._receive_requests()
                if core.tick():
                    # Out of the way of a request: the less code a turn runs, the more stays in caches.
                    for note in core.take_notes():
                        log.info("%s", note)
                    if stopping():
                        break
                    self._turn_out()
                    if self._memory is not None:
                        self._memory.give_back(core.held_bytes, time.monotonic())
                    if self._lane is not None:
                        self._lane.look(time.monotonic())
                core.dispatch()
                while self._send():
                    core.dispatch()  # what a lost peer held, or held up, need not wait
            core.stop()
            self._send()
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets, and free the endpoints."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._frontend.close()
        self._backend.close()
        self._context.term()
        for lock in self._locks:
            if lock is not None:
                lock.close()

    def _turn_out(self) -> None:
        """Forget those whose keys have been revoked."""
        if self._front_door.changed():
            self.core.revoke_clients(self._front_door.lets_in)
        if self._back_door.changed():
            self.core.revoke_workers(self._back_door.lets_in)

    def _receive_requests(self) -> None:
        self._receive(self._frontend, self._front_door, self.core.from_client, MAX_FRAMES + 1, small=1)

    def _receive_results(self) -> None:
        self._receive(self._backend, self._back_door, self.core.from_worker, _RESULT_FRAMES, small=2)

    def _receive(
        self,
        socket: zmq.Socket[bytes],
        door: Door,
        handle: Callable[[bytes, list[Any], str | None], None],
        most: int,
        small: int,
    ) -> None:
        """Hand over what has arrived, up to a burst.

        Args:
            socket: Which to read.
            door: Whom it lets in.
            handle: Takes the peer's identity, the frames of its message, and its key.
            most: Frames after which the rest of a message is not kept; its count tells that it is wrong.
            small: How many first frames are needed as bytes.
        """
        recv, has_keys = socket.recv, door.keys is not None
        for count in range(_BURST):
            if count == 1 and not sockets.has_input(socket):
                return  # where messages come one by one, an exception for each would be dear
            try:
                peer = recv(NOBLOCK)  # as bytes, which cost less than a Frame; there is always more
            except zmq.Again:
                return
            first = frame = recv(NOBLOCK, copy=False)
            message: list[Any] = [first.bytes]
            while frame.more:  # to the end, so that the next message begins where it should
                frame = recv(NOBLOCK, copy=False)
                if len(message) <= most:
                    # A small Frame pins the 8 KB that libzmq read it into.
                    as_bytes = len(message) < small or len(frame) < LARGE
                    message.append(frame.bytes if as_bytes else frame)
            try:
                handle(peer, message, _key_of(first, door) if has_keys else "")
            except Exception:
                # A defect that one message shows must not take the pool down with it.
                self.core.counters.malformed += 1
                log.exception("a message could not be handled")

    def _send_now(self, peer: bytes, frames: list[Any]) -> bool:
        """Send to a client; False if it could not be, which `_send` will look into."""
        try:
            self._send_to_client(peer, frames)
        except zmq.ZMQError:
            return False
        return True

    def _send(self) -> bool:
        """Send what stands in the outboxes, without ever waiting for a peer.

        Returns:
            Whether a peer turned out to be gone.
        """
        core = self.core
        to_clients, to_workers = core.take_outbox()
        lost_clients = False
        for peer, frames in to_clients:
            try:
                self._send_to_client(peer, frames)
            except zmq.Again:
                core.counters.dropped += 1  # it does not read; it will ask when it does
                self._dismiss(frames)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                core.counters.dropped += frames[0][5] != Op.PROBE
                self._dismiss(frames)
                core.client_unreachable(peer)
                lost_clients = True
        lost = []
        for peer, frames in to_workers:
            try:
                self._send_to_worker(peer, frames)
            except zmq.Again:
                if len(frames) > 1:
                    core.undelivered(peer)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                if len(frames) > 1:
                    core.undelivered(peer)
                lost.append(peer)
        if lost:
            # Its last results may have arrived already; what they answer need not run again.
            self._receive_results()
            for peer in lost:
                core.worker_unreachable(peer)
        return bool(lost) or lost_clients

    def _dismiss(self, frames: list[Any]) -> None:
        """What was for a client is dropped."""
        if self._lane is not None:
            self._lane.dismiss(frames[0])


def _wait(sockets_: list[tuple[Any, int]], seconds: float) -> list[Any]:
    """The sockets that have something to read, at the latest after so many seconds."""
    if seconds >= _POLL_STEP:
        milliseconds = 1 + int(seconds * 1000)
    else:
        # A batch is held open for less than a poll can wait.
        time.sleep(min(max(seconds, 0.0), _SHORT_STEP))
        milliseconds = 0
    # Without a `zmq.Poller`, whose layer is felt when one message wakes the broker.
    return [socket for socket, _ in zmq.zmq_poll(sockets_, milliseconds)]


def _key_of(first: zmq.Frame, door: Door) -> str | None:
    """The peer's key, where it matters: in what strangers may say. None if it is let in no longer."""
    if op_of(first.bytes) not in (Op.HELLO, Op.STATUS):
        return ""
    key = key_of(door, first)
    return key if door.lets_in(key) else None
