import contextlib
import enum
import fractions
import os
import pickle
import struct
import tracemalloc

import msgpack
import numpy as np
import pytest

from zmqrl.errors import DecodeError, EncodeError
from zmqrl.transport.codec import INLINE, MAX_META, decode, decode_meta, encode
from zmqrl.transport.tree import MAX_DEPTH
from zmqrl.transport.unpacking import MAX_NODES


class Unsendable:
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("it is on another device")


def nested(depth, kind=list):
    tree = np.zeros(2)
    for _ in range(depth):
        tree = {"a": tree} if kind is dict else [tree]
    return tree


# -- The sender


@pytest.mark.parametrize(
    "leaf",
    [
        np.array([object()], dtype=object),
        np.array(["a", None]),
        np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
        np.zeros(2, dtype="V3"),
        np.array(["NaT"], dtype="M8"),
        np.datetime64("NaT"),
        np.zeros(2, dtype=np.longdouble),
        np.ma.masked_array([1.0, 2.0], mask=[True, False]),
        np.longdouble(1),
        np.void(b"abc"),
        {1, 2},
        frozenset(),
        range(3),
        fractions.Fraction(1, 3),
        enum.Enum("Colour", "RED").RED,
        lambda: None,
        np.ndarray,
        memoryview(b"abc"),
        object(),
        Unsendable(),
        2**64,
        -(2**63) - 1,
        "\ud800",
        np.str_("\ud800"),
        np.zeros((1,) * 33),
    ],
    ids=lambda leaf: f"{type(leaf).__name__}-{getattr(leaf, 'dtype', '')}",
)
def test_what_cannot_be_sent_is_refused_by_its_path(leaf):
    with pytest.raises(EncodeError, match=r"'obs\.parts\[1\]'"):
        encode({"obs": {"parts": [np.zeros(2), leaf]}})


@pytest.mark.parametrize("item", [np.void(b"abc"), 2**64, "\udfff"], ids=["void", "int", "surrogate"])
def test_what_cannot_be_sent_is_refused_within_a_row_list_too(item):
    with pytest.raises(EncodeError, match=r"'task\[1\]'"):
        encode({"task": ["push", item]})


def test_a_leaf_that_is_the_whole_tree_is_named_as_that():
    with pytest.raises(EncodeError, match="the tree has type set"):
        encode({1, 2})


@pytest.mark.parametrize("key", [1, b"x", None, ("a",), 1.5, True, np.int64(3)], ids=repr)
def test_a_key_that_is_no_str_is_refused_by_its_place(key):
    with pytest.raises(EncodeError, match=r"the key .* of 'obs\[0\]' has type \w+; keys must be str"):
        encode({"obs": [{key: np.zeros(2)}]})
    with pytest.raises(EncodeError, match="of the tree"):
        encode({key: np.zeros(2)})


def test_a_key_with_surrogates_is_refused():
    with pytest.raises(EncodeError, match="surrogates"):
        encode({"obs": {"\ud800": 1}})


@pytest.mark.parametrize("kind", [list, dict])
def test_the_deepest_tree_that_may_be_sent_is_the_deepest_that_is_read(kind):
    deepest = encode(nested(MAX_DEPTH, kind))
    decode(deepest.meta)
    with pytest.raises(EncodeError, match=f"deeper than {MAX_DEPTH}"):
        encode(nested(MAX_DEPTH + 1, kind))


def test_a_tree_that_holds_itself_is_refused():
    tree = {}
    tree["again"] = tree
    with pytest.raises(EncodeError, match="nested deeper"):
        encode(tree)


def test_a_list_longer_than_the_receiver_takes_is_refused_at_the_sender():
    with pytest.raises(EncodeError, match=f"'task' has {MAX_NODES + 1} items; {MAX_NODES} is the most"):
        encode({"task": [None] * (MAX_NODES + 1)})


def test_as_many_items_as_the_receiver_takes_can_be_sent_and_not_one_more():
    tree = {"a": [None] * (MAX_NODES - 4), "b": [7]}  # with the two keys, and one in reserve
    assert decode(encode(tree).meta) == tree
    assert decode(encode({**tree, "b": [7, 8]}).meta)["b"] == [7, 8]
    with pytest.raises(EncodeError, match=f"the tree has {MAX_NODES + 1} items"):
        encode({**tree, "b": [7, 8, 9]})
    with pytest.raises(DecodeError, match=f"more than {MAX_NODES} items"):
        decode(msgpack.packb({**tree, "b": [7, 8, 9]}))


def test_an_empty_array_of_many_rows_is_refused_on_both_sides():
    empty = np.empty((MAX_NODES, 0, 3))
    assert decode(encode(empty).meta).shape == empty.shape
    with pytest.raises(EncodeError, match="too many rows of nothing"):
        encode({"x": np.empty((MAX_NODES + 1, 0))})
    for shape in ([2**32 - 1, 0], [2**17, 2**17, 0, 4]):
        refuse(array_node(shape=shape, data=b""))
    assert encode(np.empty((0, 480, 640, 3))).signature == encode(np.empty((9, 480, 640, 3))).signature


# -- The receiver


def array_node(**fields):
    node = {"nd": True, "type": "<f4", "kind": b"", "shape": [2], "data": bytes(8)} | fields
    return {key.encode(): value for key, value in node.items() if value is not ...}


def refuse(node, buffers=()):
    for tree in (node, {"x": node}, [{"x": [node]}]):
        meta = tree if isinstance(tree, bytes) else msgpack.packb(tree)
        with pytest.raises(DecodeError):
            decode(meta, buffers)
        if isinstance(tree, bytes):
            break


def test_the_message_that_the_refusals_change_is_good():
    assert decode(msgpack.packb(array_node())).tolist() == [0, 0]
    assert decode(msgpack.packb(array_node(data=..., frame=0)), [bytes(8)]).tolist() == [0, 0]


@pytest.mark.parametrize(
    "dtype",
    [
        *["O", "|O", "|O8", "O8", "object"],
        *["V", "V0", "|V0", "V8", "|V8", "void"],
        *["U0", "<U0", "S0", "|S0", "S", "U", "<U-1", "<U9999999", "S00000001"],
        *["f4,O", "i4,i4", "(2,)f4", "2f4", "{'names':['a'],'formats':['O']}"],
        *["<f16", "<c32", "<f3", "f4", "=f4", "@f4", "<b1", "float32", "int", "p", "<P8", "?", ""],
        *[
            "<M8",
            ">M8",
            "<M8[0s]",
            "<M8[]",
            "<M8[s/2]",
            "<M8[1000000s]",
            "<m8[01D]",
            "<M8[s]\n",
            "<f4 ",
            " <f4",
        ],
        *["bfloat1", "bfloat16 ", "<f4" + "x" * 100_000],
        *[[["a", "O"]], [["a", "|O8"], ["b", "<f4"]], [["a", "<f4"]], [], {}, {"names": ["a"]}],
        *[None, 0, True, b"<f4", b"O", 1.5],
    ],
    ids=lambda dtype: str(dtype)[:24].replace("\n", "LF"),
)
def test_a_dtype_outside_the_list_is_refused(dtype):
    for data in (b"", bytes(8), bytes(16)):
        refuse(array_node(type=dtype, data=data))
        refuse(array_node(type=dtype, data=..., frame=0), [data])
        refuse({b"nd": False, b"type": dtype, b"data": data})
    refuse(array_node(type=dtype, shape=[2**33], data=b""))


def test_a_missing_dtype_is_refused():
    refuse(array_node(type=...))
    refuse({b"nd": False, b"data": bytes(8)})


@pytest.mark.parametrize("kind", [b"O", b"V", b"S", "O", "V", "", None, True, [b""]], ids=repr)
def test_a_kind_other_than_the_plain_one_is_refused(kind):
    refuse(array_node(kind=kind))
    refuse(array_node(kind=kind, type="|O8"))
    refuse(array_node(kind=kind, type=[["a", "|O8"]]))


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", [b"O", b"", b"V", "O"], ids=repr)
@pytest.mark.parametrize("dtype", ["O", "|O8", [["a", "O"]], "|V8"], ids=str)
def test_nothing_in_a_message_is_ever_unpickled(dtype, kind, tmp_path):
    canary = tmp_path / "canary"
    payload = pickle.dumps(np.array([Canary(str(canary))], dtype=object))
    refuse(array_node(type=dtype, kind=kind, shape=[1], data=payload))
    refuse(array_node(type=dtype, kind=kind, shape=[1], data=..., frame=0), [payload])
    refuse({b"nd": False, b"type": dtype, b"kind": kind, b"data": payload})
    assert not canary.exists()
    pickle.loads(payload)
    assert canary.exists(), "the payload of this test is not a working one"


@pytest.mark.parametrize(
    "shape",
    [
        *[[1], [3], [], [2, 2], [0], [2, 0]],
        *[[-2], [-1], [-1, -2], [2, -1], [2**31], [2**62], [2**63], [2**64 - 1], [2**32, 2**32]],
        *[[0, 2**39, 2**39], [2**40, 0], [0, -1]],
        *[[True, 2], [2, True], [2.0], ["2"], [None], [[2]], [b"\x02"]],
        *[2, None, "2", b"\x02", {}, True],
        [1] * 32 + [2],
        [2] + [1] * 100_000,
    ],
    ids=lambda shape: str(shape)[:30],
)
def test_a_shape_that_is_not_the_one_of_the_bytes_is_refused(shape):
    refuse(array_node(shape=shape))
    refuse(array_node(shape=shape, data=..., frame=0), [bytes(8)])


def test_a_missing_shape_is_refused():
    refuse(array_node(shape=...))


def test_lengths_that_are_too_much_beside_a_zero_are_refused():
    refuse(array_node(shape=[0, 2**39, 2**39], data=b""))


@pytest.mark.parametrize("data", ["12345678", 8, None, [0] * 8, {}, ...], ids=str)
def test_data_that_are_not_bytes_are_refused(data):
    refuse(array_node(data=data))
    refuse({b"nd": False, b"type": "<f8", b"data": data} if data is not ... else {b"nd": False})


@pytest.mark.parametrize("frame", [-1, 1, 2**40, None, "0", b"", 0.5, [0], {}], ids=repr)
def test_a_frame_that_is_not_the_next_one_is_refused(frame):
    refuse(array_node(data=..., frame=frame), [bytes(8)])
    refuse(array_node(data=..., frame=frame))


def test_frames_are_refused_unless_each_is_used_once_and_in_order():
    first, second = array_node(data=..., frame=0), array_node(data=..., frame=1)
    frames = [bytes(8), bytes(8)]
    decode(msgpack.packb([first, second]), frames)
    for nodes, buffers in [
        ([second, first], frames),
        ([first, first], frames),
        ([first, first], frames[:1]),
        ([first], frames),
        ([first, second], frames[:1]),
        ([], frames[:1]),
    ]:
        with pytest.raises(DecodeError):
            decode(msgpack.packb(nodes), buffers)


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        ("<f4", bytes(3)),
        ("<f4", bytes(8)),
        ("<f4", b""),
        ("bfloat16", bytes(2)),
        ("<U1", bytes(4)),
        ("<U1", b"\xff" * 4),
        ("|S3", b"abc"),
    ],
)
def test_a_scalar_without_the_bytes_of_its_dtype_is_refused(dtype, data):
    refuse({b"nd": False, b"type": dtype, b"data": data})


@pytest.mark.parametrize("flag", [0, 1, None, "yes", 2], ids=repr)
def test_an_array_mark_that_is_no_bool_never_makes_an_array(flag):
    refuse(array_node(nd=flag))


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("large", [False, True])
def test_an_array_of_text_with_what_is_no_character_is_refused(order, large):
    size = 2 * INLINE if large else 8
    for word in (b"\xff" * 4, (0x110000).to_bytes(4, "little" if order == "<" else "big")):
        data = bytes(size - 4) + word
        node = array_node(type=f"{order}U1", shape=[size // 4], data=... if large else data)
        refuse(node | ({b"frame": 0} if large else {}), [bytearray(data)] if large else ())


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "1+1+1",
        "(lambda: 1)()",
        "",
        "1j if 1 else 2j",
        "9" * 65,
        b"1j",
        1,
        None,
        ["1j"],
    ],
    ids=repr,
)
def test_a_complex_number_that_is_none_is_refused(text):
    refuse({b"complex": True, b"data": text})


def test_a_complex_number_without_text_is_refused():
    refuse({b"complex": True})


@pytest.mark.parametrize(
    "extension",
    [msgpack.ExtType(0, b""), msgpack.ExtType(127, b"abc"), msgpack.Timestamp(1, 2)],
    ids=["empty", "some", "timestamp"],
)
def test_an_extension_type_is_refused(extension):
    refuse(extension)


@pytest.mark.parametrize("meta", [b"\xc7\x05\xff12345", b"\xd6\xff", b"\xd8\xff" + b"\xff" * 16])
def test_a_timestamp_that_is_none_is_refused(meta):
    refuse(meta)


@pytest.mark.parametrize("key", [1, b"x", None, 1.5, True, b"ND"], ids=repr)
def test_a_key_that_is_no_str_is_refused(key):
    refuse({key: 1})
    refuse({"good": 1, key: 1})


@pytest.mark.parametrize("meta", [b"\x81\x90\x01", b"\x81\x80\x01"], ids=["list", "map"])
def test_a_key_that_cannot_be_one_is_refused(meta):
    refuse(meta)


def test_every_cut_of_a_message_is_refused():
    tree = {"a": np.arange(5), "b": ["x", 1.5, None], "c": {"d": 1j, "e": np.float32(2)}}
    meta = encode(tree).meta
    for length in range(len(meta)):
        refuse(meta[:length])


@pytest.mark.parametrize("tail", [b"\xc0", b"\x00", b"\xc1", b"abc"], ids=repr)
def test_bytes_after_the_end_are_refused(tail):
    refuse(encode({"x": np.zeros(2)}).meta + tail)


@pytest.mark.parametrize(
    "meta",
    [
        b"\xc1",
        b"\xa1\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffabc",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\x7f\xff\xff\xff" + bytes(100),
        b"\xc9\xff\xff\xff\xff\x01",
    ],
    ids=["unused", "utf8", "str", "bin", "array", "map", "some of an array", "ext"],
)
def test_a_length_that_the_message_does_not_have_is_refused(meta):
    refuse(meta)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 1_023, 1_025, 100_000])
@pytest.mark.parametrize("start", [b"\x91", b"\x81\xa1a"], ids=["list", "map"])
def test_a_message_nested_too_deep_is_refused(start, depth):
    refuse(start * depth + b"\xc0")


def test_nesting_within_an_array_is_refused():
    deep = None
    for _ in range(500):
        deep = [deep]
    for field in ("type", "kind", "shape", "data"):
        refuse(array_node(**{field: deep}))


@pytest.mark.parametrize("fields", [[], None, 1, "x", {1: 2}, {b"x": 1}], ids=repr)
def test_fields_that_are_no_map_of_str_are_refused(fields):
    with pytest.raises(DecodeError):
        decode_meta(msgpack.packb(fields))


def nested_list(depth):
    node = 1
    for _ in range(depth):
        node = [node]
    return node


@pytest.mark.parametrize("key", [b"type", b"kind", b"shape", b"data", b"frame"])
@pytest.mark.parametrize("depth", [10, 900])
def test_a_field_of_an_array_that_is_deeply_nested_is_refused(key, depth):
    array = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [1], b"data": bytes(4)}
    array[key] = nested_list(depth)
    with pytest.raises(DecodeError) as error:
        decode(msgpack.packb({"x": array}))
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("depth", [10, 900])
def test_the_fields_of_a_plain_message_are_not_deeply_nested(depth):
    with pytest.raises(DecodeError):
        decode_meta(msgpack.packb({"message": nested_list(depth)}))


def lists_of(item, count):
    """Lists of a hundred items each, as bytes; `item` is msgpack."""
    return struct.pack(">BI", 0xDD, count // 100) + (b"\xdc\0\x64" + item * 100) * (count // 100)


AMPLIFIED = {
    "empty maps": lists_of(b"\x80", 2_000_000),
    "empty lists": lists_of(b"\x90", 2_000_000),
    "maps of one": lists_of(b"\x81\xa0\xc0", 600_000),
    "short texts": lists_of(b"\xa2ab", 600_000),
    "short bytes": lists_of(b"\xc4\x02ab", 500_000),
    "numbers": lists_of(b"\xcb12345678", 230_000),
    "lists that claim more than there is": struct.pack(">BI", 0xDD, MAX_NODES) * 500 + bytes(1 << 20),
    "a few bytes that claim much": struct.pack(">BI", 0xDD, MAX_NODES) * 500,
    "as many items as may be": lists_of(b"\x81\xa0\xc0", 60_000),
}


def test_what_would_unpack_to_many_times_its_size_is_refused_before_the_memory_is_spent():
    for name, meta in AMPLIFIED.items():
        for read in (decode, lambda meta: decode_meta(b"\x81\xa1x" + meta, MAX_META)):
            assert len(meta) <= MAX_META - 3
            tracemalloc.start()
            with contextlib.suppress(DecodeError):
                read(meta)
            spent = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert spent < 64e6, f"{name}: {spent / 1e6:.0f} MB"


@pytest.mark.parametrize("name", [name for name in AMPLIFIED if name != "as many items as may be"])
def test_too_many_items_are_refused_in_trees_and_fields_alike(name):
    with pytest.raises(DecodeError):
        decode(AMPLIFIED[name])
    with pytest.raises(DecodeError):
        decode_meta(b"\x81\xa1x" + AMPLIFIED[name], MAX_META)


@pytest.mark.parametrize("bad", [msgpack.ExtType(3, b"x"), msgpack.Timestamp(1)])
def test_fields_take_no_extension(bad):
    for fields in ({"x": bad}, {"x": [{"y": bad}]}):
        with pytest.raises(DecodeError):
            decode_meta(msgpack.packb(fields))


def test_a_meta_above_the_limit_is_refused_on_both_sides():
    tree = {"text": ["x" * 1024] * (MAX_META >> 10)}
    with pytest.raises(EncodeError, match="MiB"):
        encode(tree)
    with pytest.raises(DecodeError, match="most"):
        decode(msgpack.packb(tree))
    with pytest.raises(DecodeError, match="most"):
        decode_meta(msgpack.packb({"message": "x" * (1 << 20)}))
