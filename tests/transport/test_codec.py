import enum
import warnings

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zmqrl.transport.codec import INLINE, decode, decode_meta, encode, encode_meta

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
TIMES = ["M8[ns]", "M8[D]", "m8[us]", "m8[25s]"]
TEXTS = ["S1", "S5", "U1", "U7"]
SHAPES = [(), (0,), (1,), (7,), (0, 84, 84), (4, 0), (3, 4, 5), (2, 40, 40, 3)]


def round_trip(tree, copy=True):
    encoded = encode(tree, copy)
    return decode(encoded.meta, encoded.buffers)


def assert_same(got, sent):
    """Equal in type, dtype, shape, and every bit but that of the sign of a NaN."""
    if isinstance(sent, dict):
        assert isinstance(got, dict)
        assert got.keys() == sent.keys()
        for key in sent:
            assert_same(got[key], sent[key])
    elif isinstance(sent, (list, tuple)):
        assert isinstance(got, list)
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, (np.ndarray, np.generic)):
        assert type(got) is type(sent)
        assert got.dtype == sent.dtype.newbyteorder("=")
        assert got.dtype.isnative
        assert got.shape == sent.shape
        np.testing.assert_array_equal(got, sent)
    else:
        assert type(got) is type(sent)
        assert got == sent or (got != got and sent != sent)


def filled(dtype, shape):
    """An array without two equal neighbours, as far as the dtype has room."""
    count = int(np.prod(shape))
    dtype = np.dtype(dtype)
    if dtype.kind in "SU":
        return np.array([f"{i:x}"[-5:] for i in range(count)], dtype=dtype).reshape(shape)
    if dtype.kind in "mM":
        return (
            np.arange(count, dtype=np.int64).view(dtype.newbyteorder("=")).reshape(shape).astype(dtype)
        )
    return (np.arange(count) % 120).astype(dtype).reshape(shape)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NUMBERS + TIMES + TEXTS)
def test_every_dtype_and_shape_comes_back(dtype, shape, copy):
    array = filled(dtype, shape)
    assert_same(round_trip({"x": array}, copy), {"x": array})


@pytest.mark.parametrize("size", [INLINE - 1, INLINE, INLINE + 1])
def test_an_array_at_the_threshold_becomes_a_frame(size):
    array = np.arange(size, dtype=np.uint8)
    encoded = encode(array)
    assert len(encoded.buffers) == (size >= INLINE)
    assert_same(decode(encoded.meta, encoded.buffers), array)


def test_a_large_array_of_many_dimensions_is_sent_as_flat_bytes():
    array = filled("f8", (30, 40, 50))
    (buffer,) = encode(array).buffers
    assert len(buffer) == buffer.nbytes == array.nbytes


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("size", [4, 60])
@pytest.mark.parametrize(
    "layout",
    [
        np.asfortranarray,
        np.transpose,
        lambda a: a[::2],
        lambda a: a[::-1],
        lambda a: a[:, ::-2],
        lambda a: a[:, 1:],
        lambda a: np.broadcast_to(a[0], (5, *a.shape[1:])),
        lambda a: a.swapaxes(0, 1)[1:],
    ],
    ids=["fortran", "transposed", "step", "reversed", "columns", "cut", "broadcast", "swapped"],
)
def test_the_layout_in_memory_does_not_change_the_values(layout, size, copy):
    array = layout(filled("f4", (size, size, 3)))
    assert_same(round_trip(array, copy), array)


@pytest.mark.parametrize("size", [3, 3000])
@pytest.mark.parametrize("dtype", [">i2", ">u4", ">i8", ">f4", ">f8", ">c16", ">M8[ms]", ">U3"])
def test_a_big_endian_array_arrives_in_native_order(dtype, size):
    array = filled(dtype, (size,))
    got = round_trip(array)
    assert got.dtype.isnative
    np.testing.assert_array_equal(got, array)


def test_an_array_that_is_big_endian_on_the_wire_is_read():
    array = filled(">i4", (5,))
    node = {b"nd": True, b"type": ">i4", b"kind": b"", b"shape": [5], b"data": array.tobytes()}
    got = decode(msgpack.packb(node))
    assert got.dtype.isnative
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    "scalar",
    [
        np.bool_(True),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.float16(0.5),
        np.float32(1 / 3),
        np.float64("nan"),
        np.complex64(1 + 2j),
        np.datetime64("2024-02-29T12:00:00.123456789"),
        np.datetime64("NaT", "s"),
        np.timedelta64(-7, "D"),
    ],
    ids=lambda s: s.dtype.str,
)
@pytest.mark.parametrize(
    "place", [lambda s: s, lambda s: {"x": s}, lambda s: [s, s]], ids=["top", "leaf", "row"]
)
def test_a_numpy_scalar_keeps_its_dtype(scalar, place):
    assert_same(round_trip(place(scalar)), place(scalar))


def test_a_scalar_that_a_python_number_comes_from_stays_itself():
    assert type(round_trip(np.float64(1.5))) is np.float64
    assert type(round_trip(1.5)) is float


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -(2**63),
        2**63 - 1,
        2**64 - 1,
        1.5,
        float("inf"),
        float("nan"),
        1e300 - 2.5e-300j,
        "",
        "pick up the rød cube 🤖",
        b"",
        b"\x00\xff",
        {},
        [],
        {"": {"a.b": [1, "x", None]}},
    ],
    ids=repr,
)
def test_a_plain_value_comes_back_as_itself(value):
    assert_same(round_trip({"x": value}), {"x": value})


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        ((1, 2), [1, 2]),
        (({"a": 1},), [{"a": 1}]),
        (bytearray(b"ab"), b"ab"),
        (np.str_("ab"), "ab"),
        (np.bytes_(b"ab"), b"ab"),
    ],
    ids=["tuple", "nested tuple", "bytearray", "np.str_", "np.bytes_"],
)
def test_what_changes_on_the_way_is_what_the_documentation_says(sent, arrives):
    assert_same(round_trip({"x": sent}), {"x": arrives})


def test_an_enum_of_str_or_int_is_sent_as_its_value():
    class Task(str, enum.Enum):
        PICK = "pick"

    class Level(enum.IntEnum):
        HARD = 3

    assert_same(round_trip({Task.PICK: [Task.PICK, Level.HARD]}), {"pick": ["pick", 3]})


def test_a_key_that_looks_like_the_dialect_stays_a_key():
    tree = {"nd": True, "type": "<f4", "complex": np.zeros(2), "frame": 0}
    assert_same(round_trip(tree), tree)


def test_an_object_with_an_array_form_is_sent_as_that():
    class Wrapper:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3, dtype=np.int16)

    assert_same(round_trip({"x": Wrapper()}), {"x": np.arange(3, dtype=np.int16)})


def test_bytes_other_than_0_and_1_arrive_as_true():
    for size in (8, 2 * INLINE):
        sent = np.full(size, 255, dtype=np.uint8).view(np.bool_)
        got = round_trip(sent)
        assert got.view(np.uint8).tolist() == [1] * size


dtypes = st.sampled_from([*NUMBERS, *TIMES, *TEXTS, ">i4", ">f8", ">M8[s]"]).map(np.dtype)
arrays = st.builds(
    lambda array, turn: array.T if turn else array,
    hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)),
    st.booleans(),
) | st.builds(filled, dtypes, st.sampled_from([(700, 8), (4096,)]))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
    | hnp.from_dtype(np.dtype("f4"))
    | hnp.from_dtype(np.dtype("M8[us]"))
)
trees = st.recursive(
    arrays | scalars,
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), children, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(tree=trees, copy=st.booleans())
def test_any_tree_comes_back(tree, copy):
    assert_same(round_trip(tree, copy), tree)


@settings(max_examples=100, deadline=None)
@given(tree=trees)
def test_every_array_that_arrives_can_be_written_and_made_a_tensor(tree):
    torch = pytest.importorskip("torch")
    encoded = encode(tree)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for array in arrays_of(decode(encoded.meta, [bytes(b) for b in encoded.buffers])):
            assert array.flags.writeable
            assert array.flags.aligned
            assert array.flags.c_contiguous
            array[...] = array
            if array.dtype.kind in "biufc":
                torch.from_numpy(array)


def arrays_of(tree):
    if isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, (dict, list)):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from arrays_of(child)


def test_an_array_in_an_unaligned_buffer_arrives_aligned():
    encoded = encode(filled("f8", (4000,)))
    shifted = bytearray(b"x" + encoded.buffers[0])
    got = decode(encoded.meta, [memoryview(shifted)[1:]])
    assert got.flags.aligned
    assert_same(got, filled("f8", (4000,)))


@pytest.mark.parametrize("size", [5, 5000])
def test_an_array_written_to_after_encoding_is_sent_as_it_was(size):
    array = np.zeros(size, dtype=np.int64)
    encoded = encode({"x": array})
    array[:] = 7
    assert not decode(encoded.meta, encoded.buffers)["x"].any()


def test_without_copy_a_large_array_is_not_copied():
    array = np.zeros(INLINE, dtype=np.uint8)
    encoded = encode(array, copy=False)
    assert np.shares_memory(np.frombuffer(encoded.buffers[0], np.uint8), array)


@pytest.mark.parametrize("size", [5, 5000])
def test_an_array_that_was_sent_twice_arrives_as_two(size):
    array = np.zeros(size)
    first, second = round_trip([array, array])
    first += 1
    assert not second.any()


INTEROPERABLE = {
    "image": np.arange(48, dtype=np.uint8).reshape(4, 4, 3),
    "state": np.linspace(0, 1, 7, dtype=np.float32),
    "mask": np.array([True, False]),
    "empty": np.zeros((0, 3)),
    "constant": np.array(3),
    "name": np.array(["ab", "c"]),
    "scalar": np.float32(0.5),
    "flag": np.bool_(True),
    "complex": 1 + 2j,
    "task_descriptions": ["push", "pull"],
    "nested": {"list": [np.zeros(2), None], "bytes": b"\x00"},
}


def test_a_tree_without_large_arrays_is_read_by_stock_msgpack_numpy():
    got = msgpack.unpackb(encode(INTEROPERABLE).meta, object_hook=msgpack_numpy.decode)
    assert_same(got, INTEROPERABLE)


def test_what_stock_msgpack_numpy_packs_is_read():
    assert_same(decode(msgpack.packb(INTEROPERABLE, default=msgpack_numpy.encode)), INTEROPERABLE)


def test_plain_fields_come_back():
    fields = {"name": "env-1", "rank": 3, "none": None, "list": [1, {"a": b"b"}]}
    assert decode_meta(encode_meta(fields)) == fields


def test_fields_with_text_that_is_no_utf8_are_still_sent():
    assert decode_meta(encode_meta({"message": "no file \udcff"})) == {"message": "no file \\udcff"}
