"""How env workers tell the runner what they have done."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from zmqrl.errors import DecodeError
from zmqrl.telemetry.durations import Durations
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode_meta, encode_meta
from zmqrl.transport.security import CLIENTS, Door, Keys, answer_handshakes, key_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")

_BURST_S = 0.5
"""Seconds after which a reader that is flooded looks at other things."""

_EVERY = 0.5
"""Seconds between two reports of one env worker to its runner."""

_MOST_EPISODES = 2000
"""Episodes in one report, which must stay below the size that its reader takes."""

_EVERY_ALONE = 10.0
"""The same where there is no runner, and a line of text is all there is."""


@dataclass(slots=True)
class Episode:
    """One finished episode of one env."""

    env: int
    """Index over all env workers."""
    number: int
    """From 0, for each env."""
    total_return: float
    length: int
    """Steps."""
    success_once: bool | None
    """Whether some step was a success; None if the simulator reports none."""
    success_at_end: bool | None


@dataclass(slots=True)
class EnvTotals:
    """What one env worker has done since it started; seconds are summed."""

    shard_steps: int = 0
    """Calls of the vector env's step."""
    env_steps: int = 0
    """Transitions: rows stepped, without reset rows."""
    resets: int = 0
    """Reset calls of the vector env."""
    step_s: float = 0.0
    step_times: Durations = field(default_factory=Durations)
    """Of each step, its emulated delay included."""
    reset_s: float = 0.0
    reset_times: Durations = field(default_factory=Durations)
    delay_s: float = 0.0
    """Emulated delay (`env.delay_sampler`)."""
    requests: int = 0
    """Replies received, without those to the first requests, which wait for the pool to come up."""
    wait_s: float = 0.0
    """From sending a request to having its reply; includes the next two."""
    queue_s: float = 0.0
    predict_s: float = 0.0
    gate_s: float = 0.0
    """Held back by the learner, between two trajectories."""
    trajectories_sent: int = 0
    """Complete ones, those that were dropped at once included."""
    trajectories_unacknowledged: int = 0
    """Those of them that may still be on their way."""
    trajectories_dropped: int = 0
    """Those that hold numbers which are not finite."""
    not_finite: int = 0
    """Steps with such numbers."""
    state_lost: int = 0
    """Episodes that began again because the states of a policy with memory were lost."""

    def count_reset(self, seconds: float) -> None:
        """Count a call of the vector env's reset."""
        self.resets += 1
        self.reset_s += seconds
        self.reset_times.add(seconds)


@dataclass(slots=True)
class Report:
    """A message of an env worker: totals so far, and the episodes since the last one."""

    name: str
    rank: int
    incarnation: int = 0
    """Names the process: totals begin at 0 in each."""
    evaluation: int = 0
    """The number of the evaluation that the episodes belong to; 0 where there is only one."""
    version: int = 0
    """Of the weights that it evaluates."""
    env_steps_before: int = 0
    """Env steps of training when the evaluation was ordered."""
    began: float | None = None
    """`time.monotonic()` when its first actions came; None before."""
    ended: float | None = None
    """The same at its last step; None before the first."""
    finished: bool = False
    totals: EnvTotals = field(default_factory=EnvTotals)
    delays: dict[str, float] = field(default_factory=dict)
    """Average, median, max and min of the emulated delays, in seconds."""
    episodes: list[Episode] = field(default_factory=list)

    def pack(self) -> bytes:
        """As msgpack."""
        return encode_meta(asdict(self))

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Report:
        """Read the fields.

        Raises:
            DecodeError: They are not those of a report.
        """
        try:
            times = {key: Durations.of(tree["totals"][key]) for key in ("step_times", "reset_times")}
            totals = _checked(EnvTotals(**{**tree["totals"], **times}))
            episodes = [_checked(Episode(**episode)) for episode in tree["episodes"]]
            report = _checked(cls(**{**tree, "totals": totals, "episodes": episodes}))
            _check_numbers(report.delays)
            if report.delays and sorted(report.delays) != _DELAYS:
                raise TypeError("other delays than a report has")
        except (TypeError, KeyError) as error:
            raise DecodeError(f"not a report: {error}") from None
        if report.rank < 0:
            raise DecodeError("not a report: the rank is below 0")
        return report


@dataclass(slots=True)
class LearnerReport:
    """A message of the learner: its metrics so far."""

    metrics: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    """Whether it has learned all that it was to learn, and every evaluation is over."""

    def pack(self) -> bytes:
        """As msgpack."""
        return encode_meta({"learner": asdict(self)})

    @classmethod
    def of(cls, tree: Any) -> LearnerReport:
        """Read the fields.

        Raises:
            DecodeError: They are not those of a report.
        """
        try:
            report = _checked(cls(**tree))
            _check_numbers(report.metrics)
        except TypeError as error:
            raise DecodeError(f"not a report: {error}") from None
        return report


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
    "float | None": (float, int, type(None)),
    "bool | None": (bool, type(None)),
}
"""What a field may be that is annotated so."""

_DELAYS = ["average", "max", "median", "min"]


def _checked(report: _T) -> _T:
    """The same record, if each field is what it is annotated to be.

    Raises:
        TypeError: Naming the field that is not.
    """
    for f in fields(report):
        value = getattr(report, f.name)
        allowed = _TYPES.get(str(f.type))
        if allowed is not None and type(value) not in allowed:
            raise TypeError(f"{f.name} is a {type(value).__name__}, not {f.type}")
    return report


def _check_numbers(numbers: Any) -> None:
    if not isinstance(numbers, dict):
        raise TypeError(f"a {type(numbers).__name__} in place of numbers by name")
    for name, number in numbers.items():
        if type(number) not in (int, float):
            raise TypeError(f"{name} is a {type(number).__name__}, not a number")


def unpack(data: bytes) -> Report | LearnerReport:
    """Read what `pack` made.

    Raises:
        DecodeError: It is no report.
    """
    tree = decode_meta(data)
    return LearnerReport.of(tree["learner"]) if "learner" in tree else Report.of(tree)


class Reporter:
    """Sends reports; without an endpoint it only keeps the episodes.

    Args:
        endpoint: Where the runner listens; None if there is no runner.
        keys: Of a client, or the server's.
        keeps: Of the latest episodes, for a summary of one's own; None for all.
    """

    def __init__(self, endpoint: str | None, keys: Keys | None = None, keeps: int | None = None) -> None:
        self.episodes: list[Episode] = []
        """The latest episodes, for the env worker's own summary."""
        self.count = 0
        """Of all episodes."""
        self.told_success = False
        """Whether one of them told whether it was a success."""
        self._keeps = keeps
        self._unsent: list[Episode] = []
        self._sent = float("-inf")
        self._socket: zmq.Socket[bytes] | None = None
        if endpoint is not None:
            # A context of its own can be terminated although a simulator holds sockets of its own.
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            self._socket = sockets.push(self._context, endpoint, keys)

    def add(self, episode: Episode) -> None:
        """Note a finished episode for the next report."""
        self.count += 1
        self.told_success |= episode.success_once is not None
        self.episodes.append(episode)
        if self._keeps is not None and len(self.episodes) > 2 * self._keeps:
            del self.episodes[: len(self.episodes) - self._keeps]
        self._unsent.append(episode)

    @property
    def has_runner(self) -> bool:
        """Whether there is anybody to send to."""
        return self._socket is not None

    def due(self) -> bool:
        """Whether the last report is old enough for another."""
        return time.monotonic() >= self._sent + (_EVERY if self.has_runner else _EVERY_ALONE)

    def send(self, report: Report) -> None:
        """Send `report`, which has no episodes yet, with those that were not sent before."""
        if self._socket is None:
            self._sent = time.monotonic()
            return
        try:
            while True:
                report.episodes = self._unsent[:_MOST_EPISODES]
                self._socket.send(report.pack(), sockets.NOBLOCK)
                self._sent = time.monotonic()
                del self._unsent[:_MOST_EPISODES]
                if not self._unsent:
                    break
        except zmq.Again:
            pass  # the runner is away; the next report has them
        report.episodes = []

    def send_learner(self, report: LearnerReport) -> None:
        """Send a report of the learner; one that does not fit is followed by the next."""
        self._sent = time.monotonic()
        if self._socket is not None:
            with suppress(zmq.Again):
                self._socket.send(report.pack(), sockets.NOBLOCK)

    def close(self) -> None:
        """Close the socket, after up to 2 s in which what was sent is delivered."""
        if self._socket is not None:
            self._socket.close()
            self._context.term()


class Collector:
    """Receives the reports of all env workers, and of the learner.

    Args:
        endpoint: Where to listen.
        keys: The server's; None lets in whoever reaches the socket.
        insecure: Without keys: whether other machines may reach it.

    Raises:
        EndpointError: The endpoint is malformed, in use, cannot be bound, or is open to strangers.
    """

    def __init__(self, endpoint: str, keys: Keys | None = None, insecure: bool = False) -> None:
        self._lock = sockets.lock_endpoint(endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door = Door(keys, [CLIENTS], insecure)
        self._authenticator = answer_handshakes(self._context, self._door)
        try:
            self._socket = sockets.pull(self._context, endpoint, self._door)
        except Exception:
            self._free()
            raise

    def collect(self, timeout: float) -> list[Report | LearnerReport]:
        """What has arrived.

        Args:
            timeout: Seconds to wait for the first one.
        """
        reports: list[Report | LearnerReport] = []
        self._socket.poll(int(timeout * 1000))
        until = time.monotonic() + _BURST_S
        while time.monotonic() < until:
            try:
                frame = self._socket.recv(sockets.NOBLOCK, copy=False)
                if self._door.lets_in(key_of(self._door, frame)):  # it may be revoked by now
                    reports.append(unpack(frame.bytes))
            except zmq.Again:
                break
            except DecodeError:
                continue
        return reports

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._free()

    def _free(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._lock is not None:
            self._lock.close()
