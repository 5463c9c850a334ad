"""What every process of a pool does first: heed signals, log, and not outlive its launcher."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import FrameType

DEATH_PIPE = "ZMQRL_DEATH_PIPE"
"""Environment variable with the file descriptor that `tie_to_launcher` watches."""


class StopSignal:
    """Becomes set at the first SIGTERM or SIGINT; the second SIGINT interrupts whatever runs.

    Calling it tells whether it is set, so that it can be passed as `stopping`.

    Args:
        patience_s: Seconds that the process has to end after the first signal. Then it says where it is
            stuck, and is ended by SIGALRM. What holds the interpreter lock all the time, in C, is ended
            by SIGKILL only.
    """

    def __init__(self, patience_s: int = 8) -> None:
        self._patience_s = patience_s
        self.reason: str | None = None
        """The name of the signal that came; None before."""

    def install(self) -> StopSignal:
        """Catch the two signals in this process; call it from the main thread."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._leave_to_parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        threading.Thread(target=self._watch, args=(read,), name="stop-signal", daemon=True).start()
        return self

    def _leave_to_parent(self) -> None:
        """In a child that was forked: a signal to it is none to the parent, and SIGTERM ends it.

        Ctrl-C at a terminal reaches the children as well; the parent still needs them for its last step.
        """
        signal.set_wakeup_fd(-1)
        for number, own in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, _ignore)):
            if signal.getsignal(number) == self._handle:
                signal.signal(number, own)

    def __call__(self) -> bool:
        """Whether this process should end."""
        return self.reason is not None

    def sleep(self, seconds: float) -> None:
        """Sleep, but no longer than until the signal comes."""
        until = time.monotonic() + seconds
        while self.reason is None:
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.1))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def _watch(self, pipe: int) -> None:
        """See to it that the first signal has an effect, whatever the main thread is in."""
        main = threading.main_thread()
        number = 0
        while number not in (signal.SIGTERM, signal.SIGINT):
            number = os.read(pipe, 1)[0]
        until = time.monotonic() + self._patience_s
        signal.alarm(self._patience_s + 1)  # in case that this thread does not run again
        time.sleep(0.2)
        if self.reason is None and main.ident is not None:
            # Another thread took the signal, as happens with two at once, and the main one sleeps on.
            signal.pthread_kill(main.ident, number)
        time.sleep(max(0.0, until - time.monotonic()))
        frame = sys._current_frames().get(main.ident or 0)
        where = traceback.extract_stack(frame)[-1] if frame is not None else None
        at = f" in {where.name} ({where.filename}, line {where.lineno})" if where is not None else ""
        name = signal.Signals(number).name
        print(f"{name} came {self._patience_s} s ago, still{at}; ended", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGALRM)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, a program that the child becomes does not inherit it."""


def tie_to_launcher() -> None:
    """Let the kernel kill this process and its children when the launcher dies, however it dies.

    The launcher holds the other end of a pipe. When that closes, the kernel itself sends SIGKILL to the
    process group: no thread is needed, so neither a held GIL nor a simulator stuck in C delays it.
    """
    descriptor = os.environ.pop(DEATH_PIPE, None)
    if descriptor is None:
        return
    pipe = int(descriptor)
    os.set_inheritable(pipe, False)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if _is_closed(pipe):  # it died before we were ready
        os.killpg(0, signal.SIGKILL)


def _is_closed(pipe: int) -> bool:
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


def log_to_stderr() -> None:
    """Send log lines to standard error, as they are: the launcher adds who said it."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")


def allow_connections() -> None:
    """Let this process have as many connections as the system lets it: each takes a file descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # no number is unlimited here
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
