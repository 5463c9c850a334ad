"""The learner's side towards env workers: they introduce themselves, and send trajectories."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from zmqrl.errors import DecodeError
from zmqrl.learner.ledger import Sender
from zmqrl.learner.peers import MOST_NAMES, Peers, number
from zmqrl.learner.questions import Questions
from zmqrl.learner.shared import Arrival, Shared
from zmqrl.spaces import Spaces
from zmqrl.transport.codec import MAX_META, decode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op

_PROBE_EVERY = 1.0

_REFUSED_FROM = 8
"""Times the inbox's bounds, from which on nothing is taken: what senders keep is sent again later."""


@dataclass(frozen=True, slots=True)
class _Hello:
    """What a sender says of itself, its spaces apart."""

    request_id: int
    name: str
    incarnation: int
    first: int
    """The number of the first trajectory that it still has in hand, or makes next."""


class EnvLeg:
    """Acts on the messages of env workers.

    Args:
        questions: Those that they ask before they begin a trajectory.
        shared: What the learner touches too.
        peers: The way to them.
        max_frame: Bytes of one frame of a trajectory.
    """

    def __init__(self, questions: Questions, shared: Shared, peers: Peers, max_frame: int) -> None:
        self._questions = questions
        self._shared = shared
        self._peers = peers
        self._max_frame = max_frame
        self._owed: dict[bytes, Sender] = {}
        self._early: dict[bytes, _Hello] = {}
        """HELLOs that came before the books were open."""
        self._probed = time.monotonic()

    def knows(self, peer: bytes) -> bool:
        """Whether it has introduced itself."""
        return peer in self._early or peer in self._shared.ledger.senders

    def forget(self, peer: bytes) -> None:
        """It is gone."""
        self._shared.ledger.lost(peer)
        self._owed.pop(peer, None)
        self._early.pop(peer, None)
        self._questions.forget(peer)

    # -- What they say

    def hello(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        """HELLO.

        Raises:
            DecodeError: It is not valid, or its simulator is unlike that of the others.
        """
        fields = decode_meta(frames[0][HEADER_SIZE:], MAX_META)
        name = fields.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
            raise DecodeError("HELLO: name must be a str of 1 to 200 printable characters")
        incarnation = number("HELLO: incarnation", fields.get("incarnation"))
        first = number("HELLO: first", fields.get("first"), least=1)
        self._check_spaces(name, Spaces.of_fields(fields.get("spaces")))
        hello = _Hello(header.request_id, name, incarnation, first)
        if self._shared.is_open:
            self._welcome(peer, hello)
        elif len(self._early) < MOST_NAMES:
            self._early[peer] = hello
            self._peers.say(peer, Header(Op.PROBE))  # a word at least: somebody is here

    def trajectory(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        """TRAJECTORY."""
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

    def begin(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        """BEGIN."""
        sender = self._sender(peer)
        if sender is not None:
            self._questions.ask(peer, sender, header)

    # -- What they are told when it is time

    def welcome_the_early(self) -> None:
        """Let in those that came before the books were open, if they are by now."""
        if self._early and self._shared.is_open:
            early, self._early = self._early, {}
            for peer, hello in early.items():
                self._welcome(peer, hello)

    def acknowledge(self) -> None:
        """Say what has arrived, unless too much waits for the learner."""
        if self._shared.is_full():
            return
        for peer, sender in list(self._owed.items()):  # a peer that is gone leaves it
            sender.acknowledged = sender.received
            self._peers.say(peer, Header(Op.ACK, request_id=sender.received))
        self._owed.clear()

    def probe(self) -> None:
        """Look whether the senders are still connected: what a lost one had under way counts no more."""
        now = time.monotonic()
        if now < self._probed + _PROBE_EVERY:
            return
        self._probed = now
        for peer in list(self._shared.ledger.senders):
            self._peers.say(peer, Header(Op.PROBE))

    def _welcome(self, peer: bytes, hello: _Hello) -> None:
        ledger, name = self._shared.ledger, hello.name
        now = time.monotonic()
        sender, replaced = ledger.hello(peer, name, hello.incarnation, hello.first, now)
        if replaced is not None:
            self._peers.forget(replaced)
            self._peers.refuse(replaced, "replaced", f"a new process took over the name {name!r}")
        if sender is None:
            self._peers.refuse(peer, "replaced", f"a newer process has the name {name!r}")
            return
        if sender.received > sender.acknowledged:
            self._owed[peer] = sender  # what was owed to its earlier socket is owed to this one
        marks = {
            "acknowledged": sender.acknowledged,
            "received": sender.received,
            "full": self._shared.is_full(),
            "max_frame": self._max_frame,
        }
        self._peers.say(peer, Header(Op.WELCOME, request_id=hello.request_id), marks)

    def _check_spaces(self, name: str, spaces: Spaces) -> None:
        shared = self._shared
        if shared.spaces is None:
            shared.spaces = spaces
            shared.lock.notify_all()
        elif difference := shared.spaces.difference(spaces):
            raise DecodeError(f"{name} has a simulator unlike that of the others: {difference}")

    def _sender(self, peer: bytes) -> Sender | None:
        sender = self._shared.ledger.senders.get(peer)
        if sender is None and peer not in self._early:
            self._peers.say(peer, Header(Op.UNKNOWN))
        return sender
