import os

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqrl.errors import DecodeError
from zmqrl.transport.codec import INLINE, decode, decode_meta, encode
from zmqrl.transport.header import (
    Entry,
    Header,
    Op,
    Table,
    join_batch,
    split_batch,
    unpack,
    unpack_table,
)
from zmqrl.transport.tree import MAX_DEPTH

thorough = settings(max_examples=int(os.environ.get("ZMQRL_FUZZ_EXAMPLES", "500")), deadline=None)
"""More with `ZMQRL_FUZZ_EXAMPLES=100000 bin/test tests/fuzz --timeout=0`."""

TREES = [
    {
        "image": np.arange(2 * INLINE, dtype=np.uint8).reshape(2, -1),
        "state": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
        "mask": np.array([True, False]),
        "task_descriptions": ["push", "pull"],
        "depth": np.ones((2, INLINE), np.float16),
    },
    [
        np.array(["ab", "ç"]),
        np.array([b"a"]),
        np.array(7),
        np.zeros((0, 3)),
        np.array(["NaT"], "M8[us]"),
    ],
    {"scalars": [np.float32(1), 1j, None, True, -(2**63), 1.5, b"x"], "time": np.timedelta64(3, "s")},
    {"text": np.full((2, INLINE), "é"), "mask": np.ones(INLINE, bool)},
]

dtypes = st.sampled_from(
    [
        *["<f4", ">f8", "|u1", "|b1", "<U1", ">U2", "|S3", "<M8[s]", ">m8[7D]", "bfloat16", "<c8"],
        *["|O", "|V4", "<U0", "|S0", "<M8[0s]", "<M8", "V", "f4,O"],
    ]
) | st.text("<>|=biufcOSUVMm[]0123456789sDYn", max_size=9)
lengths = st.integers(-1, 3) | st.sampled_from([2**31, 2**39, 2**62, 2**64 - 1, True, None, 1.0])
plain = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
)
array_nodes = st.fixed_dictionaries(
    {},
    optional={
        b"nd": st.sampled_from([True, True, True, False, None]),
        b"type": dtypes,
        b"kind": st.sampled_from([b"", b"", b"", b"O", b"V", ""]),
        b"shape": st.lists(lengths, max_size=4) | plain,
        b"data": st.binary(max_size=24),
        b"frame": st.integers(-1, 2),
        b"complex": st.booleans(),
    },
)
nodes = st.recursive(
    plain | array_nodes,
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from([b"nd", b"data"]), children, max_size=3)
    ),
    max_leaves=6,
)
frames = st.lists(st.binary(max_size=24).map(bytearray), max_size=3)


@st.composite
def mutated(draw, message):
    """`message` with some bytes changed, cut out, or put in."""
    message = bytearray(message)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(message)))
        removed = draw(st.sampled_from([0, 1, 1, 1, 2, 8]))
        message[place : place + removed] = draw(st.binary(max_size=removed + 1))
    return bytes(message)


def check_tree(tree, depth=0):
    """Walk the whole tree and read every value in it."""
    assert depth <= MAX_DEPTH
    if isinstance(tree, dict):
        for key, child in tree.items():
            assert isinstance(key, str)
            check_tree(child, depth + 1)
    elif isinstance(tree, list):
        for child in tree:
            check_tree(child, depth + 1)
    elif isinstance(tree, np.ndarray):
        assert tree.dtype.kind in "biufcSUMm"
        assert tree.dtype.isnative
        assert tree.flags.writeable
        assert tree.flags.aligned
        assert tree.dtype.itemsize > 0
        tree.tolist()
        tree[...] = tree.copy()
    else:
        assert tree is None or isinstance(tree, (bool, int, float, complex, str, bytes, np.generic))
        assert not isinstance(tree, (np.void, np.object_))
        repr(tree)


def is_refused_or_a_tree(meta, buffers):
    try:
        tree = decode(meta, buffers)
    except DecodeError:
        return
    check_tree(tree)


@thorough
@given(meta=st.binary(max_size=200), buffers=frames)
def test_any_bytes_are_refused_or_a_tree(meta, buffers):
    is_refused_or_a_tree(meta, buffers)


@thorough
@given(node=nodes, buffers=frames)
def test_any_msgpack_is_refused_or_a_tree(node, buffers):
    try:
        meta = msgpack.packb(node)
    except UnicodeEncodeError:
        return
    is_refused_or_a_tree(meta, buffers)


@thorough
@given(data=st.data(), dtype=dtypes, shape=st.lists(st.integers(0, 3), max_size=3), framed=st.booleans())
def test_an_array_of_any_dtype_and_any_bytes_is_refused_or_a_tree(data, dtype, shape, framed):
    try:
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
    except Exception:
        size = 2 * int(np.prod(shape))
    content = data.draw(st.binary(min_size=min(size, 10_000), max_size=min(size, 10_000)))
    node = {b"nd": True, b"type": dtype, b"kind": b"", b"shape": shape}
    node |= {b"frame": 0} if framed else {b"data": content}
    is_refused_or_a_tree(msgpack.packb(node), [bytearray(content)] if framed else [])


@pytest.mark.parametrize("tree", TREES, ids=["observation", "arrays", "scalars", "large"])
def test_a_good_message_that_was_changed_is_refused_or_a_tree(tree):
    encoded = encode(tree)
    good = [bytearray(buffer) for buffer in encoded.buffers]

    @thorough
    @given(meta=mutated(encoded.meta), swap=st.permutations(good), cut=st.integers(0, 9))
    def check(meta, swap, cut):
        is_refused_or_a_tree(meta, good)
        is_refused_or_a_tree(encoded.meta, swap)
        is_refused_or_a_tree(meta, [buffer[cut:] for buffer in good])

    check()
    is_refused_or_a_tree(encoded.meta, good)


@thorough
@given(
    meta=st.binary(max_size=100) | mutated(msgpack.packb({"name": "env", "rank": 3, "list": [1, {}]}))
)
def test_any_bytes_are_refused_or_fields(meta):
    try:
        fields = decode_meta(meta)
    except DecodeError:
        return
    assert all(isinstance(key, str) for key in fields)


BATCH = join_batch(
    Table(5, 6, [Entry(1, 3, 1, 0, 6, 9), Entry(2, 2, 0, 1, 0, 8)], 0, b"origin"),
    Op.BATCH,
    [[b"one", b"large"], [b"to"]],
)


@thorough
@given(first=mutated(BATCH[0]) | st.binary(max_size=120).map(Header(Op.RESULT).pack().__add__))
def test_a_batch_table_that_was_changed_is_refused_or_adds_up(first):
    try:
        unpack(first)
        table = unpack_table(first)
        shards = split_batch(table, [first, *BATCH[1:]])
    except DecodeError:
        return
    assert b"".join(message[0] for _, message in shards) == BATCH[1]
    assert [frame for _, message in shards for frame in message[1:]] == BATCH[2:]
