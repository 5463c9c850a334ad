"""What the learner's two threads share."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from zmqrl.learner.gate import Progress
from zmqrl.learner.ledger import Ledger, Sender
from zmqrl.learner.snapshot import Snapshot
from zmqrl.spaces import Spaces

_MOST_WAITING = 64
"""Trajectories that wait for the learner; those beyond are not acknowledged until it has caught up."""

_MOST_WAITING_BYTES = 512 << 20


@dataclass(slots=True)
class Arrival:
    """A trajectory that waits for the learner, as it came."""

    sender: Sender
    number: int
    env_steps: int
    """As the sender says."""
    frames: list[Any]
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Order:
    """An evaluation that the eval workers are to do."""

    number: int
    version: int
    env_steps: int


@dataclass(slots=True)
class Shared:
    """What the service and the learner both touch, under `lock`."""

    lock: threading.Condition = field(default_factory=threading.Condition)
    epoch: int = field(default_factory=lambda: int.from_bytes(os.urandom(7), "little"))
    """Names this life of the learner."""
    ledger: Ledger = field(default_factory=Ledger)
    inbox: deque[Arrival] = field(default_factory=deque)
    inbox_bytes: int = 0
    newest: Snapshot | None = None
    pinned: Snapshot | None = None
    order: Order | None = None
    finished: dict[str, int] = field(default_factory=dict)
    """By eval worker: the number of the last evaluation that it has done."""
    workers: dict[str, dict[str, int]] = field(default_factory=dict)
    """By rollout worker: the version that it serves, how often it loaded weights, how often in vain."""
    spaces: Spaces | None = None
    updates: int = 0
    versions: int = 0
    """Publications after the first one, of all lives of the learner."""
    dropped: int = 0
    """Trajectories that have arrived but are stale or do not fit."""
    is_open: bool = False
    """Whether the books are open; before, a checkpoint may still be loaded into them."""
    hungry: bool = True
    closed: bool = False
    """Whether no trajectory may begin any more."""
    failure: BaseException | None = None

    def progress(self, now: float) -> Progress:
        """How far both sides are."""
        afoot = self.ledger.under_way(now)
        return Progress(
            updates=self.updates,
            env_steps=self.ledger.env_steps,
            trajectories=self.ledger.received - self.dropped,
            versions=self.versions,
            under_way=afoot.count,
            env_steps_under_way=afoot.env_steps,
            oldest_under_way=afoot.oldest_version,
            waiting=len(self.inbox),
            hungry=self.hungry,
        )

    def is_full(self, times: int = 1) -> bool:
        """Whether so much waits for the learner that senders have to wait."""
        count, size = len(self.inbox), self.inbox_bytes
        return count >= times * _MOST_WAITING or size >= times * _MOST_WAITING_BYTES
