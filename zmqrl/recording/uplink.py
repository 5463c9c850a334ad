"""The way of trajectories from an env worker to the learner."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Dict, List, Optional, Set, Tuple

import zmq

from zmqrl.errors import (
    AuthenticationFailed,
    DecodeError,
    EncodeError,
    LearnerRefused,
    TrainingEnded,
    VersionMismatch,
)
from zmqrl.spaces import Spaces
from zmqrl.trajectory import Trajectory
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode_meta, encode, encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op, unpack
from zmqrl.transport.refusal import Suspicion
from zmqrl.transport.security import Keys

MOST_UNACKNOWLEDGED = 4
"""Trajectories on their way; with so many a sender begins no further one."""

_ASK_EVERY = 1.0
"""Seconds after which an unanswered question, or an unacknowledged trajectory, brings another HELLO."""

_REBUILD_AFTER = 5.0
"""Seconds without a word from the learner, after which the socket is made anew, and seconds after which
an unanswered HELLO is repeated; twice as many each time, until an answer comes: on a slow link words
wait behind large messages."""

_MOST_PATIENCE = 60.0


class Uplink:
    """A socket to the learner. It never waits but in `wait` and `close`.

    Every trajectory has a number and is kept until the learner has acknowledged it, so that nothing is
    lost when the learner is restarted, and nothing counts twice. While anything is open, HELLO is said
    again and again; the WELCOME that answers it tells what has arrived, and what was sent before that
    HELLO but has not arrived is sent again.

    Args:
        endpoint: The learner's.
        introduction: The fields of HELLO: role, name, incarnation, host, pid.
        keys: Of a client.

    Raises:
        EndpointError: The endpoint is malformed.
    """

    def __init__(self, endpoint: str, introduction: Dict[str, Any], keys: Optional[Keys] = None) -> None:
        self.endpoint = endpoint
        self.sent = 0
        """Trajectories sent, each counted once."""
        self.reached = False
        """Whether the learner has said anything."""
        self.last_word = 0.0
        """When it last did, of `time.monotonic()`."""
        self.suspicion = Suspicion(endpoint, keys)
        self._keys = keys
        self._introduction = introduction
        self._unacknowledged: OrderedDict[int, List[Any]] = OrderedDict()
        self._asked: Dict[int, Tuple[int, int]] = {}  # by stage: number and env steps of a question
        self._may: Set[int] = set()  # stages that may begin
        self._questions = 0
        self._ended = ""  # what the learner said when it had learned enough
        self._hellos = 0
        self._welcomed = 0  # the last HELLO that was answered
        self._sent_before_hello = 0  # the number of the last trajectory that was
        self._max_frame = 0  # bytes that the learner takes in one frame; 0: not told yet
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
            EncodeError: It holds what cannot be sent, or an array that is too large.
        """
        # The builder has put it together in memory of its own.
        encoded = encode(trajectory.tree(), copy=False)
        largest = max((len(buffer) for buffer in encoded.buffers), default=0)
        if 0 < self._max_frame < largest:
            raise EncodeError(
                f"an array of the trajectory has {largest / 2**20:.1f} MiB; the learner at "
                f"{self.endpoint} takes {self._max_frame >> 20} MiB (max_message_mb): make "
                "trajectories of fewer steps"
            )
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
            TrainingEnded: It wants no more from anybody.
            LearnerRefused: It wants nothing from this client.
            AuthenticationFailed: Neither of both has the keys that the other wants.
        """
        self.service()
        if self._ended:
            raise TrainingEnded(self._ended)
        if len(self._unacknowledged) >= MOST_UNACKNOWLEDGED:
            return False
        if stage not in self._may and stage not in self._asked:
            self._questions += 1
            self._asked[stage] = (self._questions, env_steps)
            self._ask(stage)
        return stage in self._may

    def begin(self, stage: int) -> None:
        """Use the leave that `may_begin` has told of: the next trajectory needs another one."""
        self._may.remove(stage)

    def wait(self, timeout: float) -> None:
        """Wait for a word from the learner, and act on it.

        Args:
            timeout: Seconds.

        Raises:
            LearnerRefused: It wants nothing from this client.
            AuthenticationFailed: Neither of both has the keys that the other wants.
        """
        self._socket.poll(max(0, int(timeout * 1000 + 0.999)))
        self.service()

    def close(self, timeout: float) -> None:
        """Say goodbye, after everything has been acknowledged.

        Args:
            timeout: Seconds to wait for that.
        """
        if self._socket.closed:
            return
        until = time.monotonic() + timeout
        try:
            while self._unacknowledged and time.monotonic() < until:
                self.wait(max(0.0, min(0.1, until - time.monotonic())))
            if self.sent:
                self._hello()  # a learner that was restarted meanwhile learns what it has lost
            self._send([Header(Op.BYE).pack()])
        except (LearnerRefused, AuthenticationFailed):
            pass
        self._socket.close()

    # -- Sending

    def _connect(self, before: Optional[zmq.Socket[bytes]] = None) -> None:
        self._socket = sockets.dealer(self._context, self.endpoint, keys=self._keys)
        if before is not None:  # not sooner: there may be no file for a new one
            before.close(0)
        self._heard = self._spoke = time.monotonic()
        self.suspicion.begin()
        if "spaces" in self._introduction:
            self._hello()

    def _hello(self) -> None:
        """Introduce this client, with the number of the first trajectory that is still to arrive."""
        self._spoke = time.monotonic()
        self._hellos += 1
        self._sent_before_hello = self.sent
        first = next(iter(self._unacknowledged), self.sent + 1)
        hello = Header(Op.HELLO, request_id=self._hellos)
        self._send([hello.pack() + encode_meta({**self._introduction, "first": first})])

    def _ask(self, stage: int) -> None:
        number, env_steps = self._asked[stage]
        self._send([Header(Op.BEGIN, request_id=number, stage=stage, rows=env_steps).pack()])

    def _send(self, frames: List[Any]) -> None:
        """Send without waiting; what does not fit is sent again later, since nothing answers it."""
        try:
            sockets.send(self._socket, frames)
        except BaseException:
            # Ctrl-C between two frames: what is sent next would become part of this message.
            self._connect(self._socket)
            raise

    # -- Receiving, and looking after what is silent

    def service(self) -> None:
        """Act on what the learner has said, and look after what it has not answered; never waits.

        Raises:
            LearnerRefused: It wants nothing from this client.
            AuthenticationFailed: Neither of both has the keys that the other wants.
        """
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
        refusal = self.suspicion.look() if open_ends else None
        if refusal is not None and refusal.final:
            raise AuthenticationFailed(f"the learner at {self.endpoint} {refusal.reason}")
        if not open_ends:
            self._heard = now
            self.suspicion.rest()
        elif now >= self._heard + self._patience:
            # The connection may be half dead, so make a new one.
            self._be_more_patient()
            self._connect(self._socket)
        elif self._welcomed == self._hellos and now >= self._spoke + _ASK_EVERY:
            self._hello()
        elif now >= self._spoke + self._patience:
            self._be_more_patient()
            self._hello()

    def _be_more_patient(self) -> None:
        self._patience = min(2 * self._patience, _MOST_PATIENCE)

    def _handle(self, first: bytes) -> None:
        header = unpack(first)
        self._heard = self.last_word = time.monotonic()
        self.reached = True
        self.suspicion.end()
        if header.op == Op.ACK:
            self._acknowledged(header.request_id)
        elif header.op == Op.GO:
            if self._asked.get(header.stage, (0, 0))[0] == header.request_id:
                del self._asked[header.stage]
                self._may.add(header.stage)
        elif header.op == Op.UNKNOWN:
            if "spaces" in self._introduction:
                self._hello()
        elif header.op == Op.WELCOME:
            self._welcome(header.request_id, decode_meta(first[HEADER_SIZE:]))
        elif header.op == Op.ERROR:
            fields = decode_meta(first[HEADER_SIZE:])
            message = fields.get("message")
            if fields.get("code") == "ended":
                self._ended = f"{self.endpoint}: {message}"
                return
            if fields.get("code") == "revoked":
                raise AuthenticationFailed(f"the learner at {self.endpoint}: {message}")
            raise LearnerRefused(f"the learner at {self.endpoint} refuses {self._name}: {message}")

    def _welcome(self, hello: int, fields: Dict[str, Any]) -> None:
        self._patience = _REBUILD_AFTER
        self._max_frame = _number(fields, "max_frame")
        self._acknowledged(_number(fields, "acknowledged"))
        if hello != self._hellos:
            return  # a later HELLO is on its way, and what was sent meanwhile, too
        self._welcomed = hello
        if not fields.get("full"):
            received = _number(fields, "received")
            for number, frames in self._unacknowledged.items():
                if received < number <= self._sent_before_hello:
                    self._send(frames)
        for stage in self._asked:
            self._ask(stage)

    def _acknowledged(self, number: int) -> None:
        while self._unacknowledged and next(iter(self._unacknowledged)) <= number:
            self._unacknowledged.popitem(last=False)

    @property
    def _name(self) -> str:
        return str(self._introduction.get("name"))


def _number(fields: Dict[str, Any], key: str) -> int:
    value = fields.get(key, 0)
    return value if isinstance(value, int) else 0
