"""The learner's socket, in a thread of its own: it acknowledges, opens gates and hands out weights.

While the learner computes, this thread answers. What it shares with the learner is guarded by one lock,
which nobody holds for longer than a few lines.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import zmq

from zmqrl.errors import ConfigError, DecodeError
from zmqrl.learner.env_leg import EnvLeg
from zmqrl.learner.eval_leg import EvalLeg
from zmqrl.learner.gate import Gate
from zmqrl.learner.peers import Peers
from zmqrl.learner.questions import Questions
from zmqrl.learner.rollout_leg import RolloutLeg
from zmqrl.learner.shared import Shared
from zmqrl.transport import sockets
from zmqrl.transport.header import MAX_FRAMES, Header, Op, request_id_of, unpack
from zmqrl.transport.security import CLIENTS, WORKERS, Door, Keys, answer_handshakes

log = logging.getLogger(__name__)

_POLL_MS = 50
_HEARTBEAT_S = 60.0
"""Seconds that one array may be on its way here: the sender's sign of life waits behind it."""


class Service:
    """Owns the learner's ROUTER.

    Args:
        endpoint: Where to bind.
        gate: When trajectories may begin.
        shared: What the learner touches too.
        max_message_mb: Mebibytes of one frame of a trajectory.
        keys: The server's; None lets in whoever reaches the socket.
        insecure: Without keys: whether other machines may reach it.

    Raises:
        EndpointError: The endpoint is malformed, in use, cannot be bound, or is open to strangers.
    """

    def __init__(
        self,
        endpoint: str,
        gate: Gate,
        shared: Shared,
        max_message_mb: int,
        keys: Keys | None = None,
        insecure: bool = False,
    ) -> None:
        self._lock_file: IO[str] | None = sockets.lock_endpoint(endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door = Door(keys, [CLIENTS, WORKERS], insecure)
        self._authenticator = answer_handshakes(self._context, self._door)
        try:
            self._socket = sockets.router(
                self._context,
                endpoint,
                max_message_mb=max_message_mb,
                heartbeat_s=_HEARTBEAT_S,
                door=self._door,
            )
            self._peers = Peers(self._socket, self._door, self._forget)
        except Exception:
            self._free()
            raise
        self.endpoint = sockets.bound_endpoint(self._socket)
        self._shared = shared
        self._questions = Questions(gate, shared, self._peers)
        self._envs = EnvLeg(self._questions, shared, self._peers, max_message_mb << 20)
        self._rollouts = RolloutLeg(shared, self._peers)
        self._evals = EvalLeg(shared, self._peers)
        self._refused = 0
        self._handlers: dict[int, Callable[[bytes, Header, list[Any]], None]] = {
            Op.HELLO: self._envs.hello,
            Op.TRAJECTORY: self._envs.trajectory,
            Op.BEGIN: self._envs.begin,
            Op.WANT: self._rollouts.want,
            Op.EVALUATE: self._evals.evaluate,
            Op.BYE: self._bye,
        }
        # Not a ZeroMQ socket: any thread may wake this one, and nobody waits for it.
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="learner-service", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look at once at what has changed."""
        with suppress(OSError):  # it is awake, or has ended
            self._wake_out.send(b"!")

    def close(self) -> None:
        """End the thread, and close the socket."""
        self._stopping = True
        self.wake()
        self._thread.join()
        self._wake_out.close()
        self._wake_in.close()
        self._free()

    def _free(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._lock_file is not None:
            self._lock_file.close()

    # -- The thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wake_in, zmq.POLLIN)
            while not self._stopping:
                events = dict(poller.poll(_POLL_MS))
                if self._wake_in.fileno() in events:
                    self._wake_in.recv(4096)
                with self._shared.lock:
                    if self._door.changed():
                        self._turn_out()
                    self._envs.welcome_the_early()
                    self._receive()
                    self._questions.answer()
                    self._envs.acknowledge()
                    self._rollouts.hand_out()
                    self._envs.probe()
        except BaseException as error:
            with self._shared.lock:
                self._shared.failure = error
                self._shared.lock.notify_all()
        finally:
            self._socket.close()

    def _receive(self) -> None:
        for _ in range(100):
            try:
                identity = self._socket.recv(sockets.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames: list[Any] = []
            while self._socket.getsockopt(zmq.RCVMORE):
                frame = self._socket.recv(sockets.NOBLOCK, copy=False)
                if len(frames) <= MAX_FRAMES:
                    frames.append(frame if frames else frame.bytes)
            if frames:
                self._handle(identity, frames)

    def _handle(self, identity: zmq.Frame, frames: list[Any]) -> None:
        peer = identity.bytes
        try:
            header = unpack(frames[0])
            key = self._peers.let_in(identity, header.op)
            handler = self._handlers.get(header.op)
            if handler is None:
                raise DecodeError(f"op {header.op} has no meaning to a learner")
            if header.frames != len(frames) - 1:
                raise DecodeError(f"{len(frames) - 1} buffers came, the header says {header.frames}")
            handler(peer, header, frames)
            if key and (self._envs.knows(peer) or self._rollouts.knows(peer)):
                self._peers.keep(peer, key)
        except (DecodeError, ConfigError) as error:
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:  # the 1st, 2nd, 4th …: nobody floods the log
                log.warning("a message to the learner is refused (number %d): %s", self._refused, error)
            self._peers.refuse(peer, "refused", str(error), request_id_of(frames[0]))
        except Exception:
            # A defect that one message shows must not end the training.
            log.exception("a message to the learner could not be handled")

    def _turn_out(self) -> None:
        """Forget the peers whose keys are let in no longer, and tell them."""
        for peer in self._peers.revoked():
            self._peers.refuse(peer, "revoked", "the key of this peer has been revoked")
            self._forget(peer)

    def _bye(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        self._forget(peer)

    def _forget(self, peer: bytes) -> None:
        self._peers.forget(peer)
        self._envs.forget(peer)
        self._rollouts.forget(peer)
