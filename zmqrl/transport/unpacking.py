"""msgpack from strangers: no more of it is unpacked than an honest message has."""

from __future__ import annotations

from typing import Any

import msgpack

from zmqrl.errors import DecodeError

MAX_NODES = 1 << 17
"""Items of all lists and maps in the meta of a message together; an array has about eight.

Two mebibytes of empty maps would unpack to seventy times their size. An observation has tens of arrays,
and a text for each row: with texts of 15 bytes its meta is too large before it has so many."""

NO_EXTENSION = "a msgpack extension is no part of the protocol"


def unpack(meta: Any, limit: int) -> Any:
    """Unpack msgpack into dicts, lists, numbers, str, bytes and timestamps.

    Args:
        meta: The bytes.
        limit: The most bytes.

    Raises:
        DecodeError: They are no msgpack, or more than is taken.
    """
    size = len(meta)
    if size > limit:
        raise DecodeError(f"{size} bytes of meta; {limit} is the most")
    # Every node takes a byte at least: a message of the usual size need not be counted.
    count = _Count() if size > MAX_NODES else None
    most = min(size, MAX_NODES)
    try:
        return msgpack.unpackb(
            meta,
            raw=False,
            strict_map_key=True,
            max_array_len=most,
            max_map_len=most,
            ext_hook=_refuse_extension,
            object_hook=count,
            list_hook=count,
        )
    except DecodeError:
        raise
    except Exception as error:  # msgpack raises a dozen types, some of them bare ValueErrors
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        raise DecodeError(f"not valid msgpack ({words})") from None


def count_nodes(node: Any) -> int:
    """How many nodes `unpack` will count in what a tree is packed as."""
    if isinstance(node, dict):
        if b"shape" in node:
            return len(node) + len(node[b"shape"])
        node = node.values()
    elif not isinstance(node, (list, tuple)):
        return 0
    return len(node) + sum(count_nodes(child) for child in node)


class _Count:
    """Counts the nodes of a message while it is unpacked, which ends before the memory does."""

    def __init__(self) -> None:
        self._left = MAX_NODES

    def __call__(self, node: Any) -> Any:
        self._left -= len(node)
        if self._left < 0:
            raise DecodeError(f"the message has more than {MAX_NODES} items")
        return node


def _refuse_extension(code: int, data: bytes) -> None:
    raise DecodeError(NO_EXTENSION)
