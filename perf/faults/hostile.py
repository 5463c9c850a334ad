"""Drills in which strangers send nonsense to every socket of a pool that learns, while it works.

Not a peer of the pool may notice it: clients are answered, trajectories and weights flow, reports
arrive. The sockets are the broker's frontend (where the status is asked for, too) and backend, the
learner's, which takes trajectories and hands out weights, and the one where a runner takes reports.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import psutil
import zmq
from fuzz import mutations
from fuzz.mutations import Message

from faults import sims
from faults.drills import Trial, drill
from faults.learning import Trajectories
from faults.load import Load
from faults.pool import wait_for
from zmqrl.learner.port import Learner
from zmqrl.spaces import Spaces
from zmqrl.telemetry.report import Collector, Report
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode_meta
from zmqrl.transport.header import HEADER_SIZE, Op, op_of

_LIMIT_MB = 2
"""Mebibytes of a frame; small, so that a message above it costs little."""

_PATIENT = ("rollout.attempt_timeout_s=2", "rollout.max_attempts=100")
"""A stranger that takes work and does not answer costs an attempt, like any stuck worker."""

_GROWTH = 100 << 20
"""Bytes by which a process may grow: libzmq's own queues, and what Python keeps of it."""


class Whole:
    """A pool that learns: a broker, rollout workers, an env worker, a learner, and who takes reports.

    The learner's port and the reports' socket are this process's own, in threads.

    Args:
        trial: Whose pool it is.
    """

    def __init__(self, trial: Trial) -> None:
        folder = trial.folder
        self.pool = trial.pool
        self.learner = f"ipc://{folder}/learner"
        self.report = f"ipc://{folder}/report"
        self.trajectories = Trajectories()
        self.sent = 0
        """Trajectories, as the env worker says."""
        self.reports = 0
        """Those that have arrived."""
        self.version = 0
        self._stopping = False
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=run) for run in (self._learn, self._collect)]
        for thread in self._threads:
            thread.start()
        self.pool.overrides += [f"actor.endpoint={self.learner}", f"runner.report={self.report}"]
        self.pool.start_broker(f"broker.max_message_mb={_LIMIT_MB}", *_PATIENT)
        for rank in range(2):
            self.pool.start_worker(rank, "Weighted", seconds=0.002)
        self.pool.launcher.start(
            "env-0",
            [
                *("start-env-worker", "--mode=train", *self.pool.overrides),
                f"env.factory={sims.__file__}:make",
                f"env.kwargs={{folder: {folder}, seconds: 0.005}}",
                "env.train={total_num_envs: 2, max_steps_per_rollout_epoch: 8}",
                "cluster.component_placement={env: 0, rollout: 0-1}",
            ],
        )
        self.pool.wait_for_workers(2)

    def goes_on(self) -> None:
        """Wait until trajectories, new weights and reports have come that were not there before."""
        count, version, reports = self.trajectories.count, self.version, self.reports

        def has_gone_on() -> bool:
            self._raise_failure()
            taken = self.trajectories.count >= count + 3 and self.reports > reports
            return taken and self.version > version + 1

        wait_for(has_gone_on, f"the training to go on; the output: {self.pool.lines[-20:]}")

    def end(self, trial: Trial) -> None:
        """End the env worker, and count what became of its trajectories."""
        self.pool.terminate("env-0")
        self.pool.wait_for_exit("env-0")
        sent = "every trajectory and the last report"
        wait_for(lambda: 0 < self.sent <= self.trajectories.count, f"{sent}: {self.sent} were sent")
        self.close()
        ledger = trial.ledger
        ledger.lost += max(0, self.sent - self.trajectories.count)
        ledger.duplicated += self.trajectories.duplicated
        ledger.crossed += self.trajectories.crossed + sims.crossed(trial.folder)

    def close(self) -> None:
        """End the threads."""
        self._stopping = True
        for thread in self._threads:
            thread.join()
        self._raise_failure()

    def _learn(self) -> None:
        try:
            with Learner(self.learner, max_message_mb=_LIMIT_MB) as port:
                published = 0.0
                while not self._stopping:
                    if time.monotonic() >= published + 0.1:
                        number = port.version + 1
                        port.publish({"number": np.array([number]), "more": np.arange(5000.0)}, number)
                        published = time.monotonic()
                    for trajectory in port.receive(0.05):
                        if trajectory.origin == "env-0":
                            self.version = max(self.version, int(trajectory.versions.max()))
                            self.trajectories.add(trajectory)
        except BaseException as error:
            self._failure = error

    def _collect(self) -> None:
        try:
            collector = Collector(self.report)
            while not self._stopping:
                for report in collector.collect(0.05):
                    if isinstance(report, Report) and report.name == "env-0":
                        self.reports += 1
                        self.sent = report.totals.trajectories_sent
            collector.close()
        except BaseException as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


@contextmanager
def _whole(trial: Trial) -> Iterator[Whole]:
    whole = Whole(trial)
    try:
        yield whole
    finally:
        with suppress(Exception):
            whole.close()


# -- Strangers


class Stranger:
    """A peer that speaks no better than the drill lets it.

    Args:
        endpoint: Where it connects.
        kind: Of its socket; PUSH where reports are taken.
    """

    def __init__(self, endpoint: str, kind: int = zmq.DEALER) -> None:
        self.heard: dict[int, Message] = {}
        """By op, the latest message that it was sent."""
        self.cuts = 0
        """How often its connection was cut."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        make = sockets.push if kind == zmq.PUSH else sockets.dealer
        self._socket = make(self._context, endpoint)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, 10_000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def send(self, message: Sequence[bytes]) -> None:
        """Send, and read what has come meanwhile."""
        self._socket.send_multipart(list(message))
        self.read()

    def read(self) -> None:
        """Read what has come."""
        while self._socket.type == zmq.DEALER and self._socket.poll(0):
            message = self._socket.recv_multipart()
            self.heard[op_of(message[0])] = message
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self.cuts += 1

    def wait_for(self, op: Op) -> Message:
        """Wait until it is sent a message with this op."""
        wait_for(lambda: self.read() or op in self.heard, f"{op!r}, which a stranger waits for")
        return self.heard[op]

    def close(self) -> None:
        """Go without a goodbye."""
        self._monitor.close(0)
        self._context.destroy(0)


def _good_messages(name: str) -> dict[str, list[Message]]:
    """By socket, messages as it takes them from a peer of this name, which introduces itself first.

    Nobody can answer these requests, and no learner takes these trajectories for those of the pool.
    """
    simulator = sims.Asking("")
    observation = {key: value[None] for key, value in simulator.reset()[0].items()}
    spaces = Spaces.of(observation, simulator.action_space).fields()
    sender = {"name": name, "incarnation": 1, "first": 1, "spaces": spaces}
    return {
        "frontend": [mutations.hello("client", name), *mutations.to_frontend()[1:]],
        "backend": [mutations.hello("worker", name, policy=name), *mutations.to_backend(name)[1:]],
        "learner": [mutations.plain(Op.HELLO, sender), *mutations.to_learner()[1:]],
        "report": [[Report(name, rank=9).pack()]],
    }


def _nonsense(good: Sequence[Message], count: int, seed: int) -> Iterator[Message]:
    """So many messages, most of them no good: first every prefix of the good ones."""
    prefixes = ([m[0][:length], *m[1:]] for m in good for length in range(len(m[0])))
    return itertools.islice(itertools.chain(prefixes, mutations.mutations(good, seed)), count)


def _bytes_that_are_no_zeromq(endpoint: str) -> None:
    """Connect without ZeroMQ: say nothing, something else, or half a greeting, and be gone."""
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", bytes(1000)):
        with socket.socket(socket.AF_UNIX) as raw, suppress(OSError):
            raw.connect(endpoint.partition("://")[2])
            raw.sendall(words)


# -- Drills


@drill("nonsense-at-every-socket")
def nonsense_at_every_socket(trial: Trial) -> None:
    """Random, truncated and reordered frames at every socket, from strangers and from peers that
    were let in; nobody else notices, and memory stays.
    """
    with _whole(trial) as whole:
        pool = trial.pool
        load = trial.load(clients=8)
        load.wait_for(50)
        whole.goes_on()
        endpoints = {
            "frontend": pool.frontend,
            "backend": pool.backend,
            "learner": whole.learner,
            "report": whole.report,
        }
        before = [pool.rss("broker"), psutil.Process().memory_info().rss]
        strangers = []
        for part, endpoint in endpoints.items():
            _bytes_that_are_no_zeromq(endpoint)
            for let_in in (False, True):
                good = _good_messages(f"stranger-{part}-{let_in:d}")[part]
                stranger = Stranger(endpoint, zmq.PUSH if part == "report" else zmq.DEALER)
                strangers.append(stranger)
                if let_in and part != "report":
                    stranger.send(good[0])
                    stranger.wait_for(Op.WELCOME)
                for message in _nonsense(good, trial.size(20_000, quick=1200), seed=let_in):
                    stranger.send(message)
                _heard_nothing_of_others(trial, part, stranger)
            load.wait_for(20)
            whole.goes_on()
        for stranger in strangers:
            stranger.close()
        load.wait_for(100)
        whole.goes_on()
        _goes_on_in_bounds(trial, before)
        malformed = pool.counters()["malformed"]
        trial.expect(malformed > 1000, f"only {malformed} messages were counted as malformed")
        _end(trial, whole, load)


@drill("oversized-frames")
def oversized_frames(trial: Trial) -> None:
    """A frame above max_message_mb, at every socket: its sender is cut, and nobody else notices."""
    with _whole(trial) as whole:
        pool = trial.pool
        load = trial.load(clients=8)
        load.wait_for(50)
        before = [pool.rss("broker"), psutil.Process().memory_info().rss]
        much = bytes((_LIMIT_MB << 20) + 1024)  # there is room for some bytes of encryption
        endpoints = {"frontend": pool.frontend, "backend": pool.backend, "learner": whole.learner}
        for _ in range(trial.size(20, quick=2)):
            for part, endpoint in endpoints.items():
                good = _good_messages(f"stranger-{part}")[part]
                _is_cut(trial, part, Stranger(endpoint), [good[0], [good[1][0], much]])
                _is_cut(trial, part, Stranger(endpoint), [[good[1][0] + much]])
            _is_cut(trial, "report", Stranger(whole.report, zmq.PUSH), [[much]])
            load.wait_for(20)
            whole.goes_on()
        _goes_on_in_bounds(trial, before)
        _end(trial, whole, load)


@drill("another-protocol-version")
def another_protocol_version(trial: Trial) -> None:
    """A peer of another protocol version gets, at each socket that answers, an error that it can
    print; those of this version are served.
    """
    with _whole(trial) as whole:
        pool = trial.pool
        load = trial.load(clients=8)
        for part, endpoint in (
            ("frontend", pool.frontend),
            ("backend", pool.backend),
            ("learner", whole.learner),
        ):
            for good in _good_messages(f"stranger-{part}")[part][:2]:
                if part == "backend" and op_of(good[0]) != Op.HELLO:
                    continue  # who does not even say HELLO there is no worker
                stranger = Stranger(endpoint)
                stranger.send([good[0][:4] + bytes([99]) + good[0][5:], *good[1:]])
                words = decode_meta(stranger.wait_for(Op.ERROR)[0][HEADER_SIZE:])["message"]
                trial.expect("version 99" in words, f"{part} says of another version: {words}")
                stranger.close()
        load.wait_for(trial.size(2000, quick=100))
        whole.goes_on()
        _end(trial, whole, load)


def _is_cut(trial: Trial, part: str, stranger: Stranger, messages: list[Message]) -> None:
    for message in messages:
        stranger.send(message)
    with suppress(AssertionError):
        wait_for(lambda: stranger.read() or stranger.cuts, "the cut", 5.0)
    trial.expect(stranger.cuts, f"{part} did not cut who sent too much")
    stranger.close()


def _heard_nothing_of_others(trial: Trial, part: str, stranger: Stranger) -> None:
    """Note a reply that a stranger was sent: it has asked for nothing that can be answered."""
    if Op.REPLY in stranger.heard:
        trial.ledger.crossed += 1
        trial.expect(False, f"a stranger at {part} got a reply: {stranger.heard[Op.REPLY][0][:80]!r}")


def _goes_on_in_bounds(trial: Trial, before: list[int]) -> None:
    now = [trial.pool.rss("broker"), psutil.Process().memory_info().rss]
    for who, old, new in zip(("the broker", "the learner"), before, now, strict=True):
        trial.expect(new < old + _GROWTH, f"{who} has grown from {old >> 20} to {new >> 20} MiB")


def _end(trial: Trial, whole: Whole, load: Load) -> None:
    trial.finish(load)
    whole.end(trial)
    names = {worker["name"] for worker in trial.pool.status()["workers"]}
    trial.expect({"rollout-0", "rollout-1"} <= names, f"a rollout worker is gone: {names}")
