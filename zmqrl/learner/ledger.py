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
5.  A trajectory is under way from the leave to begin it until its sender's stage delivers, asks again,
    or is lost. One that takes far longer than the others no longer holds anybody up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_STRAGGLES_AFTER = 3.0
"""Times the longest recent duration of a trajectory, plus …"""
_STRAGGLES_LATEST = 5.0
"""… so many seconds, after which one no longer counts as under way."""


@dataclass(slots=True)
class UnderWay:
    """A trajectory that a stage was allowed to begin."""

    since: float
    env_steps: int


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
        """Their env steps, as their senders say."""
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
        if sender.peer != peer:
            self.senders.pop(sender.peer, None)
            sender.peer = peer
        if first > sender.received + 1:
            self.rolled_back += first - 1 - sender.received
            sender.received = sender.used = sender.acknowledged = first - 1
        sender.heard = now
        self.senders[peer] = self._newest[name] = sender
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
        return True

    def begun(self, sender: Sender, stage: int, env_steps: int, now: float) -> None:
        """A stage was allowed to begin a trajectory."""
        sender.under_way[stage] = UnderWay(now, env_steps)

    def lost(self, peer: bytes) -> None:
        """A sender is gone, or has been replaced: nothing of it is under way."""
        sender = self.senders.pop(peer, None)
        if sender is not None:
            sender.under_way.clear()
            if self._newest.get(sender.name) is sender:
                del self._newest[sender.name]

    def under_way(self, now: float) -> tuple[int, int]:
        """Trajectories that are under way, and their env steps; without stragglers."""
        limit = _STRAGGLES_AFTER * max(self._durations, default=20.0) + _STRAGGLES_LATEST
        count = steps = 0
        for sender in self.senders.values():
            for begun in sender.under_way.values():
                if now < begun.since + limit:
                    count += 1
                    steps += begun.env_steps
        return count, steps

    # -- What a checkpoint holds

    def marks(self) -> dict[str, int]:
        """The number of the last trajectory that was used, of every sender ever."""
        return {**self._marks, **{key: sender.used for key, sender in self._known.items()}}

    def restore(self, marks: dict[str, int], received: int, env_steps: int, rolled_back: int) -> None:
        """Go on from a checkpoint, before any sender has introduced itself."""
        self._marks = dict(marks)
        self.received, self.env_steps, self.rolled_back = received, env_steps, rolled_back
