"""Who gets which requests in normal mode: each env has a rollout worker, which waits for all of them."""

from __future__ import annotations

from collections.abc import Iterable

from zmqrl.broker.records import Client, Request, Worker
from zmqrl.broker.scheduling import Limits, Peers, Queue, fill


class FixedRanks:
    """Normal mode: env rank e of E belongs to rollout rank e * R // E, which waits for all its envs.

    The wait is for the *live* envs of the same mode and pipeline stage, by their latest request: one
    that says goodbye or is lost is no longer waited for, nor is one that has asked for other policies
    only, and the envs of a lost rollout worker move to the live ones.
    """

    def __init__(self, peers: Peers, limits: Limits) -> None:
        self._peers = peers
        self._limits = limits
        self._groups: dict[tuple[bool, int], Queue] = {}
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
        batch = fill(oldest, worker, [worker], len(oldest), self._limits, now)
        for request in batch:
            self.remove(request)
        return batch

    def took(self, seconds: float) -> None:
        """Of no matter here: a barrier waits for all, however long it takes."""

    def is_long(self, worker: Worker | None = None) -> bool:
        """Never: whose envs are all here has a worker of its own, and a barrier would be empty."""
        return False

    def wake_at(self, now: float) -> float | None:
        """Never: a barrier opens when a request arrives or an env leaves."""
        return None

    def forget(self, client: Client, left: bool) -> None:
        """Of no matter here: who is bound to whom is worked out from the ranks."""

    def _group(self, request: Request) -> Queue:
        return self._groups.setdefault((request.eval, request.stage), Queue())

    def _released(self, key: tuple[bool, int], queue: Queue, worker: Worker) -> list[Request]:
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

    def _holds_up(self, client: Client, queue: Queue, key: tuple[bool, int]) -> bool:
        """Whether the barrier of a group has to wait for `client`."""
        is_eval, stage = key
        # One that has not asked for anything is waited for as well; it will begin with the first stage.
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
