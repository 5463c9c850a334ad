"""What the C library does with memory that was freed.

glibc gives it back to the system as soon as some hundred kilobytes lie free at the end of a heap. Where
batches of images come and go that is at each batch, and the next one asks for its memory page by page.
So brokers and workers keep some of what was freed, and give it back when they have no use for it.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # M_… of malloc.h
_MOST_KEPT = 32 << 20
"""Bytes that may lie free at the end of a heap. `malloc_trim` gives back what is free within heaps,
but not at the end of those of other threads than the first."""
_LEAST_KEPT = 16 << 20
"""Bytes that stay there when more has been freed."""
_LARGEST = 32 << 20
"""Bytes from which on a block has a mapping of its own, which goes when it is freed: glibc's most."""

_TUNED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_TUNABLES = ("malloc.trim_threshold", "malloc.mmap_threshold", "malloc.top_pad")

_MUCH = 24 << 20
"""Bytes that are worth giving back."""
_EVERY = 5.0
"""Seconds between two times, since each takes milliseconds."""
_IN_VAIN = 60.0
"""The most seconds until the next one, after some that found little to give back."""


def keep_freed() -> KeptMemory | None:
    """Have this process keep what it frees. For processes of zmqrl's own: others may want it otherwise.

    Returns:
        What gives it back; None if the environment says what malloc has to keep, or this system is
        none that can be told and asked.
    """
    library = ctypes.CDLL(None)
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _TUNED) or any(name in tunables for name in _TUNABLES):
        return None
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        return None
    try:
        # Opened once: when it is needed, this process may be able to open no file.
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    # Any setting ends glibc's own adaptation: first that which it may refuse.
    if not library.mallopt(_MMAP_THRESHOLD, _LARGEST):
        os.close(statm)
        return None
    library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
    library.mallopt(_TOP_PAD, _LEAST_KEPT)
    return KeptMemory(library.malloc_trim, statm)


class KeptMemory:
    """What a process keeps of what it has freed.

    Args:
        trim: `malloc_trim`.
        statm: The file of the kernel that tells how much memory the process has, open.
    """

    def __init__(self, trim: Callable[[int], int], statm: int) -> None:
        self._trim = trim
        self._statm = statm
        self._due = 0.0
        self._wait = _EVERY
        self._in_use = 0

    def begin(self) -> None:
        """What is in use now, by code and weights, will not be given back."""
        self._trim(0)
        self._in_use = self._resident()

    def give_back(self, held: int, now: float) -> None:
        """Give it back if there is much of it, and little of it is in use.

        What comes next must ask for it again.

        Args:
            held: Bytes of requests that are open.
            now: Seconds.
        """
        if now < self._due:
            return
        self._due = now + _EVERY
        resident = self._resident()
        other = resident - self._in_use - held
        if other > _MUCH and held < other / 8:
            self._trim(0)
            # What stays is in use all the same: by a thousand connections, for instance.
            in_vain = resident - self._resident() < other / 4
            self._wait = min(2 * self._wait, _IN_VAIN) if in_vain else _EVERY
            self._due = now + self._wait

    def _resident(self) -> int:
        """Bytes of memory that this process has resident."""
        return int(os.pread(self._statm, 100, 0).split()[1]) * resource.getpagesize()
