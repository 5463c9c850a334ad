"""One request of a batch: read from what came, and answered in the words of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zmqrl.errors import DecodeError
from zmqrl.rollout.stateful import Memory, split_off
from zmqrl.transport.codec import decode, encode_meta
from zmqrl.transport.header import (
    FLAG_EVAL,
    FLAG_LANE,
    FLAG_MEMORY,
    FLAG_READS_LANE,
    HEADER_SIZE,
    Entry,
    Header,
    Op,
)
from zmqrl.transport.sharedmem import Reader
from zmqrl.transport.tree import rows_of

# A member of an enum costs at every look, and to pack.
_REPLY = int(Op.REPLY)


@dataclass(slots=True)
class Shard:
    """One request of a batch.

    Attributes:
        entry: Of the batch's table.
        header: The request's own.
        observation: A tree of arrays [rows, ...]; None before `read`.
        memory: What it says of its rows, for a policy with memory; None if it says nothing.
    """

    entry: Entry
    header: Header
    observation: Any = None
    memory: Memory | None = None

    @property
    def is_eval(self) -> bool:
        """Whether it wants deterministic actions."""
        return self.header.flags & FLAG_EVAL != 0

    @property
    def reads_lane(self) -> bool:
        """Whether its reply may be in shared memory."""
        return self.header.flags & FLAG_READS_LANE != 0

    def read(self, message: Sequence[Any], lane: Reader, is_alone: bool, keeps_state: bool) -> None:
        """Decode the message that the header is of.

        Args:
            message: Its frames; the first one as bytes.
            lane: Reads what is in shared memory.
            is_alone: Whether it is the only one of its batch.
            keeps_state: Whether the policy has a memory.

        Raises:
            SharedMemoryLost: Its arrays cannot be read.
            Exception: It is no request; a stranger's bytes may bring about any.
        """
        flags, rows = self.header.flags, self.header.rows
        meta, buffers = message[0][HEADER_SIZE:], message[1:]
        if flags & FLAG_LANE:
            meta, views = lane.views(meta)
            buffers = [*views, *buffers]
        # Views of what came: `merge` copies them into memory that is the policy's own. It has nothing to
        # do for a small observation that is alone.
        observation = decode(meta, buffers, writable=is_alone and not buffers)
        if flags & FLAG_MEMORY:
            observation, fields = split_off(observation)
            if keeps_state:
                self.memory = Memory.of(fields, rows)
        if rows_of(observation) != rows:
            raise DecodeError("the header and the arrays differ in their rows")
        self.observation = observation

    def reply(
        self,
        meta: bytes,
        buffers: Sequence[Any],
        flags: int,
        signature: int,
        version: int,
        predict_us: int,
    ) -> list[Any]:
        """The frames of a reply.

        Args:
            meta: To follow the header.
            buffers: Frames of large arrays.
            flags: Without the mode.
            signature: Of the tree.
            version: Of the weights that made it.
            predict_us: Microseconds in the policy.
        """
        entry, header = self.entry, self.header
        reply = Header(
            _REPLY,
            flags=flags | header.flags & FLAG_EVAL,
            request_id=header.request_id,
            attempt=entry.attempt,
            stage=header.stage,
            frames=len(buffers),
            rows=header.rows,
            queue_us=entry.queue_us,
            predict_us=predict_us,
            signature=signature,
            policy_version=version,
        )
        return [reply.pack() + meta, *buffers]

    def error(self, version: int, code: str, text: str, **more: Any) -> list[Any]:
        """The frames of an ERROR.

        Args:
            version: Of the weights that the worker serves.
            code: What a client tells errors apart by.
            text: What was wrong, and where.
            more: Details of the code.
        """
        reply = Header(
            Op.ERROR,
            flags=self.header.flags & FLAG_EVAL,
            request_id=self.header.request_id,
            attempt=self.entry.attempt,
            stage=self.header.stage,
            queue_us=self.entry.queue_us,
            policy_version=version,
        )
        return [reply.pack() + encode_meta({"code": code, "message": text, **more})]
