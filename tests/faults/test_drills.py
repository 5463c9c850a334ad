"""The drills of `bin/bench faults`, with small numbers; and that what they count is counted."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import faults
import pytest
import zmq
from faults.load import Load
from faults.policies import Tagged

from zmqrl.transport.codec import decode, encode, encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op, unpack

SLOW = {
    "another-protocol-version",
    "client-floods",
    "client-restarted",
    "clients-killed",
    "clients-cut-off",
    "half-the-clients-killed",
    "half-the-clients-killed-normal-mode",
    "learner-killed",
    "network-cut",
    "nonsense-at-every-socket",
    "oversized-frames",
    "policy-holds-the-gil",
    "policy-stuck-everywhere",
    "queue-full-of-bytes",
    "start-orders",
    "states-carried-workers-killed",
    "states-kept-broker-restarted",
    "states-kept-worker-frozen",
    "states-kept-workers-killed",
    "worker-cut-off",
    "workers-retire",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(drill.name, marks=pytest.mark.slow) if drill.name in SLOW else drill.name
        for drill in faults.DRILLS.values()
        if drill.in_suite
    ],
)
def test_nothing_is_lost_doubled_or_crossed_in_the_drill(name: str) -> None:
    row = faults.DRILLS[name].run(quick=True)
    if row.get("skipped"):
        pytest.skip(row["note"])
    assert row["ok"], row["note"]


class Liar:
    """Answers clients in the broker's place; the tenth request in another way than it should."""

    def __init__(self, folder: Path, lie: str) -> None:
        self.endpoint = f"ipc://{folder}/liar"
        self._policy = Tagged(str(folder))
        self._lie = lie
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind(self.endpoint)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close(0)

    def _run(self) -> None:
        requests = 0
        while not self._over.is_set():
            if not self._socket.poll(50):
                continue
            peer, first, *buffers = self._socket.recv_multipart(copy=False)
            header = unpack(first.bytes)
            if header.op == Op.HELLO:
                self._socket.send_multipart(
                    [peer, Header(Op.WELCOME).pack() + encode_meta({"epoch": 1})]
                )
            elif header.op == Op.INFER:
                requests += 1
                asked = decode(first.bytes[HEADER_SIZE:], buffers)
                for reply in self._replies(header, asked, self._lie if requests == 10 else ""):
                    self._socket.send_multipart([peer, *reply])

    def _replies(self, header: Header, asked: dict[str, Any], lie: str) -> list[list[Any]]:
        if lie == "crossed":
            asked["values"][-1, -1] += 1
        encoded = encode(self._policy.infer(asked, None))
        frames = len(encoded.buffers)
        reply = Header(Op.REPLY, request_id=header.request_id, rows=header.rows, frames=frames)
        message = [reply.pack() + encoded.meta, *encoded.buffers]
        return {"lost": [], "duplicated": [message, message]}.get(lie, [message])


@pytest.mark.parametrize("lie", ["", "lost", "duplicated", "crossed"])
def test_a_load_counts_what_goes_wrong(folder: Path, lie: str) -> None:
    liar = Liar(folder, lie)
    try:
        ledger = Load(liar.endpoint, clients=3, requests=40, timeout=0.9).finish()
    finally:
        liar.close()
    assert ledger.requests == 40
    counts = {"lost": ledger.lost, "duplicated": ledger.duplicated, "crossed": ledger.crossed}
    assert counts == {**dict.fromkeys(counts, 0), **({lie: 1} if lie else {})}
