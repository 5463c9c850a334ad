"""The way of trajectories from an env worker to the learner."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Dict, List, Set, Tuple

import zmq

from zmqrl.errors import DecodeError, LearnerRefused, VersionMismatch
from zmqrl.spaces import Spaces
from zmqrl.trajectory import Trajectory
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode_meta, encode, encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op, unpack

MOST_UNACKNOWLEDGED = 4
"""Trajectories on their way; with so many a sender begins no further one."""

_ASK_EVERY = 1.0
"""Seconds after which an unanswered question, or an unacknowledged trajectory, brings another HELLO."""

_REBUILD_AFTER = 5.0
"""Seconds without a word from the learner, after which the socket is made anew; twice
as many each time, until one comes: on a slow link words wait behind large messages."""


class Uplink:
    """A socket to the learner. It never waits but in `wait` and `close`.

    Every trajectory has a number and is kept until the learner has acknowledged it, so that nothing is
    lost when the learner is restarted, and nothing counts twice.

    Args:
        endpoint: The learner's.
        introduction: The fields of HELLO: role, name, incarnation, host, pid.

    Raises:
        EndpointError: The endpoint is malformed.
    """

    def __init__(self, endpoint: str, introduction: Dict[str, Any]) -> None:
        self.endpoint = endpoint
        self.sent = 0
        """Trajectories sent, each counted once."""
        self.reached = False
        """Whether the learner has said anything."""
        self._introduction = introduction
        self._unacknowledged: OrderedDict[int, List[Any]] = OrderedDict()
        self._asked: Dict[int, Tuple[int, int]] = {}  # by stage: number and env steps of a question
        self._may: Set[int] = set()  # stages that may begin
        self._questions = 0
        self._patience = _REBUILD_AFTER
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._connect()

    @property
    def unacknowledged(self) -> int:
        """Trajectories of which the learner has not said that they are there."""
        return len(self._unacknowledged)

    def introduce(self, spaces: Spaces) -> None:
        """Tell the learner which observations and actions there are; needed before anything else."""
        self._introduction["spaces"] = spaces.fields()
        self._hello()

    def send(self, stage: int, trajectory: Trajectory) -> None:
        """Send a trajectory, and keep it until it is acknowledged.

        Raises:
            EncodeError: It holds what cannot be sent.
        """
        # The builder has put it together in memory of its own.
        encoded = encode(trajectory.tree(), copy=False)
        self.sent += 1
        header = Header(
            Op.TRAJECTORY,
            request_id=self.sent,
            stage=stage,
            frames=len(encoded.buffers),
            rows=trajectory.env_steps,
        )
        frames = [header.pack() + encoded.meta, *encoded.buffers]
        self._unacknowledged[self.sent] = frames
        self._send(frames)

    def may_begin(self, stage: int, env_steps: int) -> bool:
        """Whether a new trajectory may begin at `stage`; asks the learner if need be, without waiting.

        Args:
            stage: The pipeline stage.
            env_steps: That the trajectory will have.

        Raises:
            LearnerRefused: It wants nothing from this client.
        """
        self._service()
        if stage in self._may:
            return len(self._unacknowledged) < MOST_UNACKNOWLEDGED
        if stage not in self._asked:
            self._questions += 1
            self._asked[stage] = (self._questions, env_steps)
            self._ask(stage)
        return False

    def begin(self, stage: int) -> None:
        """Use the leave that `may_begin` has told of: the next trajectory needs another one."""
        self._may.remove(stage)

    def wait(self, timeout: float) -> None:
        """Wait for a word from the learner, and act on it.

        Args:
            timeout: Seconds.

        Raises:
            LearnerRefused: It wants nothing from this client.
        """
        self._socket.poll(max(0, int(timeout * 1000 + 0.999)))
        self._service()

    def close(self, timeout: float) -> None:
        """Say goodbye, after everything has been acknowledged.

        Args:
            timeout: Seconds to wait for that.
        """
        until = time.monotonic() + timeout
        try:
            while self._unacknowledged and time.monotonic() < until:
                self.wait(min(0.1, until - time.monotonic()))
            self._send([Header(Op.BYE).pack()])
        except LearnerRefused:
            pass
        self._socket.close()

    # -- Sending

    def _connect(self) -> None:
        self._socket = sockets.dealer(self._context, self.endpoint)
        self._heard = self._spoke = time.monotonic()
        if "spaces" in self._introduction:
            self._hello()

    def _hello(self) -> None:
        """Introduce this client, with the number of the first trajectory that is still to arrive."""
        self._spoke = time.monotonic()
        first = next(iter(self._unacknowledged), self.sent + 1)
        self._send([Header(Op.HELLO).pack() + encode_meta({**self._introduction, "first": first})])

    def _ask(self, stage: int) -> None:
        number, env_steps = self._asked[stage]
        self._send([Header(Op.BEGIN, request_id=number, stage=stage, rows=env_steps).pack()])

    def _send(self, frames: List[Any]) -> None:
        """Send without waiting; what does not fit is sent again later, since nothing answers it."""
        last = len(frames) - 1
        index = 0
        try:
            for index, frame in enumerate(frames):
                flags = sockets.NOBLOCK if index == last else sockets.NOBLOCK_SNDMORE
                self._socket.send(frame, flags, copy=index == 0)
        except zmq.Again:
            pass  # only the first frame can be refused, so no message is left half sent
        except BaseException:
            # Ctrl-C between two frames: what is sent next would become part of this message.
            self._socket.close(0)
            self._connect()
            raise

    # -- Receiving, and looking after what is silent

    def _service(self) -> None:
        while True:
            try:
                frames = [self._socket.recv(sockets.NOBLOCK)]
            except zmq.Again:
                break
            while self._socket.getsockopt(zmq.RCVMORE):
                frames.append(self._socket.recv(sockets.NOBLOCK))
            try:
                self._handle(frames[0])
            except VersionMismatch as error:
                raise LearnerRefused(f"{self.endpoint}: {error}") from None
            except DecodeError:
                continue  # not from a zmqrl learner
        now = time.monotonic()
        open_ends = self._unacknowledged or self._asked
        if not open_ends:
            self._heard = now
        elif now >= self._heard + self._patience:
            # The connection may be half dead, so make a new one.
            self._patience *= 2
            self._socket.close(0)
            self._connect()
            self._send_again()
        elif now >= max(self._spoke, self._heard) + _ASK_EVERY:
            self._hello()

    def _handle(self, first: bytes) -> None:
        header = unpack(first)
        self._heard = time.monotonic()
        self.reached = True
        if header.op == Op.ACK:
            self._patience = _REBUILD_AFTER
            self._acknowledged(header.request_id)
        elif header.op == Op.GO:
            if self._asked.get(header.stage, (0, 0))[0] == header.request_id:
                del self._asked[header.stage]
                self._may.add(header.stage)
        elif header.op == Op.UNKNOWN:
            if "spaces" in self._introduction:
                self._hello()
        elif header.op == Op.WELCOME:
            fields = decode_meta(first[HEADER_SIZE:])
            self._acknowledged(fields.get("acknowledged", 0))
            self._send_again(fields.get("received", 0))
        elif header.op == Op.ERROR:
            message = decode_meta(first[HEADER_SIZE:]).get("message")
            raise LearnerRefused(f"the learner at {self.endpoint} refuses {self._name}: {message}")

    def _acknowledged(self, number: int) -> None:
        while self._unacknowledged and next(iter(self._unacknowledged)) <= number:
            self._unacknowledged.popitem(last=False)

    def _send_again(self, received: int = 0) -> None:
        """Send what is open, but for trajectories up to the number `received`."""
        for number, frames in self._unacknowledged.items():
            if number > received:
                self._send(frames)
        for stage in self._asked:
            self._ask(stage)

    @property
    def _name(self) -> str:
        return str(self._introduction.get("name"))
