"""The checksum of weights."""

from __future__ import annotations

import zlib
from typing import Any, Sequence


def checksum_of(body: Sequence[Any]) -> int:
    """The CRC-32 of all frames (bytes or buffers), one after the other."""
    checksum = 0
    for frame in body:
        checksum = zlib.crc32(frame, checksum)
    return checksum
