"""Weights, ready to send: what a version is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zmqrl.transport.checksum import checksum_of
from zmqrl.transport.codec import encode, encode_meta
from zmqrl.transport.header import MAX_FRAMES, Header, Op


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one version; nothing changes them any more."""

    version: int
    body: tuple[Any, ...]
    """The frames of the encoded tree of arrays."""
    checksum: int
    notes: dict[str, Any]
    """Sent with the weights: the epoch of the learner, the spaces that its actor was built for."""

    @classmethod
    def of(cls, version: int, weights: Mapping[str, Any], notes: dict[str, Any]) -> Snapshot:
        """Copy and encode weights.

        Args:
            version: Their number.
            weights: Arrays or tensors by name, such as a `state_dict`.
            notes: See the attribute.

        Raises:
            EncodeError: Something in them is no array.
        """
        encoded = encode({name: _on_cpu(value) for name, value in weights.items()}, copy=True)
        body = (encoded.meta, *encoded.buffers)
        if len(body) > MAX_FRAMES:
            raise ValueError(f"the weights have {len(body)} large arrays; {MAX_FRAMES} go")
        return cls(version, body, checksum_of(body), notes)

    def message(self, request_id: int, pinned: bool) -> list[Any]:
        """The frames of a WEIGHTS message that answers the request."""
        header = Header(
            Op.WEIGHTS,
            request_id=request_id,
            frames=len(self.body),
            signature=self.checksum,
            policy_version=self.version,
        )
        return [header.pack() + encode_meta({**self.notes, "pinned": pinned}), *self.body]


def _on_cpu(value: Any) -> Any:
    """A tensor's values on the CPU, without its history."""
    return value.detach().cpu() if hasattr(value, "detach") else value
