"""The answers to a batch, made without a socket."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from zmqrl.rollout.answers import Answers
from zmqrl.rollout.versions import PolicyVersions
from zmqrl.transport.codec import encode
from zmqrl.transport.header import (
    FLAG_READS_LANE,
    HEADER_SIZE,
    Entry,
    Header,
    Op,
    Table,
    join_batch,
    split_batch,
    unpack,
    unpack_table,
)
from zmqrl.transport.sharedmem import Lane, Reader, proof

SHARDS = 100


class Wordy:
    """A reply has 100 KB of arrays, and 12 KB of text."""

    def infer(self, observation: Any, eval_mask: np.ndarray) -> dict[str, Any]:
        rows = len(eval_mask)
        return {"actions": np.zeros((rows, 25_000), np.float32), "text": ["x" * 12_000] * rows}


def batch() -> list[Any]:
    """Requests whose clients read shared memory."""
    encoded = encode({"x": np.ones((1, 3))})
    headers = [Header(Op.INFER, FLAG_READS_LANE, request_id=n, rows=1) for n in range(1, SHARDS + 1)]
    messages = [[header.pack() + encoded.meta] for header in headers]
    entries = [Entry(slot, len(message[0]), 0, 0, 0, 0) for slot, message in enumerate(messages)]
    return join_batch(Table(1, 1, entries), int(Op.BATCH), messages)


def test_a_reply_that_is_replaced_by_an_error_does_not_keep_its_shared_memory() -> None:
    place, lane = proof(), Lane()
    assert place is not None
    lane.welcome({"epoch": 1, "lane": place.descriptor})
    answers = Answers(PolicyVersions(Wordy()), lane, "rollout-0", "actions", (), None, 1 << 20)
    frames = batch()
    result = answers.result(unpack_table(frames[0]), frames)
    reader, ops = Reader(), []
    for _, message in split_batch(unpack_table(result[0]), result):
        header = unpack(message[0])
        ops.append(header.op)
        if header.op == Op.REPLY:
            reader.dismiss(message[0][HEADER_SIZE:])
    assert 0 < ops.count(Op.ERROR) < SHARDS
    assert lane.slots.collect(time.monotonic()) == 0
    lane.close()
