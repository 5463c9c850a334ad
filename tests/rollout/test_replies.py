import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqrl.errors import EncodeError
from zmqrl.rollout.batching import split
from zmqrl.rollout.replies import _MOST_LAYOUTS, ReplyEncoder
from zmqrl.transport.codec import LARGE, encode

ENCODER = ReplyEncoder()
"""One for all examples, which fill its layouts."""

DTYPES = ["<f4", "<f8", "<i8", "|b1", "|u1", "<c8", "<U3", "|S2", "<M8[s]", ">f4", ">i2"]


def arrays(rows):
    def make(dtype, shape, strided):
        count = int(np.prod((rows, *shape)))
        flat = np.arange(count) % 100
        array = np.resize(flat.astype(dtype), (rows, *shape))
        return np.asfortranarray(array)[::-1] if strided else array

    shapes = st.sampled_from([(), (1,), (7,), (2, 3), (LARGE // 16,), (0,)])
    return st.builds(make, st.sampled_from(DTYPES), shapes, st.booleans())


@st.composite
def outputs(draw):
    parts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    rows = sum(parts) + draw(st.integers(0, 3))
    leaf = arrays(rows)
    if draw(st.booleans()):
        leaf |= st.builds(dict, x=leaf) | st.lists(leaf, min_size=1, max_size=2)
        leaf |= st.just([f"text {row}" for row in range(rows)])
    names = st.sampled_from(["actions", "value", "ä", "", "a" * 40])
    return draw(st.dictionaries(names, leaf, min_size=1, max_size=20)), parts


def sent(encoded):
    """What a peer sees of it."""
    return [(one.meta, one.buffers, one.signature) for one in encoded]


@settings(deadline=None, max_examples=300)
@given(outputs())
def test_each_part_is_encoded_as_if_it_were_alone(drawn):
    output, parts = drawn
    expected = sent(map(encode, split(output, parts)))
    for _ in range(2):
        assert sent(ENCODER.encode(output, parts)) == expected


def test_an_output_with_many_arrays_is_encoded_likewise():
    output = {f"array {index}": np.full((4, 1 + index), index) for index in range(70)}
    assert sent(ENCODER.encode(output, [1, 3])) == sent(map(encode, split(output, [1, 3])))


@pytest.mark.parametrize("width", [3, LARGE])
def test_a_policy_may_write_into_its_output_once_it_is_encoded(width):
    output = {"actions": np.ones((4, width))}
    parts = ENCODER.encode(output, [1, 3])
    output["actions"][:] = 7
    assert sent(parts) == sent(encode({"actions": np.ones((rows, width))}) for rows in (1, 3))


@pytest.mark.parametrize(
    "output",
    [{1: np.ones(2)}, {"x": np.array([None, 1])}, {"x": np.ma.masked_array(np.ones(2))}],
    ids=["key", "objects", "masked"],
)
def test_what_cannot_be_sent_is_refused_each_time(output):
    for _ in range(2):
        with pytest.raises(EncodeError):
            ENCODER.encode(output, [1, 1])


def test_the_layouts_are_bounded():
    encoder = ReplyEncoder()
    for width in range(1, _MOST_LAYOUTS + 10):
        encoder.encode({"x": np.ones((2, width), bool)}, [2])
    assert len(encoder._layouts) <= _MOST_LAYOUTS
