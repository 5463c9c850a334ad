import struct
import threading

import numpy as np
import pytest
import zmq

from zmqrl.rollout.worker import RolloutWorker
from zmqrl.transport import sockets
from zmqrl.transport.codec import encode, encode_meta
from zmqrl.transport.header import FLAG_AHEAD, Entry, Header, Op, Table, join_batch, unpack

_BATCHES = 200


class Broker:
    """Has a batch for its worker at any time.

    Args:
        endpoint: Where to bind.
        gives_ahead: Whether it answers AHEAD.
    """

    def __init__(self, endpoint, gives_ahead):
        self._context = zmq.Context()
        self._socket = sockets.router(self._context, endpoint)
        self._gives_ahead = gives_ahead
        self._number = 0
        self._open = 0
        self.asked = 0
        self.answered = 0

    def serve(self):
        while self.answered < _BATCHES:
            assert self._socket.poll(10_000), f"silent after {self.answered} batches"
            peer, first, *_ = self._socket.recv_multipart()
            op = unpack(first).op
            if op == Op.HELLO:
                self._socket.send_multipart(
                    [peer, Header(Op.WELCOME).pack() + encode_meta({"epoch": 7})]
                )
            elif op == Op.AHEAD:
                self.asked += 1
                if self._gives_ahead:
                    self._give(peer, FLAG_AHEAD)
            elif op == Op.RESULT:
                self.answered += 1
                self._open -= 1
            if op in (Op.READY, Op.RESULT) and not self._open:
                self._give(peer, 0)

    def close(self):
        self._socket.close(0)
        self._context.term()

    def _give(self, peer, flags):
        self._number += 1
        self._open += 1
        shard = encode({"x": np.zeros((1, 3), np.float32)})
        header = Header(Op.INFER, request_id=self._number, rows=1, signature=shard.signature)
        first = header.pack() + shard.meta
        entry = Entry(self._number, len(first), 0, 0, 1, queue_us=1_000_000)
        table, joined = join_batch(Table(7, self._number, [entry], origins=b"z"), Op.BATCH, [[first]])
        table = bytearray(table)
        struct.pack_into("<H", table, 6, flags)  # where docs/protocol.md has them
        self._socket.send_multipart([peer, bytes(table), joined])


class Zeros:
    def infer(self, observation, eval_mask):
        return np.zeros((len(eval_mask), 2), np.float32)


@pytest.mark.parametrize("gives_ahead", [True, False])
def test_a_worker_asks_ahead_as_long_as_it_is_given_batches_for_that(tmp_path, gives_ahead):
    endpoint = f"ipc://{tmp_path}/b"
    broker = Broker(endpoint, gives_ahead)
    worker = RolloutWorker(Zeros(), endpoint, name="w")
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop.is_set,))
    thread.start()
    try:
        broker.serve()
    finally:
        stop.set()
        thread.join(10)
        broker.close()
    if gives_ahead:
        assert broker.asked > 0.8 * _BATCHES
    else:
        assert 0 < broker.asked < 0.3 * _BATCHES
