"""The inference loop of a rollout worker."""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import zmq

from zmqrl.errors import (
    DecodeError,
    PolicyOutputError,
    SharedMemoryLost,
    StartupFailed,
    VersionMismatch,
    in_a_line,
)
from zmqrl.rollout.failures import Failures
from zmqrl.rollout.inference import Inference
from zmqrl.rollout.policy import Policy
from zmqrl.rollout.prefetch import Prefetch
from zmqrl.rollout.replies import ReplyEncoder
from zmqrl.rollout.stateful import NO_MEMORY, Memory, Recall, States, are_apart, split_off
from zmqrl.rollout.versions import PolicyVersions
from zmqrl.transport import sockets
from zmqrl.transport.codec import LARGE, Encoded, decode, decode_meta, encode_meta
from zmqrl.transport.header import (
    FLAG_EVAL,
    FLAG_KEPT,
    FLAG_LANE,
    FLAG_MEMORY,
    FLAG_READS_LANE,
    HEADER_SIZE,
    MAX_FRAMES,
    REWARD,
    Entry,
    Header,
    Op,
    Table,
    join_batch,
    split_batch,
    unpack,
    unpack_table,
)
from zmqrl.transport.refusal import Suspicion
from zmqrl.transport.security import Keys
from zmqrl.transport.sharedmem import Lane
from zmqrl.transport.tree import rows_of

log = logging.getLogger(__name__)

# A member of an enum costs at every look, and to pack.
_BATCH = int(Op.BATCH)
_REPLY = int(Op.REPLY)
_RESULT = int(Op.RESULT)

_TICK_MS = 250
"""Milliseconds after which an idle worker looks at what else is to do."""

_READY_EVERY = 1.0
"""Seconds after which an idle worker repeats that it is idle; the broker may have been restarted."""

_REBUILD_AFTER = 12.0
"""Seconds without a word, although the broker probes every worker now and then, after which an idle
worker makes its socket anew."""

_COPIED_WITHIN = 2.0
"""Seconds that a worker which leaves gives its clients to copy replies out of its memory."""

_MAX_TRACEBACK = 8000

_ASK_AGAIN_MS = 100
"""Milliseconds after which a client asks again for a version whose weights are still on their way."""

_LAST_MOMENT_MS = 1000
"""A request that has less time left is not told to ask again: it ends in an error that says why."""

_MOST_NAMED = 100_000
"""Rows that an error lists; a message that lists many more is not read."""

_ROOM_FOR_ERROR = 256
"""Bytes kept for each reply of a batch: it can always be replaced by a short ERROR."""


@dataclass(slots=True)
class _Shard:
    """One request of a batch, decoded."""

    entry: Entry
    header: Header
    observation: Any
    memory: Memory | None
    """What it says of its rows, for a policy with memory."""


class RolloutWorker:
    """Takes batches from the broker and answers them with a policy.

    The loop: receive a batch, decode its shards, group those of one structure, run the policy once for
    each group, split the result, send all replies in one message. The broker gives work only to a
    worker that has said it is idle, so nothing waits here while a batch is computed.

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
    ) -> None:
        self.endpoint = endpoint
        self.name = name
        self._versions = policy if isinstance(policy, PolicyVersions) else PolicyVersions(policy)
        key = "actions" if serves != REWARD else "rewards"
        self._inference = Inference(self._versions, key, static_sizes)
        self._apart = FLAG_EVAL if self._inference.wants_one_mode else 0
        """The flags that requests of one batch must have in common."""
        self._encoder = ReplyEncoder()
        self._states = States(state_mb) if self._versions.keeps_state else None
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
        if self._states is not None and not self._states.travel:
            self._introduction["sticky"] = True
        self._max_message = max_message_mb << 20
        self._heartbeat_s = heartbeat_s
        self._keys = keys
        self._suspicion = Suspicion(endpoint, keys)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._number = 0  # of the last batch received
        self._prefetch = Prefetch(prefetch)
        self._predict_s = 0.0  # spent in the policy for the batch in hand
        self._epoch: Any = None  # of the broker that knows this worker
        self._failures = Failures()
        self._lane = Lane()
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
                self._batch(frames)
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

    # -- A batch

    def _batch(self, frames: list[Any]) -> None:
        table = unpack_table(frames[0])
        self._number = table.number
        if self._prefetch.begin():
            self._send([Header(Op.AHEAD, request_id=table.number).pack()])
        self._versions.refresh()
        replies: dict[int, list[Any]] = {}
        groups: dict[tuple[int, ...], list[_Shard]] = {}
        is_single = len(table.entries) == 1
        for entry, message in split_batch(table, frames):
            header = unpack(message[0])
            try:
                meta, buffers = message[0][HEADER_SIZE:], message[1:]
                if header.flags & FLAG_LANE:
                    meta, views = self._lane.reader.views(meta)
                    buffers = [*views, *buffers]
                # Views of what came: `merge` copies them into memory that is the policy's own. It has
                # nothing to do for a small observation that is alone.
                observation = decode(meta, buffers, writable=is_single and not buffers)
                memory = None
                if header.flags & FLAG_MEMORY:
                    observation, fields = split_off(observation)
                    if self._states is not None:
                        memory = Memory.of(fields, header.rows)
                elif self._states is not None:
                    replies[entry.slot] = self._error(entry, header, "memory", NO_MEMORY)
                    continue
                if rows_of(observation) != header.rows:
                    raise DecodeError("the header and the arrays differ in their rows")
            except SharedMemoryLost as error:
                replies[entry.slot] = self._error(entry, header, "lane", str(error))
                continue
            except Exception as error:  # whatever a stranger's bytes bring about, it is this request's
                replies[entry.slot] = self._error(entry, header, "refused", str(error))
                continue
            kind = (header.signature, header.policy_version, header.flags & self._apart)
            groups.setdefault(kind, []).append(_Shard(entry, header, observation, memory))
        self._predict_s = 0.0
        for shards in groups.values():
            replies.update(self._answer(shards))
        messages = self._within_bounds(table.entries, [replies[entry.slot] for entry in table.entries])
        entries = [
            Entry(entry.slot, len(message[0]), len(message) - 1, entry.attempt, 0, entry.queue_us)
            for entry, message in zip(table.entries, messages, strict=True)
        ]
        result = Table(table.epoch, table.number, entries, _microseconds(self._predict_s))
        self._send(join_batch(result, _RESULT, messages))
        self._prefetch.end()
        self._lane.look(self._spoke)
        self._lane.slots.collect(self._spoke)

    def _within_bounds(self, entries: Sequence[Entry], replies: list[list[Any]]) -> list[list[Any]]:
        """The replies of a batch, of which those that make its frame too large are errors."""
        room = self._max_message - _ROOM_FOR_ERROR * len(entries)
        if sum([len(reply[0]) for reply in replies]) <= room:
            return replies
        bounded = []
        for entry, reply in zip(entries, replies, strict=True):
            if len(reply[0]) > room + _ROOM_FOR_ERROR:
                text = f"the replies of one batch are larger than {self._max_message >> 20} MiB"
                reply = self._error(entry, unpack(reply[0]), "policy", text)
            room -= max(0, len(reply[0]) - _ROOM_FOR_ERROR)
            bounded.append(reply)
        return bounded

    def _answer(self, shards: Sequence[_Shard]) -> dict[int, list[Any]]:
        """The replies, by slot, for shards of one structure that ask for one version."""
        version = shards[0].header.policy_version
        if self._versions.lacks(version):
            return {shard.entry.slot: self._later(shard, version) for shard in shards}
        if self._states is not None and len(shards) > 1 and not are_apart(s.memory for s in shards):
            # A request that came twice: the second is answered with what was kept of the first.
            return {**self._answer(shards[:1]), **self._answer(shards[1:])}
        try:
            recall = None
            if self._states is not None:
                recall = self._states.recall([shard.memory for shard in shards if shard.memory])
                if recall.lost.any():
                    return self._answer_the_rest(shards, recall.lost)
            return self._infer(shards, recall)
        except Exception as error:
            if len(shards) > 1:
                # One of them may be to blame, so each is tried for itself.
                replies: dict[int, list[Any]] = {}
                for shard in shards:
                    replies.update(self._answer([shard]))
                return replies
            text = in_a_line(error)
            trace = traceback.format_exc()[-_MAX_TRACEBACK:]
            self._failures.note(text, error)
            entry, header = shards[0].entry, shards[0].header
            return {entry.slot: self._error(entry, header, "policy", f"{text}\n\n{self.name}: {trace}")}

    def _answer_the_rest(self, shards: Sequence[_Shard], lost: np.ndarray) -> dict[int, list[Any]]:
        """The replies, of which those to shards with lost states are errors."""
        replies: dict[int, list[Any]] = {}
        rest = []
        bounds = list(accumulate([shard.header.rows for shard in shards]))
        for shard, of_shard in zip(shards, np.split(lost, bounds[:-1]), strict=True):
            rows = np.flatnonzero(of_shard).tolist()
            if rows:
                names = ", ".join(map(str, rows[:20]))
                text = f"{self.name} does not have the state of row {names}: begin an episode there"
                entry, header = shard.entry, shard.header
                # Without a list it is about all rows.
                named = {"rows": rows} if len(rows) <= _MOST_NAMED else {}
                replies[entry.slot] = self._error(entry, header, "state", text, **named)
            else:
                rest.append(shard)
        if rest:
            replies.update(self._answer(rest))
        return replies

    def _infer(self, shards: Sequence[_Shard], recall: Recall | None) -> dict[int, list[Any]]:
        rows = [shard.header.rows for shard in shards]
        output, version, seconds, state = self._inference.run(
            [shard.observation for shard in shards],
            rows,
            [bool(shard.header.flags & FLAG_EVAL) for shard in shards],
            shards[0].header.policy_version,
            recall,
        )
        versions = [version] * len(shards)
        kept = 0
        if recall is not None:
            output = recall.answer(output, version, state)
            versions = recall.versions(rows)
            kept = FLAG_MEMORY if self._states is not None and self._states.travel else FLAG_KEPT
        self._predict_s += seconds
        predict_us = _microseconds(seconds)
        replies = {}
        shares = self._lane.is_open and any(s.header.flags & FLAG_READS_LANE for s in shards)
        if shares:
            self._lane.slots.collect(time.monotonic())
        encoded_parts = self._encoder.encode(output, rows, copy=not shares)
        for encoded in encoded_parts:  # all of them first: memory that was lent must be read by somebody
            self._check_size(encoded)
        if recall is not None:
            recall.commit()
        for shard, encoded, version in zip(shards, encoded_parts, versions, strict=True):
            entry, header = shard.entry, shard.header
            flags, buffers, place = kept | header.flags & FLAG_EVAL, encoded.buffers, b""
            if shares and buffers:
                reads = header.flags & FLAG_READS_LANE != 0
                buffers, slot = self._lane.place(buffers, borrowed=True, lends=reads)
                if slot is not None:
                    flags, place = flags | FLAG_LANE, slot.descriptor
            reply = Header(
                _REPLY,
                flags=flags,
                request_id=header.request_id,
                attempt=entry.attempt,
                stage=header.stage,
                frames=len(buffers),
                rows=header.rows,
                queue_us=entry.queue_us,
                predict_us=predict_us,
                signature=encoded.signature,
                policy_version=version,
            )
            replies[entry.slot] = [reply.pack() + place + encoded.meta, *buffers]
        return replies

    def _later(self, shard: _Shard, version: int) -> list[Any]:
        """The reply to a request whose weights are not here: nobody else waits until they are."""
        entry, header = shard.entry, shard.header
        text = (
            f"the weights of version {version}, which the request asks for, are not here; {self.name} "
            f"serves version {self._versions.version}"
        )
        if header.budget_ms - entry.queue_us / 1000 < _LAST_MOMENT_MS:
            return self._error(entry, header, "policy", text)
        # It is the code upon which a client asks again within its own time limit.
        return self._error(entry, header, "overloaded", text, retry_after_ms=_ASK_AGAIN_MS)

    def _check_size(self, encoded: Encoded) -> None:
        largest = max([len(encoded.meta), *map(len, encoded.buffers)])
        if largest > self._max_message - HEADER_SIZE or len(encoded.buffers) > MAX_FRAMES:
            raise PolicyOutputError(
                f"the reply has {len(encoded.buffers)} large arrays of up to {largest / 2**20:.1f} MiB; "
                f"at most {MAX_FRAMES} of {self._max_message >> 20} MiB can be sent"
            )

    def _error(self, entry: Entry, header: Header, code: str, text: str, **more: Any) -> list[Any]:
        reply = Header(
            Op.ERROR,
            flags=header.flags & FLAG_EVAL,
            request_id=header.request_id,
            attempt=entry.attempt,
            stage=header.stage,
            queue_us=entry.queue_us,
            policy_version=self._versions.version,
        )
        return [reply.pack() + encode_meta({"code": code, "message": text, **more})]


def _microseconds(seconds: float) -> int:
    return min(int(seconds * 1e6), 2**32 - 1)
