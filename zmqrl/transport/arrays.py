"""Arrays to bytes and back.

The bytes may come from strangers: what they say of an array is checked *before* it is built.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any, Dict, NamedTuple, Tuple

import numpy as np

from zmqrl.errors import DecodeError
from zmqrl.transport.unpacking import MAX_NODES

BFLOAT16 = "bfloat16"

MAX_DIMENSIONS = 32

_NUMBERS = frozenset(
    ["|b1", "|i1", "|u1"]
    + [
        order + kind
        for order in "<>"
        for kind in ["i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
    ]
)
_TEXT = re.compile(r"[<>|][SU][1-9][0-9]{0,5}")
# A date without a unit is no date: numpy cannot even print it.
_TIME = re.compile(r"[<>](m8|[mM]8\[([1-9][0-9]{0,5})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])")


@functools.lru_cache(maxsize=1024)
def is_allowed(dtype: str) -> bool:
    """Whether arrays of a dtype, in the form of `numpy.dtype.str`, are sent and read."""
    return dtype in _NUMBERS or bool(_TEXT.fullmatch(dtype) or _TIME.fullmatch(dtype))


class Form(NamedTuple):
    """What a message says of an array, checked."""

    dtype: np.dtype
    """As on the wire; of bfloat16 that of its words."""
    shape: Tuple[int, ...]
    size: int
    """Bytes."""
    is_bfloat16: bool

    @property
    def is_plain(self) -> bool:
        """Whether any bytes of the right number are those of the array as it arrives."""
        dtype = self.dtype
        return dtype.kind in "iufcmMS" and dtype.isnative and self.size > 0 and not self.is_bfloat16

    @classmethod
    def of(cls, node: Dict[Any, Any]) -> Form:
        """Read it from the node of an array.

        Raises:
            DecodeError: The dtype is not allowed, or the shape none.
        """
        dtype, is_bfloat16 = dtype_of(node)
        shape = _shape(node)
        size = dtype.itemsize
        for length in shape:
            size *= length
        return cls(dtype, shape, size, is_bfloat16)

    def build(self, data: Any, writable: bool) -> np.ndarray:
        """The array.

        Args:
            data: Its bytes: anything with the buffer protocol.
            writable: Copy what cannot be written to.

        Raises:
            DecodeError: The bytes are not those of such an array.
        """
        view = memoryview(data)
        dtype, shape, size = self.dtype, self.shape, self.size
        if view.nbytes != size:
            raise DecodeError(f"an array of shape {shape} and dtype {dtype} has {view.nbytes} bytes")
        if size == 0:
            if empty_rows(shape) > MAX_NODES:
                raise DecodeError(f"an array of shape {shape} has too many rows of nothing")
            try:
                array = np.empty(shape, dtype)
            except ValueError as error:  # the other lengths alone are too much
                raise DecodeError(f"an array of shape {shape} is not possible: {error}") from None
        else:
            array = np.frombuffer(view, dtype).reshape(shape)
        if self.is_bfloat16:
            words = array.astype(np.uint32)
            words <<= 16  # in place, which keeps an array of no dimension an array
            return words.view(np.float32)
        if dtype.kind == "b":
            # Another byte than 0 or 1 is no bool: numpy and torch would count it wrongly.
            return array.view(np.uint8).astype(np.bool_)
        flags = array.flags
        if not dtype.isnative:
            array = array.astype(dtype.newbyteorder("="))
        elif (writable and not flags.writeable) or not flags.aligned or dtype.kind == "U":
            array = array.copy()  # text always: what is in shared memory may change once it was checked
        if dtype.kind == "U" and size and array.reshape(-1).view(np.uint32).max() > sys.maxunicode:
            raise DecodeError("an array of text holds what is no character")
        return array


def buffer_of(array: np.ndarray, copy: bool) -> memoryview:
    """The bytes of an array in C order.

    Args:
        array: In little-endian byte order.
        copy: Without it they are those of the array itself, if it is contiguous.
    """
    if copy or not array.flags.c_contiguous:
        array = np.array(array, order="C", copy=True)
    return array.reshape(-1).view(np.uint8).data


def empty_rows(shape: Tuple[int, ...]) -> int:
    """How many parts an empty array has although it has no bytes: those before the axis of length 0."""
    rows = 1
    for length in shape[: shape.index(0)]:
        rows *= length
    return rows


def dtype_of(node: Dict[Any, Any]) -> Tuple[np.dtype, bool]:
    """The dtype of an array or scalar, and whether it is bfloat16.

    Raises:
        DecodeError: It is not allowed.
    """
    name = node.get(b"type")
    if name == BFLOAT16:
        return np.dtype("<u2"), True
    # The length first: a cache must not keep what strangers send.
    allowed = isinstance(name, str) and len(name) < 32 and is_allowed(name)
    if not allowed or node.get(b"kind", b"") != b"":
        shown = repr(name[:40]) if isinstance(name, str) else f"a {type(name).__name__}"
        raise DecodeError(f"the dtype {shown} is not allowed")
    return np.dtype(name), False


def _shape(node: Dict[Any, Any]) -> Tuple[int, ...]:
    shape = node.get(b"shape")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise DecodeError("the shape of an array is not a short list")
    for length in shape:
        if type(length) is not int or not 0 <= length < 2**40:
            raise DecodeError("the shape of an array is not made of lengths")
    return tuple(shape)
