"""The packed header at the head of every message, and the batch table of the worker leg.

All integers are little endian. The first 16 bytes (magic, version, op, flags, request id) keep their
place in every version of the protocol, so that peers of different versions can tell each other so.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Any, List, NamedTuple, Sequence, Tuple

from zmqrl.errors import DecodeError, VersionMismatch

MAGIC = b"ZMQR"
VERSION = 1

REWARD = "reward"
"""The name of the policy that reward workers serve."""

MAX_FRAMES = 4096
"""The most large-buffer frames that one message may have."""


class Op(IntEnum):
    """What a message is. The same numbers serve both legs."""

    # Both legs
    HELLO = 1  # a peer introduces itself; meta: who it is
    WELCOME = 2  # the broker knows the peer now; meta: epoch
    UNKNOWN = 3  # the broker does not know the peer, or the request id in the header
    BYE = 4  # the peer leaves
    PROBE = 5  # the broker looks whether the peer is still connected; ignore it
    ERROR = 6  # meta: code, message, and details of the code

    # Client leg
    INFER = 16  # a shard of observations
    REPLY = 17  # the actions for it
    KNOWN = 18  # client: do you still have this request? broker: yes; meta: its state
    CANCEL = 19  # the client no longer wants the reply
    STATUS = 20  # anyone: how are you? broker: meta with counters and peers
    REST = 21  # the pipeline stage in the header asks no more for now; no barrier waits for it
    PHASE = 22  # what the client does until its next request; meta: phase

    # Worker leg
    READY = 32  # the worker is idle; `number` is the last batch that it received
    BATCH = 33  # shards to run
    RESULT = 34  # their replies; the worker is idle again
    AHEAD = 35  # the worker begins the batch in the request id, and would take the next one already

    # Learner leg
    TRAJECTORY = 48  # steps of a shard; the request id is its number, from 1, in its sender's life
    ACK = 49  # learner: every trajectory up to the number in the request id is here
    BEGIN = 50  # may the stage in the header begin a trajectory? The request id names the question
    GO = 51  # learner: it may
    WANT = 52  # rollout worker: send me weights newer than those that I have, once there are any
    WEIGHTS = 53  # learner: here they are
    EVALUATE = 54  # eval worker: I am idle, the request id is my last evaluation; learner: do this one


FLAG_EVAL = 1
"""The request wants deterministic actions (`eval`); without it, sampled ones (`train`)."""

FLAG_LANE = 2
"""The large buffers are in shared memory; before the meta stands where."""

FLAG_READS_LANE = 4
"""The sender can read such messages; of an INFER: so its reply may be one."""

FLAG_MEMORY = 8
"""INFER: beside the observation stands what a policy with memory needs to know of the rows. REPLY:
beside the output stands the state of the rows, for the next request."""

FLAG_KEPT = 16
"""REPLY: the worker keeps the state of the rows."""

FLAG_BEGINS = 32
"""INFER: it needs no state that a worker may keep for its client: all envs begin an episode."""

FLAG_AHEAD = 64
"""BATCH: it was given while its worker was in another one, for its AHEAD."""

_MARK = MAGIC + bytes([VERSION])
"""What every message of this version begins with."""

_HEADER = struct.Struct("<5sBHQBBHIIIIIQQ")
_FIELDS = struct.Struct("<5xBHQBBHIIIIIQQ")  # the same without the mark
HEADER_SIZE = _HEADER.size
_PREFIX = struct.Struct("<5sBHQ")


class Header(NamedTuple):
    """The fixed fields of a message; those that an op has no use for are 0."""

    op: int
    flags: int = 0
    request_id: int = 0
    attempt: int = 0
    """How often the request was given to a rollout worker before this one."""
    stage: int = 0
    """The pipeline stage of the env worker that asks."""
    frames: int = 0
    """The number of large-buffer frames that follow the first frame."""
    rows: int = 0
    """Observations in the shard, or actions in the reply."""
    budget_ms: int = 0
    """Milliseconds that the sender still waits. Relative, so that no clocks need to agree."""
    policy_id: int = 0
    """Which policy is asked: `policy_id_of` its name."""
    queue_us: int = 0
    """Reply: microseconds that the request waited in the broker's queue."""
    predict_us: int = 0
    """Reply: microseconds that the policy took for the whole batch."""
    signature: int = 0
    """Names, dtypes and shapes (less the first axis) of the tree; equal trees can share a batch."""
    policy_version: int = 0
    """Reply: the version of the weights that made it."""

    def pack(self) -> bytes:
        """The header's bytes."""
        return _HEADER.pack(_MARK, *self)

    def pack_again(self, attempt: int, budget_ms: int) -> bytes:
        """The header's bytes with another attempt and budget; faster than `_replace`."""
        op, flags, request_id, _, stage, frames, rows, _, *rest = self
        return _HEADER.pack(_MARK, op, flags, request_id, attempt, stage, frames, rows, budget_ms, *rest)


_new = tuple.__new__
"""Makes a named tuple of a tuple of its length; `_make` would run Python code to check that."""


def unpack(first: bytes) -> Header:
    """Read the header of a message from its first frame.

    Raises:
        DecodeError: The bytes are no zmqrl message.
        VersionMismatch: They are one of another version of the protocol.
    """
    if len(first) >= HEADER_SIZE and first[:5] == _MARK:
        return _new(Header, _FIELDS.unpack_from(first))
    if len(first) < _PREFIX.size or first[:4] != MAGIC:
        raise DecodeError("not a zmqrl message")
    if first[4] != VERSION:
        raise VersionMismatch(f"the peer speaks protocol version {first[4]}, this is {VERSION}")
    raise DecodeError(f"a header has {HEADER_SIZE} bytes, this message {len(first)}")


def policy_id_of(name: str) -> int:
    """The number that stands for a policy's name in a header.

    Args:
        name: Of the policy; "" is the pool's own, the default one.

    Returns:
        0 for the default policy, and never 0 for another.
    """
    return (zlib.crc32(name.encode("utf-8")) or 1) if name else 0


def request_id_of(first: bytes) -> int:
    """The request id of a message of any version; 0 if it has none."""
    if len(first) < _PREFIX.size or first[:4] != MAGIC:
        return 0
    return int(_PREFIX.unpack_from(first)[3])


def op_of(first: bytes) -> int:
    """The op of a message of any version; 0 if it is none."""
    if len(first) < _PREFIX.size or first[:4] != MAGIC:
        return 0
    return first[5]


_TABLE = struct.Struct("<QQII")
_ENTRY = struct.Struct("<QIHBBI")


class Entry(NamedTuple):
    """One shard of a batch, in the batch's table."""

    slot: int
    """Its place in the broker's in-flight table; a result names it again."""
    length: int
    """Bytes of its first frame (header and meta) within the joined bodies."""
    frames: int
    """Large-buffer frames that belong to it."""
    attempt: int
    origin_length: int
    """Bytes of the identity of the client that asked; 0 in a result."""
    queue_us: int


class Table(NamedTuple):
    """What a BATCH or RESULT message says about its shards."""

    epoch: int
    """Names the broker's process: new at each start."""
    number: int
    """Names the batch within the epoch."""
    entries: Sequence[Entry]
    predict_us: int = 0
    """Result: microseconds spent in the policy."""
    origins: bytes = b""
    """The identities of the clients that asked, joined; empty in a result."""

    def pack(self, op: int) -> bytes:
        """The first frame of a BATCH or RESULT message."""
        entries = [_ENTRY.pack(*entry) for entry in self.entries]
        return pack_table(op, self.epoch, self.number, entries, [self.origins], self.predict_us)


_HEADS = {
    (int(op), flags): Header(op, flags).pack()
    for op, flags in ((Op.BATCH, 0), (Op.BATCH, FLAG_AHEAD), (Op.RESULT, 0))
}

pack_entry = _ENTRY.pack
"""The bytes of an `Entry`, of its fields."""


def pack_table(
    op: int,
    epoch: int,
    number: int,
    entries: List[bytes],
    origins: List[bytes],
    predict_us: int = 0,
    flags: int = 0,
) -> bytes:
    """The bytes of a `Table`, of its packed entries; the broker, which makes many, makes no tuples."""
    head = _TABLE.pack(epoch, number, len(entries), predict_us)
    return b"".join([_HEADS[op, flags], head, *entries, *origins])


def unpack_table_head(first: bytes) -> Tuple[int, int, int]:
    """Epoch, number and count of entries of a table, without reading the entries.

    Raises:
        DecodeError: The table is cut short.
    """
    try:
        epoch, number, count, _ = _TABLE.unpack_from(first, HEADER_SIZE)
    except struct.error:
        raise DecodeError("the table of a batch is cut short") from None
    return epoch, number, count


def unpack_table(first: bytes) -> Table:
    """Read the table of a BATCH or RESULT message.

    Raises:
        DecodeError: The table is cut short or has bytes left over.
    """
    begin = HEADER_SIZE + _TABLE.size
    if len(first) < begin:
        raise DecodeError("the table of a batch is cut short")
    epoch, number, count, predict_us = _TABLE.unpack_from(first, HEADER_SIZE)
    end = begin + count * _ENTRY.size
    if len(first) < end:
        raise DecodeError("the table of a batch is cut short")
    entries, named = [], 0
    for fields in _ENTRY.iter_unpack(first[begin:end]):
        entry = _new(Entry, fields)
        entries.append(entry)
        named += entry.origin_length
    origins = first[end:]
    if named != len(origins):
        raise DecodeError("the table of a batch does not fill its frame")
    return _new(Table, (epoch, number, entries, predict_us, origins))


def join_batch(table: Table, op: int, messages: Sequence[Sequence[Any]]) -> List[Any]:
    """The frames of a BATCH or RESULT message: table, joined first frames, large buffers."""
    return join_bodies(table.pack(op), messages)


def join_bodies(first: bytes, messages: Sequence[Sequence[Any]]) -> List[Any]:
    """The same of a table that is packed already."""
    frames: List[Any] = [first, b"".join([message[0] for message in messages])]
    for message in messages:
        if len(message) > 1:
            frames.extend(message[1:])
    return frames


def split_batch(table: Table, frames: Sequence[Any]) -> List[Tuple[Entry, List[Any]]]:
    """The messages within a BATCH or RESULT message: the reverse of `join_batch`.

    Args:
        table: The unpacked first frame.
        frames: All frames of the message, the first included; frame 1 as bytes.

    Raises:
        DecodeError: Lengths or frame counts do not add up.
    """
    if len(frames) < 2:
        raise DecodeError("a batch has no bodies")
    joined = frames[1]
    if not isinstance(joined, bytes):
        raise DecodeError("the joined bodies of a batch must be bytes")
    shards = []
    start, large = 0, 2
    for entry in table.entries:
        end = start + entry.length
        message = [joined[start:end]]
        start = end
        if entry.frames:
            message += frames[large : large + entry.frames]
            large += entry.frames
        shards.append((entry, message))
    if start != len(joined):
        raise DecodeError("the joined bodies of a batch do not match its table")
    if large != len(frames):
        raise DecodeError("the large buffers of a batch do not match its table")
    return shards
