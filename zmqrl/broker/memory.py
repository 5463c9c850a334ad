"""Gives back to the system the memory of a queue that was long."""

from __future__ import annotations

import ctypes

_MUCH = 64 << 20
"""Bytes of requests, after which it is worth a few milliseconds."""

_EVERY = 5.0


class Memory:
    """Tells the C library to return what it keeps after a queue of large requests is gone.

    glibc keeps what was freed for later, up to the most that was ever in use; a queue that was long once
    would hold the memory for ever.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        self._most = 0
        self._trimmed = 0.0

    def look(self, held: int, now: float) -> None:
        """Do it if it is time.

        Args:
            held: Bytes of the requests that are open.
            now: Seconds.
        """
        self._most = max(self._most, held)
        if self._most >= _MUCH and held < self._most / 4 and now >= self._trimmed + _EVERY:
            self._most, self._trimmed = held, now
            if self._trim is not None:
                self._trim(0)
