"""What the C library does with memory that was freed.

glibc gives it back to the system as soon as some hundred kilobytes lie free at the end of a heap. Where
batches of images come and go that is at each batch, and the next one asks for its memory page by page:
a third of what a request of 200 KB costs. So brokers and workers keep what was freed, and give it back
when they have no use for it.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_… of malloc.h
_KEPT = 16 << 20
"""Bytes that may lie free at the end of a heap. `malloc_trim` gives back what is free within heaps,
but not at the end of those of other threads than the first."""
_LARGEST = 32 << 20
"""Bytes from which on a block has a mapping of its own, which goes when it is freed: glibc's most."""

_TUNED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_TUNABLES = ("malloc.trim_threshold", "malloc.mmap_threshold", "malloc.top_pad")

_MUCH = 24 << 20
"""Bytes that are worth giving back."""
_EVERY = 5.0
"""Seconds between two times, since each takes milliseconds."""


def keep_freed() -> KeptMemory | None:
    """Have this process keep what it frees. For processes of zmqrl's own: others may want it otherwise.

    Returns:
        What gives it back; None if the environment says what malloc has to keep, or the C library is
        none that can be told.
    """
    library = ctypes.CDLL(None)
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _TUNED) or any(name in tunables for name in _TUNABLES):
        return None
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        return None
    library.mallopt(_TRIM_THRESHOLD, _KEPT)
    library.mallopt(_MMAP_THRESHOLD, _LARGEST)
    return KeptMemory(library.malloc_trim)


class KeptMemory:
    """What a process keeps of what it has freed.

    Args:
        trim: `malloc_trim`.
    """

    def __init__(self, trim: Callable[[int], int]) -> None:
        self._trim = trim
        self._due = 0.0
        self._in_use = 0

    def begin(self) -> None:
        """What is in use now, by code and weights, will not be given back."""
        self._trim(0)
        self._in_use = _resident()

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
        other = _resident() - self._in_use - held
        if other > _MUCH and held < other / 8:
            self._trim(0)


def _resident() -> int:
    """Bytes of memory that this process has resident."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
