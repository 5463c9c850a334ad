"""Who gets which requests: what all schedules share, and the shared queue of decoupled mode.

The fixed ranks of normal mode are in `ranks`, the homes at workers that keep state in `sticky`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from zmqrl.broker.records import Client, Request, Worker

_AUTO_WAIT = 0.1
"""The share of a batch's duration for which a partial one is held open: clients whose replies came
together ask again together, within a moment; the first of them should not go alone."""

_MOST_WAIT = 0.1
"""Seconds, however long a batch took: one of them may just have been stuck."""

_LEAST_WAIT = 0.0002
"""Seconds: a wait that would be shorter is none. The broker cannot keep it, and would delay by as much
again a client whose companions are not about to ask."""

_SHARE = 0.1
"""What the latest batch counts in the mean duration of a batch."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch."""

    queue_size: int = 0
    """Shards; 0 means ceil(clients / workers) of a policy, counted from those connected now."""
    max_rows: int = 0
    """Rows; 0 means no limit."""
    max_wait: float | None = 0.0
    """Seconds that a partial batch may be held open, from its oldest request's arrival; None for a share
    of what batches take."""
    max_attempts: int = 3
    max_joined: int = 256 << 20
    """Bytes of the first frames, which travel as one: a larger frame would cut the worker off."""


@dataclass(slots=True)
class Peers:
    """Who takes part in a policy: the workers that serve it, and the clients that ask for it."""

    clients: dict[bytes, Client] = field(default_factory=dict)
    workers: dict[bytes, Worker] = field(default_factory=dict)
    changes: int = 0
    """Counts every arrival, departure and quarantine."""
    _live: list[Worker] = field(default_factory=list)
    _live_at: int = -1

    def add_client(self, client: Client) -> None:
        """A client has come."""
        self.clients[client.peer] = client
        self.changes += 1

    def remove_client(self, client: Client) -> None:
        """A client has gone, if it ever was here."""
        if self.clients.pop(client.peer, None) is not None:
            self.changes += 1

    def add_worker(self, worker: Worker) -> None:
        """A worker has come."""
        self.workers[worker.peer] = worker
        self.changes += 1

    def remove_worker(self, worker: Worker) -> None:
        """A worker has gone."""
        del self.workers[worker.peer]
        self.changes += 1

    def live_workers(self) -> list[Worker]:
        """The workers that can be given work, now or when their batch is done."""
        if self._live_at != self.changes:
            self._live = [worker for worker in self.workers.values() if not worker.quarantined]
            self._live_at = self.changes
        return self._live


class Schedule(Protocol):
    """Holds the waiting requests of a policy, and makes the batch for a worker of it that is idle."""

    def __len__(self) -> int:
        """The number of waiting requests."""

    def add(self, request: Request) -> None:
        """Take in a new request."""

    def put_back(self, requests: list[Request]) -> None:
        """Take requests back, oldest first, ahead of all others."""

    def remove(self, request: Request) -> None:
        """Forget a waiting request that needs no answer any more."""

    def take(self, worker: Worker, now: float) -> list[Request]:
        """The batch that `worker` should run now; empty to let it wait."""

    def took(self, seconds: float) -> None:
        """A batch has taken so long."""

    def is_long(self, worker: Worker | None = None) -> bool:
        """Whether so much waits that `worker` may take a batch while it is still in one.

        Without a worker: whether any might.
        """

    def wake_at(self, now: float) -> float | None:
        """When to look again although nothing has arrived; None if there is no such time.

        One that is past was looked at already.
        """

    def forget(self, client: Client, left: bool) -> None:
        """A client is gone; unless it `left`, it may come back under its name."""


class Queue:
    """Waiting requests, oldest first; any of them can leave at once."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()
        self.rows = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.slot in self._requests

    def oldest(self) -> Request | None:
        """The request at the head."""
        return next(iter(self._requests.values()), None)

    def all(self) -> Iterable[Request]:
        """All requests, oldest first."""
        return self._requests.values()

    def add(self, request: Request) -> None:
        """Take in a new request."""
        self._requests[request.slot] = request
        self.rows += request.rows

    def put_back(self, requests: list[Request]) -> None:
        """Take requests back, oldest first, ahead of all others."""
        for request in reversed(requests):
            self.add(request)
            self._requests.move_to_end(request.slot, last=False)

    def merge(self, requests: list[Request]) -> None:
        """Take in requests that have waited elsewhere."""
        for request in requests:
            self.add(request)
        self._requests = OrderedDict(sorted(self._requests.items()))  # slots are given in turn

    def remove(self, request: Request) -> None:
        """Let a request go."""
        del self._requests[request.slot]
        self.rows -= request.rows


class Patience:
    """How long a partial batch is held open.

    Args:
        limits: Of a batch.
    """

    def __init__(self, limits: Limits) -> None:
        self.wait = limits.max_wait or 0.0
        """Seconds from the arrival of its oldest request."""
        self._is_automatic = limits.max_wait is None
        self._batch_s = 0.0  # that a batch takes, in the mean

    def took(self, seconds: float) -> None:
        """Bring the mean duration of a batch up to date."""
        self._batch_s += _SHARE * (seconds - self._batch_s)
        if self._is_automatic:
            wait = min(_AUTO_WAIT * self._batch_s, _MOST_WAIT)
            self.wait = wait if wait >= _LEAST_WAIT else 0.0


def most_shards(peers: Peers, limits: Limits, requests: int) -> int:
    """The most shards in a batch, if `requests` at most are asked at once."""
    if limits.queue_size:
        return limits.queue_size
    return max(1, -(-requests // max(1, len(peers.live_workers()))))


def fill(
    requests: Iterable[Request],
    worker: Worker,
    live: list[Worker],
    most: int,
    limits: Limits,
    now: float,
) -> list[Request]:
    """The first of `requests` that one batch of `worker` can hold, at most `most`."""
    batch: list[Request] = []
    rows = joined = 0
    most_rows = limits.max_rows or sys.maxsize
    for request in requests:
        if now >= request.deadline:
            continue
        avoid, history = request.avoid, request.history
        if avoid and worker.name in avoid and any(w.name not in avoid for w in live):
            continue
        # The last attempt goes alone: a request that kills its worker takes nobody with it.
        last = bool(history) and len(history) + 1 >= limits.max_attempts
        rows += request.rows
        joined += len(request.message[0])
        full = len(batch) >= most or joined > limits.max_joined or rows > most_rows
        if batch and (last or full):
            break
        batch.append(request)
        if last:
            break
    return batch


class SharedQueue:
    """Decoupled mode, and named policies: whoever is idle takes the oldest requests, up to a cap.

    The cap is never a requirement: a batch does not wait for a request that has not come.

    Args:
        peers: Who asks for the policy, and who serves it.
        limits: Of a batch.
        several: Whether clients have several requests under way, as those for rewards: then the workers
            share what waits.
    """

    def __init__(self, peers: Peers, limits: Limits, several: bool = False) -> None:
        self._peers = peers
        self._limits = limits
        self._several = several
        self._queue = Queue()
        self._patience = Patience(limits)
        self.took = self._patience.took
        self._cap = 1
        self._cap_at = -1  # the count of changes for which it was worked out
        self.add = self._queue.add
        self.put_back = self._queue.put_back
        self.remove = self._queue.remove
        self.all = self._queue.all

    def __len__(self) -> int:
        return len(self._queue)

    def cap(self) -> int:
        """The most shards in a batch now."""
        peers = self._peers
        if self._limits.queue_size:
            return self._limits.queue_size
        if self._cap_at != peers.changes or self._several:
            requests = max(len(peers.clients), len(self._queue) if self._several else 0)
            self._cap = most_shards(peers, self._limits, requests)
            self._cap_at = peers.changes
        return self._cap

    def take(self, worker: Worker, now: float) -> list[Request]:
        """The oldest requests, unless a partial batch is still held open."""
        oldest = self._queue.oldest()
        if oldest is None or (self._patience.wait and self._is_held_open(oldest, now)):
            return []
        live = self._peers.live_workers()
        batch = fill(self._queue.all(), worker, live, self.cap(), self._limits, now)
        for request in batch:
            self._queue.remove(request)
        return batch

    def is_long(self, worker: Worker | None = None) -> bool:
        """A full batch: a smaller one would only have to be paid for sooner."""
        return len(self._queue) >= self.cap()

    def wake_at(self, now: float) -> float | None:
        """When the partial batch that is held open must leave."""
        oldest = self._queue.oldest()
        if oldest is None:
            return None
        wake = oldest.arrived + self._patience.wait
        return wake if wake > now else None

    def forget(self, client: Client, left: bool) -> None:
        """Of no matter here: nobody is bound to a worker."""

    def _is_held_open(self, oldest: Request, now: float) -> bool:
        if oldest.history or now >= oldest.arrived + self._patience.wait:
            return False
        most = self.cap()
        if self._limits.max_wait is None:
            most = min(most, len(self._peers.clients))  # once all are here there is nobody to wait for
        full = len(self._queue) >= most
        return not full and not 0 < self._limits.max_rows <= self._queue.rows
