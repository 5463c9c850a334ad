"""The broker's state machine: no sockets, and no clock of its own.

The rules, in the order in which they matter:

1.  A request is the broker's until it is answered. Each one accepted ends in exactly one of: a reply,
    an ERROR, or the loss or the word of its client.
2.  Late binding: a worker is given a batch only when it says that it is idle, and then the oldest
    requests first. READY says so, and RESULT says so with the results.
3.  A reply counts only from the worker that holds the request's current batch. It goes to the client
    that the *broker* noted for the slot; a worker cannot name another.
4.  Worker lost, or its batch older than the attempt timeout: its requests return to the head of the
    queue, with a line in their history. A request whose history has `max_attempts` lines ends in an
    ERROR that tells it; its last attempt goes alone.
5.  A READY may cross a dispatch. It names the last batch that its worker received; if READYs a second
    apart do not know the batch that the worker holds, that batch was lost on the way.
6.  Peers are probed through the ROUTER, which refuses a message to a peer that is gone: workers that
    hold work, and clients that a barrier waits for, four times a second; the silent ones now and then.
7.  Peers that are not known, after a restart of the broker for instance, are told UNKNOWN and register.
8.  Nothing is unbounded, and nothing is dropped without being counted.

Every message ends up in `to_clients` or `to_workers` for the server to send.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from zmqrl.broker.records import (
    Batch,
    Client,
    Counters,
    Introduction,
    Request,
    State,
    Worker,
    WorkerTotals,
)
from zmqrl.broker.scheduling import FixedRanks, Limits, Peers, Schedule, SharedQueue
from zmqrl.errors import DecodeError, VersionMismatch
from zmqrl.transport.codec import decode_meta, encode_meta
from zmqrl.transport.header import (
    FLAG_EVAL,
    HEADER_SIZE,
    Entry,
    Header,
    Op,
    Table,
    join_batch,
    request_id_of,
    split_batch,
    unpack,
    unpack_table,
)

TICK = 0.25
"""Seconds between two looks at the timers."""

_PROBE_BUSY_AFTER = 0.25
_PROBE_SILENT_AFTER = 3.0
_UNAWARE_FOR = 1.0
_PAUSE = 1.0
_MAX_TOTALS = 1000


@dataclass(frozen=True, slots=True)
class Options:
    """How a broker behaves."""

    decoupled: bool = True
    limits: Limits = field(default_factory=Limits)
    attempt_timeout: float = 60.0
    """Seconds that a worker may hold a batch."""
    max_open: int = 100_000
    """Requests held at once."""
    max_open_bytes: int = 4 << 30
    max_client_open: int = 1024
    """Requests of one client held at once."""


class Broker:
    """The state of one broker.

    The server calls `advance` with the time, then hands in what arrived, then calls `tick` and
    `dispatch`, and sends what stands in the two outboxes.

    Args:
        options: How it behaves.
        epoch: A number that no earlier broker at this endpoint used.
        now: Seconds on a monotonic clock.
    """

    def __init__(self, options: Options, epoch: int, now: float) -> None:
        self.options = options
        self.epoch = epoch
        self.counters = Counters()
        self.to_clients: list[tuple[bytes, list[Any]]] = []
        self.to_workers: list[tuple[bytes, list[Any]]] = []
        self.peers = Peers()
        self._names: dict[str, Client] = {}
        self._requests: dict[int, Request] = {}
        self._bytes = 0
        self._totals: dict[str, WorkerTotals] = {}
        self._idle: dict[bytes, Worker] = {}
        self._schedule: Schedule = (SharedQueue if options.decoupled else FixedRanks)(
            self.peers, options.limits
        )
        self._next_slot = 1
        self._next_batch = 1
        self._started = self._now = self._clock = now
        self._paused = 0.0
        self._ticked = now

    # -- Time

    def advance(self, clock: float) -> None:
        """Note the time; a gap of more than a second means that the broker itself was stopped.

        Nobody is to blame for such a gap, so the broker's own clock stands still over it.
        """
        gap = clock - self._clock
        if gap > _PAUSE:
            self._paused += gap
        self._clock = clock
        self._now = clock - self._paused

    def tick(self) -> None:
        """Do what is due: deadlines, stuck batches, probes."""
        if self._now < self._ticked + TICK:
            return
        self._ticked = self._now
        for request in list(self._requests.values()):
            if self._now >= request.deadline:
                self._fail(request, "deadline", self._explain(request))
        for worker in list(self.peers.workers.values()):
            batch = worker.batch
            if batch and self._now >= batch.sent + self.options.attempt_timeout:
                worker.quarantined = True
                self.peers.changes += 1
                self._take_back(worker, f"held it for {self.options.attempt_timeout:g} s")
        self._probe()

    def timeout(self) -> float:
        """Seconds after which `tick` and `dispatch` want to be called again."""
        wake = self._schedule.wake_at()
        if wake is None or wake <= self._now or not self._idle:
            return TICK
        return min(wake - self._now, TICK)

    def _probe(self) -> None:
        probe = [Header(Op.PROBE).pack()]
        for worker in self.peers.workers.values():
            busy = worker.batch is not None and self._now >= worker.batch.sent + _PROBE_BUSY_AFTER
            if busy or self._now >= max(worker.heard, worker.probed) + _PROBE_SILENT_AFTER:
                worker.probed = self._now
                self.to_workers.append((worker.peer, probe))
        for client in self.peers.clients.values():
            silent = _PROBE_SILENT_AFTER
            if not self.options.decoupled and not client.requests:
                silent = _PROBE_BUSY_AFTER  # a barrier may be waiting for it
            if self._now >= max(client.heard, client.probed) + silent:
                client.probed = self._now
                self.to_clients.append((client.peer, probe))

    # -- The client leg

    def from_client(self, peer: bytes, message: list[Any]) -> None:
        """Take in a message of the frontend: its frames, the first as bytes."""
        try:
            header = unpack(message[0])
            if header.frames != len(message) - 1:
                raise DecodeError(
                    f"{len(message) - 1} large buffers, but the header says {header.frames}"
                )
            client = self.peers.clients.get(peer)
            if client is not None:
                client.heard = self._now
            self._client_message(peer, client, header, message)
        except DecodeError as error:
            self.counters.malformed += 1
            request_id = request_id_of(message[0])
            if request_id or isinstance(error, VersionMismatch):
                self._error_to(peer, request_id, "refused", str(error))

    def _client_message(
        self, peer: bytes, client: Client | None, header: Header, message: list[Any]
    ) -> None:
        op, request_id = header.op, header.request_id
        if op == Op.HELLO:
            self._client_hello(peer, client, decode_meta(message[0][HEADER_SIZE:]))
        elif op == Op.STATUS:
            self.to_clients.append((peer, self._plain(Op.STATUS, self.status(), request_id)))
        elif op in (Op.BYE, Op.CANCEL):
            if client is not None:
                open_request = client.requests.get(request_id)
                if op == Op.BYE:
                    self._forget_client(client)
                elif open_request is not None:
                    self._cancel(open_request)
        elif op not in (Op.INFER, Op.KNOWN):
            raise DecodeError(f"op {op} has no meaning from a client")
        elif client is None:
            self.counters.unknown += 1
            self.to_clients.append((peer, [Header(Op.UNKNOWN, request_id=request_id).pack()]))
        elif op == Op.INFER:
            self._infer(client, header, message)
        elif request_id in client.requests:
            state = {"state": self._explain(client.requests[request_id])}
            self.to_clients.append((peer, self._plain(Op.KNOWN, state, request_id)))
        else:
            self.to_clients.append((peer, [Header(Op.UNKNOWN, request_id=request_id).pack()]))

    def _client_hello(self, peer: bytes, known: Client | None, fields: dict[str, Any]) -> None:
        hello = Introduction.of(fields)
        if known is None:
            namesake = self._names.get(hello.name)
            if namesake is not None and namesake.incarnation > hello.incarnation:
                self._error_to(peer, 0, "replaced", f"a newer process has the name {hello.name!r}")
                return
            if namesake is not None:
                if namesake.incarnation != hello.incarnation:
                    text = f"a new process took over the name {hello.name!r}"
                    self._error_to(namesake.peer, 0, "replaced", text)
                self._forget_client(namesake)
            known = Client(
                peer,
                hello.name,
                hello.incarnation,
                hello.rank,
                hello.world_size,
                hello.host,
                hello.pid,
                since=self._now,
                heard=self._now,
                eval=hello.eval,
            )
            self.peers.clients[peer] = self._names[hello.name] = known
            self.peers.changes += 1
        self.to_clients.append((peer, self._plain(Op.WELCOME, {"epoch": self.epoch})))

    def _infer(self, client: Client, header: Header, message: list[Any]) -> None:
        if header.request_id == 0:
            raise DecodeError("a request needs an id above 0")
        if header.request_id in client.requests:
            self.counters.duplicates += 1
            return
        if header.policy_id != 0:
            raise DecodeError(f"no worker serves the policy {header.policy_id}")
        if not self.options.decoupled and client.rank is None:
            raise DecodeError(
                "the pool runs in normal mode (runner.enable_decoupled_mode is false), which binds env "
                "ranks to rollout ranks: give PolicyClient a rank and world_size"
            )
        # A small frame is bytes; a large one is a Frame that stays where libzmq received it.
        size = sum(len(frame) for frame in message)
        if (
            len(self._requests) >= self.options.max_open
            or self._bytes + size > self.options.max_open_bytes
            or len(client.requests) >= self.options.max_client_open
        ):
            self.counters.overloaded += 1
            text = f"{len(self._requests)} requests with {self._bytes >> 20} MiB are open"
            self._error_to(client.peer, header.request_id, "overloaded", text, retry_after_ms=100)
            return
        request = Request(
            self._next_slot,
            client,
            header.request_id,
            message,
            size,
            header.rows,
            bool(header.flags & FLAG_EVAL),
            header.stage,
            arrived=self._now,
            deadline=self._now + header.budget_ms / 1000,
        )
        self._next_slot += 1
        self._requests[request.slot] = request
        self._bytes += size
        client.requests[request.request_id] = request
        client.modes[request.stage] = request.eval
        self.counters.requests += 1
        self._schedule.add(request)

    def client_unreachable(self, peer: bytes) -> None:
        """The frontend could not deliver: the client is gone."""
        client = self.peers.clients.get(peer)
        if client is not None:
            self.counters.lost_clients += 1
            self._forget_client(client)

    def _forget_client(self, client: Client) -> None:
        for request in list(client.requests.values()):
            self._cancel(request)
        del self.peers.clients[client.peer]
        self.peers.changes += 1
        if self._names.get(client.name) is client:
            del self._names[client.name]

    # -- The worker leg

    def from_worker(self, peer: bytes, message: list[Any]) -> None:
        """Take in a message of the backend: its frames, the first two as bytes."""
        try:
            header = unpack(message[0])
            worker = self.peers.workers.get(peer)
            if header.op == Op.HELLO:
                self._worker_hello(peer, worker, decode_meta(message[0][HEADER_SIZE:]))
            elif worker is None:
                self.counters.unknown += 1
                self.to_workers.append((peer, [Header(Op.UNKNOWN).pack()]))
            else:
                worker.heard = self._now
                self._worker_message(worker, header, message)
        except DecodeError as error:
            self.counters.malformed += 1
            if isinstance(error, VersionMismatch):
                fields = {"code": "refused", "message": str(error)}
                self.to_workers.append((peer, self._plain(Op.ERROR, fields)))

    def _worker_message(self, worker: Worker, header: Header, message: list[Any]) -> None:
        if header.op == Op.READY:
            self._ready(worker, header.request_id)
        elif header.op == Op.RESULT:
            try:
                self._result(worker, unpack_table(message[0]), message)
            finally:
                self._take_back(worker, "gave no valid result for it")
                self._set_idle(worker)
        elif header.op == Op.BYE:
            self._forget_worker(worker, "left")
        else:
            raise DecodeError(f"op {header.op} has no meaning from a worker")

    def _worker_hello(self, peer: bytes, known: Worker | None, fields: dict[str, Any]) -> None:
        hello = Introduction.of(fields)
        if known is not None:
            self._take_back(known, "registered again")
        else:
            if len(self._totals) >= _MAX_TOTALS and hello.name not in self._totals:
                alive = {worker.name for worker in self.peers.workers.values()}
                self._totals.pop(next((n for n in self._totals if n not in alive), hello.name), None)
            self.peers.workers[peer] = Worker(
                peer,
                hello.name,
                hello.rank,
                hello.world_size,
                hello.host,
                hello.pid,
                since=self._now,
                heard=self._now,
                totals=self._totals.setdefault(hello.name, WorkerTotals()),
            )
            self.peers.changes += 1
        self.to_workers.append((peer, self._plain(Op.WELCOME, {"epoch": self.epoch})))

    def _ready(self, worker: Worker, number: int) -> None:
        batch = worker.batch
        if batch is not None and number < batch.number:
            if worker.unaware_since is None:
                worker.unaware_since = self._now  # this READY may have crossed the batch
                return
            if self._now < worker.unaware_since + _UNAWARE_FOR:
                return
        if batch is not None:
            self._take_back(worker, "never got it" if number < batch.number else "lost its result")
        self._set_idle(worker)

    def _result(self, worker: Worker, table: Table, message: list[Any]) -> None:
        batch = worker.batch
        if batch is None or table.epoch != self.epoch or table.number != batch.number:
            self.counters.late_results += len(table.entries)
            return
        totals = worker.totals
        totals.batches += 1
        totals.predict_s += table.predict_us / 1e6
        self.counters.batches += 1
        for entry, reply in split_batch(table, message):
            request = batch.requests.pop(entry.slot, None)
            if request is None or request.state is not State.RUNNING:
                self.counters.late_results += 1
                continue
            header = unpack(reply[0])
            if header.request_id != request.request_id or header.frames != entry.frames:
                batch.requests[entry.slot] = request
                raise DecodeError("a result does not belong to its request")
            totals.shards += 1
            totals.rows += request.rows
            totals.policy_version = header.policy_version
            self.counters.shards += 1
            self.counters.rows += request.rows
            self._close(request)
            if header.op == Op.REPLY:
                self.counters.answered += 1
                self.counters.queue_s += header.queue_us / 1e6
            else:
                self.counters.errors += 1
            self.to_clients.append((request.client.peer, reply))

    def worker_unreachable(self, peer: bytes) -> None:
        """The backend could not deliver: the worker is gone."""
        worker = self.peers.workers.get(peer)
        if worker is not None:
            self.counters.lost_workers += 1
            self._forget_worker(worker, "was lost")

    def undelivered(self, peer: bytes) -> None:
        """The backend could not take the batch for `peer`; its requests wait on, none the worse."""
        worker = self.peers.workers.get(peer)
        if worker is not None:
            self._take_back(worker, None)

    def _forget_worker(self, worker: Worker, why: str) -> None:
        self._take_back(worker, why)
        self._idle.pop(worker.peer, None)
        del self.peers.workers[worker.peer]
        self.peers.changes += 1

    def _set_idle(self, worker: Worker) -> None:
        if worker.quarantined:
            worker.quarantined = False
            self.peers.changes += 1
        worker.unaware_since = None
        if worker.peer not in self._idle:
            worker.changed = self._now
            self._idle[worker.peer] = worker

    # -- Requests and batches

    def dispatch(self) -> None:
        """Give waiting requests to idle workers, the longest idle first."""
        for worker in list(self._idle.values()):
            requests = self._schedule.take(worker, self._now)
            if requests:
                self._send_batch(worker, requests)

    def _send_batch(self, worker: Worker, requests: list[Request]) -> None:
        del self._idle[worker.peer]
        batch = Batch(self._next_batch, self._now, {request.slot: request for request in requests})
        self._next_batch += 1
        worker.batch, worker.changed, worker.unaware_since = batch, self._now, None
        entries = []
        for request in requests:
            request.state = State.RUNNING
            entries.append(
                Entry(
                    request.slot,
                    len(request.message[0]),
                    len(request.message) - 1,
                    min(len(request.history), 255),
                    min(int((self._now - request.arrived) * 1e6), 2**32 - 1),
                    request.client.peer,
                )
            )
        table = Table(self.epoch, batch.number, entries)
        messages = [request.message for request in requests]
        self.to_workers.append((worker.peer, join_batch(table, Op.BATCH, messages)))

    def _take_back(self, worker: Worker, why: str | None) -> None:
        """Return the open requests of the batch that `worker` holds to the head of the queue.

        Args:
            worker: Who holds them, if anything.
            why: Ends the sentence "NAME …" in their history; None if the attempt does not count.
        """
        batch, worker.batch = worker.batch, None
        if batch is None:
            return
        back = []
        for request in batch.requests.values():
            if request.state is not State.RUNNING:
                continue
            if why is not None:
                request.history.append(f"{worker.name} {why} after {self._now - batch.sent:.1f} s")
                request.avoid.add(worker.name)
                if len(request.history) >= self.options.limits.max_attempts:
                    history = "; ".join(request.history)
                    text = f"{len(request.history)} rollout workers were lost with it: {history}"
                    self._fail(request, "attempts", text)
                    continue
                self.counters.requeued += 1
            request.state = State.WAITING
            back.append(request)
        self._schedule.put_back(back)

    def _close(self, request: Request) -> None:
        request.state = State.CLOSED
        request.message = []
        self._bytes -= request.size
        del self._requests[request.slot]
        del request.client.requests[request.request_id]

    def _cancel(self, request: Request) -> None:
        self._close(request)
        self.counters.cancelled += 1

    def _fail(self, request: Request, code: str, text: str) -> None:
        self._close(request)
        self.counters.errors += 1
        self._error_to(request.client.peer, request.request_id, code, text)

    def _explain(self, request: Request) -> str:
        """Where a request is, for its client to read."""
        waited = self._now - request.arrived
        workers = len(self.peers.workers)
        text = f"{request.state.value} for {waited:.1f} s, {workers} rollout workers connected"
        return "; ".join([text, *request.history])

    # -- Words

    def _plain(self, op: Op, fields: dict[str, Any], request_id: int = 0) -> list[Any]:
        return [Header(op, request_id=request_id).pack() + encode_meta(fields)]

    def _error_to(self, peer: bytes, request_id: int, code: str, text: str, **details: int) -> None:
        fields = {"code": code, "message": text, **details}
        self.to_clients.append((peer, self._plain(Op.ERROR, fields, request_id)))

    def stop(self) -> None:
        """Answer everything that is open with an ERROR; there will be no more replies."""
        for request in list(self._requests.values()):
            self._fail(request, "stopping", "the broker is shutting down")

    def status(self) -> dict[str, Any]:
        """Counters, and every peer with what it does; numbers, str and lists only."""
        now = self._now
        return {
            "epoch": self.epoch,
            "decoupled": self.options.decoupled,
            "uptime_s": now - self._started,
            "counters": asdict(self.counters),
            "open_requests": len(self._requests),
            "open_bytes": self._bytes,
            "workers": [
                {
                    "name": worker.name,
                    "host": worker.host,
                    "pid": worker.pid,
                    "state": _state_of(worker),
                    "state_s": now - worker.changed,
                    "shards": 0 if worker.batch is None else len(worker.batch.requests),
                }
                for worker in self.peers.workers.values()
            ],
            "totals": {name: asdict(totals) for name, totals in self._totals.items()},
            "clients": [
                {
                    "name": client.name,
                    "host": client.host,
                    "pid": client.pid,
                    "open_requests": len(client.requests),
                    "silent_s": now - client.heard,
                }
                for client in self.peers.clients.values()
            ],
        }


def _state_of(worker: Worker) -> str:
    if worker.quarantined:
        return "stuck"
    return "idle" if worker.batch is None else "busy"
