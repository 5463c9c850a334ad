import numpy as np
import pytest

from zmqrl.errors import EncodeError
from zmqrl.transport.codec import decode, encode

torch = pytest.importorskip("torch")


def round_trip(tree):
    encoded = encode(tree)
    return decode(encoded.meta, encoded.buffers)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (3, 5), (40, 70)], ids=str)
@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64"],
)
def test_a_tensor_arrives_as_the_array_it_is(dtype, shape):
    tensor = (torch.arange(int(np.prod(shape))) % 2).reshape(shape).to(getattr(torch, dtype))
    got = round_trip({"x": tensor})["x"]
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, tensor.numpy(), strict=True)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (256, 256)], ids=str)
def test_bfloat16_arrives_as_the_same_values_in_float32(shape):
    count = int(np.prod(shape))
    tensor = torch.arange(count, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(shape)
    got = round_trip(tensor)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, tensor.float().numpy(), strict=True)


def test_bfloat16_takes_two_bytes_a_value_on_the_way():
    (buffer,) = encode(torch.zeros(10_000, dtype=torch.bfloat16)).buffers
    assert buffer.nbytes == 20_000


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_arrives_as_the_same_values_in_float32(name):
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    tensor = torch.tensor([0.5, -2.0, 0.0, 16.0]).to(getattr(torch, name))
    got = round_trip(tensor)
    np.testing.assert_array_equal(got, np.array([0.5, -2, 0, 16], np.float32), strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "layout",
    [lambda t: t.t(), lambda t: t[::2], lambda t: t[:, 1:], lambda t: t[:1].expand(9, -1)],
    ids=["transposed", "step", "cut", "expanded"],
)
@pytest.mark.parametrize("size", [6, 90])
def test_a_tensor_that_is_not_contiguous_keeps_its_values(layout, dtype, size):
    tensor = layout(torch.arange(size * size).reshape(size, size).to(dtype))
    np.testing.assert_array_equal(round_trip(tensor), tensor.float().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_requires_a_gradient_is_sent(dtype):
    tensor = torch.ones(3, dtype=dtype, requires_grad=True)
    for sent in (tensor, tensor * 2, torch.nn.Parameter(tensor)):
        np.testing.assert_array_equal(round_trip(sent), sent.detach().float().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_written_to_after_encoding_is_sent_as_it_was(dtype):
    tensor = torch.zeros(5000, dtype=dtype)
    encoded = encode(tensor)
    tensor.fill_(1)
    assert not decode(encoded.meta, encoded.buffers).any()


def test_a_tensor_without_array_form_is_refused_by_its_path():
    with pytest.raises(EncodeError, match=r"'obs\.mesh\[1\]' is a tensor that has no array form"):
        encode({"obs": {"mesh": [torch.zeros(1), torch.eye(2).to_sparse()]}})


def test_tensors_and_arrays_of_one_kind_share_a_signature():
    of_tensor = encode({"x": torch.zeros(3, 4)}).signature
    assert of_tensor == encode({"x": np.zeros((2, 4), np.float32)}).signature
    assert of_tensor != encode({"x": torch.zeros(3, 4, dtype=torch.bfloat16)}).signature
