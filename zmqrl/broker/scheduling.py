"""Who gets which requests: the shared queue of decoupled mode, the fixed ranks of normal mode."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from zmqrl.broker.records import Client, Request, State, Worker


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch."""

    queue_size: int = 0
    """Shards; 0 means ceil(clients / workers), counted from those connected now."""
    max_rows: int = 0
    """Rows; 0 means no limit."""
    max_wait: float = 0.0
    """Seconds that a partial batch may be held open, from its oldest request's arrival."""
    max_attempts: int = 3


@dataclass(slots=True)
class Peers:
    """Who is connected."""

    clients: dict[bytes, Client] = field(default_factory=dict)
    workers: dict[bytes, Worker] = field(default_factory=dict)
    changes: int = 0
    """Counts every arrival, departure and quarantine."""

    def live_workers(self) -> list[Worker]:
        """The workers that can be given work, now or when their batch is done."""
        return [worker for worker in self.workers.values() if not worker.quarantined]


class Schedule(Protocol):
    """Holds the waiting requests, and makes the batch for a worker that is idle."""

    def add(self, request: Request) -> None:
        """Take in a new request."""

    def put_back(self, requests: list[Request]) -> None:
        """Take requests back, oldest first, ahead of all others."""

    def take(self, worker: Worker, now: float) -> list[Request]:
        """The batch that `worker` should run now; empty to let it wait."""

    def wake_at(self) -> float | None:
        """When to look again although nothing has arrived; None if there is no such time."""


def _fill(
    queue: Iterable[Request], worker: Worker, live: list[Worker], most: int, limits: Limits
) -> list[Request]:
    """The first requests of `queue` that one batch of `worker` can hold, at most `most`."""
    batch: list[Request] = []
    rows = 0
    for request in queue:
        if request.state is not State.WAITING:
            continue
        if worker.name in request.avoid and any(w.name not in request.avoid for w in live):
            continue
        # The last attempt goes alone: a request that kills its worker takes nobody with it.
        last = bool(request.history) and len(request.history) + 1 >= limits.max_attempts
        if batch and (
            last or len(batch) >= most or (limits.max_rows and rows + request.rows > limits.max_rows)
        ):
            break
        batch.append(request)
        rows += request.rows
        if last:
            break
    return batch


class SharedQueue:
    """Decoupled mode: whoever is idle takes the oldest requests, up to a cap.

    The cap is never a requirement: a batch does not wait for a request that has not come.
    """

    def __init__(self, peers: Peers, limits: Limits) -> None:
        self._peers = peers
        self._limits = limits
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Take in a new request."""
        self._queue.append(request)

    def put_back(self, requests: list[Request]) -> None:
        """Take requests back, oldest first, ahead of all others."""
        self._queue.extendleft(reversed(requests))

    def cap(self) -> int:
        """The most shards in a batch now."""
        if self._limits.queue_size:
            return self._limits.queue_size
        return max(1, -(-len(self._peers.clients) // max(1, len(self._peers.live_workers()))))

    def take(self, worker: Worker, now: float) -> list[Request]:
        """The oldest requests, unless a partial batch is still held open."""
        oldest = self._oldest()
        if oldest is None:
            return []
        cap = self.cap()
        held = now < oldest.arrived + self._limits.max_wait and not oldest.history
        if held and len(self._queue) < cap:
            return []
        batch = _fill(self._queue, worker, self._peers.live_workers(), cap, self._limits)
        if batch and batch[-1] is self._queue[len(batch) - 1]:
            for _ in batch:
                self._queue.popleft()
        else:  # something was passed over
            taken = {id(request) for request in batch}
            self._queue = deque(
                r for r in self._queue if r.state is State.WAITING and id(r) not in taken
            )
        return batch

    def wake_at(self) -> float | None:
        """When the partial batch that is held open must leave."""
        if not self._limits.max_wait:
            return None
        oldest = self._oldest()
        return None if oldest is None else oldest.arrived + self._limits.max_wait

    def _oldest(self) -> Request | None:
        while self._queue and self._queue[0].state is not State.WAITING:
            self._queue.popleft()
        return self._queue[0] if self._queue else None


class FixedRanks:
    """Normal mode: env rank e of E belongs to rollout rank e * R // E, which waits for all its envs.

    The wait is for the *live* envs of the same mode and pipeline stage, by their latest request: one
    that says goodbye or is lost is no longer waited for, and the envs of a lost rollout worker move to
    the live ones.
    """

    def __init__(self, peers: Peers, limits: Limits) -> None:
        self._peers = peers
        self._limits = limits
        self._groups: dict[tuple[bool, int], deque[Request]] = {}
        self._bound: dict[bytes, Worker | None] = {}
        self._bound_at = -1

    def add(self, request: Request) -> None:
        """Take in a new request."""
        self._groups.setdefault((request.eval, request.stage), deque()).append(request)

    def put_back(self, requests: list[Request]) -> None:
        """Take requests back, oldest first, ahead of all others."""
        for request in reversed(requests):
            self._groups.setdefault((request.eval, request.stage), deque()).appendleft(request)

    def take(self, worker: Worker, now: float) -> list[Request]:
        """One request of each env bound to `worker`, if none of them is missing."""
        homes = self._homes()
        for key, queue in self._groups.items():
            own = [r for r in queue if r.state is State.WAITING and homes[r.client.peer] is worker]
            ready = [request for request in own if request.released]
            if not ready:
                ready = self._open_barrier(key, worker, own)
            batch = _fill(ready, worker, [worker], len(ready), self._limits)
            if batch:
                taken = {id(request) for request in batch}
                self._groups[key] = deque(
                    r for r in queue if r.state is State.WAITING and id(r) not in taken
                )
                return batch
        return []

    def wake_at(self) -> float | None:
        """Never: a barrier opens when a request arrives or an env leaves."""
        return None

    def _open_barrier(
        self, key: tuple[bool, int], worker: Worker, waiting: list[Request]
    ) -> list[Request]:
        """The oldest request of each env of the group, once all have one."""
        is_eval, stage = key
        homes = self._homes()
        first: dict[bytes, Request] = {}
        for request in waiting:
            first.setdefault(request.client.peer, request)
        for client in self._peers.clients.values():
            # One that has not asked yet is waited for as well; it will begin with the first stage.
            mode = client.modes.get(stage, client.eval if stage == 0 else None)
            if mode is is_eval and homes[client.peer] is worker and client.peer not in first:
                return []
        for request in first.values():
            request.released = True  # what this batch has no room for need not wait for all again
        return list(first.values())

    def _homes(self) -> dict[bytes, Worker | None]:
        """The rollout worker of each client; worked out anew when a peer came or went."""
        if self._bound_at != self._peers.changes:
            live = self._peers.live_workers()
            live.sort(key=lambda worker: (worker.rank is None, worker.rank or 0, worker.since))
            self._bound = {p: _home(c, live) for p, c in self._peers.clients.items()}
            self._bound_at = self._peers.changes
        return self._bound


def _home(client: Client, live: list[Worker]) -> Worker | None:
    if not live or client.rank is None or client.world_size is None:
        return None
    world = max([worker.world_size or 0 for worker in live] + [len(live)])
    home = client.rank * world // client.world_size
    by_rank = {worker.rank: worker for worker in live}
    return by_rank.get(home) or live[client.rank * len(live) // client.world_size]
