"""An hour of a large pool in seconds: the broker's core under a fake clock, with simulated peers.

The messages are real ones, byte for byte; what is left out is what peers say while nothing happens to
them (a worker repeats READY while it is idle, a client asks KNOWN? about a request that takes long). The
broker itself and the links take no time, so that the pool's throughput can be worked out; see
`test_simulation`.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections.abc import Callable
from itertools import count
from types import FunctionType, ModuleType

from driver import EPOCH, plain

from zmqrl.broker.core import TICK, Broker
from zmqrl.broker.pool import Options
from zmqrl.broker.scheduling import Limits
from zmqrl.transport.header import (
    HEADER_SIZE,
    Header,
    Op,
    Table,
    join_batch,
    request_id_of,
    split_batch,
    unpack_table,
)

BUDGET_MS = 3_600_000


class SimulatedClient:
    """An env worker in a closed loop: it steps, asks, waits, and steps again."""

    def __init__(self, name: str, peer: bytes) -> None:
        self.name, self.peer = name, peer
        self.request_id = 0
        self.asked: float | None = None
        """When it asked what it waits for; None while it steps."""
        self.answers = 0
        self.longest = 0.0
        """Seconds that it waited for an answer, at most."""


class SimulatedWorker:
    """A rollout worker: a batch of n rows takes it `base + per_row * n` seconds, times its `factor`."""

    __slots__ = (
        "batch",
        "batches",
        "began",
        "began_batch",
        "factor",
        "name",
        "number",
        "peer",
        "rank",
        "shards",
    )

    def __init__(self, rank: int, factor: float) -> None:
        self.rank, self.name, self.factor = rank, f"rollout-{rank}", factor
        self.peer = b""
        """Of its present life; empty while it is dead."""
        self.batch: list[bytes] | None = None
        self.began = self.began_batch = 0.0
        self.number = 0
        """Of the last batch that it received."""
        self.batches = self.shards = 0


class Simulation:
    """A broker, and what happens around it.

    Args:
        clients: How many env workers.
        workers: How many rollout workers.
        step: Draws the seconds of an env step.
        base: Seconds that a batch takes.
        per_row: Seconds that each row of it takes besides.
        slow: How many times longer a batch takes some workers, by rank.
        mean_life: Seconds after which a rollout worker dies, on average; without a word to anybody.
        absent: Seconds until it is back.
        mean_client_life: The same for clients, which are back at once, under their old names.
        sticky: Whether rollout workers keep state for their clients.
        seed: Of all that is random.
        options: Fields of `Options` and `Limits`.
    """

    def __init__(
        self,
        clients: int,
        workers: int,
        step: Callable[[random.Random], float],
        base: float,
        per_row: float,
        *,
        slow: dict[int, float] | None = None,
        mean_life: float = 0.0,
        absent: float = 60.0,
        mean_client_life: float = 0.0,
        sticky: bool = False,
        seed: int = 0,
        **options: object,
    ) -> None:
        limits = {key: options.pop(key) for key in list(options) if key in Limits.__dataclass_fields__}
        self.now = 0.0
        self.broker = Broker(Options(limits=Limits(**limits), **options), EPOCH, self.now)
        self._random = random.Random(seed)
        self._step, self._base, self._per_row = step, base, per_row
        self._mean_life, self._absent = mean_life, absent
        self._mean_client_life = mean_client_life
        self._sticky = sticky
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = count()
        self._peers = count(1)
        self._stopping = False
        self._clients_at: dict[bytes, SimulatedClient] = {}
        self._workers_at: dict[bytes, SimulatedWorker] = {}
        self.crossed = 0
        """Answers that came for another request than the one that the client waits for."""
        self.given_up = 0
        """Requests of clients that died."""
        self.alive_s = 0.0
        """Seconds that the workers were alive, in all."""
        self.wasted_s = 0.0
        """Seconds of those that went into batches which died with their worker."""
        self.clients = [SimulatedClient(f"env-{rank}", b"") for rank in range(clients)]
        self.workers = [SimulatedWorker(rank, (slow or {}).get(rank, 1.0)) for rank in range(workers)]
        for worker in self.workers:
            self._worker_joins(worker)
        for rank, client in enumerate(self.clients):
            self._client_joins(client, rank)
        self._at(TICK, self._tick)
        self._turn()

    # -- For the test

    @property
    def answers(self) -> int:
        """Answers that clients have got."""
        return sum(client.answers for client in self.clients)

    def run(self, until: float) -> None:
        """Let time pass, to `until` seconds."""
        events = self._events
        while events[0][0] <= until:
            self.now, _, act, arguments = heapq.heappop(events)
            self.broker.advance(self.now)
            act(*arguments)
            self._turn()
        self.now = until

    def finish(self) -> None:
        """Each client says goodbye after the step that it is in, then the workers do."""
        self._stopping = True
        while self._clients_at:
            self.run(self.now + 10.0)
        for peer, worker in list(self._workers_at.items()):
            self.broker.from_worker(peer, [Header(Op.BYE, request_id=worker.number).pack()])
        self._workers_at.clear()
        self._events.clear()  # those who are dead stay so
        self._at(TICK, self._tick)
        self.run(self.now + 10.0)  # for those whose death nobody has noticed yet

    def used_s(self) -> float:
        """Seconds that workers were alive and did not work in vain."""
        living = sum(self.now - worker.began for worker in self.workers if worker.peer)
        return self.alive_s + living - self.wasted_s

    # -- Clients

    def _client_joins(self, client: SimulatedClient, rank: int) -> None:
        client.peer = b"c%d" % next(self._peers)
        client.asked = None
        self._clients_at[client.peer] = client
        hello = {"name": client.name, "rank": rank, "world_size": len(self.clients)}
        self.broker.from_client(client.peer, plain(Op.HELLO, incarnation=next(self._peers), **hello))
        # The first steps end at any time, as those do that come after.
        self._at(self._random.random() * self._step(self._random), self._ask, client, client.peer)
        if self._mean_client_life:
            life = self._random.expovariate(1 / self._mean_client_life)
            self._at(life, self._client_dies, client, rank)

    def _ask(self, client: SimulatedClient, peer: bytes) -> None:
        if client.peer != peer:
            return  # that was in its former life
        if self._stopping:
            self.broker.from_client(peer, plain(Op.BYE))
            del self._clients_at[peer]
            return
        client.request_id += 1
        client.asked = self.now
        header = Header(Op.INFER, request_id=client.request_id, rows=1, budget_ms=BUDGET_MS)
        self.broker.from_client(peer, [header.pack() + b"observation"])

    def _client_dies(self, client: SimulatedClient, rank: int) -> None:
        if not self._stopping:
            self.given_up += client.asked is not None
            del self._clients_at[client.peer]
            self._client_joins(client, rank)

    def _take_reply(self, client: SimulatedClient, frames: list[bytes]) -> None:
        is_answer = frames[0][5] == Op.REPLY and request_id_of(frames[0]) == client.request_id
        if client.asked is None or not is_answer:
            self.crossed += frames[0][5] in (Op.REPLY, Op.ERROR)
            return
        client.longest = max(client.longest, self.now - client.asked)
        client.asked = None
        client.answers += 1
        self._at(self._step(self._random), self._ask, client, client.peer)

    # -- Rollout workers

    def _worker_joins(self, worker: SimulatedWorker) -> None:
        worker.peer = b"w%d" % next(self._peers)
        worker.began = self.now
        worker.number = 0
        self._workers_at[worker.peer] = worker
        hello = {"name": worker.name, "rank": worker.rank, "world_size": len(self.workers)}
        hello["sticky"] = self._sticky
        self.broker.from_worker(worker.peer, plain(Op.HELLO, **hello))
        self.broker.from_worker(worker.peer, [Header(Op.READY).pack()])
        if self._mean_life:
            self._at(self._random.expovariate(1 / self._mean_life), self._worker_dies, worker)

    def _worker_dies(self, worker: SimulatedWorker) -> None:
        self.alive_s += self.now - worker.began
        if worker.batch is not None:
            self.wasted_s += self.now - worker.began_batch
        del self._workers_at[worker.peer]
        worker.peer, worker.batch = b"", None
        self._at(self._absent, self._worker_joins, worker)

    def _take_batch(self, worker: SimulatedWorker, frames: list[bytes]) -> None:
        assert worker.batch is None, "a worker that computes was given another batch"
        table = unpack_table(frames[0])
        worker.batch, worker.number = frames, table.number
        worker.began_batch = self.now
        seconds = (self._base + self._per_row * len(table.entries)) * worker.factor
        self._at(seconds, self._give_result, worker, worker.peer)

    def _give_result(self, worker: SimulatedWorker, peer: bytes) -> None:
        if worker.peer != peer:
            return
        frames, worker.batch = worker.batch, None
        table = unpack_table(frames[0])
        entries, replies = [], []
        for entry, message in split_batch(table, frames):
            header = Header(Op.REPLY, request_id=request_id_of(message[0]), queue_us=entry.queue_us)
            replies.append([header.pack() + message[0][HEADER_SIZE:]])
            entries.append(entry._replace(origin_length=0))
        worker.batches += 1
        worker.shards += len(entries)
        result = Table(table.epoch, table.number, entries)
        self.broker.from_worker(peer, join_batch(result, Op.RESULT, replies))

    # -- The server's loop

    def _at(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._sequence), act, arguments))

    def _tick(self) -> None:
        self.broker.tick()
        self.broker.take_notes()
        self._at(TICK, self._tick)

    def _turn(self) -> None:
        """What the server does at the end of each turn."""
        self.broker.dispatch()
        while self._send():
            self.broker.dispatch()
        wait = self.broker.timeout()
        if wait < TICK:  # a partial batch is held open until then
            self._at(wait, int)

    def _send(self) -> bool:
        broker, lost_client, lost_workers = self.broker, False, []
        to_clients, to_workers = broker.take_outbox()
        for peer, frames in to_clients:
            client = self._clients_at.get(peer)
            if client is None:
                broker.client_unreachable(peer)
                lost_client = True
            elif frames[0][5] != Op.PROBE:
                self._take_reply(client, frames)
        for peer, frames in to_workers:
            worker = self._workers_at.get(peer)
            if worker is None:
                if len(frames) > 1:
                    broker.undelivered(peer)
                lost_workers.append(peer)
            elif len(frames) > 1:
                self._take_batch(worker, frames)
        for peer in lost_workers:
            broker.worker_unreachable(peer)
        return lost_client or bool(lost_workers)


def held(broker: Broker) -> int:
    """How many objects a broker holds."""
    seen = {id(broker)}
    waiting: list[object] = [broker]
    objects = 0
    while waiting:
        objects += 1
        for other in gc.get_referents(waiting.pop()):
            if id(other) not in seen and not isinstance(other, (type, ModuleType, FunctionType)):
                seen.add(id(other))
                waiting.append(other)
    return objects
