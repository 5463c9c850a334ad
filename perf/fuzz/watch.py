"""What is seen of a process that reads nonsense: whether it goes on, and how its memory grows."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PATIENCE = 20.0
"""Seconds without any progress after which a reader counts as hung."""

_GROWTH = 0.1
_WARM = 0.2
"""The share of the messages after which memory should grow no more."""


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start a part of this bench as a process of its own; see `child.py`."""
    command = [sys.executable, str(Path(__file__).with_name("child.py")), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def stop(process: subprocess.Popen[str]) -> None:
    """End a process that `start` gave, as Ctrl-C does, unless it ends by itself because of that."""
    for patience, number in ((2.0, signal.SIGINT), (10.0, signal.SIGKILL)):
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        process.send_signal(number)


class Memory:
    """The memory of a process after its warm-up, and now.

    Args:
        pid: Whose.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._warm = self._now = 0

    def look(self, done: float) -> None:
        """Note the moment, at which the share `done` of all messages has been sent."""
        with suppress(psutil.NoSuchProcess):
            self._now = self._process.memory_info().rss
        if done <= _WARM or not self._warm:
            self._warm = max(self._warm, self._now)

    @property
    def growth(self) -> float:
        """By which share it has grown since the warm-up."""
        return self._now / self._warm - 1 if self._warm else 0.0


def row(case: str, growth: float, counts: dict[str, int], served: int | None = None) -> dict[str, Any]:
    """A row: not ok if its reader crashed, hung or grew, or if a good peer was not served."""
    numbers = {key: counts.get(key, 0) for key in ("messages", "decoded", "refused", "crashed", "hung")}
    ok = not numbers["crashed"] and not numbers["hung"] and growth <= _GROWTH and served != 0
    return {"case": case, **numbers, "served": served, "rss_growth": round(growth, 3), "ok": ok}


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """What a process prints; one that is silent for too long is killed."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(PATIENCE):
                process.kill()
                return
            line = process.stdout.readline()
            if not line:
                return
            yield line


class Pulse:
    """Notices when something stands still."""

    def __init__(self) -> None:
        self._value: object = None
        self._moved = time.monotonic()
        self.longest = 0.0
        """Seconds of the longest standstill."""

    def look(self, value: object) -> None:
        """Note the value, which changes while things go on."""
        now = time.monotonic()
        self.longest = max(self.longest, now - self._moved)
        if value != self._value:
            self._value, self._moved = value, now
