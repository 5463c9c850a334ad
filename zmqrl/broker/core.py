"""The broker's state machine: no sockets, and no clock of its own.

The rules, in the order in which they matter:

1.  A request is the broker's until it is answered. Each one accepted ends in exactly one of: a reply,
    an ERROR, or the loss or the word of its client.
2.  Late binding: a worker is given a batch only when it says that it is idle, and then the oldest
    requests for the policy that it serves. READY says so, and RESULT says so with the results. A
    worker whose batches are as short as a few trips to the broker may ask for one batch more when it
    begins one (AHEAD); it gets it if nobody is idle and a full batch waits. The policies share nothing
    but the bounds of rule 8: none waits for another.
3.  A reply counts only from the worker that holds the request's current batch. It goes to the client
    that the *broker* noted for the slot; a worker cannot name another.
4.  Worker lost, or its batch older than the attempt timeout: its requests return to the head of
    their queue, with a line in their history; those of a batch that waits behind another return
    without. A request whose history has `max_attempts` lines ends in an ERROR that tells it; its last
    attempt goes alone.
5.  A READY may cross a dispatch. It names the last batch that its worker received; if READYs a second
    apart do not know a batch that the worker holds, that batch was lost on the way.
6.  Peers are probed through the ROUTER, which refuses a message to a peer that is gone: workers that
    hold work, and clients that a barrier waits for, four times a second; idle workers and silent
    clients now and then.
7.  Peers that are not known, after a restart of the broker for instance, are told UNKNOWN and register.
8.  Queues are bounded, and nothing is dropped without being counted.
9.  A peer whose key is let in no longer is forgotten like a lost one, and told so, now and whenever it
    introduces itself again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from zmqrl.broker import pool as words
from zmqrl.broker.client_leg import ClientLeg
from zmqrl.broker.lane import BrokerLane
from zmqrl.broker.pool import Options, Pool
from zmqrl.broker.records import Client, Counters, Worker
from zmqrl.broker.worker_leg import WorkerLeg
from zmqrl.errors import DecodeError
from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import MAX_FRAMES, Header, Op, op_of, request_id_of, unpack

_STATUS = int(Op.STATUS)

TICK = 0.25
"""Seconds between two looks at the timers."""

_PROBE_BUSY_AFTER = 0.25
_PROBE_SILENT_AFTER = 3.0
_PAUSE = 1.0

_MAX_SHOWN = 1000
"""Clients in the status, which has to fit into a message: those that are in one state for longest."""


class Broker:
    """The state of one broker.

    The server calls `advance` with the time, then hands in what arrived, then calls `tick` and
    `dispatch`, and sends what `take_outbox` gives. Replies may leave earlier, through `send_now`.

    Args:
        options: How it behaves.
        epoch: A number that no earlier broker at this endpoint used.
        now: Seconds on a monotonic clock.
        lane: Shared memory between peers of this host; None without.
        send_now: Sends `frames` to the client `peer`, and returns whether it could. What it could not,
            and everything where there is no such function, stands in the outbox.
    """

    def __init__(
        self,
        options: Options,
        epoch: int,
        now: float,
        lane: BrokerLane | None = None,
        send_now: Callable[[bytes, list[Any]], bool] = lambda peer, frames: False,
    ) -> None:
        self._pool = Pool(options, epoch, now, lane, send_now)
        self._clients = ClientLeg(self._pool)
        self._workers = WorkerLeg(self._pool)
        self._started = self._ticked = self._clock = now
        self._paused = 0.0
        self._status_meta: bytes | None = None  # of this turn, if somebody has asked

    @property
    def counters(self) -> Counters:
        """What happened since the start."""
        return self._pool.counters

    @property
    def held_bytes(self) -> int:
        """Bytes of the open requests that are in this process's memory."""
        return self._pool.open_bytes - self._pool.lane_bytes

    # -- Time

    def advance(self, clock: float) -> None:
        """Note the time; a gap of more than a second means that the broker itself was stopped.

        Nobody is to blame for such a gap, so the broker's own clock stands still over it.
        """
        gap = clock - self._clock
        if gap > _PAUSE:
            self._paused += gap
            self._ticked -= TICK  # the timers are looked at even if each turn is such a gap
        self._clock = clock
        self._pool.now = clock - self._paused
        self._status_meta = None

    def tick(self) -> bool:
        """Do what is due: deadlines, stuck batches, probes.

        Returns:
            Whether it was time for that, as it is a few times a second.
        """
        pool = self._pool
        if pool.now < self._ticked + TICK:
            return False
        self._ticked = pool.now
        late = [request for request in pool.requests.values() if pool.now >= request.deadline]
        for request in late:
            pool.fail(request, words.error("deadline", pool.explain(request), request.request_id))
        limit = pool.options.attempt_timeout
        for worker in list(pool.workers.values()):
            if worker.batch is not None and pool.now >= worker.batch.begun + limit:
                self._workers.quarantine(worker, f"held it for {limit:g} s (rollout.attempt_timeout_s),")
        self._probe()
        return True

    def timeout(self) -> float:
        """Seconds after which `tick` and `dispatch` want to be called again."""
        pool = self._pool
        if not pool.requests:
            return TICK
        wake = pool.policies.wake_at(pool.idle.values(), pool.now)
        return TICK if wake is None else min(wake - pool.now, TICK)

    def _probe(self) -> None:
        pool = self._pool
        probe = [Header(Op.PROBE).pack()]
        for worker in pool.workers.values():
            batch = worker.batch
            busy = batch is not None and pool.now >= batch.begun + _PROBE_BUSY_AFTER
            # Idle workers are probed although they speak: it tells them that the broker is there.
            if busy or pool.now >= worker.probed + _PROBE_SILENT_AFTER:
                worker.probed = pool.now
                pool.to_workers.append((worker.peer, probe))
        bound = not pool.options.decoupled
        lately, before = pool.now - _PROBE_BUSY_AFTER, pool.now - _PROBE_SILENT_AFTER
        for client in pool.clients.values():  # of which there may be thousands
            last = client.heard if client.heard > client.probed else client.probed
            # A barrier may be waiting for one that does not ask.
            barrier = bound and last <= lately and not self._asks_for_default(client)
            if last <= before or barrier:
                client.probed = pool.now
                pool.to_clients.append((client.peer, probe))

    def _asks_for_default(self, client: Client) -> bool:
        default = self._pool.policies.default
        return any(request.policy is default for request in client.requests.values())

    # -- What arrives

    def from_client(self, peer: bytes, message: list[Any], key: str | None = "") -> None:
        """Take in a message of the frontend.

        Args:
            peer: Its sender.
            message: Its frames, the first as bytes.
            key: With HELLO and STATUS: the sender's, empty without keys, None if it is let in no longer.
        """
        if key is None:
            self.counters.revoked += 1
            self._pool.to_clients.append((peer, words.revoked()))
            return
        try:
            header = unpack(message[0])
            frames = len(message) - 1
            if header.frames != frames or frames > MAX_FRAMES:
                raise DecodeError(_wrong_frames(header.frames, frames))
            if header.op == _STATUS:
                # With a thousand clients it takes milliseconds: once a turn, however often asked for.
                self._status_meta = self._status_meta or encode_meta(self.status())
                status = Header(Op.STATUS, request_id=header.request_id).pack() + self._status_meta
                self._pool.to_clients.append((peer, [status]))
            else:
                self._clients.receive(peer, header, message, key)
        except DecodeError as error:
            self.counters.malformed += 1
            request_id = request_id_of(message[0])
            if request_id or op_of(message[0]) == Op.HELLO:
                refusal = words.error("refused", str(error), request_id)
                self._pool.to_clients.append((peer, refusal))

    def from_worker(self, peer: bytes, message: list[Any], key: str | None = "") -> None:
        """Take in a message of the backend: its frames, the first two as bytes; `key` as above."""
        if key is None:
            self.counters.revoked += 1
            self._pool.to_workers.append((peer, words.revoked()))
            return
        try:
            self._workers.receive(peer, unpack(message[0]), message, key)
        except DecodeError as error:
            self.counters.malformed += 1
            if op_of(message[0]) == Op.HELLO:
                self._pool.to_workers.append((peer, words.error("refused", str(error))))

    # -- What is sent

    def dispatch(self) -> None:
        """Give waiting requests to idle workers."""
        self._workers.dispatch()

    def take_outbox(self) -> tuple[list[tuple[bytes, list[Any]]], list[tuple[bytes, list[Any]]]]:
        """What is to be sent now: `(peer, frames)` for clients, and for workers."""
        pool = self._pool
        outbox = pool.to_clients, pool.to_workers
        pool.to_clients, pool.to_workers = [], []
        return outbox

    def take_notes(self) -> list[str]:
        """What has happened to rollout workers, in words."""
        notes, self._pool.notes = self._pool.notes, []
        return notes

    def client_unreachable(self, peer: bytes) -> None:
        """The frontend could not deliver: the client is gone."""
        client = self._pool.clients.get(peer)
        if client is not None:
            self.counters.lost_clients += 1
            self._clients.forget(client)

    def worker_unreachable(self, peer: bytes) -> None:
        """The backend could not deliver: the worker is gone."""
        worker = self._pool.workers.get(peer)
        if worker is not None:
            self.counters.lost_workers += 1
            self._workers.forget(worker, "was lost")

    def revoke_clients(self, lets_in: Callable[[str], bool]) -> None:
        """Forget the clients whose keys are let in no longer, and tell them."""
        pool = self._pool
        for client in [client for client in pool.clients.values() if not lets_in(client.key)]:
            self.counters.revoked += 1
            pool.notes.append(f"{client.name} had its key revoked")
            self._clients.forget(client)
            pool.to_clients.append((client.peer, words.revoked()))

    def revoke_workers(self, lets_in: Callable[[str], bool]) -> None:
        """The same for workers; what they hold runs elsewhere."""
        pool = self._pool
        for worker in [worker for worker in pool.workers.values() if not lets_in(worker.key)]:
            self.counters.revoked += 1
            self._workers.forget(worker, "had its key revoked")
            pool.to_workers.append((worker.peer, words.revoked()))

    def undelivered(self, peer: bytes) -> None:
        """The backend could not take the batch for `peer`; its requests wait on, none the worse."""
        worker = self._pool.workers.get(peer)
        if worker is not None:
            self._workers.undelivered(worker)

    def stop(self) -> None:
        """Answer everything that is open with an ERROR; there will be no more replies."""
        for request in list(self._pool.requests.values()):
            error = words.error("stopping", "the broker is shutting down", request.request_id)
            self._pool.fail(request, error)

    # -- What one can see

    def status(self) -> dict[str, Any]:
        """Counters, and every peer with what it does; numbers, str and lists only."""
        pool = self._pool
        oldest = next(iter(pool.requests.values()), None)
        longest = heapq.nsmallest(_MAX_SHOWN, pool.clients.values(), lambda client: client.doing()[1])
        return {
            "epoch": pool.epoch,
            "decoupled": pool.options.decoupled,
            "uptime_s": pool.now - self._started,
            "counters": asdict(pool.counters),
            "open_requests": len(pool.requests),
            "open_bytes": pool.open_bytes,
            "oldest_request_s": pool.now - oldest.arrived if oldest else 0.0,
            "queues": pool.policies.waiting(),
            "workers": [
                {
                    "name": worker.name,
                    "policy": worker.policy.name,
                    "host": worker.host,
                    "pid": worker.pid,
                    "state": _state_of(worker),
                    "state_s": pool.now - worker.changed,
                    "since_s": pool.now - worker.since,
                    "shards": sum(len(batch.requests) for batch in worker.batches.values()),
                    "homes": worker.homes,
                }
                for worker in pool.workers.values()
            ],
            "totals": {name: asdict(totals) for name, totals in pool.totals.items()},
            "clients_connected": len(pool.clients),
            "clients": [
                {
                    "name": client.name,
                    "host": client.host,
                    "pid": client.pid,
                    "state": client.doing()[0],
                    "state_s": pool.now - client.doing()[1],
                    "open_requests": len(client.requests),
                    "silent_s": pool.now - client.heard,
                }
                for client in longest
            ],
        }


def _wrong_frames(told: int, came: int) -> str:
    if told > MAX_FRAMES:
        return f"{told} large buffers; {MAX_FRAMES} is the most"
    return f"{came} large buffers came, the header says {told}"


def _state_of(worker: Worker) -> str:
    if worker.quarantined:
        return "stuck"
    return "busy" if worker.batches else "idle"
