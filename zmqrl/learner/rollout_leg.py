"""The learner's side towards rollout workers: they wait for newer weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zmqrl.learner.peers import MOST_NAMES, Peers, number
from zmqrl.learner.shared import Shared
from zmqrl.transport.codec import MAX_REQUEST, decode_meta
from zmqrl.transport.header import HEADER_SIZE, Header

_NUMBERS = {"version": 63, "pinned": 63, "serving": 63, "loaded": 48, "failed": 48}
"""What a rollout worker tells of itself, in so many bits: the counts of all can be summed in 64."""


@dataclass(slots=True)
class _Want:
    """A rollout worker that waits for newer weights."""

    request_id: int
    version: int
    pinned: int
    answered: bool = False


class RolloutLeg:
    """Hands out weights.

    Args:
        shared: What the learner touches too.
        peers: The way to rollout workers.
    """

    def __init__(self, shared: Shared, peers: Peers) -> None:
        self._shared = shared
        self._peers = peers
        self._wants: dict[bytes, _Want] = {}

    def knows(self, peer: bytes) -> bool:
        """Whether it has asked."""
        return peer in self._wants

    def forget(self, peer: bytes) -> None:
        """It is gone."""
        self._wants.pop(peer, None)

    def want(self, peer: bytes, header: Header, frames: list[Any]) -> None:
        """WANT.

        Raises:
            DecodeError: It is not valid.
        """
        fields = decode_meta(frames[0][HEADER_SIZE:], MAX_REQUEST)
        known = self._wants.get(peer)
        if known is not None and known.request_id == header.request_id and known.answered:
            return  # the answer is on its way
        here = fields.get("epoch") == self._shared.epoch
        numbers = {
            key: number(f"WANT: {key}", fields.get(key, 0), bits=bits) for key, bits in _NUMBERS.items()
        }
        if known is None and len(self._wants) >= MOST_NAMES:
            return  # it asks again; those that are gone are forgotten with the next version
        version, pinned = (numbers["version"], numbers["pinned"]) if here else (-1, -1)
        self._wants[peer] = _Want(header.request_id, version, pinned)
        name = str(fields.get("name"))[:200]
        if name in self._shared.workers or len(self._shared.workers) < MOST_NAMES:
            self._shared.workers[name] = numbers

    def hand_out(self) -> None:
        """Answer those for whom there are newer weights."""
        newest, pinned = self._shared.newest, self._shared.pinned
        for peer, want in list(self._wants.items()):
            if want.answered:
                continue
            if pinned is not None and want.pinned != pinned.version:
                want.answered = self._peers.send(peer, pinned.message(want.request_id, pinned=True))
            elif newest is not None and want.version < newest.version:
                want.answered = self._peers.send(peer, newest.message(want.request_id, pinned=False))
