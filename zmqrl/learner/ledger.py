"""Which trajectories have arrived, from whom, and who has one under way.

The rules:

1.  A sender is known by its name and incarnation. It numbers its trajectories from 1, and keeps each one
    until it is acknowledged.
2.  Only the number that follows the last one is new. A lower one is a duplicate: it was sent again
    because its acknowledgement was late or lost. A higher one is ignored: the one before it will come.
3.  A sender that says that its first trajectory in hand has a number above the one that should follow
    had those between acknowledged in a life of the learner that is gone, after its last checkpoint: they
    are *rolled back*.
4.  A checkpoint holds what has been *used*: what had only arrived is rolled back too.
5.  A trajectory is under way from the leave to begin it until its sender's stage delivers, asks another
    question, or is lost. A question that was answered with leave and is repeated, because the answer was
    lost or late, changes nothing. A trajectory that takes far longer than the others no longer holds
    anybody up.
6.  A share is that of an env worker's name, over its restarts and all of its pipeline stages.
7.  Nobody's books are kept for ever: of senders that are gone only the latest few thousand are known.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from zmqrl.learner.shares import Shares

_STRAGGLES_AFTER = 3.0
"""Times the longest recent duration of a trajectory, plus …"""
_STRAGGLES_LATEST = 5.0
"""… so many seconds, after which one no longer counts as under way."""

_MOST_KNOWN = 10_000
"""Senders that are remembered, those that are gone included."""


@dataclass(slots=True)
class UnderWay:
    """A trajectory that a stage was allowed to begin."""

    since: float
    env_steps: int
    version: int
    """Of the weights that were the newest ones."""


@dataclass(frozen=True, slots=True)
class Afoot:
    """All trajectories that are under way."""

    count: int = 0
    env_steps: int = 0
    oldest_version: int | None = None


@dataclass(slots=True, eq=False)
class Sender:
    """One process that sends trajectories."""

    name: str
    incarnation: int
    peer: bytes
    received: int = 0
    """The last number that has arrived."""
    acknowledged: int = 0
    used: int = 0
    """The last number that the algorithm has, or that was dropped."""
    heard: float = 0.0
    under_way: dict[int, UnderWay] = field(default_factory=dict)
    """By pipeline stage."""
    granted: dict[int, int] = field(default_factory=dict)
    """By pipeline stage: the last question that was answered with leave."""

    @property
    def key(self) -> str:
        """Names this process in a checkpoint."""
        return f"{self.name}/{self.incarnation}"


class Ledger:
    """The books. No sockets, and no clock of its own; the rules stand at the head of this file."""

    def __init__(self) -> None:
        self.received = 0
        """Trajectories that have arrived, each counted once."""
        self.env_steps = 0
        """Their env steps: as their senders say, until they are read."""
        self.shares = Shares()
        self.duplicates = 0
        self.rolled_back = 0
        self.senders: dict[bytes, Sender] = {}
        """By peer."""
        self._known: dict[str, Sender] = {}
        self._newest: dict[str, Sender] = {}
        self._marks: dict[str, int] = {}
        self._durations: deque[float] = deque(maxlen=50)

    def hello(
        self, peer: bytes, name: str, incarnation: int, first: int, now: float
    ) -> tuple[Sender | None, bytes | None]:
        """A sender introduces itself, perhaps again.

        Args:
            peer: Its socket's identity.
            name: Its name.
            incarnation: Its process: a later one has a larger number.
            first: The number of the first trajectory that it still has in hand, or makes next.
            now: Seconds.

        Returns:
            The sender, or None if a newer process has its name; and the peer that it replaces, if any.
        """
        newest = self._newest.get(name)
        if newest is not None and newest.incarnation > incarnation:
            return None, None
        replaced = None
        if newest is not None and newest.incarnation < incarnation:
            replaced = newest.peer
            self.lost(newest.peer)
        sender = self._known.get(f"{name}/{incarnation}")
        if sender is None:
            sender = Sender(name, incarnation, peer)
            sender.received = sender.used = sender.acknowledged = self._marks.get(sender.key, 0)
            self._known[sender.key] = sender
            self._forget_the_oldest()
        if sender.peer != peer:
            self.senders.pop(sender.peer, None)
            sender.peer = peer
        if first > sender.received + 1:
            self.rolled_back += first - 1 - sender.received
            sender.received = sender.used = sender.acknowledged = first - 1
        sender.heard = now
        self.senders[peer] = self._newest[name] = sender
        self.shares.meet(name)
        return sender, replaced

    def arrived(self, sender: Sender, number: int, stage: int, env_steps: int, now: float) -> bool:
        """A trajectory is here.

        Returns:
            Whether it is new.
        """
        sender.heard = now
        if number != sender.received + 1:
            self.duplicates += number <= sender.received
            return False
        begun = sender.under_way.pop(stage, None)
        if begun is not None:
            self._durations.append(now - begun.since)
        sender.received = number
        self.received += 1
        self.env_steps += env_steps
        self.shares.add(sender.name, env_steps, len(self.senders))
        return True

    def corrected(self, sender: Sender, said: int, found: int) -> None:
        """A trajectory has been read: its env steps, as its sender said and as they are."""
        self.env_steps += found - said
        self.shares.correct(sender.name, said, found)

    def asked(self, sender: Sender, stage: int, question: int, now: float) -> bool:
        """A stage asks whether it may begin a trajectory.

        Returns:
            Whether the question is new; if not, its answer was lost or is late.
        """
        sender.heard = now
        if sender.granted.get(stage) == question:
            return False
        sender.under_way.pop(stage, None)  # it would not ask if one were under way
        return True

    def begun(
        self, sender: Sender, stage: int, question: int, env_steps: int, version: int, now: float
    ) -> None:
        """A stage was allowed to begin a trajectory, while `version` was the newest one."""
        sender.under_way[stage] = UnderWay(now, env_steps, version)
        sender.granted[stage] = question

    def lost(self, peer: bytes) -> None:
        """A sender is gone, or has been replaced: nothing of it is under way."""
        sender = self.senders.pop(peer, None)
        if sender is not None:
            sender.under_way.clear()
            if self._newest.get(sender.name) is sender:
                del self._newest[sender.name]

    def under_way(self, now: float) -> Afoot:
        """What is under way, without stragglers."""
        afoot = [begun for _, begun in self._afoot(now)]
        oldest = min((begun.version for begun in afoot), default=None)
        return Afoot(len(afoot), sum(begun.env_steps for begun in afoot), oldest)

    def held(self, now: float) -> Counter[str]:
        """The recent env steps of each env worker, and those that it has under way."""
        held = self.shares.recent.copy()
        for sender, begun in self._afoot(now):
            held[sender.name] += begun.env_steps
        return held

    def active(self, now: float, asking: Iterable[bytes]) -> int:
        """How many env workers take part: who asked or delivered lately, or is among those `asking`."""
        since = now - self._patience()
        waiting = set(asking)
        return sum(sender.heard > since or peer in waiting for peer, sender in self.senders.items())

    def _afoot(self, now: float) -> list[tuple[Sender, UnderWay]]:
        since = now - self._patience()
        return [
            (sender, begun)
            for sender in self.senders.values()
            for begun in sender.under_way.values()
            if begun.since > since
        ]

    def _patience(self) -> float:
        """Seconds after which a trajectory no longer counts as under way."""
        return _STRAGGLES_AFTER * max(self._durations, default=20.0) + _STRAGGLES_LATEST

    def _forget_the_oldest(self) -> None:
        if len(self._known) > _MOST_KNOWN:
            gone = [s for s in self._known.values() if self.senders.get(s.peer) is not s]
            for sender in sorted(gone, key=lambda sender: sender.heard)[: len(gone) // 2]:
                self._marks.pop(sender.key, None)
                del self._known[sender.key]

    # -- What a checkpoint holds

    def marks(self) -> dict[str, int]:
        """The number of the last trajectory that was used, of every sender that is remembered."""
        marks = {**self._marks, **{key: sender.used for key, sender in self._known.items()}}
        return dict(list(marks.items())[-_MOST_KNOWN:])

    def restore(self, marks: dict[str, int], received: int, env_steps: int, rolled_back: int) -> None:
        """Go on from a checkpoint, before any sender has introduced itself."""
        self._marks = dict(marks)
        self.received, self.env_steps, self.rolled_back = received, env_steps, rolled_back
