"""Where the arrays are in a slot, and the few bytes that say so: its descriptor."""

from __future__ import annotations

import mmap
import struct
from typing import List, Sequence, Tuple

from zmqrl.errors import SharedMemoryLost
from zmqrl.transport.header import MAX_FRAMES

NAME = "zmqrl"
"""Of each memfd."""

DATA = mmap.PAGESIZE
"""Where the arrays begin: behind the page with the token and the words below."""

GENERATION, COPIED = 2, 3
"""64-bit words at the head of a slot."""

PLACE = 24
"""Bytes of a descriptor that name the slot: process, file, token."""

USE = struct.Struct("<QI")
"""What follows: generation, and number of arrays, before their lengths."""

MOST = 4 << 30
"""Bytes of a slot."""

F_SEAL_SHRINK = 2
"""Of `fcntl`; a Python that was built for an old system lacks the name."""

_ALIGNED = 64


def size_of(body: bytes) -> int:
    """Bytes of the arrays that a descriptor names; at least 1.

    Raises:
        SharedMemoryLost: It is cut short.
    """
    return max(1, sum(use_of(body)[1]))


def use_of(body: bytes) -> Tuple[int, Sequence[int]]:
    """The generation that a descriptor names, and the lengths of the arrays.

    Raises:
        SharedMemoryLost: It is cut short.
    """
    try:
        generation, count = USE.unpack_from(body, PLACE)
        if count > MAX_FRAMES:
            raise SharedMemoryLost(f"{count} arrays in a slot; {MAX_FRAMES} is the most")
        return generation, struct.unpack_from(f"<{count}Q", body, PLACE + USE.size)
    except struct.error:
        raise SharedMemoryLost("the descriptor of a slot is cut short") from None


def parts_of(memory: memoryview, lengths: Sequence[int]) -> List[memoryview]:
    """The places of arrays of these lengths, one after the other, aligned."""
    parts, begin = [], DATA
    for length in lengths:
        parts.append(memory[begin : begin + length])
        begin += -(-length // _ALIGNED) * _ALIGNED
    return parts


def end_of(lengths: Sequence[int]) -> int:
    """Bytes of a slot that holds arrays of these lengths."""
    return DATA + sum(-(-length // _ALIGNED) * _ALIGNED for length in lengths)
