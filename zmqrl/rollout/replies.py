"""A policy's output as what is sent to the requests of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from zmqrl.rollout.batching import split
from zmqrl.transport.codec import Encoded, encode

_MOST_LAYOUTS = 256


class _Layout(NamedTuple):
    """What encoded parts of one structure and number of rows have in common."""

    pieces: list[tuple[str, int, bytes]]
    """Of each array, as they are sent: its name, the bytes of a row, and what precedes the array."""
    signature: int


class ReplyEncoder:
    """Encodes the parts of an output.

    Parts of one structure and number of rows differ in nothing but the bytes of their arrays, so what
    surrounds these is made once. Where an array is large or nested, each part is encoded by itself.
    """

    def __init__(self) -> None:
        self._layouts: dict[Any, _Layout | None] = {}

    def encode(self, output: dict[str, Any], rows: Sequence[int], copy: bool = True) -> list[Encoded]:
        """What `encode` makes of each part.

        Args:
            output: Arrays of as many rows as the parts have together, or more.
            rows: Rows of each part.
            copy: Copy large arrays: a policy may write its next output there. Without it the caller
                must, before that.

        Raises:
            EncodeError: The output cannot be sent.
        """
        shapes: list[Any] = []
        for name, array in output.items():
            if type(array) is not np.ndarray:
                return [encode(part, copy) for part in split(output, rows)]
            shapes += (name, array.dtype, array.shape[1:])
        layouts: dict[int, _Layout] = {}
        for count in set(rows):
            layout = self._layout(output, count, tuple(shapes))
            if layout is None:
                return [encode(part, copy) for part in split(output, rows)]
            layouts[count] = layout
        bytes_of = {name: array.tobytes() for name, array in output.items()}
        encoded = []
        end = 0
        for count in rows:
            begin, end = end, end + count
            layout = layouts[count]
            parts: list[bytes] = []
            for name, size, piece in layout.pieces:
                parts += (piece, bytes_of[name][begin * size : end * size])
            encoded.append(Encoded(b"".join(parts), [], layout.signature, count))
        return encoded

    def _layout(self, output: dict[str, Any], rows: int, shapes: tuple[Any, ...]) -> _Layout | None:
        """The layout of parts of so many rows; None if they have none."""
        key = (rows, shapes)
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = _learn({name: array[:rows] for name, array in output.items()}, rows)
        return self._layouts[key]


def _learn(part: dict[str, np.ndarray], rows: int) -> _Layout | None:
    """The layout of `part`; None if arrays are large, empty, or sent with other bytes than they have."""
    for array in part.values():
        if array.nbytes == 0 or array.dtype.str[0] == ">":
            return None
    whole = encode(part, copy=False)
    if whole.buffers:
        return None
    pieces: list[tuple[str, int, bytes]] = []
    rest = b""
    for name in sorted(part):
        data = part[name].tobytes()
        piece = msgpack.packb(name) + encode(part[name]).meta[: -len(data)]
        pieces.append((name, len(data) // rows, piece))
        rest += piece + data
    if not whole.meta.endswith(rest):
        return None
    name, size, piece = pieces[0]
    pieces[0] = (name, size, whole.meta[: -len(rest)] + piece)
    return _Layout(pieces, whole.signature)
