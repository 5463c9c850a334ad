"""A learner and a reader of reports: hostile peers at both sockets, and good ones that are served."""

from __future__ import annotations

import json
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import zmq
from gymnasium import spaces

from fuzz import mutations, watch
from zmqrl.errors import ClientError
from zmqrl.learner.port import Learner
from zmqrl.recording import Recording
from zmqrl.rollout.download import WeightsDownload
from zmqrl.telemetry.report import Collector, Report
from zmqrl.transport import sockets
from zmqrl.transport.header import Op, op_of, request_id_of

_BURST = 500
_STEPS = 2


class GoodSender:
    """Sends trajectories whose rewards count up."""

    def __init__(self, endpoint: str) -> None:
        self.sent = 0
        self.wrong: list[str] = []
        self._endpoint = endpoint
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        recording = Recording(self._endpoint, "good", 1, steps=_STEPS, action_space=spaces.Discrete(3))
        try:
            for step in range(1 << 40):
                recording.asked(0, {"state": np.full((2, 3), step, np.float32)})
                self.sent = recording.sent
                if self._stopping:
                    break
                recording.wait_to_begin(0, time.monotonic() + watch.PATIENCE)
                recording.answered(0, {"actions": np.array([0, 1])}, 1)
                recording.outcome(0, [step // _STEPS, 0], [False] * 2, [False] * 2)
        except ClientError as error:
            self.wrong.append(repr(error))
        recording.close(watch.PATIENCE)

    def close(self) -> None:
        """Deliver what is complete, and end."""
        self._stopping = True
        self._thread.join()


def main(endpoint: str, report: str) -> None:
    """The process that reads: a learner's port, and the reader of reports; prints what it has got."""
    collector = Collector(report)
    counts = dict.fromkeys(("good", "lost", "received", "refused", "reports"), 0)
    with Learner(endpoint) as port:
        port.publish({"version": np.array(1)})
        said = time.monotonic()
        while True:
            for trajectory in port.receive(0.05):
                counts["received"] += 1
                if trajectory.origin == "good":
                    counts["lost"] += int(trajectory.reward[0, 0]) != counts["good"]
                    counts["good"] += 1
            counts["reports"] += sum(r == _report() for r in collector.collect(0.0))
            counts["refused"] = port.invalid
            if time.monotonic() >= said + 0.2:
                said = time.monotonic()
                port.publish({"version": np.array(port.version + 1)})
                print(json.dumps(counts | {"version": port.version}), flush=True)


def _report() -> Report:
    return Report("good", 3)


def measure(messages: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row for the process with both."""
    with tempfile.TemporaryDirectory(prefix="zb-") as folder, zmq.Context() as context:
        endpoint, report = f"ipc://{folder}/l", f"ipc://{folder}/r"
        process = watch.start("learner", endpoint, report)
        memory, pulse = watch.Memory(process.pid), watch.Pulse()
        told = dict.fromkeys(("good", "lost", "received", "refused", "reports", "version"), 0)

        def listen() -> None:
            for line in watch.lines(process):
                told.update(json.loads(line))
                pulse.look(line)

        listener = threading.Thread(target=listen)
        listener.start()
        sender, download = GoodSender(endpoint), WeightsDownload(endpoint, "good")
        reporter = sockets.push(context, report)
        try:
            until = time.monotonic() + watch.PATIENCE
            while not told["good"] and time.monotonic() < until:
                time.sleep(0.01)
            hung = _feed(context, endpoint, report, messages, seed, memory, reporter)
            sender.close()
            until = time.monotonic() + watch.PATIENCE
            while time.monotonic() < until and told["good"] < sender.sent:
                time.sleep(0.01)
            version = told["version"]
            while time.monotonic() < until and (w := download.newest()) and w.version <= version:
                time.sleep(0.01)
            weights = download.newest()
            stale = weights is None or weights.version <= version
            crashed = int(process.poll() is not None)
        finally:
            sender.close()
            process.kill()
            listener.join()
            process.communicate()  # closes the pipe
            download.close()
            reporter.close(0)
        wrong = len(sender.wrong) + told["lost"] + abs(told["good"] - sender.sent)
        counts = {
            "messages": messages,
            "decoded": told["received"] - told["good"],
            "refused": told["refused"],
            "crashed": crashed + wrong,
            "hung": hung + stale + (pulse.longest >= watch.PATIENCE),
        }
        served = min(told["good"], told["reports"], 0 if weights is None else weights.version)
        yield watch.row("learner", memory.growth, counts, served)
        for wrong_word in sender.wrong[:5]:
            print(f"a good sender: {wrong_word}")


def _feed(
    context: zmq.Context[Any],
    endpoint: str,
    report: str,
    messages: int,
    seed: int,
    memory: watch.Memory,
    reporter: zmq.Socket[bytes],
) -> int:
    """Send so many messages; how often nobody took one."""
    to_learner = mutations.mutations(mutations.to_learner(), seed)
    to_runner = mutations.mutations(mutations.reports(), seed)
    sent = 0
    while sent < messages:
        next_number = 1
        known, stranger = (context.socket(zmq.DEALER) for _ in range(2))
        liar = context.socket(zmq.PUSH)
        for socket in (known, stranger, liar):
            socket.setsockopt(zmq.LINGER, 2000)
            socket.connect(report if socket is liar else endpoint)
        known.send(mutations.sender(f"hostile-{sent}")[0])
        for _ in range(min(_BURST, messages - sent) // 4 + 1):
            for socket in (known, stranger, known, liar):
                if not socket.poll(watch.PATIENCE * 1000, zmq.POLLOUT):
                    return 1
                message = next(to_runner if socket is liar else to_learner)
                numbered = socket is known and op_of(message[0]) == Op.TRAJECTORY
                if numbered:  # the learner takes no other
                    message[0] = message[0][:8] + struct.pack("<Q", next_number) + message[0][16:]
                socket.send_multipart(message)
                sent += 1
                while socket is not liar and socket.poll(20 * numbered):
                    first = socket.recv_multipart()[0]
                    if op_of(first) == Op.ACK:
                        next_number = request_id_of(first) + 1
                    numbered = False
        reporter.send(_report().pack(), sockets.NOBLOCK)
        for socket in (known, stranger, liar):
            socket.close()
        memory.look(sent / messages)
    return 0
