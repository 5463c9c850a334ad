"""Memory for batches that is used again, but never while somebody still holds it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

_LARGE = 1 << 20
"""Bytes from which memory is kept; the allocator has smaller pieces at hand, and faster."""

_MOST_BUFFERS = 64

_MOST_BYTES = 1 << 30

_lonely = [object()]
_UNUSED = sys.getrefcount(_lonely[0])
"""What `sys.getrefcount` says of an item that only its list refers to."""


class BatchMemory:
    """Arrays for batches; large ones lie in buffers that are used again.

    A policy may keep its observation, in a replay buffer for instance. Whatever shares memory with a
    buffer, be it an array, a tensor or a memoryview, refers to it, so a buffer to which nobody but this
    object refers is free, and no other is handed out.

    Args:
        pinned: In page-locked memory, from which a GPU copies while others compute. Who starts such a
            copy must hold the array until it is done.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._buffers: list[np.ndarray] = []  # uint8, the one used last at the end

    def take(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """An array with any content, which nothing else shares memory with."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        if (size < _LARGE and not self.pinned) or size == 0:
            return np.empty(shape, dtype)
        buffer = self._free(size)
        if buffer is None:
            # A quarter more than asked for, because batches differ in their rows.
            buffer = self._new(size + size // 4)
        self._buffers.append(buffer)
        self._forget()
        return buffer[:size].view(dtype).reshape(shape)

    def _free(self, size: int) -> np.ndarray | None:
        """Take out the smallest free buffer of enough bytes, if it has fewer than four times as many."""
        best, least = -1, 4 * size
        for index in range(len(self._buffers)):  # a loop over the items would refer to them
            if (
                size <= self._buffers[index].nbytes < least
                and sys.getrefcount(self._buffers[index]) == _UNUSED
            ):
                best, least = index, self._buffers[index].nbytes
        return None if best < 0 else self._buffers.pop(best)

    def _forget(self) -> None:
        """Let go of the buffers that have been used least, the one in hand excepted."""
        held = sum(buffer.nbytes for buffer in self._buffers)
        while len(self._buffers) > 1 and (held > _MOST_BYTES or len(self._buffers) > _MOST_BUFFERS):
            held -= self._buffers.pop(0).nbytes

    def _new(self, size: int) -> np.ndarray:
        if not self.pinned:
            return np.empty(size, np.uint8)
        import torch

        array: np.ndarray = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return array
