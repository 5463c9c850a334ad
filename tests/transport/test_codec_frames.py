import numpy as np
import pytest
import zmq

from zmqrl.transport.codec import decode, encode


@pytest.fixture
def pair(tmp_path):
    """Two connected PAIR sockets, over a real Unix socket."""
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (sender, receiver):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.setsockopt(zmq.SNDTIMEO, 10_000)
    receiver.bind(f"ipc://{tmp_path}/pair")
    sender.connect(f"ipc://{tmp_path}/pair")
    yield sender, receiver
    sender.close()
    receiver.close()
    context.term()


def send(socket, tree):
    encoded = encode(tree)
    socket.send_multipart([encoded.meta, *encoded.buffers], copy=False)


def receive(socket):
    meta, *buffers = socket.recv_multipart(copy=False)
    return decode(meta, buffers)


def observation(number):
    return {
        "image": np.full((64, 65), number % 256, dtype=np.uint8),
        "state": np.full(1003, number, dtype=np.float64),
        "small": np.full(3, number, dtype=np.int16),
        "mask": np.full(5000, number % 2, dtype=bool),
    }


def test_arrays_that_are_kept_stay_as_they_were_when_a_thousand_more_messages_arrive(pair):
    sender, receiver = pair
    kept = []
    for number in range(1100):
        send(sender, observation(number))
        tree = receive(receiver)
        if number < 100:
            kept.append(tree)
    for number, tree in enumerate(kept):
        for key, array in observation(number).items():
            np.testing.assert_array_equal(tree[key], array, strict=True)


def test_writing_to_one_received_array_leaves_all_others(pair):
    sender, receiver = pair
    send(sender, [observation(3), observation(3)])
    send(sender, [observation(4), observation(4)])
    first, second = receive(receiver)
    third, fourth = receive(receiver)
    for array in first.values():
        array[...] = 1
    for number, tree in ((3, second), (4, third), (4, fourth)):
        for key, array in observation(number).items():
            np.testing.assert_array_equal(tree[key], array)


def test_a_received_array_is_writable_aligned_and_a_tensor_without_a_warning(pair):
    torch = pytest.importorskip("torch")
    sender, receiver = pair
    for size in (1, 100, 513, 5000, 100_001):
        send(sender, {"x": np.arange(size, dtype=np.float64), "y": np.zeros(3, np.uint8)})
        for array in receive(receiver).values():
            assert array.flags.writeable
            assert array.flags.aligned
            array += 1
            torch.from_numpy(array).add_(1)
            assert array[0] == 2


def test_a_simulator_that_reuses_one_buffer_sends_each_of_its_states(pair):
    sender, receiver = pair
    image = np.zeros((300, 300), dtype=np.uint8)
    for number in range(30):
        image[...] = number
        send(sender, image)
    image[...] = 255
    for number in range(30):
        assert (receive(receiver) == number).all()
