"""The slots of one process, which others read."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import sys
import time
from typing import Any, Dict, List, Optional, Sequence

from zmqrl.transport.sharedmem.descriptor import (
    COPIED,
    DATA,
    F_SEAL_SHRINK,
    GENERATION,
    MOST,
    NAME,
    USE,
    end_of,
    parts_of,
)

LEAST = 64_000
"""Bytes of large arrays in a message from which the lane is no slower than a socket."""

KEPT_S = 10.0
"""Seconds for which a slot that is not used is kept, by its owner and by its reader."""

_ROUNDED = 64 << 10

# A Python that was built for an old system lacks the names of what the system has by now.
_MAP_POPULATE = 0x8000
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS = 1033

_MAX_LENT = 128
"""Slots that one process has in use at once; each takes two file descriptors."""

_UNREAD_S = 600.0
"""Seconds after which the owner lets go of a reply that was never read: its client may be dead."""


class Slot:
    """Memory of this process that holds the large arrays of one message.

    Args:
        size: Bytes.

    Raises:
        OSError: There are no memfds, or not so much memory, or not another file descriptor.
    """

    _file = -1  # for `close`, also where there is none

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0.0
        """When it was last lent, or given back, of `time.monotonic()`."""
        self.descriptor = b""
        """What the receiver is told."""
        self.parts: List[memoryview] = []
        """The arrays."""
        self._file = _memfd()
        try:
            # Memory that is not there is an error here; upon the first write it would be a SIGBUS.
            os.posix_fallocate(self._file, 0, size)
            # Nor can the owner cut it off under its reader.
            fcntl.fcntl(self._file, _F_ADD_SEALS, F_SEAL_SHRINK)
            memory = mmap.mmap(self._file, size, mmap.MAP_SHARED | _MAP_POPULATE)
        except BaseException:
            self.close()
            raise
        self._bytes = memoryview(memory)
        self._words = self._bytes[:32].cast("Q")
        self._place = struct.pack("<II", os.getpid(), self._file) + os.urandom(16)
        self._bytes[:16] = self._place[8:]

    def fill(self, buffers: Sequence[Any]) -> None:
        """Copy the arrays in, and describe where they are."""
        self._words[GENERATION] += 1
        lengths = [len(buffer) for buffer in buffers]
        self.parts = parts_of(self._bytes, lengths)
        for part, buffer in zip(self.parts, buffers):
            part[:] = buffer
        use = USE.pack(self._words[GENERATION], len(lengths))
        self.descriptor = self._place + use + struct.pack(f"<{len(lengths)}Q", *lengths)

    @property
    def is_copied(self) -> bool:
        """Whether the reader says that it needs it no more."""
        return bool(self._words[COPIED] == self._words[GENERATION])

    def close(self) -> None:
        """Let go of it; who has it mapped can still read it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.parts = []
        self._bytes = self._words = memoryview(b"")

    def __del__(self) -> None:
        self.close()


class Slots:
    """The slots of one process: as many as it needs at once, used again and again."""

    def __init__(self) -> None:
        self._free: List[Slot] = []  # the longest unused first
        self._lent: Dict[int, Slot] = {}  # by id, the longest lent first

    def lend(self, buffers: Sequence[Any]) -> Optional[Slot]:
        """A slot that holds these arrays; None if they are too small, or there is no memory."""
        lengths = [len(buffer) for buffer in buffers]
        if sum(lengths) < LEAST or len(self._lent) >= _MAX_LENT:
            return None
        slot = self._take(end_of(lengths))
        if slot is not None:
            slot.fill(buffers)
            slot.used = time.monotonic()
            self._lent[id(slot)] = slot
        return slot

    def give_back(self, slot: Slot, is_unread: bool) -> None:
        """End the use of a slot; `is_unread` says that nobody can still be reading it."""
        if self._lent.pop(id(slot), None) is None:
            return
        if is_unread:
            slot.used = time.monotonic()
            self._free.append(slot)
        else:
            slot.close()

    def look(self, now: float) -> None:
        """Let go of what has not been needed for long."""
        while self._free and now > self._free[0].used + KEPT_S:
            self._free.pop(0).close()

    def collect(self, now: float) -> int:
        """Take back what its readers have copied; for replies.

        Returns:
            How many have not been copied.
        """
        for slot in list(self._lent.values()):
            if slot.is_copied:
                self.give_back(slot, is_unread=True)
            elif now > slot.used + _UNREAD_S:
                self.give_back(slot, is_unread=False)
        return len(self._lent)

    def close(self) -> None:
        """Let go of all."""
        for slot in [*self._free, *self._lent.values()]:
            slot.close()
        self._free.clear()
        self._lent.clear()

    def _take(self, size: int) -> Optional[Slot]:
        for index in range(len(self._free) - 1, -1, -1):
            if size <= self._free[index].size <= 2 * size + _ROUNDED:
                return self._free.pop(index)
        if size > MOST:
            return None
        try:
            return Slot(-(-size // _ROUNDED) * _ROUNDED)
        except OSError:
            return None


def proof() -> Optional[Slot]:
    """A slot without arrays: who can read it is on this host. None where there are no memfds."""
    try:
        slot = Slot(DATA)
    except OSError:
        return None
    slot.fill([])
    return slot


def _memfd() -> int:
    """A new memfd of no length, as a file descriptor.

    Raises:
        OSError: There are no memfds, or not another file descriptor.
    """
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    if hasattr(os, "memfd_create"):
        return os.memfd_create(NAME, flags)
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    if not sys.platform.startswith("linux") or not hasattr(library, "memfd_create"):
        raise OSError(errno.ENOSYS, "the system has no memfds")
    file = int(library.memfd_create(NAME.encode(), flags))
    if file < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return file
