import numpy as np
import pytest

from zmqrl.rollout.memory import _LARGE, _MOST_BUFFERS, _MOST_BYTES, BatchMemory

SHAPE = (4, _LARGE // 4)
BYTE = np.dtype(np.uint8)


def address(array):
    return array.__array_interface__["data"][0]


def taken(memory, value):
    array = memory.take(SHAPE, BYTE)
    array[:] = value
    return array


def test_memory_that_nobody_holds_is_used_again_whatever_its_dtype():
    memory = BatchMemory()
    addresses = set()
    for rows in (5, 6, 5):
        for name in ("u1", "?", "f8", "c16", "M8[s]", "U7"):
            dtype = np.dtype(name)
            array = memory.take((rows, _LARGE // 4 // dtype.itemsize), dtype)
            assert array.dtype == dtype
            assert array.flags.writeable
            addresses.add(address(array))
            del array
    assert len(addresses) == 1


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[2:3, ::7],
        lambda array: array.reshape(-1)[5:][::-1].view(np.int8),
        lambda array: memoryview(array)[1:],
        lambda array: np.frombuffer(array, np.uint16),
        lambda array: np.lib.stride_tricks.as_strided(array, (2, 2), (1, 1)),
        lambda array: array.view(np.recarray),
        lambda array: {"deep": [(array[0],)]},
    ],
    ids=["array", "part", "view", "memoryview", "buffer", "strided", "subclass", "in a tree"],
)
def test_memory_that_somebody_holds_is_not_handed_out(hold):
    memory = BatchMemory()
    held = hold(taken(memory, 1))
    seen = {address(taken(memory, 2)) for _ in range(5)}
    assert len(seen) == 1, "there is no need for more than one other"
    content = held["deep"][0][0] if isinstance(held, dict) else held
    assert set(np.asarray(content).tobytes()) == {1}


@pytest.mark.parametrize("hold", ["tensor", "part", "parameter", "other dtype"])
def test_memory_that_a_tensor_shares_is_not_handed_out(hold):
    torch = pytest.importorskip("torch")
    memory = BatchMemory()
    tensor = torch.from_numpy(taken(memory, 1))
    if hold == "part":
        tensor = tensor[1:, 3]
    elif hold == "parameter":
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    elif hold == "other dtype":
        tensor = tensor.view(torch.int8).unsqueeze(0).expand(2, -1, -1)
    for _ in range(5):
        taken(memory, 2)
    assert (tensor == 1).all()


def test_arrays_in_use_never_share_memory():
    random = np.random.default_rng(0)
    memory = BatchMemory()
    held = []
    for number in range(400):
        rows = int(random.integers(1, 9))
        array = memory.take((rows, _LARGE // 4), BYTE)
        array[:] = number % 256
        held.append((number % 256, array[random.integers(rows)]))
        while len(held) > random.integers(10):
            held.pop(int(random.integers(len(held))))
        for value, part in held:
            assert (part[:: _LARGE // 64] == value).all()


def test_what_is_kept_is_bounded_in_number_and_bytes():
    memory = BatchMemory()
    for length in (_LARGE, _MOST_BYTES // 5):
        held = [memory.take((length + index,), BYTE) for index in range(_MOST_BUFFERS + 6)]
        assert len(memory._buffers) <= _MOST_BUFFERS
        assert sum(buffer.nbytes for buffer in memory._buffers) <= _MOST_BYTES
        del held


def test_an_array_larger_than_the_bound_can_be_had():
    assert BatchMemory().take((_MOST_BYTES + 1,), BYTE).nbytes == _MOST_BYTES + 1


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (2, 3)], ids=str)
def test_small_and_empty_arrays_are_had_too(shape):
    array = BatchMemory().take(shape, np.dtype(np.float32))
    assert (array.shape, array.dtype) == (shape, np.float32)
