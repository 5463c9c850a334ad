"""Messages that are almost valid, from a plain generator with a seed, and the good ones behind them."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zmqrl.learner.snapshot import Snapshot
from zmqrl.recording.builder import TrajectoryBuilder
from zmqrl.spaces import ActionSpace, Spaces
from zmqrl.telemetry.report import Episode, LearnerReport, Report
from zmqrl.transport.codec import encode, encode_meta
from zmqrl.transport.header import (
    HEADER_SIZE,
    Entry,
    Header,
    Op,
    Table,
    join_batch,
    policy_id_of,
)

Message = list[bytes]

SPACES = Spaces({"state": ((3,), "float32")}, ActionSpace("discrete", n=3, text="Discrete(3)"))
"""Of the simulators of all good messages to a learner."""

_NUMBERS = (0, 1, 2, 255, 4096, 4097, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_LENGTHS = (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")  # msgpack: what follows is a length of 32 bits


def mutations(good: Sequence[Message], seed: int) -> Iterator[Message]:
    """Messages without end; the same ones for the same seed.

    One in ten is good. The others are cut, changed in some bits, have bytes taken out or put in, frames
    dropped, repeated, exchanged or added, lengths and numbers that are too large, or are random.
    """
    dice = random.Random(seed)
    changes = (_cut, _flip, _splice, _frames, _lengths, _fields, _cross)
    while True:
        message = list(dice.choice(good))
        what = dice.randrange(10)
        if what == 0:
            yield message
        elif what == 1:
            yield [dice.randbytes(dice.randrange(200)) for _ in range(dice.choice((1, 1, 2, 3, 50)))]
        else:
            for _ in range(dice.choice((1, 1, 1, 2, 3))):
                dice.choice(changes)(dice, message, good)
            yield message or [b""]


def _cut(dice: random.Random, message: Message, good: Sequence[Message]) -> None:
    index = dice.randrange(len(message)) if message else None
    if index is not None:
        message[index] = message[index][: dice.randrange(len(message[index]) + 1)]


def _flip(dice: random.Random, message: Message, good: Sequence[Message]) -> None:
    if message and message[0]:
        changed = bytearray(message[0])
        for _ in range(dice.choice((1, 1, 2, 8))):
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        message[0] = bytes(changed)


def _splice(dice: random.Random, message: Message, good: Sequence[Message]) -> None:
    if message:
        index = dice.randrange(len(message))
        frame = message[index]
        at = dice.randrange(len(frame) + 1)
        message[index] = frame[:at] + dice.randbytes(dice.randrange(9)) + frame[at + dice.randrange(9) :]


def _frames(dice: random.Random, message: Message, good: Sequence[Message]) -> None:
    what = dice.randrange(5)
    if what == 0:
        del message[dice.randrange(len(message) + 1) :]
    elif what == 1 and message:
        message.insert(dice.randrange(len(message) + 1), dice.choice(message))
    elif what == 2:
        dice.shuffle(message)
    elif what == 3 and message:
        del message[dice.randrange(len(message))]
    else:
        message.extend(dice.randbytes(dice.randrange(40)) for _ in range(dice.randrange(50)))


def _lengths(dice: random.Random, message: Message, good: Sequence[Message]) -> None:
    if message and len(message[0]) > HEADER_SIZE:
        at = dice.randrange(HEADER_SIZE, len(message[0]))
        large = struct.pack(">I", dice.choice((2**32 - 1, 2**31, 2**20, 2**17, 2**16, len(message[0]))))
        message[0] = message[0][:at] + dice.choice(_LENGTHS) + large + message[0][at + 1 :]


def _fields(dice: random.Random, message: Message, good: Sequence[Message]) -> None:
    """Another number in the header, or four bytes of it anywhere else."""
    if not message or len(message[0]) < HEADER_SIZE:
        return
    at = dice.choice((5, 6, 7, 8, 16, 18, 20, 24, 28, 32, 36, 40, 44, 52, 60, 68, 76))
    size = dice.choice((1, 2, 4, 8))
    number = dice.choice(_NUMBERS) % 256**size
    message[0] = message[0][:at] + number.to_bytes(size, "little") + message[0][at + size :]


def _cross(dice: random.Random, message: Message, good: Sequence[Message]) -> None:
    """The header of one message, what follows it of another."""
    other = dice.choice(good)
    if message and message[0]:
        message[:] = [message[0][:HEADER_SIZE] + other[0][HEADER_SIZE:], *other[1:]]


# -- Good messages


def plain(op: Op, fields: dict[str, Any] | None = None, request_id: int = 1, **more: int) -> Message:
    """A message without arrays."""
    body = b"" if fields is None else encode_meta(fields)
    return [Header(op, request_id=request_id, **more).pack() + body]


def of_tree(op: Op, tree: Any, request_id: int = 1, **more: int) -> Message:
    """A message with a tree of arrays."""
    encoded = encode(tree)
    header = Header(
        op,
        request_id=request_id,
        frames=len(encoded.buffers),
        signature=encoded.signature,
        **more,
    )
    return [header.pack() + encoded.meta, *(bytes(buffer) for buffer in encoded.buffers)]


def hello(role: str, name: str, **more: Any) -> Message:
    """A peer of the broker introduces itself."""
    fields = {"role": role, "name": name, "incarnation": 1, "host": "here", "pid": 7, **more}
    return plain(Op.HELLO, fields)


def sender(name: str) -> Message:
    """An env worker introduces itself to the learner."""
    fields = {"role": "env", "name": name, "incarnation": 1, "first": 1, "spaces": SPACES.fields()}
    return plain(Op.HELLO, fields)


OBSERVATION = {
    "x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "image": np.zeros((2, 64, 64), np.uint8),
    "task": ["push", "pull"],
    "when": np.array(["2026-01-01", "NaT"], "M8[s]"),
    "name": np.array(["ä", "bc"]),
    "scalars": [np.float32(1), 1j, True],
}
_SMALL = {"x": np.ones((2, 3), np.float32)}


def to_frontend(policy: str = "") -> list[Message]:
    """What a client says."""
    asked = {"policy_id": policy_id_of(policy), "rows": 2, "budget_ms": 2000}
    return [
        hello("client", "fuzz", rank=0, world_size=2, mode="eval"),
        *(of_tree(Op.INFER, OBSERVATION, number, **asked) for number in (1, 2)),
        *(of_tree(Op.INFER, _SMALL, number, **asked) for number in (3, 4)),
        plain(Op.KNOWN),
        plain(Op.CANCEL),
        plain(Op.STATUS),
        plain(Op.REST),
        plain(Op.PHASE, {"phase": "reset"}),
        plain(Op.BYE),
    ]


def to_backend(policy: str) -> list[Message]:
    """What a rollout worker says."""
    reply = of_tree(Op.REPLY, {"actions": np.zeros((2, 1500))}, 3, rows=2)
    error = plain(Op.ERROR, {"code": "policy", "message": "text"}, 4)
    entries = [Entry(n, len(m[0]), len(m) - 1, 0, 0, 9) for n, m in ((1, reply), (2, error))]
    return [
        hello("worker", "fuzz", policy=policy),
        plain(Op.READY, request_id=0),
        join_batch(Table(5, 1, entries, 40), Op.RESULT, [reply, error]),
        join_batch(Table(5, 2, []), Op.RESULT, []),
        plain(Op.BYE),
    ]


def to_peers() -> list[Message]:
    """What a broker says to a client or to a rollout worker."""
    asked = of_tree(Op.INFER, OBSERVATION, 1, rows=2)
    entries = [Entry(1, len(asked[0]), len(asked) - 1, 0, 13, 9)]
    return [
        plain(Op.WELCOME, {"epoch": 5, "warning": "rank 0 is also that of another"}),
        plain(Op.UNKNOWN),
        plain(Op.PROBE),
        plain(Op.ERROR, {"code": "overloaded", "message": "full", "retry_after_ms": 1}),
        plain(Op.ERROR, {"code": "policy", "message": "text"}),
        plain(Op.ERROR, {"code": "replaced", "message": "text"}, request_id=0),
        of_tree(Op.REPLY, {"actions": np.zeros((2, 3)), "image": np.zeros((2, 64, 64))}, rows=2),
        plain(Op.KNOWN, {"state": "queued"}),
        join_batch(Table(5, 1, entries, 0, b"z" * 13), Op.BATCH, [asked]),
    ]


def to_learner() -> list[Message]:
    """What env workers, rollout workers and eval workers say."""
    numbers = dict.fromkeys(("version", "pinned", "serving", "loaded", "failed"), 1)
    want = {"name": "fuzz", "epoch": 5, **numbers}
    return [
        sender("fuzz"),
        *(of_trajectory("fuzz", number) for number in (1, 1, 2)),
        plain(Op.BEGIN, rows=4),
        plain(Op.WANT, want),
        plain(Op.EVALUATE, {"name": "fuzz", "epoch": 5}),
        plain(Op.BYE),
    ]


def from_learner() -> list[Message]:
    """What a learner says."""
    notes = {"epoch": 5, "spaces": SPACES.fields()}
    weights = Snapshot.of(1, {"w": np.zeros(3), "large": np.zeros((50, 50))}, notes)
    marks = {"acknowledged": 1, "received": 1, "full": False, "max_frame": 1 << 20}
    return [
        plain(Op.WELCOME, marks),
        plain(Op.ACK),
        plain(Op.GO),
        plain(Op.EVALUATE, {"env_steps": 4, "epoch": 5}),
        plain(Op.ERROR, {"code": "ended", "message": "text"}),
        [bytes(frame) for frame in weights.message(1, pinned=False)],
    ]


def of_trajectory(name: str, number: int, value: float = 0.0) -> Message:
    """A trajectory of two steps of two simulators; its rewards are `value`."""
    builder = TrajectoryBuilder(2, name)
    for step in range(3):
        builder.observe({"state": np.full((2, 3), step, np.float32)})
        if step < 2:
            builder.act({"actions": np.array([0, 1]), "extra": np.zeros((2, 300))}, 1)
            builder.outcome([value] * 2, [False, step == 1], [False] * 2, {"state": np.ones((2, 3))})
    (trajectory,) = builder.take()
    return of_tree(Op.TRAJECTORY, trajectory.tree(), number, rows=trajectory.env_steps)


def reports() -> list[Message]:
    """What the runner is told."""
    episodes = [Episode(0, number, 1.0, 10, True, None) for number in range(3)]
    delays = {"average": 1.0, "max": 1.0, "median": 1.0, "min": 1.0}
    report = Report("env-0", 0, began=1.0, ended=2.0, delays=delays, episodes=episodes)
    report.totals.count_reset(2e-6)
    learner = LearnerReport({"env_steps": 4, "time/actor/update": 0.5})
    return [[report.pack()], [learner.pack()]]


def status() -> Message:
    """What a broker tells of itself."""
    totals = {"batches": 1, "shards": 1, "rows": 2, "predict_s": 0.1, "policy_version": 1}
    peer = {"name": "env-0", "host": "here", "pid": 7}
    fields = {
        "counters": {"requests": 4, "queue_s": 0.5},
        "workers": [peer],
        "clients": [peer],
        "totals": {"rollout-0": totals},
    }
    return plain(Op.STATUS, fields)
