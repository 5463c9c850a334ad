"""Reads the slots of other processes."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections import OrderedDict
from typing import List, Tuple

from zmqrl.errors import SharedMemoryLost
from zmqrl.transport.sharedmem.descriptor import (
    COPIED,
    DATA,
    F_SEAL_SHRINK,
    GENERATION,
    MOST,
    NAME,
    PLACE,
    USE,
    end_of,
    parts_of,
    use_of,
)
from zmqrl.transport.sharedmem.slots import KEPT_S

# A Python that was built for an old system lacks the names of what the system has by now.
_F_GET_SEALS = 1034
_O_PATH = 0o10000000

_MAX_MAPPED = 256
"""Slots of others that a process keeps mapped."""


class _Mapped:
    """A slot of another process.

    Args:
        place: The head of a descriptor that names it.
        is_writable: Whether it is to be told that it has been copied.

    Raises:
        SharedMemoryLost: There is none, or this process cannot read it.
    """

    def __init__(self, place: bytes, is_writable: bool) -> None:
        self.used = 0.0
        """When it was last read, of `time.monotonic()`."""
        self.bytes = _map(place, is_writable)
        self.words = self.bytes[:32].cast("Q")
        if self.bytes[:16] != place[8:]:
            raise SharedMemoryLost("the slot has another token: it is not the one that is meant")


class Reader:
    """Reads the slots of other processes; keeps them mapped while they are in use."""

    def __init__(self) -> None:
        # By place and way of access, the longest unused first.
        self._mapped: "OrderedDict[Tuple[bytes, bool], _Mapped]" = OrderedDict()

    def views(self, body: bytes) -> Tuple[bytes, List[memoryview]]:
        """The arrays of a request: read-only, and unchanged until the reply.

        Args:
            body: What follows the header: a descriptor, then the meta.

        Returns:
            The meta, and the arrays.

        Raises:
            SharedMemoryLost: There is no such slot, or this process cannot read it.
        """
        meta, _, parts = self._read(body, is_writable=False)
        return meta, parts

    def copies(self, body: bytes) -> Tuple[bytes, List[bytearray]]:
        """Copies of the arrays of a reply, whose owner may then use the slot again; as `views`."""
        meta, slot, parts = self._read(body, is_writable=True)
        copies = [bytearray(part) for part in parts]
        slot.words[COPIED] = slot.words[GENERATION]
        return meta, copies

    def dismiss(self, body: bytes) -> None:
        """Tell the owner of a reply, if it is still there, that nobody will read it."""
        try:
            _, slot, _ = self._read(body, is_writable=True)
        except SharedMemoryLost:
            return
        slot.words[COPIED] = slot.words[GENERATION]

    def can_read(self, descriptor: bytes) -> bool:
        """Whether a slot is there and can be read."""
        try:
            self.views(descriptor)
        except SharedMemoryLost:
            return False
        return True

    def look(self, now: float) -> None:
        """Let go of what has not been read for long: its owner may be gone."""
        while self._mapped and now > next(iter(self._mapped.values())).used + KEPT_S:
            self._mapped.popitem(last=False)

    def close(self) -> None:
        """Let go of all."""
        self._mapped.clear()

    def _read(self, body: bytes, is_writable: bool) -> Tuple[bytes, _Mapped, List[memoryview]]:
        generation, lengths = use_of(body)
        key = (body[:PLACE], is_writable)
        slot = self._mapped.get(key)
        if slot is None:
            slot = self._mapped[key] = _Mapped(*key)
            if len(self._mapped) > _MAX_MAPPED:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(key)
        slot.used = time.monotonic()
        if slot.words[GENERATION] != generation:
            raise SharedMemoryLost("the slot holds another message by now")
        if end_of(lengths) > len(slot.bytes):
            raise SharedMemoryLost("the descriptor names more than its slot has")
        meta = body[PLACE + USE.size + 8 * len(lengths) :]
        return meta, slot, parts_of(slot.bytes, lengths)


def _map(place: bytes, is_writable: bool) -> memoryview:
    """Map the memory of the slot that the head of a descriptor names.

    Raises:
        SharedMemoryLost: There is none, or this process cannot read it.
    """
    pid, number = struct.unpack_from("<II", place)
    try:
        # This opens nothing yet: a stranger may name a pipe, a terminal, or a device.
        path = os.open(f"/proc/{pid}/fd/{number}", _O_PATH | os.O_CLOEXEC)
        try:
            found = f"/proc/self/fd/{path}"
            if os.readlink(found) != f"/memfd:{NAME} (deleted)":
                raise SharedMemoryLost("the descriptor names no slot")
            mode = os.O_RDWR if is_writable else os.O_RDONLY
            file = os.open(found, mode | os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(path)
        try:
            status = os.fstat(file)
            if not fcntl.fcntl(file, _F_GET_SEALS) & F_SEAL_SHRINK:
                raise SharedMemoryLost("the slot is not sealed: its owner could cut it off")
            if not DATA <= status.st_size <= min(MOST, status.st_blocks * 512):
                raise SharedMemoryLost("the slot has a hole, or an odd size")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
            return memoryview(mmap.mmap(file, status.st_size, mmap.MAP_SHARED, protection))
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise SharedMemoryLost(f"a slot of process {pid} cannot be read here: {error}") from None
