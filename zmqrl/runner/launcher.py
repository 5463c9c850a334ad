"""Starts the processes of a run on this machine, and sees to it that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from zmqrl.process import DEATH_PIPE

_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""

_HEAD_START = 1.5


@dataclass(slots=True, eq=False)
class Child:
    """A process that the launcher started."""

    name: str
    process: subprocess.Popen[str]
    pipe: int
    """Our end of its death pipe."""
    reader: threading.Thread = field(default_factory=threading.Thread)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    ended: bool = False
    """Its end was seen, and what was left of its process group was killed."""

    def cause(self) -> str:
        """How it ended, and its last word."""
        code = self.process.returncode
        if code is None:
            return f"{self.name} is running"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        words = [line for line in self.last_lines if line.strip()]
        return f"{self.name} {how}" + (f": {words[-1].strip()}" if code > 0 and words else "")


class Launcher:
    """Starts `zmqrl` subcommands as processes of their own, each in a process group of its own.

    Args:
        on_line: Called, from a thread for each child, with its name and a line of its output.
    """

    def __init__(self, on_line: Callable[[str, str], None]) -> None:
        self.children: dict[str, Child] = {}
        self._on_line = on_line

    def start(
        self, name: str, arguments: Sequence[str], program: Sequence[str] = ("-m", "zmqrl")
    ) -> None:
        """Start a process under `name`, which no running child has.

        Its standard input is empty: a simulator that asks a question gets an end of file.

        Args:
            name: Of the child.
            arguments: Of the program.
            program: What Python is to run.
        """
        if name in self.children:
            self.kill(name)
            _end(self.children[name])
            os.close(self.children[name].pipe)
        theirs, ours = os.pipe()
        os.set_inheritable(theirs, True)
        # One thread a process: N processes of as many threads as there are cores slow each other down.
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ}
        environment[DEATH_PIPE] = str(theirs)
        try:
            process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        child = Child(name, process, ours)
        child.reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        self.children[name] = child
        child.reader.start()

    def exits(self) -> list[Child]:
        """The children that have ended since the last call."""
        new = [c for c in self.children.values() if not c.ended and c.process.poll() is not None]
        for child in new:
            _end(child)
        _join_readers(new)  # their last words explain why
        return new

    def running(self) -> list[Child]:
        """The children that have not ended."""
        return [child for child in self.children.values() if child.process.poll() is None]

    def kill(self, name: str) -> None:
        """End one child and its children at once."""
        child = self.children[name]
        if not child.ended:
            _signal_group(child, signal.SIGKILL)

    def stop(self, first: Sequence[str] = (), meanwhile: Callable[[], None] = lambda: None) -> None:
        """End all children: SIGTERM, and SIGKILL to what is left after the grace.

        Args:
            first: Who is told first, and has a second and a half before the others are told: env workers
                can then say goodbye to a broker that still listens.
            meanwhile: Called now and then while the children end.
        """
        begin = time.monotonic()
        early = [self.children[name] for name in first]
        _terminate(early)
        _wait_for(early, begin + _HEAD_START, meanwhile)
        others = [child for child in self.children.values() if child not in early]
        _terminate(others)
        _wait_for([*others, *early], begin + _GRACE, meanwhile)
        for child in self.children.values():
            _end(child)
        _join_readers(list(self.children.values()))

    def close(
        self, first: Sequence[str] = (), meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, str]:
        """Stop all children, as `stop` does, and free what they held.

        Returns:
            By name, the cause of those that ended with an error.
        """
        self.stop([name for name in first if name in self.children], meanwhile)
        for child in self.children.values():
            os.close(child.pipe)
        failed = [child for child in self.children.values() if (child.process.returncode or 0) > 0]
        self.children.clear()
        return {child.name: child.cause() for child in failed}

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, child: Child) -> None:
        assert child.process.stdout is not None
        with child.process.stdout as output:
            for line in output:
                child.last_lines.append(line.rstrip("\n"))
                # Whatever becomes of the line, read on: the child would block on a full pipe.
                with suppress(Exception):
                    self._on_line(child.name, line.rstrip("\n"))


def _terminate(children: Sequence[Child]) -> None:
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)


def _wait_for(children: Sequence[Child], until: float, meanwhile: Callable[[], None]) -> None:
    while time.monotonic() < until:
        meanwhile()
        if all(child.process.poll() is not None for child in children):
            return
        time.sleep(0.02)


def _end(child: Child) -> None:
    """Kill what is left of a child and its own children, once: later its number may be another's."""
    if not child.ended:
        child.ended = True
        _signal_group(child, signal.SIGKILL)
        child.process.wait()


def _join_readers(children: Sequence[Child]) -> None:
    """Wait for the rest of the output; a daemon that left the group may hold a pipe open for ever."""
    until = time.monotonic() + 1.0
    for child in children:
        child.reader.join(max(0.0, until - time.monotonic()))


def _signal_group(child: Child, number: signal.Signals) -> None:
    # The child leads a session of its own, so its pid names its group, which outlives it.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)
