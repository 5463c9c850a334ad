"""One peer's end of the lane: whether it works, what it lends, and what it reads."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Tuple

from zmqrl.transport.sharedmem.reader import Reader
from zmqrl.transport.sharedmem.slots import Slot, Slots

_AGAIN_S = 60.0
"""Seconds after which a lane that did not work is tried again, twice as many each time in a row: a
worker that was killed took its replies with it, but one that can never be read must not cost much."""


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
