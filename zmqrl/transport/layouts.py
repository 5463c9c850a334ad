"""Layouts: a tree with the structure of an earlier one is written, and read, without a walk over it.

A simulator sends the same structure in each step, so all bytes of its meta stay the same but those of
the arrays in it. A layout knows where these are. A meta with the same bytes elsewhere was checked when
the layout was learned; what depends on the bytes of an array is checked again.
"""

from __future__ import annotations

import os
import struct
from typing import Any, Dict, Hashable, List, NamedTuple, Optional, Sequence, Set, Tuple

import msgpack
import numpy as np

from zmqrl.transport.arrays import Form, buffer_of

_MAX_BYTES = 1 << 16  # of a meta whose layout is kept
_MAX_ITEMS = 256  # keys and texts in it
_MAX_DEPTH = 8
_SMALL = {b"nd", b"type", b"kind", b"shape", b"data"}  # what is said of an array
_LARGE = {b"nd", b"type", b"kind", b"shape", b"frame"}
_MAX_KEPT = 64
_FREE = 64  # misses from each of which a layout is learned
_RARELY = 8  # of 256 of those after them


class _Place(NamedTuple):
    """Where the bytes of an array are."""

    is_framed: bool
    at: int
    """Which frame, or which piece of the meta."""
    is_checked: bool
    """Whether no bytes in it can be wrong: they are as many as the array has, of a plain dtype."""
    form: Form


class Layout(NamedTuple):
    """Where the bytes of the arrays are in the meta of a tree that has but arrays and text."""

    cut: struct.Struct
    """Cuts a meta into pieces: fixed bytes, an array, fixed bytes, …, fixed bytes."""
    fixed: Tuple[bytes, ...]
    places: Dict[str, Any]
    """The tree, with a `_Place` for each array."""
    is_framed: Tuple[bool, ...]
    """Of each array, in the order of the tree."""
    frames: int
    signature: int
    """Of the tree; 0 if it was received."""
    rows: Optional[int]
    """Of all leaves; None if they differ in their rows, or none has any."""

    def write(self, arrays: Sequence[np.ndarray], copy: bool) -> Tuple[bytes, List[memoryview]]:
        """The meta and the large arrays of a tree.

        Args:
            arrays: In the order of `structure_of`.
            copy: Copy the large ones.
        """
        pieces = [b""] * (2 * len(self.fixed) - 1)
        pieces[::2] = self.fixed
        if not self.frames:
            pieces[1::2] = [array.tobytes() for array in arrays]
            return b"".join(pieces), []
        framed = list(zip(arrays, self.is_framed))
        pieces[1::2] = [array.tobytes() for array, is_framed in framed if not is_framed]
        return b"".join(pieces), [buffer_of(array, copy) for array, is_framed in framed if is_framed]

    def read(self, meta: bytes, buffers: Sequence[Any], writable: bool) -> Optional[Dict[str, Any]]:
        """The tree, as `decode` does it; None if the meta has another layout.

        Args:
            meta: As long as that of which the layout was learned.
            buffers: The large arrays.
            writable: Copy what cannot be written to.

        Raises:
            DecodeError: The bytes of an array are none of its dtype.
        """
        pieces = self.cut.unpack(meta)
        if pieces[::2] != self.fixed or len(buffers) != self.frames:
            return None
        return _filled(self.places, pieces, buffers, writable)


def _filled(
    places: Dict[str, Any], pieces: Sequence[bytes], buffers: Sequence[Any], writable: bool
) -> Dict[str, Any]:
    tree: Dict[str, Any] = {}
    for key, place in places.items():
        if type(place) is dict:
            tree[key] = _filled(place, pieces, buffers, writable)
        elif type(place) is list:
            tree[key] = place.copy()
        elif place.is_checked:
            data, form = pieces[place.at], place.form
            tree[key] = np.ndarray(form.shape, form.dtype, bytearray(data) if writable else data)
        else:
            data = buffers[place.at] if place.is_framed else pieces[place.at]
            tree[key] = place.form.build(data, writable)
    return tree


class Layouts:
    """The layouts that were learned lately.

    Bounded in number, size and in the work of learning, whatever strangers send.
    """

    def __init__(self) -> None:
        self._kept: Dict[Hashable, Layout] = {}
        self._missed = 0
        self.get = self._kept.get  # the layout that a key stands for, or None

    def learn(self, key: Hashable, node: Any, meta: bytes, signature: int = 0) -> None:
        """Keep the layout of a tree under `key`, if it has one.

        Args:
            key: What tells the layout before the tree is known, nearly.
            node: The tree as msgpack packs it, or unpacked it.
            meta: It, packed; or received and accepted.
            signature: Of the tree.
        """
        self._missed += 1
        # By chance, so that no regular mixture of structures keeps one of them out for ever.
        if self._missed > _FREE and os.urandom(1)[0] >= _RARELY:
            return
        layout = _layout_of(node, meta, signature)
        if layout is None:
            return
        if len(self._kept) >= _MAX_KEPT:
            oldest = next(iter(list(self._kept)))  # a copy, because other threads may learn as well
            self._kept.pop(oldest, None)
        self._kept[key] = layout


def structure_of(tree: Any, arrays: List[np.ndarray], depth: int = 0) -> Optional[Tuple[Any, ...]]:
    """What decides on the layout of a tree; None for one that has other leaves than arrays and text.

    Args:
        tree: The tree.
        arrays: Its arrays are added here, in the order in which they are sent.
        depth: Of this part of it.
    """
    if type(tree) is not dict or depth > _MAX_DEPTH or len(tree) > _MAX_ITEMS:
        return None
    for name in tree:
        if type(name) is not str:
            return None
    parts: List[Tuple[Any, ...]] = []
    for name in sorted(tree):
        child = tree[name]
        if type(child) is np.ndarray and child.ndim:
            arrays.append(child)
            parts.append((name, child.shape, child.dtype))
        elif _is_text(child):
            parts.append((name, tuple(child), None))
        else:
            inner = structure_of(child, arrays, depth + 1)
            if inner is None:
                return None
            parts.append((name, inner))
    return tuple(parts)


def _is_text(node: Any) -> bool:
    return type(node) is list and len(node) <= _MAX_ITEMS and all(type(item) is str for item in node)


def _is_array(node: Any) -> bool:
    if not isinstance(node, dict) or node.get(b"nd") is not True:  # a scalar may say as much of itself
        return False
    return node.keys() == _SMALL or node.keys() == _LARGE


def _layout_of(node: Any, meta: bytes, signature: int) -> Optional[Layout]:
    if len(meta) > _MAX_BYTES:
        return None
    search = _Search()
    places = search.tree(node, 0)
    if places is None or search.packer.bytes() != meta:
        return None
    sizes = [*search.sizes, len(meta) - sum(search.sizes)]
    cut = struct.Struct("".join(f"{size}s" for size in sizes))
    fixed = cut.unpack(meta)[::2]
    rows = search.rows.pop() if len(search.rows) == 1 else None
    return Layout(cut, fixed, places, tuple(search.is_framed), sum(search.is_framed), signature, rows)


class _Search:
    """Packs a tree once more, and notes where its arrays are."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(use_bin_type=True, autoreset=False)
        self.sizes: List[int] = []  # of the pieces, without the last
        self.is_framed: List[bool] = []
        self.rows: Set[int] = set()
        self._left = _MAX_ITEMS

    def tree(self, node: Any, depth: int) -> Optional[Dict[str, Any]]:
        """The places of a dict; None if it has other leaves than arrays and text, or very many."""
        if not isinstance(node, dict) or depth > _MAX_DEPTH:
            return None
        self._left -= len(node)
        places: Dict[str, Any] = {}
        self.packer.pack_map_header(len(node))
        for key, child in node.items():
            if not isinstance(key, str) or self._left < 0:
                return None
            self.packer.pack(key)
            if _is_array(child):
                places[key] = self.array(child)
            elif _is_text(child):
                self._left -= len(child)
                self.packer.pack(child)
                self.rows.add(len(child))
                places[key] = child
            else:
                places[key] = self.tree(child, depth + 1)
                if places[key] is None:
                    return None
        return places

    def array(self, node: Dict[bytes, Any]) -> _Place:
        """The place of an array."""
        is_framed = b"frame" in node
        self.packer.pack_map_header(len(node))
        for key, value in node.items():
            self.packer.pack(key)
            self.packer.pack(value)
            if key == b"data" and not is_framed:
                end = len(self.packer.bytes())
                self.sizes += [end - len(value) - sum(self.sizes), len(value)]
        at = sum(self.is_framed) if is_framed else len(self.sizes) - 1
        self.is_framed.append(is_framed)
        form = Form.of(node)
        self.rows.update(form.shape[:1])
        return _Place(is_framed, at, not is_framed and form.is_plain, form)
