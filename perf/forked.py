"""Many parts of a pool that are forked from one process, for small machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from zmqrl.process import StopSignal, tie_to_launcher

T = TypeVar("T")


def fork_each(parts: Iterable[T], run: Callable[[T, StopSignal], None]) -> None:
    """Run each part in a process of its own, wait for all, and exit with 1 if one of them failed.

    Args:
        parts: What is different about each.
        run: Is a part until it is told to stop; SIGTERM to the process group tells all.
    """
    tie_to_launcher()
    stop = StopSignal(patience_s=60).install()  # a machine may have other things to do
    children = []
    for part in parts:
        pid = os.fork()  # before there is any socket
        if pid == 0:
            run(part, stop)
            return
        children.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    sys.exit(any(statuses))
