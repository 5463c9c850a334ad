"""All decoders, in a process of their own: whatever comes, they read it or raise DecodeError."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import zmq

from fuzz import mutations, watch
from fuzz.mutations import Message
from zmqrl import PolicyClient
from zmqrl.broker.records import Introduction
from zmqrl.broker.status import StatusClient
from zmqrl.env.orders import Orders
from zmqrl.errors import (
    AuthenticationFailed,
    ClientError,
    DecodeError,
    RequestRefused,
    StartupFailed,
)
from zmqrl.recording.uplink import Uplink
from zmqrl.rollout.download import WeightsDownload
from zmqrl.rollout.worker import RolloutWorker
from zmqrl.spaces import Spaces
from zmqrl.telemetry import report
from zmqrl.trajectory import Trajectory
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode, decode_meta
from zmqrl.transport.header import (
    HEADER_SIZE,
    op_of,
    request_id_of,
    split_batch,
    unpack,
    unpack_table,
    unpack_table_head,
)


def measure(case: str, messages: int, seed: int) -> dict[str, Any]:
    """Let a process of its own read so many messages."""
    process = watch.start("readers", case, messages, seed)
    memory, counts = watch.Memory(process.pid), {"messages": 0}
    try:
        for line in watch.lines(process):
            counts = json.loads(line)
            memory.look(counts["messages"] / messages)
        code = process.wait()
    finally:
        watch.stop(process)
    counts["hung"] = int(code == -9)
    counts["crashed"] = counts.get("crashed", 0) + int(code not in (0, -9))
    return watch.row(case, memory.growth, counts)


# -- Functions that read a message


def read_header(message: Message) -> None:
    """Everything that looks at the packed part of a message."""
    first = message[0]
    op_of(first), request_id_of(first)
    unpack(first)
    unpack_table_head(first)
    for _, shard in split_batch(unpack_table(first), message):
        unpack(shard[0])


def read_tree(message: Message) -> None:
    """The tree of a message, and the trajectory that it may be."""
    Trajectory.of_tree(decode(message[0][HEADER_SIZE:], message[1:]))


def read_fields(message: Message) -> None:
    """The fields of a message, and what they may introduce."""
    fields = decode_meta(message[0][HEADER_SIZE:])
    for role in ("client", "worker"):
        Introduction.of(fields, role)
    Spaces.of_fields(fields.get("spaces"))


def read_report(message: Message) -> None:
    """A report."""
    report.unpack(message[0])


READERS: dict[str, list[tuple[Callable[[Message], None], Callable[[], list[Message]]]]] = {
    "headers": [(read_header, lambda: [*mutations.to_backend("a"), *mutations.to_peers()])],
    "trees": [
        (read_tree, lambda: [*mutations.to_frontend(), *mutations.to_peers(), *mutations.to_learner()]),
        (read_fields, lambda: [*mutations.to_frontend(), *mutations.to_learner()]),
        (read_report, mutations.reports),
    ],
}
"""By case: who reads, and what is good to read."""


def read(case: str, messages: int, seed: int) -> Iterator[tuple[Message, BaseException | None]]:
    """Yield every message with what came of it: None if it was read."""
    for reader, good in READERS[case]:
        for message in islice(mutations.mutations(good(), seed), messages // len(READERS[case])):
            try:
                reader(message)
                yield message, None
            except Exception as error:
                yield message, error


# -- Peers that a stranger answers


class Strange:
    """Answers whatever it hears with nonsense, as no broker and no learner would."""

    def __init__(self, endpoint: str, good: list[Message], seed: int) -> None:
        self.sent = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = sockets.router(self._context, endpoint)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self._answers = mutations.mutations(good, seed)
        self._dice = random.Random(seed)
        self._stopping = False
        # A daemon: Ctrl-C in what asks must not leave a process that only answers.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            if self._socket.poll(50):
                peer, first, *_ = self._socket.recv_multipart()
                asked = first[8:16]
                for answer in islice(self._answers, 50):
                    if self._dice.random() < 0.8 and len(answer[0]) >= 16:
                        answer[0] = answer[0][:8] + asked + answer[0][16:]
                    self._socket.send_multipart([peer, *answer])
                    self.sent += 1

    def close(self) -> None:
        """End the thread."""
        self._stopping = True
        self._thread.join()
        self._context.destroy(0)


def _ask_a_policy(endpoint: str) -> Any:
    with PolicyClient(endpoint, timeout=0.05) as client:
        for _ in range(20):
            with suppress(ClientError):
                assert isinstance(client.infer({"x": np.zeros((1, 3))}), dict)


def _ask_for_the_status(endpoint: str) -> Any:
    client = StatusClient(endpoint)
    for _ in range(20):
        with suppress(AuthenticationFailed, RequestRefused):
            status = client.ask(0.05)
            assert status is None or sum(status["counters"].values()) is not None
    client.close()


def _take_batches(endpoint: str) -> Any:
    class Zeros:
        def infer(self, observation: Any, eval_mask: np.ndarray) -> Any:
            return np.zeros((len(eval_mask), 2))

    until = time.monotonic() + 0.5
    with suppress(StartupFailed):
        RolloutWorker(Zeros(), endpoint, name="fuzz").run(lambda: time.monotonic() >= until)


def _send_trajectories(endpoint: str) -> Any:
    uplink = Uplink(endpoint, {"role": "env", "name": "fuzz", "incarnation": 1})
    try:
        uplink.introduce(mutations.SPACES)
        for _ in range(20):
            if uplink.may_begin(0, 4):
                uplink.begin(0)
            uplink.wait(0.02)
    except ClientError:
        pass
    finally:
        uplink.close(0.0)


def _await_orders(endpoint: str) -> Any:
    orders = Orders(endpoint, "fuzz")
    for _ in range(5):
        try:
            order = orders.next(0.1)
        except ClientError:
            break
        if order is not None:
            orders.done(order)
    orders.close()


def _fetch_weights(endpoint: str) -> Any:
    download = WeightsDownload(endpoint, "fuzz")
    until = time.monotonic() + 0.5
    try:
        while time.monotonic() < until:
            download.newest()
            time.sleep(0.01)
    except StartupFailed:
        pass
    download.close()


ASKERS: list[tuple[Callable[[str], Any], Callable[[], list[Message]]]] = [
    (_ask_a_policy, mutations.to_peers),
    (_ask_for_the_status, lambda: [*mutations.to_peers(), mutations.status()]),
    (_take_batches, mutations.to_peers),
    (_send_trajectories, mutations.from_learner),
    (_await_orders, mutations.from_learner),
    (_fetch_weights, mutations.from_learner),
]


def ask(messages: int, seed: int) -> Iterator[tuple[int, BaseException | None]]:
    """Let every peer hear nonsense in answer; yield how much it was, and what came of it."""
    with tempfile.TemporaryDirectory(prefix="zb-") as folder:
        for asker, good in ASKERS:
            endpoint = f"ipc://{folder}/{asker.__name__}"
            strange = Strange(endpoint, good(), seed)
            heard = 0
            while heard < messages // len(ASKERS):
                try:
                    asker(endpoint)
                    error = None
                except Exception as caught:
                    error = caught
                yield strange.sent - heard, error
                heard = strange.sent
            strange.close()


def main(case: str, messages: int, seed: int) -> None:
    """Read, and print what has become of it now and then."""
    counts: Counter[str] = Counter()
    results: Any = ask(messages, seed) if case == "replies" else read(case, messages, seed)
    said = time.monotonic()
    for what, error in results:
        counts["messages"] += what if isinstance(what, int) else 1
        if error is None:
            counts["decoded"] += 1
        elif isinstance(error, DecodeError):
            counts["refused"] += 1
        else:
            counts["crashed"] += 1
            shown = what if isinstance(what, int) else [frame.hex() for frame in what]
            print(f"{case}: {error!r} for {shown}", file=sys.stderr)
        if time.monotonic() >= said + 0.5:
            said = time.monotonic()
            print(json.dumps(counts), flush=True)
    print(json.dumps(counts), flush=True)
