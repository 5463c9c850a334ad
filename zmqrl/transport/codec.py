"""Trees of arrays to frames and back, in the msgpack-numpy dialect.

A tree without large arrays is stock msgpack-numpy. An array of `LARGE` bytes or more travels as a
frame of its own, unless there is little of them; in its place stands the index of that frame.

What changes on the way: a tuple arrives as a list, a bytearray as bytes, a big-endian array in native
byte order, a torch tensor as an array. bfloat16 travels as its two bytes and arrives as float32, which
holds the same values; other dtypes that numpy lacks (float8) are sent as float32.

Decoding is for untrusted input: every dtype, shape, length and index is checked *before* an array is
built. The stock decoder must never see these bytes: it unpickles object arrays, and takes the address
that an array points to from the message.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set

import msgpack
import msgpack_numpy
import numpy as np

from zmqrl.errors import DecodeError, EncodeError
from zmqrl.transport.arrays import (
    BFLOAT16,
    MAX_DIMENSIONS,
    Form,
    buffer_of,
    dtype_of,
    empty_rows,
    is_allowed,
)
from zmqrl.transport.layouts import Layouts, structure_of
from zmqrl.transport.tree import MAX_DEPTH, is_row_list
from zmqrl.transport.unpacking import MAX_NODES, NO_EXTENSION, count_nodes, unpack

LARGE = 4096
"""Bytes from which an array becomes a frame of its own, unless it is one of few."""

INLINE = 1 << 14
"""Bytes from which it always does: as long as the large arrays of a tree have fewer than so many in all,
a copy costs less than a frame."""

MAX_META = 2 << 20
"""Bytes of the meta of a message: what is not in large arrays."""

MAX_REQUEST = 1 << 14
"""Bytes of the meta in which a peer introduces itself, or asks for something, in a few short words."""

_MAX_PLAIN_DEPTH = 6
_START = 32  # bytes, and the number of all, by which a layout is looked up
_MAX_CACHED = 4096  # characters: a constant may be an image of megabytes


class Encoded(NamedTuple):
    """A tree, ready to send."""

    meta: bytes
    """To follow the header in the first frame."""
    buffers: List[memoryview]
    """The large arrays, a frame each, contiguous and no longer than the sender allowed."""
    signature: int
    """64 bits; equal for trees that can be merged into one batch."""
    rows: Optional[int]
    """Of all leaves; None if they differ in their rows, or none has any."""


def encode(tree: Any, copy: bool = True) -> Encoded:
    """Turn a tree of arrays into bytes.

    Args:
        tree: Dicts with str keys, lists, tuples; numpy arrays, torch tensors, scalars, str, bytes, None.
        copy: Copy large arrays now. Without it the caller promises not to change them until they are
            sent; simulators that reuse their observation buffer must not promise that.

    Raises:
        EncodeError: Naming the path of the leaf or key that cannot be sent.
    """
    arrays: List[np.ndarray] = []
    structure = structure_of(tree, arrays)
    layout = None if structure is None else _written.get(structure)
    if layout is not None:
        meta, buffers = layout.write(arrays, copy)
        return Encoded(meta, buffers, layout.signature, layout.rows)
    encoder = _Encoder(copy)
    node = encoder.node(tree, "", 0)
    meta = msgpack.packb(node, use_bin_type=True)
    if len(meta) > MAX_META:
        raise EncodeError(
            f"the tree without large arrays has {len(meta) / 2**20:.1f} MiB; "
            f"{MAX_META >> 20} MiB can be sent"
        )
    if len(meta) > MAX_NODES and count_nodes(node) > MAX_NODES:
        raise EncodeError(
            f"the tree has {count_nodes(node)} items without those in arrays; {MAX_NODES} can be sent. "
            "Make arrays of lists of numbers"
        )
    shape = "".join(encoder.shape)
    signature = _cached_hash(shape) if len(shape) <= _MAX_CACHED else _hash(shape)
    if structure is not None and not any(_is_swapped(array.dtype) for array in arrays):
        _written.learn(structure, node, meta, signature)
    rows = encoder.rows.pop() if len(encoder.rows) == 1 else None
    return Encoded(meta, encoder.buffers, signature, rows)


def decode(meta: Any, buffers: Sequence[Any] = (), writable: bool = True) -> Any:
    """Turn bytes back into a tree; arrays are in native byte order.

    Args:
        meta: The bytes after the header in the first frame.
        buffers: The large-buffer frames (`zmq.Frame` or anything with the buffer protocol). Arrays
            are views of them where the alignment allows.
        writable: Copy what cannot be written to. Without it arrays may be read-only views of the bytes,
            for who copies them anyway.

    Raises:
        DecodeError: The bytes are not a valid tree; no array has been built from the wrong part.
    """
    start = (len(meta), meta[:_START]) if isinstance(meta, bytes) else None
    layout = None if start is None else _read.get(start)
    if layout is not None:
        known = layout.read(meta, buffers, writable)
        if known is not None:
            return known
    decoder = _Decoder(buffers, writable)
    node = unpack(meta, MAX_META)
    tree = decoder.node(node, 0)
    if decoder.used != len(buffers):
        raise DecodeError(f"{len(buffers)} buffers came, {decoder.used} are used")
    if start is not None:
        _read.learn(start, node, meta)
    return tree


def encode_meta(fields: Dict[str, Any]) -> bytes:
    """Plain msgpack, for messages that carry no arrays."""
    # The text of an error may hold surrogates: the name of a file, for instance.
    packed: bytes = msgpack.packb(fields, use_bin_type=True, unicode_errors="backslashreplace")
    return packed


def decode_meta(meta: Any, limit: int = 1 << 20) -> Dict[str, Any]:
    """Read what `encode_meta` made.

    Args:
        meta: The bytes after the header.
        limit: The most bytes.

    Raises:
        DecodeError: It is not a msgpack map with str keys, or large, or deeply nested.
    """
    fields = unpack(meta, limit)
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise DecodeError("expected a map with str keys")
    _check_plain(fields, 0)
    return fields


def _check_plain(node: Any, depth: int) -> None:
    if depth > _MAX_PLAIN_DEPTH:
        raise DecodeError(f"the fields are nested deeper than {_MAX_PLAIN_DEPTH}")
    if isinstance(node, dict):
        node = node.values()
    elif isinstance(node, msgpack.Timestamp):
        raise DecodeError(NO_EXTENSION)
    elif not isinstance(node, list):
        return
    for child in node:
        _check_plain(child, depth + 1)


def _hash(shape: str) -> int:
    import hashlib  # it brings OpenSSL, for which an import of the client need not wait

    return int.from_bytes(hashlib.blake2b(shape.encode(), digest_size=8).digest(), "little")


_cached_hash = functools.lru_cache(maxsize=1024)(_hash)

_written = Layouts()
_read = Layouts()


class _Encoder:
    """One walk over a tree: collects large buffers, numbers of rows, and the words of the signature."""

    def __init__(self, copy: bool) -> None:
        self.copy = copy
        self.buffers: List[memoryview] = []
        self.large = 0  # bytes of the large arrays so far
        self.shape: List[str] = []
        self.rows: Set[int] = set()

    def node(self, node: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise EncodeError(f"the tree is nested deeper than {MAX_DEPTH} at {path[:80]!r}")
        if isinstance(node, np.ndarray):
            return self.array(node, path)
        if isinstance(node, dict):
            return self.mapping(node, path, depth)
        if isinstance(node, (list, tuple)):
            if len(node) > MAX_NODES:
                raise EncodeError(f"{_at(path)} has {len(node)} items; {MAX_NODES} is the most")
            if is_row_list(node):
                self.shape.append("rows;")
                self.rows.add(len(node))
                return [self.scalar(item, f"{path}[{i}]") for i, item in enumerate(node)]
            self.shape.append("(")
            children = [self.node(c, f"{path}[{i}]", depth + 1) for i, c in enumerate(node)]
            self.shape.append(")")
            return children
        torch = sys.modules.get("torch")  # a client without torch can hold no tensor
        if torch is not None and isinstance(node, torch.Tensor):
            return self.tensor(node, torch, path)
        if isinstance(node, np.generic) or not hasattr(node, "__array__"):
            packed = self.scalar(node, path)
            self.shape.append(f"{type(node).__name__}={node!r};")
            return packed
        try:
            array = np.asarray(node)
        except Exception as error:  # whatever the array type of another library raises
            raise EncodeError(
                f"{_at(path)} has type {type(node).__name__} without array form: {error}"
            ) from None
        return self.array(array, path)

    def mapping(self, node: Dict[Any, Any], path: str, depth: int) -> Dict[str, Any]:
        for key in node:
            if not isinstance(key, str):
                raise EncodeError(
                    f"the key {key!r} of {_at(path)} has type {type(key).__name__}; keys must be str"
                )
        # Sorted, so that the order in which a simulator fills its dict does not split a batch.
        packed = {}
        self.shape.append("{")
        for key in sorted(node):
            self.shape.append(repr(str.__str__(key)))
            child = f"{path}.{key}" if path else key
            packed[_text(key, child)] = self.node(node[key], child, depth + 1)
        self.shape.append("}")
        return packed

    def array(self, array: np.ndarray, path: str, dtype: str = "") -> Any:
        if isinstance(array, np.ma.MaskedArray):
            raise EncodeError(f"{_at(path)} is a masked array; fill it first")
        array = np.asarray(array)
        if not dtype:
            if _is_swapped(array.dtype):
                array = array.astype(array.dtype.newbyteorder("<"))
            dtype = array.dtype.str
            if not is_allowed(dtype):
                raise EncodeError(
                    f"{_at(path)} is an array of dtype {array.dtype}; only numbers, bool, fixed-length "
                    "text and bytes, and datetime64/timedelta64 can be sent"
                )
        if array.ndim > MAX_DIMENSIONS:
            raise EncodeError(f"{_at(path)} has {array.ndim} dimensions; {MAX_DIMENSIONS} is the most")
        if array.size == 0 and empty_rows(array.shape) > MAX_NODES:
            raise EncodeError(
                f"{_at(path)} is empty and has shape {array.shape}: too many rows of nothing"
            )
        if array.ndim:
            self.shape.append(f"{dtype}{array.shape[1:]};")
            self.rows.add(array.shape[0])
        else:
            self.shape.append(f"{dtype}={array.tolist()!r};")
        packed: Dict[bytes, Any] = {
            b"nd": True,
            b"type": dtype,
            b"kind": b"",
            b"shape": list(array.shape),
        }
        if array.nbytes >= LARGE:
            self.large += array.nbytes
        if array.nbytes < LARGE or self.large < INLINE:
            packed[b"data"] = array.tobytes()
        else:
            packed[b"frame"] = len(self.buffers)
            self.buffers.append(buffer_of(array, self.copy))
        return packed

    def tensor(self, tensor: Any, torch: Any, path: str) -> Any:
        try:
            if tensor.dtype == torch.bfloat16:
                words = tensor.detach().cpu().contiguous().view(torch.uint16)
                return self.array(words.numpy(), path, BFLOAT16)
            if str(tensor.dtype).startswith("torch.float8"):
                tensor = tensor.float()
            return self.array(tensor.numpy(force=True), path)
        except (TypeError, RuntimeError) as error:
            raise EncodeError(f"{_at(path)} is a tensor that has no array form: {error}") from None

    def scalar(self, value: Any, path: str) -> Any:
        if isinstance(value, np.generic):
            if isinstance(value, np.bytes_):
                return value.item()
            if isinstance(value, np.str_):
                return _text(value, path)
            if not is_allowed(value.dtype.str):
                raise EncodeError(f"{_at(path)} is a numpy scalar of dtype {value.dtype}")
            if value.dtype.kind in "mM":  # these have no buffer, which the stock encoder asks for
                return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
            return msgpack_numpy.encode(value)
        if isinstance(value, bool) or value is None or isinstance(value, (float, bytes, bytearray)):
            return value
        if isinstance(value, str):
            return _text(value, path)
        if isinstance(value, int):
            if not -(2**63) <= value < 2**64:
                raise EncodeError(f"{_at(path)} is an int that does not fit 64 bits")
            return int(value)
        if isinstance(value, complex):
            return msgpack_numpy.encode(value)
        raise EncodeError(
            f"{_at(path)} has type {type(value).__name__}; it must be an array, a tensor, a number, "
            "bool, str, bytes or None, or a dict or list of them"
        )


class _Decoder:
    """One walk over unpacked msgpack: checks each array, then builds it."""

    def __init__(self, buffers: Sequence[Any], writable: bool) -> None:
        self.buffers = buffers
        self.writable = writable
        self.used = 0

    def node(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise DecodeError(f"the tree is nested deeper than {MAX_DEPTH}")
        if isinstance(node, dict):
            if b"nd" in node:
                return self.array(node) if node[b"nd"] is True else self.scalar(node)
            if b"complex" in node:
                return _complex(node)
            for key in node:
                if not isinstance(key, str):
                    raise DecodeError("a key is not a str")
            return {key: self.node(child, depth + 1) for key, child in node.items()}
        if isinstance(node, list):
            return [self.node(child, depth + 1) for child in node]
        if isinstance(node, msgpack.Timestamp):
            raise DecodeError(NO_EXTENSION)
        return node

    def array(self, node: Dict[Any, Any]) -> np.ndarray:
        form = Form.of(node)
        if b"frame" in node:
            # Frames are used once each and in order: no array shares memory with another.
            if node[b"frame"] != self.used or self.used >= len(self.buffers):
                raise DecodeError("an array names a frame that is not its own")
            data = self.buffers[self.used]
            self.used += 1
        else:
            data = node.get(b"data")
            if not isinstance(data, bytes):
                raise DecodeError("the data of an array are not bytes")
        return form.build(data, self.writable)

    def scalar(self, node: Dict[Any, Any]) -> Any:
        dtype, bfloat16 = dtype_of(node)
        data = node.get(b"data")
        is_text = dtype.kind in "SU"
        if bfloat16 or is_text or not isinstance(data, bytes) or len(data) != dtype.itemsize:
            raise DecodeError("a numpy scalar does not have the bytes of its dtype")
        return np.frombuffer(data, dtype)[0].astype(dtype.newbyteorder("="))


def _complex(node: Dict[Any, Any]) -> complex:
    text = node.get(b"data")
    if not isinstance(text, str) or len(text) > 64:
        raise DecodeError("a complex number is not text")
    try:
        return complex(text)
    except ValueError:
        raise DecodeError("a complex number is not one") from None


def _is_swapped(dtype: np.dtype) -> bool:
    """Whether arrays of it are not sent with the bytes that they have."""
    return dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big")


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EncodeError(f"{_at(path)} holds surrogates, which are not text") from None
    return str.__str__(value)  # str() would ask an enum for its name


def _at(path: str) -> str:
    return repr(path) if path else "the tree"
