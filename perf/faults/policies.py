"""What drills ask, the policy that answers, and how an answer is told from another's.

A request says in its data whose it is: every row has a tag of four numbers and, so that mixed bytes
show, values that follow from it. The policy sends both back, changed in a way that proves that it ran.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import Counter
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

_MASK = 0x5A5A5A5A
_MERSENNE = 2**31 - 1
_RUNS = "runs-"
_STUCK = "stuck-"


class Command(IntEnum):
    """What a marked row makes the policy do."""

    NONE = 0
    RAISE = 1
    DIE = 2
    HOLD_GIL = 3


def observation(client: int, sequence: int, rows: int, width: int, command: int = 0) -> dict[str, Any]:
    """A request's data.

    Args:
        client: Who asks.
        sequence: Its how-manieth request.
        rows: N.
        width: Numbers in a row; from 1024/N on they travel in a frame of their own.
        command: For the first row.
    """
    tag = np.empty((rows, 4), np.int64)
    tag[:, 0], tag[:, 1], tag[:, 2], tag[:, 3] = client, sequence, np.arange(rows), 0
    tag[0, 3] = command
    return {"tag": tag, "values": _values(tag, width)}


def is_answer_to(asked: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Whether the policy made `answer` of just this request."""
    tag, values = answer.get("actions"), answer.get("values")
    return np.array_equal(tag, asked["tag"] ^ _MASK) and np.array_equal(values, asked["values"] + 1)


def _values(tag: np.ndarray, width: int) -> np.ndarray:
    first = (tag[:, 0] * 7919 + tag[:, 1] * 31 + tag[:, 2]) % 1_000_003
    return (first[:, None] + np.arange(width)).astype(np.float32)


class Tagged:
    """Answers as `is_answer_to` wants it, after `seconds`, and notes each request that it begins to run.

    Args:
        folder: Where the notes go.
        seconds: Of a call.
    """

    def __init__(self, folder: str, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._stuck = Path(folder) / f"{_STUCK}{os.getpid()}"
        # Written through at once: the process may be killed at any moment.
        self._notes = os.open(f"{folder}/{_RUNS}{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray) -> dict[str, Any]:
        tag = observation["tag"]
        os.write(self._notes, tag[tag[:, 2] == 0, :2].tobytes())
        while self._stuck.exists():
            time.sleep(0.02)
        time.sleep(self._seconds)
        for command in tag[:, 3]:
            if command == Command.RAISE:
                raise RuntimeError("this row is marked")
            if command == Command.DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            if command == Command.HOLD_GIL:
                ctypes.PyDLL(None).sleep(3)
        return {"actions": tag ^ _MASK, "values": observation["values"] + 1}


def set_stuck(folder: Path, pid: int, stuck: bool) -> None:
    """Make the policy of a worker hang in its next call; or let it go on."""
    file = folder / f"{_STUCK}{pid}"
    if stuck:
        file.touch()
    else:
        file.unlink(missing_ok=True)


def runs(folder: Path) -> Counter[tuple[int, int]]:
    """How often each request, `(client, sequence)`, was begun by a policy."""
    counter: Counter[tuple[int, int]] = Counter()
    for file in folder.glob(f"{_RUNS}*"):
        notes = np.fromfile(file, np.int64)
        counter.update(map(tuple, notes[: len(notes) // 2 * 2].reshape(-1, 2).tolist()))
    return counter


class Remembering(Tagged):
    """Has a memory, and says with each answer what is in it, and in which process.

    A state has the `count` of its steps and their `trace`, a number made of all of them and their order.
    """

    def initial_state(self, rows: int) -> dict[str, np.ndarray]:
        return {"count": np.zeros(rows, np.int64), "trace": np.zeros(rows, np.int64)}

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray, state: dict[str, Any]) -> Any:
        answer = super().infer(observation, eval_mask)
        state["count"] += 1  # in place: it is the policy's own, whatever becomes of this call
        state["trace"] = traced(state["trace"], observation["tag"])
        pid = np.full(len(eval_mask), os.getpid())
        return {**answer, "count": state["count"].copy(), "trace": state["trace"], "pid": pid}, state


def traced(trace: np.ndarray, tag: np.ndarray) -> np.ndarray:
    """The trace of rows after one more step each; no other order, row or client gives the same."""
    return (trace * 48271 + tag[:, 0] * 7919 + tag[:, 1] * 31 + tag[:, 2] + 1) % _MERSENNE


class Weighted(Tagged):
    """Says with each answer which weights it has; those of the drills are their version's number."""

    def load_state_dict(self, weights: dict[str, np.ndarray]) -> None:
        self._weights = int(weights["number"][0])

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray) -> dict[str, Any]:
        answer = super().infer(observation, eval_mask)
        return {**answer, "weights": np.full(len(eval_mask), self._weights)}
