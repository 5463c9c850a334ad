"""The lane for large arrays between processes of one host: they stay in memory that both can see.

A *slot* is a piece of memory of the sender's, a memfd, that holds the large arrays of one message; in
their place a *descriptor* of a few bytes crosses the sockets. A reader opens the slot through
`/proc/PID/fd/FD`. That it is on the same host, in the same namespace of processes, and allowed to, is
shown and not assumed: each slot begins with a random token, which the descriptor repeats. Whatever does
not fit makes the arrays travel over the socket.

A memfd has no name. Nothing is left in /dev/shm however a process ends, and the kernel frees the memory
with the last process that has it mapped. `multiprocessing.shared_memory` has names, which outlive a
SIGKILL, and a resource tracker that unlinks the segments of others (until Python 3.13).

*Reuse.* Nobody ever writes into a slot that somebody may still read:

* A request's slot is used again after its reply, if the request was sent once and given to one rollout
  worker. Otherwise another worker may still be reading it: then its owner lets go of it, and the memory
  lasts for as long as that worker has it mapped.
* A reply's slot is used again when its reader has written into it that it has its copy; if that takes
  too long, its owner lets go of it.

Each use has a number, its *generation*; a descriptor of an earlier one is refused.

Only Linux has memfds; elsewhere the lane is never open.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import sys
import time
from collections import OrderedDict
from typing import Any, Dict, List, Optional, Sequence, Tuple

from zmqrl.errors import SharedMemoryLost
from zmqrl.transport.header import MAX_FRAMES

LEAST = 64_000
"""Bytes of large arrays in a message from which the lane is no slower than a socket."""

_NAME = "zmqrl"
_DATA = mmap.PAGESIZE  # where the arrays begin: behind the page with the token and the words below
_GENERATION, _COPIED = 2, 3  # 64-bit words at the head of a slot
_ALIGNED = 64
_ROUNDED = 64 << 10
_MOST = 4 << 30
_PLACE = 24  # bytes of a descriptor that name the slot: process, file, token
_USE = struct.Struct("<QI")  # what follows: generation, and number of arrays, before their lengths

# A Python that was built for an old system lacks the names of what the system has by now.
_MAP_POPULATE = 0x8000
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_GET_SEALS, _F_SEAL_SHRINK = 1033, 1034, 2
_O_PATH = 0o10000000

_MAX_LENT = 128
"""Slots that one process has in use at once; each takes two file descriptors."""

_MAX_MAPPED = 256
"""Slots of others that a process keeps mapped."""

_KEPT_S = 10.0
"""Seconds for which a slot that is not used is kept, by its owner and by its reader."""

_AGAIN_S = 60.0
"""Seconds after which a lane that did not work is tried again, twice as many each time in a row: a
worker that was killed took its replies with it, but one that can never be read must not cost much."""

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
            fcntl.fcntl(self._file, _F_ADD_SEALS, _F_SEAL_SHRINK)
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
        self._words[_GENERATION] += 1
        lengths = [len(buffer) for buffer in buffers]
        self.parts = _parts(self._bytes, lengths)
        for part, buffer in zip(self.parts, buffers):
            part[:] = buffer
        use = _USE.pack(self._words[_GENERATION], len(lengths))
        self.descriptor = self._place + use + struct.pack(f"<{len(lengths)}Q", *lengths)

    @property
    def is_copied(self) -> bool:
        """Whether the reader says that it needs it no more."""
        return bool(self._words[_COPIED] == self._words[_GENERATION])

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
        slot = self._take(_end(lengths))
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
        while self._free and now > self._free[0].used + _KEPT_S:
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
        if size > _MOST:
            return None
        try:
            return Slot(-(-size // _ROUNDED) * _ROUNDED)
        except OSError:
            return None


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
        slot.words[_COPIED] = slot.words[_GENERATION]
        return meta, copies

    def dismiss(self, body: bytes) -> None:
        """Tell the owner of a reply, if it is still there, that nobody will read it."""
        try:
            _, slot, _ = self._read(body, is_writable=True)
        except SharedMemoryLost:
            return
        slot.words[_COPIED] = slot.words[_GENERATION]

    def can_read(self, descriptor: bytes) -> bool:
        """Whether a slot is there and can be read."""
        try:
            self.views(descriptor)
        except SharedMemoryLost:
            return False
        return True

    def look(self, now: float) -> None:
        """Let go of what has not been read for long: its owner may be gone."""
        while self._mapped and now > next(iter(self._mapped.values())).used + _KEPT_S:
            self._mapped.popitem(last=False)

    def close(self) -> None:
        """Let go of all."""
        self._mapped.clear()

    def _read(self, body: bytes, is_writable: bool) -> Tuple[bytes, _Mapped, List[memoryview]]:
        generation, lengths = _use(body)
        key = (body[:_PLACE], is_writable)
        slot = self._mapped.get(key)
        if slot is None:
            slot = self._mapped[key] = _Mapped(*key)
            if len(self._mapped) > _MAX_MAPPED:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(key)
        slot.used = time.monotonic()
        if slot.words[_GENERATION] != generation:
            raise SharedMemoryLost("the slot holds another message by now")
        if _end(lengths) > len(slot.bytes):
            raise SharedMemoryLost("the descriptor names more than its slot has")
        meta = body[_PLACE + _USE.size + 8 * len(lengths) :]
        return meta, slot, _parts(slot.bytes, lengths)


class Lane:
    """One peer's end of the lane: what it lends, and what it reads.

    It is open while the broker's latest WELCOME had a slot that this process can read, except for a
    while after a message to or from another peer showed that it does not work after all.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.slots = Slots()
        self.reader = Reader()
        self._epoch: Any = None
        self._proof: Any = None  # of the latest WELCOME
        self._pause = _AGAIN_S
        self._shut_until = float("-inf")

    def welcome(self, fields: Dict[str, Any]) -> None:
        """Open the lane if the fields of a WELCOME show that it works."""
        if fields.get("epoch") != self._epoch:
            self._epoch = fields.get("epoch")
            self._shut_until = float("-inf")
        self._proof = fields.get("lane")
        self._open(time.monotonic())

    def give_up(self) -> None:
        """It does not work: no more of it for a while, or until there is another broker."""
        if self.is_open:  # else another request was under way when the first one showed it
            now = time.monotonic()
            soon = now < self._shut_until + self._pause  # it was tried again in vain
            self._pause = 2 * self._pause if soon else _AGAIN_S
            self._shut_until = now + self._pause
        self.is_open = False

    def place(
        self, buffers: List[Any], borrowed: bool, lends: bool = True
    ) -> Tuple[List[Any], Optional[Slot]]:
        """Put large arrays where they can stay: into shared memory, or else into this process's own.

        Args:
            buffers: The arrays.
            borrowed: Whether they may change where they are.
            lends: Whether the receiver can read shared memory.

        Returns:
            The frames to send, and the slot that they are in instead, if any.
        """
        slot = self.slots.lend(buffers) if lends and self.is_open else None
        if slot is not None:
            return [], slot
        return [bytes(buffer) for buffer in buffers] if borrowed else buffers, None

    def look(self, now: float) -> None:
        """Let go of what is not used any more, and try again what did not work.

        To be called now and then.
        """
        self.slots.look(now)
        self.reader.look(now)
        if not self.is_open and self._proof is not None:
            self._open(now)

    def close(self) -> None:
        """Let go of all."""
        self.is_open = False
        self._proof = None
        self.slots.close()
        self.reader.close()

    def _open(self, now: float) -> None:
        place = self._proof
        can_be = isinstance(place, bytes) and now >= self._shut_until
        self.is_open = can_be and self.reader.can_read(place)
        if not self.is_open and can_be:
            self._proof = None  # not on this host; no more looks


def proof() -> Optional[Slot]:
    """A slot without arrays: who can read it is on this host. None where there are no memfds."""
    try:
        slot = Slot(_DATA)
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
        return os.memfd_create(_NAME, flags)
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    if not sys.platform.startswith("linux") or not hasattr(library, "memfd_create"):
        raise OSError(errno.ENOSYS, "the system has no memfds")
    file = int(library.memfd_create(_NAME.encode(), flags))
    if file < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return file


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
            if os.readlink(found) != f"/memfd:{_NAME} (deleted)":
                raise SharedMemoryLost("the descriptor names no slot")
            mode = os.O_RDWR if is_writable else os.O_RDONLY
            file = os.open(found, mode | os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(path)
        try:
            status = os.fstat(file)
            if not fcntl.fcntl(file, _F_GET_SEALS) & _F_SEAL_SHRINK:
                raise SharedMemoryLost("the slot is not sealed: its owner could cut it off")
            if not _DATA <= status.st_size <= min(_MOST, status.st_blocks * 512):
                raise SharedMemoryLost("the slot has a hole, or an odd size")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
            return memoryview(mmap.mmap(file, status.st_size, mmap.MAP_SHARED, protection))
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise SharedMemoryLost(f"a slot of process {pid} cannot be read here: {error}") from None


def size_of(body: bytes) -> int:
    """Bytes of the arrays that a descriptor names; at least 1.

    Raises:
        SharedMemoryLost: It is cut short.
    """
    return max(1, sum(_use(body)[1]))


def _use(body: bytes) -> Tuple[int, Sequence[int]]:
    """The generation that a descriptor names, and the lengths of the arrays."""
    try:
        generation, count = _USE.unpack_from(body, _PLACE)
        if count > MAX_FRAMES:
            raise SharedMemoryLost(f"{count} arrays in a slot; {MAX_FRAMES} is the most")
        return generation, struct.unpack_from(f"<{count}Q", body, _PLACE + _USE.size)
    except struct.error:
        raise SharedMemoryLost("the descriptor of a slot is cut short") from None


def _parts(memory: memoryview, lengths: Sequence[int]) -> List[memoryview]:
    """The places of arrays of these lengths, one after the other, aligned."""
    parts, begin = [], _DATA
    for length in lengths:
        parts.append(memory[begin : begin + length])
        begin += -(-length // _ALIGNED) * _ALIGNED
    return parts


def _end(lengths: Sequence[int]) -> int:
    """Bytes of a slot that holds arrays of these lengths."""
    return _DATA + sum(-(-length // _ALIGNED) * _ALIGNED for length in lengths)
