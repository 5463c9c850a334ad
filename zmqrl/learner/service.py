"""The learner's socket, in a thread of its own: it acknowledges, opens gates and hands out weights.

While the learner computes, this thread answers. What it shares with the learner is guarded by one lock,
which nobody holds for longer than a few lines.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import zmq

from zmqrl.errors import ConfigError, DecodeError
from zmqrl.learner.gate import Gate
from zmqrl.learner.ledger import Sender
from zmqrl.learner.shared import Arrival, Shared
from zmqrl.spaces import Spaces
from zmqrl.transport import sockets
from zmqrl.transport.codec import MAX_META, MAX_REQUEST, decode_meta, encode_meta
from zmqrl.transport.header import HEADER_SIZE, MAX_FRAMES, Header, Op, request_id_of, unpack
from zmqrl.transport.security import CLIENTS, WORKERS, Door, Keys, answer_handshakes, key_of

log = logging.getLogger(__name__)

_POLL_MS = 50
_PROBE_EVERY = 1.0

_REFUSED_FROM = 8
"""Times the inbox's bounds, from which on nothing is taken: what senders keep is sent again later."""

_WHO_MAY = {Op.HELLO: CLIENTS, Op.EVALUATE: CLIENTS, Op.WANT: WORKERS}
"""On which allow-list a peer must be. Whatever else a peer says, it must have said HELLO before."""

_NUMBERS = {"version": 63, "pinned": 63, "serving": 63, "loaded": 48, "failed": 48}
"""What a rollout worker tells of itself, in so many bits: the counts of all can be summed in 64."""

_HEARTBEAT_S = 60.0
"""Seconds that one array may be on its way here: the sender's sign of life waits behind it."""

_MOST_NAMES = 10_000
"""Workers of one kind that are known by name, and senders that wait for the learner to be ready."""


@dataclass(frozen=True, slots=True)
class _Hello:
    """What a sender says of itself, its spaces apart."""

    request_id: int
    name: str
    incarnation: int
    first: int
    """The number of the first trajectory that it still has in hand, or makes next."""


@dataclass(slots=True)
class _Question:
    """A stage that asks whether it may begin a trajectory."""

    peer: bytes
    stage: int
    request_id: int
    env_steps: int


@dataclass(slots=True)
class _Want:
    """A rollout worker that waits for newer weights."""

    request_id: int
    version: int
    pinned: int
    answered: bool = False


class Service:
    """Owns the learner's ROUTER.

    Args:
        endpoint: Where to bind.
        epoch: Names this life of the learner.
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
        epoch: int,
        gate: Gate,
        shared: Shared,
        max_message_mb: int,
        keys: Keys | None = None,
        insecure: bool = False,
    ) -> None:
        self._lock_file: IO[str] | None = sockets.lock_endpoint(endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door = Door(keys, [CLIENTS, WORKERS], insecure)
        self._keys: dict[bytes, str] = {}
        """Of the peers that are known, if there are keys."""
        self._authenticator = answer_handshakes(self._context, self._door)
        try:
            self._socket = sockets.router(
                self._context,
                endpoint,
                max_message_mb=max_message_mb,
                heartbeat_s=_HEARTBEAT_S,
                door=self._door,
            )
            self._send_to = sockets.sender(self._socket)
        except Exception:
            self._free()
            raise
        self._max_frame = max_message_mb << 20
        self.endpoint = sockets.bound_endpoint(self._socket)
        self._epoch = epoch
        self._gate = gate
        self._shared = shared
        self._questions: dict[tuple[bytes, int], _Question] = {}
        self._wants: dict[bytes, _Want] = {}
        self._told: set[bytes] = set()  # who knows that the training has ended
        self._owed: dict[bytes, Sender] = {}
        self._early: dict[bytes, _Hello] = {}
        """HELLOs that came before the books were open."""
        self._refused = 0
        self._probed = time.monotonic()
        self._handlers: dict[int, Callable[[bytes, Header, list[Any]], None]] = {
            Op.HELLO: self._hello,
            Op.TRAJECTORY: self._trajectory,
            Op.BEGIN: self._begin,
            Op.WANT: self._want,
            Op.EVALUATE: self._evaluate,
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
                    self._welcome_the_early()
                    self._receive()
                    self._open_gate()
                    self._acknowledge()
                    self._hand_out_weights()
                    self._probe()
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
            key = ""
            if self._door.keys is not None and header.op in _WHO_MAY:
                key = key_of(self._door, identity)
                if not self._door.lets_in(key, _WHO_MAY[Op(header.op)]):
                    raise DecodeError("the key of this peer does not allow that, or has been revoked")
            handler = self._handlers.get(header.op)
            if handler is None:
                raise DecodeError(f"op {header.op} has no meaning to a learner")
            if header.frames != len(frames) - 1:
                raise DecodeError(f"{len(frames) - 1} buffers came, the header says {header.frames}")
            handler(peer, header, frames)
            if key and (
                peer in self._wants or peer in self._early or peer in self._shared.ledger.senders
            ):
                self._keys[peer] = key
        except (DecodeError, ConfigError) as error:
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:  # the 1st, 2nd, 4th …: nobody floods the log
                log.warning("a message to the learner is refused (number %d): %s", self._refused, error)
            fields = {"code": "refused", "message": str(error)}
            error_header = Header(Op.ERROR, request_id=request_id_of(frames[0]))
            self._send(peer, [error_header.pack() + encode_meta(fields)])
        except Exception:
            # A defect that one message shows must not end the training.
            log.exception("a message to the learner could not be handled")

    def _send(self, peer: bytes, frames: list[Any]) -> bool:
        """Send without waiting for the peer; whether that was possible."""
        try:
            self._send_to(peer, frames)
        except zmq.Again:
            return False  # it does not read; it asks again when it does
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(peer)
            return False
        return True

    def _turn_out(self) -> None:
        """Forget the peers whose keys are let in no longer, and tell them."""
        for peer in [peer for peer, key in self._keys.items() if not self._door.lets_in(key)]:
            fields = {"code": "revoked", "message": "the key of this peer has been revoked"}
            self._send(peer, [Header(Op.ERROR).pack() + encode_meta(fields)])
            self._forget(peer)

    def _forget(self, peer: bytes) -> None:
        self._keys.pop(peer, None)
        self._shared.ledger.lost(peer)
        self._wants.pop(peer, None)
        self._owed.pop(peer, None)
        self._early.pop(peer, None)
        for key in [key for key in self._questions if key[0] == peer]:
            del self._questions[key]

    # -- Env workers

    def _hello(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        fields = decode_meta(frames[0][HEADER_SIZE:], MAX_META)
        name = fields.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
            raise DecodeError("HELLO: name must be a str of 1 to 200 printable characters")
        incarnation = _number("HELLO: incarnation", fields.get("incarnation"))
        first = _number("HELLO: first", fields.get("first"), least=1)
        self._check_spaces(name, Spaces.of_fields(fields.get("spaces")))
        hello = _Hello(header.request_id, name, incarnation, first)
        if self._shared.is_open:
            self._welcome(peer, hello)
        elif len(self._early) < _MOST_NAMES:
            self._early[peer] = hello
            self._send(peer, [Header(Op.PROBE).pack()])  # a word at least: somebody is here

    def _welcome(self, peer: bytes, hello: _Hello) -> None:
        ledger, name = self._shared.ledger, hello.name
        now = time.monotonic()
        sender, replaced = ledger.hello(peer, name, hello.incarnation, hello.first, now)
        if replaced is not None:
            self._keys.pop(replaced, None)
            self._refuse(replaced, f"a new process took over the name {name!r}")
        if sender is None:
            self._refuse(peer, f"a newer process has the name {name!r}")
            return
        if sender.received > sender.acknowledged:
            self._owed[peer] = sender  # what was owed to its earlier socket is owed to this one
        marks = {
            "acknowledged": sender.acknowledged,
            "received": sender.received,
            "full": self._shared.is_full(),
            "max_frame": self._max_frame,
        }
        welcome = Header(Op.WELCOME, request_id=hello.request_id)
        self._send(peer, [welcome.pack() + encode_meta(marks)])

    def _welcome_the_early(self) -> None:
        if self._early and self._shared.is_open:
            early, self._early = self._early, {}
            for peer, hello in early.items():
                self._welcome(peer, hello)

    def _check_spaces(self, name: str, spaces: Spaces) -> None:
        shared = self._shared
        if shared.spaces is None:
            shared.spaces = spaces
            shared.lock.notify_all()
        elif difference := shared.spaces.difference(spaces):
            raise DecodeError(f"{name} has a simulator unlike that of the others: {difference}")

    def _refuse(self, peer: bytes, why: str) -> None:
        fields = {"code": "replaced", "message": why}
        self._send(peer, [Header(Op.ERROR).pack() + encode_meta(fields)])

    def _sender(self, peer: bytes) -> Sender | None:
        sender = self._shared.ledger.senders.get(peer)
        if sender is None and peer not in self._early:
            self._send(peer, [Header(Op.UNKNOWN).pack()])
        return sender

    def _trajectory(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        sender = self._sender(peer)
        shared = self._shared
        if sender is None or shared.is_full(_REFUSED_FROM):
            return
        now = time.monotonic()
        if shared.ledger.arrived(sender, header.request_id, header.stage, header.rows, now):
            size = sum(len(frame) for frame in frames)
            shared.inbox.append(Arrival(sender, header.request_id, header.rows, frames, size))
            shared.inbox_bytes += size
            shared.lock.notify_all()
        self._owed[peer] = sender

    def _begin(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        sender = self._sender(peer)
        if sender is None:
            return
        if self._shared.ledger.asked(sender, header.stage, header.request_id, time.monotonic()):
            question = _Question(peer, header.stage, header.request_id, header.rows)
            self._questions[peer, header.stage] = question
        else:
            self._go(peer, header.stage, header.request_id)

    def _go(self, peer: bytes, stage: int, request_id: int) -> None:
        self._send(peer, [Header(Op.GO, request_id=request_id, stage=stage).pack()])

    def _bye(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        self._forget(peer)

    def _open_gate(self) -> None:
        """Answer the questions that can be answered with yes, in the order in which they came."""
        now = time.monotonic()
        shared, ledger = self._shared, self._shared.ledger
        if shared.closed:
            self._say_that_it_ended()
            return
        held: Counter[str] = Counter()
        active = 0
        if self._questions and self._gate.max_env_share is not None:
            held, active = ledger.held(now), ledger.active(now, (peer for peer, _ in self._questions))
        for key, question in list(self._questions.items()):
            if key not in self._questions:
                continue  # its sender turned out to be gone when another stage was answered
            sender = ledger.senders.get(question.peer)
            if sender is not None and not self._gate.within_share(sender.name, held, active):
                continue  # those behind it hold less
            if not self._gate.may_begin(shared.progress(now), question.env_steps):
                return
            del self._questions[key]
            if sender is not None:
                held[sender.name] += question.env_steps
                stage, request_id = question.stage, question.request_id
                ledger.begun(sender, stage, request_id, question.env_steps, shared.versions, now)
                self._go(question.peer, stage, request_id)

    def _say_that_it_ended(self) -> None:
        """Tell every sender once: none must wait for a leave that will not come."""
        fields = {"code": "ended", "message": "the training has come to its end"}
        for peer in [peer for peer in self._shared.ledger.senders if peer not in self._told]:
            self._told.add(peer)
            self._send(peer, [Header(Op.ERROR).pack() + encode_meta(fields)])

    def _acknowledge(self) -> None:
        if self._shared.is_full():
            return
        for peer, sender in list(self._owed.items()):  # a peer that is gone leaves it
            sender.acknowledged = sender.received
            self._send(peer, [Header(Op.ACK, request_id=sender.received).pack()])
        self._owed.clear()

    def _probe(self) -> None:
        """Look whether the senders are still connected: what a lost one had under way counts no more."""
        now = time.monotonic()
        if now < self._probed + _PROBE_EVERY:
            return
        self._probed = now
        for peer in list(self._shared.ledger.senders):
            self._send(peer, [Header(Op.PROBE).pack()])

    # -- Rollout workers

    def _want(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        fields = decode_meta(frames[0][HEADER_SIZE:], MAX_REQUEST)
        known = self._wants.get(peer)
        if known is not None and known.request_id == header.request_id and known.answered:
            return  # the answer is on its way
        here = fields.get("epoch") == self._epoch
        numbers = {
            key: _number(f"WANT: {key}", fields.get(key, 0), bits=bits) for key, bits in _NUMBERS.items()
        }
        if known is None and len(self._wants) >= _MOST_NAMES:
            return  # it asks again; those that are gone are forgotten with the next version
        version, pinned = (numbers["version"], numbers["pinned"]) if here else (-1, -1)
        self._wants[peer] = _Want(header.request_id, version, pinned)
        name = str(fields.get("name"))[:200]
        if name in self._shared.workers or len(self._shared.workers) < _MOST_NAMES:
            self._shared.workers[name] = numbers

    def _hand_out_weights(self) -> None:
        newest, pinned = self._shared.newest, self._shared.pinned
        for peer, want in list(self._wants.items()):
            if want.answered:
                continue
            if pinned is not None and want.pinned != pinned.version:
                want.answered = self._send(peer, pinned.message(want.request_id, pinned=True))
            elif newest is not None and want.version < newest.version:
                want.answered = self._send(peer, newest.message(want.request_id, pinned=False))

    # -- Eval workers

    def _evaluate(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        fields = decode_meta(frames[0][HEADER_SIZE:], MAX_REQUEST)
        name = str(fields.get("name"))[:200]
        shared = self._shared
        # An earlier life of the learner numbered its evaluations from 1, too.
        done = header.request_id if fields.get("epoch") == self._epoch else 0
        order = shared.order
        if order is not None and done == order.number and shared.finished.get(name) != done:
            if len(shared.finished) < _MOST_NAMES:
                shared.finished[name] = done
            shared.lock.notify_all()
        if order is not None and done < order.number and shared.finished.get(name) != order.number:
            answer = Header(Op.EVALUATE, request_id=order.number, policy_version=order.version)
            fields = {"env_steps": order.env_steps, "epoch": self._epoch}
            self._send(peer, [answer.pack() + encode_meta(fields)])
        else:
            self._send(peer, [Header(Op.WELCOME).pack() + encode_meta({})])


def _number(what: str, value: Any, least: int = 0, bits: int = 63) -> int:
    if type(value) is not int or not least <= value < 2**bits:
        raise DecodeError(f"{what} must be a number of at least {least} that has {bits} bits at most")
    return value
