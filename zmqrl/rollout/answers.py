"""Answers the requests of a batch with a policy."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from zmqrl.errors import PolicyOutputError, SharedMemoryLost, in_a_line
from zmqrl.rollout.failures import Failures
from zmqrl.rollout.inference import Inference
from zmqrl.rollout.replies import ReplyEncoder
from zmqrl.rollout.shard import Shard
from zmqrl.rollout.stateful import NO_MEMORY, Recall, States, are_apart, turns
from zmqrl.rollout.versions import PolicyVersions
from zmqrl.transport.codec import Encoded
from zmqrl.transport.header import (
    FLAG_EVAL,
    FLAG_KEPT,
    FLAG_LANE,
    FLAG_MEMORY,
    HEADER_SIZE,
    MAX_FRAMES,
    Entry,
    Op,
    Table,
    join_batch,
    split_batch,
    unpack,
)
from zmqrl.transport.sharedmem import Lane, Slot

_RESULT = int(Op.RESULT)  # a member of an enum costs at every look, and to pack

_MAX_TRACEBACK = 8000

_ASK_AGAIN_MS = 100
"""Milliseconds after which a client asks again for a version whose weights are still on their way."""

_LAST_MOMENT_MS = 1000
"""A request that has less time left is not told to ask again: it ends in an error that says why."""

_MOST_NAMED = 100_000
"""Rows that an error lists; a message that lists many more is not read."""

_ROOM_FOR_ERROR = 256
"""Bytes kept for each reply of a batch: it can always be replaced by a short ERROR."""


class Answers:
    """Makes the answers to batches.

    Shards of one structure are one call of the policy. What goes wrong with one of them is told to who
    sent it, and to nobody else.

    Args:
        versions: The policy.
        lane: Where arrays come and go in shared memory.
        name: The worker's, for errors.
        key: Of the answers in the policy's output: `actions` or `rewards`.
        static_sizes: The only numbers of rows that the policy is called with; see `Inference`.
        state_mb: Mebibytes of states that are kept here for a policy with memory; None to have the
            clients carry them.
        max_message: Bytes; a larger reply becomes an error.
    """

    def __init__(
        self,
        versions: PolicyVersions,
        lane: Lane,
        name: str,
        key: str,
        static_sizes: Sequence[int],
        state_mb: int | None,
        max_message: int,
    ) -> None:
        self._versions = versions
        self._lane = lane
        self._name = name
        self._inference = Inference(versions, key, static_sizes)
        self._apart = FLAG_EVAL if self._inference.wants_one_mode else 0
        """The flags that requests of one call must have in common."""
        self._states = States(state_mb) if versions.keeps_state else None
        self._encoder = ReplyEncoder()
        self._failures = Failures()
        self._max_message = max_message
        self._predict_s = 0.0  # spent in the policy for the batch in hand
        self._lent: dict[int, Slot] = {}  # what its replies are in, by the slot of the request

    @property
    def keeps_states(self) -> bool:
        """Whether states are kept here, so that the requests of an env must come here, too."""
        return self._states is not None and not self._states.travel

    def result(self, table: Table, frames: Sequence[Any]) -> list[Any]:
        """The frames of the RESULT for a BATCH.

        Args:
            table: The batch's.
            frames: All frames of the batch.

        Raises:
            DecodeError: It is no batch.
        """
        self._predict_s = 0.0
        self._lent.clear()
        shards: list[Shard] = []
        groups: dict[tuple[int, ...], list[Shard]] = {}
        replies: dict[int, list[Any]] = {}
        is_alone, keeps_state = len(table.entries) == 1, self._states is not None
        for entry, message in split_batch(table, frames):
            header = unpack(message[0])
            shard = Shard(entry, header)
            shards.append(shard)
            try:
                shard.read(message, self._lane.reader, is_alone, keeps_state)
            except SharedMemoryLost as error:
                replies[entry.slot] = self._error(shard, "lane", str(error))
                continue
            except Exception as error:  # whatever a stranger's bytes bring about, it is this request's
                replies[entry.slot] = self._error(shard, "refused", str(error))
                continue
            if keeps_state and shard.memory is None:
                replies[entry.slot] = self._error(shard, "memory", NO_MEMORY)
                continue
            kind = (header.signature, header.policy_version, header.flags & self._apart)
            groups.setdefault(kind, []).append(shard)
        for group in groups.values():
            replies.update(self._answer(group))
        messages = self._within_bounds(shards, [replies[shard.entry.slot] for shard in shards])
        entries = [
            Entry(entry.slot, len(message[0]), len(message) - 1, entry.attempt, 0, entry.queue_us)
            for entry, message in zip(table.entries, messages, strict=True)
        ]
        answer = Table(table.epoch, table.number, entries, _microseconds(self._predict_s))
        return join_batch(answer, _RESULT, messages)

    def _within_bounds(self, shards: Sequence[Shard], replies: list[list[Any]]) -> list[list[Any]]:
        """The replies of a batch, of which those that make its frame too large are errors."""
        room = self._max_message - _ROOM_FOR_ERROR * len(shards)
        if sum([len(reply[0]) for reply in replies]) <= room:
            return replies
        bounded = []
        for shard, reply in zip(shards, replies, strict=True):
            if len(reply[0]) > room + _ROOM_FOR_ERROR:
                slot = self._lent.get(shard.entry.slot)
                if slot is not None:
                    self._lane.slots.give_back(slot, is_unread=True)
                text = f"the replies of one batch are larger than {self._max_message >> 20} MiB"
                reply = self._error(shard, "policy", text)
            room -= max(0, len(reply[0]) - _ROOM_FOR_ERROR)
            bounded.append(reply)
        return bounded

    def _answer(self, shards: Sequence[Shard]) -> dict[int, list[Any]]:
        """The replies, by slot, for shards of one structure that ask for one version."""
        version = shards[0].header.policy_version
        if self._versions.lacks(version):
            return {shard.entry.slot: self._later(shard, version) for shard in shards}
        if self._states is not None and len(shards) > 1 and not are_apart(s.memory for s in shards):
            # A request that came twice: the second is answered with what was kept of the first.
            in_turns: dict[int, list[Any]] = {}
            for turn in turns(shards, [shard.memory for shard in shards]):
                in_turns.update(self._answer(turn))
            return in_turns
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
            reply = self._error(shards[0], "policy", f"{text}\n\n{self._name}: {trace}")
            return {shards[0].entry.slot: reply}

    def _answer_the_rest(self, shards: Sequence[Shard], lost: np.ndarray) -> dict[int, list[Any]]:
        """The replies, of which those to shards with lost states are errors."""
        replies: dict[int, list[Any]] = {}
        rest = []
        bounds = list(accumulate([shard.header.rows for shard in shards]))
        for shard, of_shard in zip(shards, np.split(lost, bounds[:-1]), strict=True):
            rows = np.flatnonzero(of_shard).tolist()
            if rows:
                names = ", ".join(map(str, rows[:20]))
                text = f"{self._name} does not have the state of row {names}: begin an episode there"
                # Without a list it is about all rows.
                named = {"rows": rows} if len(rows) <= _MOST_NAMED else {}
                replies[shard.entry.slot] = self._error(shard, "state", text, **named)
            else:
                rest.append(shard)
        if rest:
            replies.update(self._answer(rest))
        return replies

    def _infer(self, shards: Sequence[Shard], recall: Recall | None) -> dict[int, list[Any]]:
        rows = [shard.header.rows for shard in shards]
        output, version, seconds, state = self._inference.run(
            [shard.observation for shard in shards],
            rows,
            [shard.is_eval for shard in shards],
            shards[0].header.policy_version,
            recall,
        )
        versions = [version] * len(shards)
        kept = 0
        if recall is not None:
            output = recall.answer(output, version, state)
            versions = recall.versions(rows)
            kept = FLAG_KEPT if self.keeps_states else FLAG_MEMORY
        self._predict_s += seconds
        predict_us = _microseconds(seconds)
        shares = self._lane.is_open and any(shard.reads_lane for shard in shards)
        if shares:
            self._lane.slots.collect(time.monotonic())
        encoded_parts = self._encoder.encode(output, rows, copy=not shares)
        for encoded in encoded_parts:  # all of them first: memory that was lent must be read by somebody
            self._check_size(encoded)
        if recall is not None:
            recall.commit()
        replies = {}
        for shard, encoded, version in zip(shards, encoded_parts, versions, strict=True):
            flags, meta, buffers = kept, encoded.meta, encoded.buffers
            if shares and buffers:
                buffers, slot = self._lane.place(buffers, borrowed=True, lends=shard.reads_lane)
                if slot is not None:
                    self._lent[shard.entry.slot] = slot
                    flags, meta = flags | FLAG_LANE, slot.descriptor + meta
            reply = shard.reply(meta, buffers, flags, encoded.signature, version, predict_us)
            replies[shard.entry.slot] = reply
        return replies

    def _later(self, shard: Shard, version: int) -> list[Any]:
        """The reply to a request whose weights are not here: nobody else waits until they are."""
        text = (
            f"the weights of version {version}, which the request asks for, are not here; {self._name} "
            f"serves version {self._versions.version}"
        )
        if shard.header.budget_ms - shard.entry.queue_us / 1000 < _LAST_MOMENT_MS:
            return self._error(shard, "policy", text)
        # It is the code upon which a client asks again within its own time limit.
        return self._error(shard, "overloaded", text, retry_after_ms=_ASK_AGAIN_MS)

    def _check_size(self, encoded: Encoded) -> None:
        largest = len(encoded.meta)
        if encoded.buffers:
            largest = max(largest, *map(len, encoded.buffers))
        if largest > self._max_message - HEADER_SIZE or len(encoded.buffers) > MAX_FRAMES:
            raise PolicyOutputError(
                f"the reply has {len(encoded.buffers)} large arrays of up to {largest / 2**20:.1f} MiB; "
                f"at most {MAX_FRAMES} of {self._max_message >> 20} MiB can be sent"
            )

    def _error(self, shard: Shard, code: str, text: str, **more: Any) -> list[Any]:
        return shard.error(self._versions.version, code, text, **more)


def _microseconds(seconds: float) -> int:
    return min(int(seconds * 1e6), 2**32 - 1)
