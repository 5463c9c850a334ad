"""The broker's backend: rollout workers register, take batches, and return results."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from zmqrl.broker import pool as words
from zmqrl.broker.pool import Pool
from zmqrl.broker.records import (
    RUNNING,
    WAITING,
    Batch,
    Introduction,
    Request,
    Worker,
    WorkerTotals,
)
from zmqrl.errors import DecodeError, SharedMemoryLost
from zmqrl.transport.codec import MAX_REQUEST, decode_meta
from zmqrl.transport.header import (
    FLAG_AHEAD,
    FLAG_LANE,
    FLAG_READS_LANE,
    HEADER_SIZE,
    Header,
    Op,
    Table,
    join_bodies,
    pack_entry,
    pack_table,
    split_batch,
    unpack,
    unpack_table,
    unpack_table_head,
)

# Plain ints: the look at a member of an enum is felt with each request.
_REPLY, _ERROR, _RESULT, _BATCH = int(Op.REPLY), int(Op.ERROR), int(Op.RESULT), int(Op.BATCH)
_HELLO = int(Op.HELLO)

_UNAWARE_FOR = 1.0
"""Seconds between two READYs that do not know a batch, after which it counts as lost on the way."""

_MAX_TOTALS = 1000


class WorkerLeg:
    """Acts on the messages of rollout workers, and gives them work.

    Args:
        pool: The broker's tables.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._next_batch = 1

    def receive(self, peer: bytes, header: Header, message: list[Any], key: str) -> None:
        """Act on one message; `key` is the peer's if it says HELLO.

        Raises:
            DecodeError: It is not valid; what it would have answered runs again.
        """
        worker, op = self._pool.workers.get(peer), header.op
        if op == _HELLO:
            self._hello(peer, worker, decode_meta(message[0][HEADER_SIZE:], MAX_REQUEST), key)
        elif worker is None:
            self._pool.counters.unknown += 1
            self._pool.to_workers.append((peer, words.plain(Op.UNKNOWN, {})))
        else:
            worker.heard = self._pool.now
            if op == _RESULT:
                self._result(worker, message)
            elif op == Op.READY:
                worker.reads_lane = bool(header.flags & FLAG_READS_LANE)
                self._ready(worker, header.request_id)
            elif op == Op.AHEAD:
                self._ahead(worker, header.request_id)
            elif op == Op.BYE:
                batch = worker.batch
                crossed = batch is not None and header.request_id < batch.number
                self.forget(worker, None if crossed else "left")
            else:
                raise DecodeError(f"op {op} has no meaning from a worker")

    def forget(self, worker: Worker, why: str | None) -> None:
        """A worker has left or was lost: what it holds runs elsewhere; `why` as in `_take_back`."""
        pool, policy = self._pool, worker.policy
        pool.notes.append(f"{worker.name} {why or 'left'}")
        self._take_all_back(worker, why)
        pool.idle.pop(worker.peer, None)
        del pool.workers[worker.peer]
        policy.peers.remove_worker(worker)
        pool.policies.forget_unused(policy)

    def quarantine(self, worker: Worker, why: str) -> None:
        """A worker holds its batch for too long: it gets no more until it says that it is idle."""
        worker.quarantined = True
        worker.policy.peers.changes += 1
        self._pool.notes.append(f"{worker.name} is stuck in a batch; its requests wait for others")
        self._take_all_back(worker, why)

    def undelivered(self, worker: Worker) -> None:
        """The batch that was sent last did not go out; its requests wait on, none the worse."""
        self._take_back(worker, next(reversed(worker.batches.values()), None), None)

    def _take_all_back(self, worker: Worker, why: str | None) -> None:
        """Take back what `worker` holds; `why` is about the batch that it computes."""
        first = worker.batch
        for batch in reversed(list(worker.batches.values())):
            self._take_back(worker, batch, why if batch is first else None)

    def _take_back(self, worker: Worker, batch: Batch | None, why: str | None) -> None:
        """Return the open requests of a batch that `worker` holds to the head of their queue.

        Args:
            worker: Who holds them.
            batch: Which; None for none.
            why: Ends the sentence "NAME …" in their history; None if the attempt does not count.
        """
        if batch is None:
            return
        del worker.batches[batch.number]
        self._pool.ahead.pop(worker.peer, None)
        back = []
        for request in batch.requests.values():
            if request.state is not RUNNING:
                continue
            request.taken_back = True
            if why is None or self._has_another_attempt(request, worker, why, batch):
                request.state = WAITING
                back.append(request)
        if back:
            worker.policy.schedule.put_back(back)

    def dispatch(self) -> None:
        """Give waiting requests to idle workers of their policy, the longest idle first."""
        pool, policies = self._pool, self._pool.policies
        if not pool.requests:
            return
        for worker in list(pool.idle.values()):
            requests = worker.policy.schedule.take(worker, pool.now)
            if requests:
                self._send_batch(worker, requests)
            elif not policies.wait_for_workers():
                return  # spares the look at every idle worker
        if not pool.ahead or not policies.has_long_queue():
            return  # the same
        for worker in list(pool.ahead.values()):
            schedule = worker.policy.schedule
            if schedule.is_long(worker) and (requests := schedule.take(worker, pool.now)):
                self._send_batch(worker, requests)

    def _has_another_attempt(self, request: Request, worker: Worker, why: str, batch: Batch) -> bool:
        pool = self._pool
        line = f"{worker.name} {why} after {pool.now - batch.begun:.1f} s"
        request.history = (*request.history, line)
        request.avoid |= {worker.name}
        if len(request.history) < pool.options.limits.max_attempts:
            pool.counters.requeued += 1
            return True
        history = "; ".join(request.history)
        text = f"given up after {len(request.history)} attempts (rollout.max_attempts): {history}"
        pool.fail(request, words.error("attempts", text, request.request_id))
        return False

    def _hello(self, peer: bytes, known: Worker | None, fields: dict[str, Any], key: str) -> None:
        pool = self._pool
        hello = Introduction.of(fields, "worker")
        if known is not None and hello.policy != known.policy.name:
            raise DecodeError(f"HELLO: this worker serves {known.policy}; open a new socket for another")
        policy = pool.policies.named(hello.policy)
        if known is not None:
            self._take_all_back(known, "registered again")
        else:
            self._forget_old_totals(hello.name)
            pool.workers[peer] = worker = Worker(
                peer,
                hello.name,
                policy,
                hello.rank,
                hello.world_size,
                hello.host,
                hello.pid,
                since=pool.now,
                heard=pool.now,
                totals=pool.totals.setdefault(hello.name, WorkerTotals()),
                key=key,
                sticky=hello.sticky,
            )
            pool.policies.add_worker(worker)
            pool.notes.append(f"{hello.name} joined (host {hello.host or '?'}, pid {hello.pid})")
        welcome = dict(pool.welcome)
        for other in policy.peers.workers.values():
            if other.sticky is not hello.sticky:
                welcome["warning"] = (
                    f"of {hello.name} and {other.name}, which serve {policy}, one keeps the state of "
                    "clients and one does not: give both the same rollout.affinity"
                )
            if hello.rank is not None and other.rank == hello.rank and other.pid != hello.pid:
                welcome["warning"] = f"rank {hello.rank} is also that of {other.name} (pid {other.pid})"
        pool.to_workers.append((peer, words.plain(Op.WELCOME, welcome)))

    def _forget_old_totals(self, name: str) -> None:
        totals = self._pool.totals
        if name not in totals and len(totals) >= _MAX_TOTALS:
            alive = {worker.name for worker in self._pool.workers.values()}
            oldest = next((known for known in totals if known not in alive), None)
            if oldest is not None:
                del totals[oldest]

    def _ready(self, worker: Worker, number: int) -> None:
        for batch in reversed(list(worker.batches.values())):
            if number >= batch.number:
                self._take_back(worker, batch, "lost its result")
            elif worker.unaware_since is None:
                worker.unaware_since = self._pool.now  # this READY may have crossed the batch
            elif self._pool.now >= worker.unaware_since + _UNAWARE_FOR:
                self._take_back(worker, batch, "never got it")
        if not worker.batches:
            self._set_idle(worker)

    def _ahead(self, worker: Worker, number: int) -> None:
        """A worker begins a batch, and takes the next one already."""
        if list(worker.batches) == [number]:
            self._pool.ahead[worker.peer] = worker

    def _result(self, worker: Worker, message: list[Any]) -> None:
        pool, batch = self._pool, worker.batch
        try:
            epoch, number, count = unpack_table_head(message[0])
            if epoch == pool.epoch and number in worker.batches:
                if batch is not None and batch.number != number:
                    self._take_back(worker, batch, "lost its result")
                batch = worker.batches[number]
                if count > len(batch.requests):
                    raise DecodeError("a result has more entries than its batch")
                self._answer(worker, batch, unpack_table(message[0]), message)
            else:
                pool.counters.late_results += 1
                self._dismiss(message)
                if epoch == pool.epoch and number < worker.given:
                    return  # the worker is not idle: a later batch comes next, be it taken back as well
        except DecodeError:
            self._take_back(worker, batch, "gave no valid result for it")
            self._begin_next(worker)
            raise
        self._take_back(worker, batch, "left it out of its result")
        self._begin_next(worker)

    def _dismiss(self, message: list[Any]) -> None:
        """Nobody is told the results of a batch that has been taken back, or is another broker's."""
        if self._pool.lane is None:
            return
        with suppress(DecodeError):
            for _, reply in split_batch(unpack_table(message[0]), message):
                self._pool.lane.dismiss(reply[0])

    def _begin_next(self, worker: Worker) -> None:
        """A worker is done with a batch: it begins the one that waits behind it, or is idle."""
        batch = worker.batch
        if batch is None:
            self._set_idle(worker)
        else:
            batch.begun = worker.changed = self._pool.now

    def _answer(self, worker: Worker, batch: Batch, table: Table, message: list[Any]) -> None:
        pool, totals, counters = self._pool, worker.totals, self._pool.counters
        shards = split_batch(table, message)
        worker.policy.schedule.took(pool.now - batch.begun)
        totals.batches += 1
        totals.predict_s += table.predict_us / 1e6
        counters.batches += 1
        for entry, reply in shards:
            request = batch.requests.get(entry.slot)
            if request is None or request.state is not RUNNING:
                counters.late_results += 1
                if pool.lane is not None:
                    pool.lane.dismiss(reply[0])
                continue
            header = unpack(reply[0])
            op, rows = header.op, request.rows
            if (
                header.request_id != request.request_id
                or header.frames != entry.frames
                or (op != _REPLY and op != _ERROR)
            ):
                raise DecodeError("a result does not belong to its request")
            totals.shards += 1
            totals.rows += rows
            totals.policy_version = header.policy_version
            counters.shards += 1
            counters.rows += rows
            if op == _REPLY:
                if header.flags & FLAG_LANE:
                    counters.lane_replies += 1
                counters.queue_s += batch.sent - request.arrived
                if request.taken_back and request.in_lane and header.attempt == 0:
                    # No attempt of its worker counted, but its client must know that there were two.
                    reply = [header._replace(attempt=1).pack() + reply[0][HEADER_SIZE:], *reply[1:]]
                pool.answer(request, reply)
            else:
                pool.fail(request, reply)

    def _set_idle(self, worker: Worker) -> None:
        pool = self._pool
        if worker.quarantined:
            worker.quarantined = False
            worker.policy.peers.changes += 1
            pool.notes.append(f"{worker.name} is back")
        worker.unaware_since = None
        worker.ready = True
        if worker.peer not in pool.idle:
            worker.changed = pool.now
            pool.idle[worker.peer] = worker

    def _send_batch(self, worker: Worker, requests: list[Request]) -> None:
        pool, now = self._pool, self._pool.now
        inlined: dict[int, list[Any]] = {}
        if pool.lane_bytes and not worker.reads_lane and any(request.in_lane for request in requests):
            inlined = self._inlined(requests)
            requests = [request for request in requests if request.state is WAITING]
            if not requests:
                return
        if worker.batches:
            del pool.ahead[worker.peer]
            flags = FLAG_AHEAD
        else:
            del pool.idle[worker.peer]
            worker.changed = now
            flags = 0
        batch = Batch(self._next_batch, now, now, {request.slot: request for request in requests})
        self._next_batch += 1
        worker.batches[batch.number] = batch
        worker.given = batch.number
        worker.unaware_since = None
        entries, messages, origins = [], [], []
        for request in requests:
            request.state = RUNNING
            message, origin = inlined.get(request.slot) or request.message, request.client.peer
            waited_us = int((now - request.arrived) * 1e6)
            entries.append(
                pack_entry(
                    request.slot,
                    len(message[0]),
                    len(message) - 1,
                    min(len(request.history), 255),
                    len(origin),
                    min(waited_us, 2**32 - 1),
                )
            )
            messages.append(message)
            origins.append(origin)
        table = pack_table(_BATCH, pool.epoch, batch.number, entries, origins, flags=flags)
        pool.to_workers.append((worker.peer, join_bodies(table, messages)))

    def _inlined(self, requests: list[Request]) -> dict[int, list[Any]]:
        """Messages for a worker that cannot read shared memory, by slot.

        A request whose memory cannot be read here either ends in an ERROR.
        """
        pool, messages = self._pool, {}
        for request in requests:
            if not request.in_lane or pool.lane is None:
                continue
            try:
                messages[request.slot] = pool.lane.inlined(request.message)
                pool.counters.inlined += 1
            except SharedMemoryLost as error:
                request.state = RUNNING  # it stands in no queue any more
                pool.fail(request, words.error("lane", str(error), request.request_id))
        return messages
