"""The loop of a rollout worker: it tells the broker that it is idle, and takes batches."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from zmqrl.allocator import KeptMemory
from zmqrl.errors import DecodeError, StartupFailed, VersionMismatch
from zmqrl.rollout.answers import Answers
from zmqrl.rollout.policy import Policy
from zmqrl.rollout.prefetch import Prefetch
from zmqrl.rollout.versions import PolicyVersions
from zmqrl.transport import sockets
from zmqrl.transport.codec import LARGE, decode_meta, encode_meta
from zmqrl.transport.header import (
    FLAG_AHEAD,
    FLAG_READS_LANE,
    HEADER_SIZE,
    REWARD,
    Header,
    Op,
    unpack,
    unpack_table,
)
from zmqrl.transport.refusal import Suspicion
from zmqrl.transport.security import Keys
from zmqrl.transport.sharedmem import Lane

log = logging.getLogger(__name__)

_BATCH = int(Op.BATCH)  # a member of an enum costs at every look

_TICK_MS = 250
"""Milliseconds after which an idle worker looks at what else is to do."""

_READY_EVERY = 1.0
"""Seconds after which an idle worker repeats that it is idle; the broker may have been restarted."""

_REBUILD_AFTER = 12.0
"""Seconds without a word, although the broker probes every worker now and then, after which an idle
worker makes its socket anew."""

_AT_REST_AFTER = 3.0
"""Seconds without a batch after which a worker may need its memory no more."""

_COPIED_WITHIN = 2.0
"""Seconds that a worker which leaves gives its clients to copy replies out of its memory."""


class RolloutWorker:
    """Takes batches from the broker and answers them with a policy.

    The loop: receive a batch, have it answered, send all replies in one message. The broker gives work
    only to a worker that has said it is idle, so nothing waits here while a batch is computed.

    Args:
        policy: Loaded and warmed up; or one whose weights change.
        endpoint: The broker's backend.
        name: Names the worker in status and history.
        serves: The name of the policy; empty for the pool's own.
        prefetch: Whether it asks for one batch more when it begins one; None if that depends on whether
            a batch takes about as long as the way to the broker and back.
        rank: Its number among the rollout workers; normal mode binds env ranks by it.
        world_size: The number of rollout workers, with `rank`.
        max_message_mb: Mebibytes; as the broker's. A larger reply becomes an error.
        heartbeat_s: Seconds; as the broker's.
        keys: Of a worker.
        static_sizes: The only numbers of rows that the policy is called with; see `Inference`.
        state_mb: Mebibytes of states that the worker keeps for a policy with memory; None to have the
            clients carry them.
        memory: What this process keeps of freed memory, to be given back when there is nothing to do.
    """

    def __init__(
        self,
        policy: Policy | PolicyVersions,
        endpoint: str,
        *,
        name: str,
        serves: str = "",
        prefetch: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        max_message_mb: int = sockets.MAX_MESSAGE_MB,
        heartbeat_s: float = sockets.HEARTBEAT_S,
        keys: Keys | None = None,
        static_sizes: Sequence[int] = (),
        state_mb: int | None = None,
        memory: KeptMemory | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._memory = memory
        self._answered = 0.0  # when a batch was, the last time
        self._versions = policy if isinstance(policy, PolicyVersions) else PolicyVersions(policy)
        self._lane = Lane()
        self._answers = Answers(
            self._versions,
            self._lane,
            name,
            key="actions" if serves != REWARD else "rewards",
            static_sizes=static_sizes,
            state_mb=state_mb,
            max_message=max_message_mb << 20,
        )
        self._introduction: dict[str, Any] = {
            "role": "worker",
            "name": name,
            "incarnation": time.time_ns(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "policy": serves,
        }
        if rank is not None:
            self._introduction.update(rank=rank, world_size=world_size)
        if self._answers.keeps_states:
            self._introduction["sticky"] = True
        self._heartbeat_s = heartbeat_s
        self._keys = keys
        self._suspicion = Suspicion(endpoint, keys)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._number = 0  # of the last batch received
        self._prefetch = Prefetch(prefetch)
        self._epoch: Any = None  # of the broker that knows this worker
        self._connect()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping` says so; a batch in hand is finished first.

        Args:
            stopping: Asked at least four times a second while idle.

        Raises:
            StartupFailed: The broker refuses this worker.
        """
        try:
            warned = time.monotonic()
            if self._memory is not None:
                self._memory.begin()
            while not stopping():
                frames = self._receive()
                if frames:
                    self._handle(frames)
                    self._heard = time.monotonic()
                    self._suspicion.end()
                    continue
                self._versions.refresh()
                now = time.monotonic()
                self._lane.look(now)
                self._lane.slots.collect(now)
                if self._memory is not None and now >= self._answered + _AT_REST_AFTER:
                    self._memory.give_back(0, now)
                if now >= self._heard + _REBUILD_AFTER:
                    self._socket.close(0)
                    self._connect()
                elif now >= self._spoke + _READY_EVERY:
                    self._ready()
                refusal = self._suspicion.look()
                if refusal is not None and refusal.final:
                    raise StartupFailed(f"the broker at {self.endpoint} {refusal.reason}")
                if now >= max(warned, self._heard) + 5.0:
                    warned = now
                    why = self._suspicion.reason
                    log.warning("no broker answers at %s%s", self.endpoint, why and f": it {why}")
            self._send([Header(Op.BYE, request_id=self._number).pack()])
            until = time.monotonic() + _COPIED_WITHIN
            while self._lane.slots.collect(time.monotonic()) and time.monotonic() < until:
                time.sleep(0.001)  # memory wakes nobody
        finally:
            self._lane.close()
            self._socket.close()
            self._context.term()

    def _connect(self) -> None:
        self._socket = sockets.dealer(self._context, self.endpoint, self._heartbeat_s, self._keys)
        # Waiting in `recv` is one call, where a poll before it costs as much as a small batch.
        self._socket.setsockopt(zmq.RCVTIMEO, _TICK_MS)
        self._heard = time.monotonic()
        self._suspicion.begin()
        self._hello()

    def _receive(self) -> list[Any]:
        """The next message; empty if none comes for a while."""
        frames: list[Any] = []
        more = True
        while more:
            try:
                frame = self._socket.recv(copy=False)
            except zmq.Again:
                return []
            more = frame.more
            small = len(frames) < 2 or len(frame) < LARGE
            frames.append(frame.bytes if small else frame)
        return frames

    def _handle(self, frames: list[Any]) -> None:
        """Act on a message."""
        try:
            header = unpack(frames[0])
            if header.op == _BATCH:
                self._batch(frames, ahead=header.flags & FLAG_AHEAD != 0)
            elif header.op == Op.WELCOME:
                self._welcome(decode_meta(frames[0][HEADER_SIZE:]))
                self._ready()
            elif header.op == Op.UNKNOWN:
                self._hello()
            elif header.op == Op.ERROR:
                message = decode_meta(frames[0][HEADER_SIZE:]).get("message")
                raise StartupFailed(f"the broker at {self.endpoint} refuses this worker: {message}")
        except VersionMismatch as error:
            raise StartupFailed(f"{self.endpoint}: {error}") from None
        except DecodeError as error:
            log.warning("a message from the broker is not valid: %s", error)

    def _batch(self, frames: list[Any], ahead: bool) -> None:
        """Answer a batch, which was perhaps given `ahead`."""
        table = unpack_table(frames[0])
        self._number = table.number
        queued_s = table.entries[0].queue_us / 1e6 if table.entries else 0.0
        if self._prefetch.begin(ahead, queued_s):
            self._send([Header(Op.AHEAD, request_id=table.number).pack()])
        self._versions.refresh()
        self._send(self._answers.result(table, frames))
        self._answered = self._spoke
        self._prefetch.end()
        self._lane.look(self._spoke)
        self._lane.slots.collect(self._spoke)

    def _welcome(self, fields: dict[str, Any]) -> None:
        if fields.get("epoch") != self._epoch:
            log.info("connected to the broker at %s", self.endpoint)
        if fields.get("warning"):
            log.warning("%s", fields["warning"])
        self._epoch = fields.get("epoch")
        self._number = 0
        self._lane.welcome(fields)

    def _ready(self) -> None:
        flags = FLAG_READS_LANE if self._lane.is_open else 0
        self._send([Header(Op.READY, flags, self._number).pack()])

    def _hello(self) -> None:
        self._send([Header(Op.HELLO).pack() + encode_meta(self._introduction)])

    def _send(self, frames: list[Any]) -> None:
        """Send without waiting: a broker that is away takes the batch back, or asks to register."""
        self._spoke = time.monotonic()
        sockets.send(self._socket, frames, copied=2)
