"""A broker and a rollout worker: hostile peers at both sockets, and a good client that is served."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from fuzz import mutations, watch
from fuzz.mutations import Message
from zmqrl import PolicyClient
from zmqrl.broker.status import StatusClient
from zmqrl.errors import ClientError
from zmqrl.runner.launcher import Launcher
from zmqrl.transport.header import Header, Op, join_batch, split_batch, unpack, unpack_table

_POLICY = "fuzz"
"""What the hostile rollout worker serves: only the hostile client asks for it."""

_BURST = 1000
"""Messages until the hostile peers go, and others come."""

_NAMES = itertools.count()


class GoodClient:
    """Asks in a closed loop, and checks every answer."""

    def __init__(self, endpoint: str) -> None:
        self.answered = 0
        self.wrong: list[str] = []
        self.pulse = watch.Pulse()
        self._endpoint = endpoint
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with PolicyClient(self._endpoint, timeout=watch.PATIENCE) as client:
            while not self._stopping:
                value = float(self.answered)
                try:
                    actions = client.infer({"x": np.full((2, 3), value)})["actions"]
                    if not (actions == 2 * value).all():
                        self.wrong.append(f"{actions} for {value}")
                except ClientError as error:
                    self.wrong.append(repr(error))
                self.answered += 1
                self.pulse.look(self.answered)

    def close(self) -> None:
        """End the loop."""
        self._stopping = True
        self._thread.join()


class HostilePeers:
    """A client and a rollout worker that are registered, and a stranger at each socket."""

    def __init__(self, frontend: str, backend: str) -> None:
        self.sent = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 2000)
        self.client, self.stranger = self._join(frontend), self._join(frontend)
        self.worker, self.strange_worker = self._join(backend), self._join(backend)
        number = next(_NAMES)
        self.client.send(mutations.hello("client", f"hostile-{number}")[0])
        self.worker.send(mutations.hello("worker", f"hostile-{number}", policy=_POLICY)[0])
        self.worker.send(Header(Op.READY).pack())

    def _join(self, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.connect(endpoint)
        return socket

    def say(self, socket: zmq.Socket[bytes], message: Message) -> bool:
        """Send one message; whether somebody takes it."""
        self.listen()
        if not socket.poll(watch.PATIENCE * 1000, zmq.POLLOUT):
            return False
        socket.send_multipart(message)
        self.sent += 1
        return True

    def listen(self) -> None:
        """Take what has come; a batch is answered with a result that is almost right."""
        for socket in (self.client, self.stranger, self.strange_worker):
            while socket.poll(0):
                socket.recv_multipart()
        while self.worker.poll(0):
            frames = self.worker.recv_multipart()
            if unpack(frames[0]).op == Op.BATCH:
                result = mutations.mutations([_result_of(frames)], self.sent)
                self.worker.send_multipart(next(result))
                self.sent += 1

    def have_been_heard(self) -> bool:
        """Wait until the broker has read all that was said; whether it did."""
        self.listen()
        poller = zmq.Poller()
        for socket in (self.client, self.stranger, self.worker, self.strange_worker):
            poller.register(socket, zmq.POLLIN)
        until = time.monotonic() + watch.PATIENCE
        while poller.sockets and time.monotonic() < until:
            for socket, _ in poller.sockets:  # again: an answer to who does not read is dropped
                socket.send(mutations.hello("last word", "fuzz")[0])  # refused with these words
            while poller.sockets and (ready := poller.poll(500)):
                for socket, _ in ready:
                    if b"last word" in socket.recv_multipart()[0]:
                        poller.unregister(socket)
        return not poller.sockets

    def close(self) -> None:
        """Go without a goodbye."""
        self._context.destroy()


def _result_of(frames: list[bytes]) -> Message:
    """A good answer to a batch."""
    table = unpack_table(frames[0])
    entries, replies = [], []
    for entry, message in split_batch(table, frames):
        request_id = unpack(message[0]).request_id
        reply = mutations.of_tree(Op.REPLY, {"actions": np.zeros((2, 3))}, request_id, rows=2)
        replies.append(reply)
        entries.append(entry._replace(length=len(reply[0]), frames=len(reply) - 1, origin_length=0))
    return join_batch(table._replace(entries=entries, origins=b""), Op.RESULT, replies)


def measure(messages: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row for the broker, and one for the rollout worker behind it."""
    with tempfile.TemporaryDirectory(prefix="zb-") as folder, Launcher(_unheard) as launcher:
        frontend, backend = f"ipc://{folder}/f", f"ipc://{folder}/b"
        common = [f"broker.frontend={frontend}", f"broker.backend={backend}"]
        # A stranger that takes work and is gone again costs an attempt, like any lost worker.
        limits = ["rollout.max_attempts=100", "rollout.attempt_timeout_s=1"]
        mode = "runner.enable_decoupled_mode=true"
        launcher.start("broker", ["start-broker", *common, *limits, mode])
        policy = f"--policy={Path(__file__).resolve().with_name('doubles.py')}:Doubles"
        launcher.start("rollout-0", ["start-rollout-worker", *common, policy])
        status = StatusClient(frontend)
        good = GoodClient(frontend)
        try:
            while not good.answered:
                time.sleep(0.01)
            memories = {name: watch.Memory(c.process.pid) for name, c in launcher.children.items()}
            hung = _feed(frontend, backend, messages, seed, memories)
            answered = good.answered
            until = time.monotonic() + watch.PATIENCE
            while good.answered < answered + 100 and time.monotonic() < until:
                time.sleep(0.01)
            told = status.ask(watch.PATIENCE) or {"counters": {"malformed": 0}}
            hung += told.get("epoch") is None or good.pulse.longest >= watch.PATIENCE
            for memory in memories.values():
                memory.look(1.0)
        finally:
            good.close()
            status.close()
        refused = told["counters"]["malformed"]
        for name, memory in memories.items():
            ended = launcher.children[name].process.poll() is not None
            counts = {
                "messages": messages if name == "broker" else told["counters"]["shards"],
                "refused": refused if name == "broker" else told["counters"]["errors"],
                "crashed": int(ended) + len(good.wrong),
                "hung": int(hung),
            }
            counts["decoded"] = counts["messages"] - counts["refused"]
            yield watch.row(name, memory.growth, counts, good.answered)
        for wrong in good.wrong[:5]:
            print(f"a good client: {wrong}")


def _feed(
    frontend: str,
    backend: str,
    messages: int,
    seed: int,
    memories: dict[str, watch.Memory],
) -> int:
    """Send so many messages; how often nobody took one, or the broker did not answer."""
    to_frontend = mutations.mutations(mutations.to_frontend() + mutations.to_frontend(_POLICY), seed)
    to_backend = mutations.mutations(mutations.to_backend(_POLICY), seed + 1)
    sent = 0
    while sent < messages:
        peers = HostilePeers(frontend, backend)
        for number in range(min(_BURST, messages - sent) // 4 + 1):
            ok = peers.say(peers.client, next(to_frontend)) and peers.say(peers.worker, next(to_backend))
            ok = ok and peers.say(peers.stranger, next(to_frontend))
            ok = ok and peers.say(peers.strange_worker, next(to_backend))
            if not ok:
                return 1
            if number % 20 == 0:
                peers.worker.send(Header(Op.READY).pack())
        sent += peers.sent
        if not peers.have_been_heard():
            return 1
        peers.close()
        for memory in memories.values():
            memory.look(sent / messages)
    return 0


def _unheard(name: str, line: str) -> None:
    """What the parts print does not belong into the table."""
