"""Gives memory back to the system that large requests have left behind."""

from __future__ import annotations

import ctypes
import resource

_MUCH = 64 << 20
_EVERY = 5.0


class Memory:
    """Tells the C library to return what it keeps of requests that are gone.

    glibc keeps what was freed for later, up to the most that was ever in use: a broker whose queue was
    long once would hold that memory for ever. Returning it takes milliseconds, and what comes next must
    ask for it again, so it is done only when little of it is in use.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        self._looked = 0.0
        self._first = _resident()

    def look(self, held: int, now: float) -> None:
        """Do it if it is time.

        Args:
            held: Bytes of the requests that are open.
            now: Seconds.
        """
        if self._trim is None or now < self._looked + _EVERY:
            return
        self._looked = now
        other = _resident() - self._first - held
        if other > _MUCH and held < other / 8:
            self._trim(0)


def _resident() -> int:
    """Bytes of memory that this process has resident."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
