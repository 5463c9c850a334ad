"""Who gets which requests where the rollout workers keep state: each client has a home."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import attrgetter

from zmqrl.broker.records import Client, Request, Worker
from zmqrl.broker.scheduling import Limits, Patience, Peers, Queue, fill, most_shards

_MOST_ABSENT = 1000
"""Clients that were lost and whose homes are kept, should they come back."""


_EMPTY = Queue()


class StickyQueues:
    """The requests of a client go to its home, the worker that keeps its state, while others are idle.

    Homes are a hint: the requests themselves tell whether the state is there. A client, which is known
    by its name, gets a home when its first request is taken, by an idle worker that has fewer than
    ceil(clients / live workers) of those that ask. It keeps it over a new socket, until it says goodbye
    or its home is lost or stuck. Then it is like a new one, but what its home had in hand may go to any
    worker. It is like a new one as well when it needs no state, and its home has two more than another
    worker: one that was started again, for instance.

    Args:
        peers: Who asks for the policy, and who serves it.
        limits: Of a batch.
        several: Whether clients have several requests under way.
    """

    def __init__(self, peers: Peers, limits: Limits, several: bool = False) -> None:
        self._peers = peers
        self._limits = limits
        self._several = several
        self._homes: dict[str, Worker] = {}
        """By client name. Whose worker is no longer live has none."""
        self._absent: dict[str, None] = {}
        """Names of clients that were lost, the latest last; they do not count as homes of a worker."""
        self._queues: dict[Worker, Queue] = {}
        """By worker, the requests of those at home there. Back on its old socket it is another one."""
        self._strangers = Queue()
        """The requests of clients without a home."""
        self._returned = Queue()
        """Those of them that were lost with a worker; any other may take them, however full it is."""
        self._count = 0
        self._live_at = -1
        self._patience = Patience(limits)
        self.took = self._patience.took

    def __len__(self) -> int:
        return self._count

    def all(self) -> list[Request]:
        """All waiting requests, oldest first."""
        queues = [*self._queues.values(), self._strangers, self._returned]
        return sorted((r for queue in queues for r in queue.all()), key=attrgetter("slot"))

    def add(self, request: Request) -> None:
        """Take in a new request."""
        self._leave_the_lost()
        self._check_home(request.client.name)
        if request.begins:
            self._leave_the_crowd(request.client)
        self._queue_of(request).add(request)
        self._count += 1

    def put_back(self, requests: list[Request]) -> None:
        """Take requests back, oldest first, ahead of all others; home, if that is still live."""
        self._leave_the_lost()
        for request in reversed(requests):
            self._check_home(request.client.name)
            self._queue_of(request).put_back([request])
        self._count += len(requests)

    def remove(self, request: Request) -> None:
        """Forget a waiting request that needs no answer any more."""
        self._queue_of(request).remove(request)
        self._count -= 1

    def take(self, worker: Worker, now: float) -> list[Request]:
        """The oldest requests of those at home at `worker`, and of new clients if it has room."""
        self._leave_the_lost()
        own = self._queues.get(worker, _EMPTY)
        room = self._room(worker)
        if not len(own) and not len(self._returned) and room <= 0:
            return []
        waiting = heapq.merge(
            own.all(), self._lost_by_others(worker), self._new(room, now), key=attrgetter("slot")
        )
        # That it avoids its home is no reason to go where its state is not: a worker is not asked here.
        batch = fill(waiting, worker, [worker], self._cap(), self._limits, now)
        if not batch or self._is_held_open(batch[0], worker, own, room, now):
            return []
        for request in batch:
            self.remove(request)
        for request in batch:
            if request.client.name not in self._homes:
                self._move_in(request.client, worker)
        return batch

    def is_long(self, worker: Worker | None = None) -> bool:
        """A full batch of those at home at `worker`."""
        if worker is None:
            return self._count >= self._cap()  # one queue cannot have more than all of them
        return len(self._queues.get(worker, _EMPTY)) >= self._cap()

    def wake_at(self, now: float) -> float | None:
        """When the next of the partial batches that are held open must leave."""
        wait = self._patience.wait
        oldest = [queue.oldest() for queue in (*self._queues.values(), self._strangers)]
        wakes = (request.arrived + wait for request in oldest if request is not None)
        return min((wake for wake in wakes if wake > now), default=None)

    def forget(self, client: Client, left: bool) -> None:
        """A client is gone: its place is free, and kept for it only if it did not say goodbye."""
        name = client.name
        if name not in self._homes or name in self._absent:
            return
        if left:
            self._move_out(name)
            return
        self._homes[name].homes -= 1
        self._absent[name] = None
        if len(self._absent) > _MOST_ABSENT:
            self._move_out(next(iter(self._absent)))

    # -- Batches

    def _cap(self) -> int:
        requests = max(len(self._peers.clients), self._count if self._several else 0)
        return most_shards(self._peers, self._limits, requests)

    def _room(self, worker: Worker) -> int:
        """How many of those without a home may move in with `worker`, for all to have equally many.

        Those who never ask take no share of anybody's, nor do workers that have never been idle.
        """
        if not len(self._strangers):
            return 0
        homes = [other.homes for other in self._ready_workers()]
        if not homes:
            return 0
        clients = min(sum(homes) + len(self._strangers), len(self._peers.clients))
        share, left = divmod(clients, len(homes))
        more = sum(count > share for count in homes) < left  # one more than the others have
        return share + more - worker.homes

    def _lost_by_others(self, worker: Worker) -> Iterator[Request]:
        live = self._peers.live_workers()
        for request in self._returned.all():
            avoid = request.avoid
            if worker.name not in avoid or all(other.name in avoid for other in live):
                yield request

    def _new(self, room: int, now: float) -> Iterator[Request]:
        """The first requests of the first `room` clients without a home."""
        names = set()
        for request in self._strangers.all():
            if now < request.deadline:
                names.add(request.client.name)
                if len(names) > room:
                    return
                yield request

    def _is_held_open(self, oldest: Request, worker: Worker, own: Queue, room: int, now: float) -> bool:
        if oldest.history or now >= oldest.arrived + self._patience.wait:
            return False
        shards, rows, clients = len(own), own.rows, worker.homes
        if room > 0:
            new = min(room, len(self._strangers))
            shards, rows, clients = shards + new, rows + self._strangers.rows, clients + new
        # Once all who live there are here there is nobody to wait for.
        full = shards >= min(self._cap(), clients)
        return not full and not 0 < self._limits.max_rows <= rows

    # -- Homes

    def _queue_of(self, request: Request) -> Queue:
        home = self._homes.get(request.client.name)
        if home is not None:
            return self._queues.setdefault(home, Queue())
        return self._returned if request.avoid else self._strangers

    def _is_live(self, worker: Worker) -> bool:
        return not worker.quarantined and self._peers.workers.get(worker.peer) is worker

    def _check_home(self, name: str) -> None:
        """A client with this name asks, or has asked."""
        home = self._homes.get(name)
        if home is None:
            return
        if not self._is_live(home):
            self._move_out(name)
        elif name in self._absent:
            del self._absent[name]
            home.homes += 1

    def _leave_the_crowd(self, client: Client) -> None:
        """A client that asks for nothing else needs no state: it may have a home with fewer others."""
        home = self._homes.get(client.name)
        if home is None or len(client.requests) > 1:
            return
        least = min(other.homes for other in self._ready_workers())
        if home.homes >= least + len(self._strangers) + 2:  # they are on their way there
            self._move_out(client.name)

    def _ready_workers(self) -> list[Worker]:
        return [worker for worker in self._peers.live_workers() if worker.ready]

    def _move_in(self, client: Client, worker: Worker) -> None:
        """`worker` is the home of a client from now on; what the client asks besides waits for it."""
        also = [r for r in client.requests.values() if r in self._strangers or r in self._returned]
        for request in also:
            self._queue_of(request).remove(request)
        self._homes[client.name] = worker
        worker.homes += 1
        if also:
            self._queues.setdefault(worker, Queue()).merge(also)

    def _move_out(self, name: str) -> None:
        home = self._homes.pop(name)
        if name in self._absent:
            del self._absent[name]
        else:
            home.homes -= 1

    def _leave_the_lost(self) -> None:
        """Who waits for a worker that is no longer live has no home."""
        if self._live_at == self._peers.changes:
            return
        self._live_at = self._peers.changes
        for worker in [worker for worker in self._queues if not self._is_live(worker)]:
            requests = list(self._queues.pop(worker).all())
            for name in {request.client.name for request in requests}:
                self._move_out(name)
            for queue in (self._strangers, self._returned):
                queue.merge([request for request in requests if self._queue_of(request) is queue])
