"""The policies of the pool: each has rollout workers, clients and waiting requests of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from zmqrl.broker.ranks import FixedRanks
from zmqrl.broker.records import Client, Worker
from zmqrl.broker.scheduling import Limits, Peers, Schedule, SharedQueue
from zmqrl.broker.sticky import StickyQueues
from zmqrl.errors import DecodeError
from zmqrl.transport.header import policy_id_of

_MAX_NAMES = 1000

_MAX_SHOWN = 100
"""Policies in the status, which has to fit into a message."""

_MAX_TOLD = 10
"""Policies that a client is told of which waits for another."""


@dataclass(slots=True, eq=False)
class Policy:
    """What some rollout workers serve, and the requests that wait for it."""

    number: int
    """The policy id of requests; see `policy_id_of`."""
    name: str | None
    """None until a worker has named it: requests know the number only."""
    peers: Peers
    schedule: Schedule

    def __str__(self) -> str:
        if self.number == 0:
            return "the default policy"
        return (
            f"the policy with the id {self.number}" if self.name is None else f"the policy {self.name!r}"
        )


class Policies:
    """The default policy, and those named ones that a worker serves or a request waits for.

    No other is kept, because policy ids cost a client nothing. Those who have asked for a policy are
    forgotten with it.

    Args:
        decoupled: How the default policy is scheduled. A named one always has a shared queue: it needs
            no ranks, and no barrier waits for it.
        limits: What bounds a batch of any policy.
    """

    def __init__(self, decoupled: bool, limits: Limits) -> None:
        self._limits = limits
        peers = Peers()
        schedule = SharedQueue(peers, limits) if decoupled else FixedRanks(peers, limits)
        self.default = Policy(0, "", peers, schedule)
        self._kept = {0: self.default}
        self._names: dict[int, str] = {}
        """What workers have called the policies; outlives them, to name what nobody serves any more."""

    def asked_by(self, client: Client, number: int) -> Policy:
        """The policy of a request; its client is one of the policy's from now on."""
        policy = self._kept.get(number) or self._begin(number, self._names.get(number))
        if client.peer not in policy.peers.clients:
            policy.peers.add_client(client)
            client.eval = None  # it may never ask for the default one, of which all ask from the start
        return policy

    def named(self, name: str) -> Policy:
        """The policy that a worker wants to serve.

        Raises:
            DecodeError: Another name has the same number.
        """
        number = policy_id_of(name)
        policy = self._kept.get(number) or self._begin(number, name)
        if policy.name not in (None, name):
            raise DecodeError(
                f"HELLO: the policies {name!r} and {policy.name!r} have the same id {number}; rename one"
            )
        policy.name = name
        self._remember(number, name)
        return policy

    def add_worker(self, worker: Worker) -> None:
        """A worker has come, and says whether it keeps state for its clients.

        They are all sent where their state is if any worker of the policy says so. In normal mode, the
        clients of the default policy are bound to workers anyway.
        """
        policy = worker.policy
        policy.peers.add_worker(worker)
        workers = policy.peers.workers.values()
        sticky = any(worker.sticky for worker in workers)
        before = policy.schedule
        if not isinstance(before, (SharedQueue, StickyQueues)):
            return
        if sticky is isinstance(before, StickyQueues):
            return
        for worker in workers:
            worker.homes = 0
        kind = StickyQueues if sticky else SharedQueue
        policy.schedule = kind(policy.peers, self._limits, several=policy is not self.default)
        policy.schedule.put_back(list(before.all()))

    def forget_client(self, client: Client, left: bool) -> None:
        """A client is gone; unless it `left`, it may come back under its name."""
        for policy in self._kept.values():
            policy.peers.remove_client(client)
            policy.schedule.forget(client, left)

    def forget_unused(self, policy: Policy) -> None:
        """Let go of a policy that nobody serves and nobody waits for; the default one stays."""
        if not policy.peers.workers and not len(policy.schedule) and policy is not self.default:
            del self._kept[policy.number]

    def wake_at(self, idle: Iterable[Worker], now: float) -> float | None:
        """When an idle worker next has to be given a partial batch; None if there is no such time.

        Args:
            idle: The workers that wait for work.
            now: Seconds.
        """
        if self._limits.max_wait == 0.0 or not self.wait_for_workers():
            return None  # nothing is held open; spares the look at every idle worker
        wakes = [policy.schedule.wake_at(now) for policy in {worker.policy for worker in idle}]
        return min((wake for wake in wakes if wake is not None), default=None)

    def wait_for_workers(self) -> bool:
        """Whether any request waits."""
        for policy in self._kept.values():  # noqa: SIM110 - any() would make a generator, each turn
            if len(policy.schedule):
                return True
        return False

    def has_long_queue(self) -> bool:
        """Whether so much waits for any policy that a worker may take a batch while still in one."""
        return any(policy.schedule.is_long() for policy in self._kept.values())

    def waiting(self) -> dict[str, int]:
        """The number of waiting requests by policy: its name, or else its number."""
        return {
            str(policy.number) if policy.name is None else policy.name: len(policy.schedule)
            for policy in islice(self._kept.values(), _MAX_SHOWN)
        }

    def served(self) -> list[Policy]:
        """The policies that a worker serves; the first ones, if there are many."""
        served = (policy for policy in self._kept.values() if policy.peers.workers)
        return list(islice(served, _MAX_TOLD))

    def _begin(self, number: int, name: str | None) -> Policy:
        peers = Peers()
        policy = Policy(number, name, peers, SharedQueue(peers, self._limits, several=True))
        self._kept[number] = policy
        return policy

    def _remember(self, number: int, name: str) -> None:
        self._names.pop(number, None)  # the latest stand last
        if len(self._names) >= _MAX_NAMES:
            del self._names[next(iter(self._names))]
        self._names[number] = name
