"""The broker's part in the lane of shared memory: it shows what host it is on, and helps who is not."""

from __future__ import annotations

from typing import Any

from zmqrl.transport.header import FLAG_LANE, HEADER_SIZE, unpack
from zmqrl.transport.sharedmem import Reader, Slot, size_of


class BrokerLane:
    """Offers the lane.

    Args:
        proof: A slot for peers to read.
    """

    def __init__(self, proof: Slot) -> None:
        self._proof = proof
        self._reader = Reader()

    @property
    def proof(self) -> bytes:
        """Where the slot is."""
        return self._proof.descriptor

    def size_of(self, message: list[Any]) -> int:
        """Bytes of shared memory that a request names.

        Raises:
            SharedMemoryLost: It does not do so properly.
        """
        return size_of(message[0][HEADER_SIZE:])

    def inlined(self, message: list[Any]) -> list[Any]:
        """A message with copies of its large arrays in place of the words where they are.

        Raises:
            SharedMemoryLost: They cannot be read.
        """
        header = unpack(message[0])
        meta, views = self._reader.views(message[0][HEADER_SIZE:])
        frames = [*(bytes(view) for view in views), *message[1:]]
        header = header._replace(flags=header.flags & ~FLAG_LANE, frames=len(frames))
        return [header.pack() + meta, *frames]

    def dismiss(self, first: bytes) -> None:
        """A message is dropped: if it is a reply, its worker may use the memory of its arrays again."""
        if unpack(first).flags & FLAG_LANE:
            self._reader.dismiss(first[HEADER_SIZE:])

    def look(self, now: float) -> None:
        """Let go of what has not been read for long."""
        self._reader.look(now)
