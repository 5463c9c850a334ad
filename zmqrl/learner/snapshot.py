"""Weights, ready to send: what a version is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zmqrl.errors import EncodeError
from zmqrl.rollout.download import weights_signature
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
            ValueError: The number is not above 0, or there are too many large arrays.
        """
        if not 0 < version < 2**63:
            raise ValueError(f"a version is a number above 0, not {version!r}")
        for name, value in weights.items():
            if not hasattr(value, "__array__"):
                raise EncodeError(f"the weights {name!r} are a {type(value).__name__}, not an array")
        encoded = encode({name: _on_cpu(value) for name, value in weights.items()}, copy=True)
        body = (encoded.meta, *encoded.buffers)
        if len(body) > MAX_FRAMES:
            raise ValueError(f"the weights have {len(body)} large arrays; {MAX_FRAMES} go")
        return cls(version, body, checksum_of(body), notes)

    def message(self, request_id: int, pinned: bool) -> list[Any]:
        """The frames of a WEIGHTS message that answers the request."""
        notes = encode_meta({**self.notes, "pinned": pinned})
        header = Header(
            Op.WEIGHTS,
            request_id=request_id,
            frames=len(self.body),
            signature=weights_signature(self.version, notes, self.checksum),
            policy_version=self.version,
        )
        return [header.pack() + notes, *self.body]


def _on_cpu(value: Any) -> Any:
    """A tensor's values on the CPU, without its history."""
    return value.detach().cpu() if hasattr(value, "detach") else value
