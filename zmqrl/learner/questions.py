"""The stages of env workers that ask whether they may begin a trajectory, and when they are answered."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from zmqrl.learner.gate import Gate
from zmqrl.learner.ledger import Sender
from zmqrl.learner.peers import Peers
from zmqrl.learner.shared import Shared
from zmqrl.transport.header import Header, Op


@dataclass(slots=True)
class _Question:
    """A stage that asks whether it may begin a trajectory."""

    peer: bytes
    stage: int
    request_id: int
    env_steps: int


class Questions:
    """Those that are open.

    Args:
        gate: When trajectories may begin.
        shared: What the learner touches too.
        peers: The way to those that ask.
    """

    def __init__(self, gate: Gate, shared: Shared, peers: Peers) -> None:
        self._gate = gate
        self._shared = shared
        self._peers = peers
        self._open: dict[tuple[bytes, int], _Question] = {}
        self._told: set[bytes] = set()  # who knows that the training has ended

    def ask(self, peer: bytes, sender: Sender, header: Header) -> None:
        """A stage asks, perhaps again."""
        if self._shared.ledger.asked(sender, header.stage, header.request_id, time.monotonic()):
            question = _Question(peer, header.stage, header.request_id, header.rows)
            self._open[peer, header.stage] = question
        else:
            self._go(peer, header.stage, header.request_id)

    def forget(self, peer: bytes) -> None:
        """It is gone."""
        for key in [key for key in self._open if key[0] == peer]:
            del self._open[key]

    def answer(self) -> None:
        """Answer those that can be answered with yes, in the order in which they came."""
        now = time.monotonic()
        shared, ledger = self._shared, self._shared.ledger
        if shared.closed:
            self._say_that_it_ended()
            return
        held: Counter[str] = Counter()
        active = 0
        if self._open and self._gate.max_env_share is not None:
            held, active = ledger.held(now), ledger.active(now, (peer for peer, _ in self._open))
        for key, question in list(self._open.items()):
            if key not in self._open:
                continue  # its sender turned out to be gone when another stage was answered
            sender = ledger.senders.get(question.peer)
            if sender is not None and not self._gate.within_share(sender.name, held, active):
                continue  # those behind it hold less
            if not self._gate.may_begin(shared.progress(now), question.env_steps):
                return
            del self._open[key]
            if sender is not None:
                held[sender.name] += question.env_steps
                stage, request_id = question.stage, question.request_id
                ledger.begun(sender, stage, request_id, question.env_steps, shared.versions, now)
                self._go(question.peer, stage, request_id)

    def _go(self, peer: bytes, stage: int, request_id: int) -> None:
        self._peers.say(peer, Header(Op.GO, request_id=request_id, stage=stage))

    def _say_that_it_ended(self) -> None:
        """Tell every sender once: none must wait for a leave that will not come."""
        for peer in [peer for peer in self._shared.ledger.senders if peer not in self._told]:
            self._told.add(peer)
            self._peers.refuse(peer, "ended", "the training has come to its end")
