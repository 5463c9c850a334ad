"""Who gets which requests: the shared queue of decoupled mode, the fixed ranks of normal mode."""

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

    def is_long(self) -> bool:
        """Whether so much waits that a worker may take a batch while it is still in one."""

    def wake_at(self) -> float | None:
        """When to look again although nothing has arrived; None if there is no such time."""


class _Queue:
    """Waiting requests, oldest first; any of them can leave at once."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()
        self.rows = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.slot in self._requests

    def oldest(self) -> Request | None:
        return next(iter(self._requests.values()), None)

    def all(self) -> Iterable[Request]:
        return self._requests.values()

    def add(self, request: Request) -> None:
        self._requests[request.slot] = request
        self.rows += request.rows

    def put_back(self, requests: list[Request]) -> None:
        for request in reversed(requests):
            self.add(request)
            self._requests.move_to_end(request.slot, last=False)

    def remove(self, request: Request) -> None:
        del self._requests[request.slot]
        self.rows -= request.rows


def _fill(
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
        self._queue = _Queue()
        self._batch_s = 0.0  # that a batch takes, in the mean
        self._max_wait = limits.max_wait or 0.0  # s that a partial batch is held open
        self._cap = 1
        self._cap_at = -1  # the count of changes for which it was worked out
        self.add = self._queue.add
        self.put_back = self._queue.put_back
        self.remove = self._queue.remove

    def __len__(self) -> int:
        return len(self._queue)

    def cap(self) -> int:
        """The most shards in a batch now."""
        peers = self._peers
        if self._limits.queue_size:
            return self._limits.queue_size
        if self._cap_at != peers.changes or self._several:
            requests = max(len(peers.clients), len(self._queue) if self._several else 0)
            self._cap = max(1, -(-requests // max(1, len(peers.live_workers()))))
            self._cap_at = peers.changes
        return self._cap

    def take(self, worker: Worker, now: float) -> list[Request]:
        """The oldest requests, unless a partial batch is still held open."""
        oldest = self._queue.oldest()
        if oldest is None or (self._max_wait and self._is_held_open(oldest, now)):
            return []
        live = self._peers.live_workers()
        batch = _fill(self._queue.all(), worker, live, self.cap(), self._limits, now)
        for request in batch:
            self._queue.remove(request)
        return batch

    def took(self, seconds: float) -> None:
        """Bring the mean duration of a batch up to date."""
        self._batch_s += _SHARE * (seconds - self._batch_s)
        if self._limits.max_wait is None:
            wait = min(_AUTO_WAIT * self._batch_s, _MOST_WAIT)
            self._max_wait = wait if wait >= _LEAST_WAIT else 0.0

    def is_long(self) -> bool:
        """A full batch: a smaller one would only have to be paid for sooner."""
        return len(self._queue) >= self.cap()

    def wake_at(self) -> float | None:
        """When the partial batch that is held open must leave."""
        oldest = self._queue.oldest()
        return None if oldest is None else oldest.arrived + self._max_wait

    def _is_held_open(self, oldest: Request, now: float) -> bool:
        if oldest.history or now >= oldest.arrived + self._max_wait:
            return False
        most = self.cap()
        if self._limits.max_wait is None:
            most = min(most, len(self._peers.clients))  # once all are here there is nobody to wait for
        full = len(self._queue) >= most
        return not full and not 0 < self._limits.max_rows <= self._queue.rows


class FixedRanks:
    """Normal mode: env rank e of E belongs to rollout rank e * R // E, which waits for all its envs.

    The wait is for the *live* envs of the same mode and pipeline stage, by their latest request: one
    that says goodbye or is lost is no longer waited for, and the envs of a lost rollout worker move to
    the live ones.
    """

    def __init__(self, peers: Peers, limits: Limits) -> None:
        self._peers = peers
        self._limits = limits
        self._groups: dict[tuple[bool, int], _Queue] = {}
        self._bound: dict[bytes, Worker | None] = {}
        self._bound_at = -1
        self._blockers: dict[tuple[bool, int, bytes], Client] = {}
        """Whom a barrier was found waiting for: while it still does, nobody else need be looked at."""

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._groups.values())

    def add(self, request: Request) -> None:
        """Take in a new request, which tells what its client is busy with."""
        request.client.modes[request.stage] = request.eval
        self._group(request).add(request)

    def put_back(self, requests: list[Request]) -> None:
        """Take requests back, oldest first, ahead of all others."""
        self._blockers.clear()
        for request in reversed(requests):
            self._group(request).put_back([request])

    def remove(self, request: Request) -> None:
        """Forget a waiting request that needs no answer any more."""
        self._group(request).remove(request)

    def take(self, worker: Worker, now: float) -> list[Request]:
        """One request of each env bound to `worker`, if none of them is missing."""
        ready = [
            requests
            for key, queue in self._groups.items()
            if (requests := self._released(key, queue, worker))
        ]
        if not ready:
            return []
        oldest = min(ready, key=lambda requests: requests[0].arrived)
        batch = _fill(oldest, worker, [worker], len(oldest), self._limits, now)
        for request in batch:
            self.remove(request)
        return batch

    def took(self, seconds: float) -> None:
        """Of no matter here: a barrier waits for all, however long it takes."""

    def is_long(self) -> bool:
        """Never: whose envs are all here has a worker of its own, and a barrier would be empty."""
        return False

    def wake_at(self) -> float | None:
        """Never: a barrier opens when a request arrives or an env leaves."""
        return None

    def _group(self, request: Request) -> _Queue:
        return self._groups.setdefault((request.eval, request.stage), _Queue())

    def _released(self, key: tuple[bool, int], queue: _Queue, worker: Worker) -> list[Request]:
        """The oldest request of each env of a group, if its barrier is open; oldest first.

        Whom a batch has no room for, and who was lost with a worker, need not wait for all again.
        """
        homes = self._homes()
        blocker = self._blockers.get((*key, worker.peer))
        if blocker is not None and self._holds_up(blocker, queue, key):
            return []
        waiting = [r for r in queue.all() if homes.get(r.client.peer) is worker]
        released = _first_of_each_client(r for r in waiting if r.released)
        if released or not waiting:
            return released
        for client in self._peers.clients.values():
            if homes[client.peer] is worker and self._holds_up(client, queue, key):
                self._blockers[(*key, worker.peer)] = client
                return []
        # Whoever it waited for last will be missing again before a second batch has taken the others.
        self._blockers.pop((*key, worker.peer), None)
        first = _first_of_each_client(waiting)
        for request in first:
            request.released = True
        return first

    def _holds_up(self, client: Client, queue: _Queue, key: tuple[bool, int]) -> bool:
        """Whether the barrier of a group has to wait for `client`."""
        is_eval, stage = key
        # One that has not asked yet is waited for as well; it will begin with the first stage.
        mode = client.modes.get(stage, client.eval if stage == 0 else None)
        return mode is is_eval and not any(request in queue for request in client.requests.values())

    def _homes(self) -> dict[bytes, Worker | None]:
        """The rollout worker of each client; worked out anew when a peer came or went."""
        if self._bound_at != self._peers.changes:
            live = sorted(
                self._peers.live_workers(),
                key=lambda worker: (worker.rank is None, worker.rank or 0, worker.since),
            )
            world = max([len(live), *(worker.world_size or 0 for worker in live)])
            by_rank = {worker.rank: worker for worker in live}
            self._bound = {p: _home(c, live, world, by_rank) for p, c in self._peers.clients.items()}
            self._bound_at = self._peers.changes
            self._blockers.clear()
        return self._bound


def _first_of_each_client(requests: Iterable[Request]) -> list[Request]:
    first: dict[bytes, Request] = {}
    for request in requests:
        first.setdefault(request.client.peer, request)
    return list(first.values())


def _home(
    client: Client, live: list[Worker], world: int, by_rank: dict[int | None, Worker]
) -> Worker | None:
    if not live or client.rank is None or client.world_size is None:
        return None
    home = by_rank.get(client.rank * world // client.world_size)
    return home or live[client.rank * len(live) // client.world_size]
