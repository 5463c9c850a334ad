"""What the C library does with memory that was freed.

glibc gives it back to the system as soon as some hundred kilobytes lie free at the end of a heap. Where
batches of images come and go that is at each batch, and the next one asks for its memory page by page:
a third of what a request of 200 KB costs. So the parts of a pool keep what was freed, and give it back
when they have no use for it.
"""

from __future__ import annotations

import ctypes
import os
import resource

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_… of malloc.h
_KEPT = 128 << 20
_LARGEST = 32 << 20
"""Bytes from which on a block has a mapping of its own, which goes when it is freed: glibc's most."""

_MUCH = 24 << 20
_EVERY = 5.0


def keep_freed() -> None:
    """Keep what was freed, up to 128 MiB in each heap; unless the environment tunes malloc itself.

    For processes of zmqrl's own: what else is in a process may want it otherwise.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    tuned = any(name.startswith("MALLOC_") for name in os.environ)
    if mallopt is None or tuned or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT)
    mallopt(_MMAP_THRESHOLD, _LARGEST)


class Freed:
    """Gives back what is kept, while little of it is in use.

    That takes milliseconds, and what comes next must ask for it again.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        self._looked = 0.0
        self._in_use = _resident()  # by what is not freed for the next request

    def look(self, held: int, now: float) -> None:
        """Give it back if it is time, and worth its while.

        Args:
            held: Bytes of the requests that are open.
            now: Seconds.
        """
        if self._trim is None or now < self._looked + _EVERY:
            return
        self._looked = now
        other = _resident() - self._in_use - held
        if other > _MUCH and held < other / 8:
            self._trim(0)
            other = _resident() - self._in_use - held
            self._in_use += max(other, 0)  # it was no freed memory
        elif other < 0:
            self._in_use += other


def _resident() -> int:
    """Bytes of memory that this process has resident."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
