"""The thin client: observations out, actions back."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any, Dict, List, Optional, Set, Type

import numpy as np
import zmq

from zmqrl.errors import (
    AttemptsExhausted,
    BrokerStopping,
    BrokerUnreachable,
    ClientClosed,
    ClientError,
    ClientInUse,
    DecodeError,
    EncodeError,
    Overloaded,
    PolicyError,
    PolicyTimeout,
    Replaced,
    RequestRefused,
    VersionMismatch,
)
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode, decode_meta, encode, encode_meta
from zmqrl.transport.header import FLAG_EVAL, HEADER_SIZE, MAX_FRAMES, Header, Op, unpack
from zmqrl.transport.tree import is_row_list, rows_of

_ASK_AFTER = 1.0
"""Seconds without a word about a request, after which the client asks whether it is known."""

_REBUILD_AFTER = 2.0
"""Seconds without a word from the broker after that question, after which the socket is made anew."""

_RETRY_AFTER = 0.2
"""Seconds between two tries where the broker cannot take a request yet."""

_FATAL: Dict[str, Type[ClientError]] = {
    "policy": PolicyError,
    "attempts": AttemptsExhausted,
    "deadline": PolicyTimeout,
    "replaced": Replaced,
    "refused": RequestRefused,
}


class Pending:
    """A request in flight; `PolicyClient.submit` returns it."""

    def __init__(self, client: PolicyClient, header: Header, meta: bytes, buffers: List[Any]) -> None:
        self._client = client
        self._header = header
        self._meta = meta
        self._buffers = buffers
        self._deadline = 0.0
        self._look_at = 0.0  # when to do something about it if there is no reply
        self._retry = False  # whether it is to be sent again then
        self._kind: Type[ClientError] = PolicyTimeout  # what it ends in when time is up
        self._state = ""  # what the broker last said of it
        self._outcome: Any = None
        self._error: Optional[ClientError] = None
        self._done = False
        self.policy_version: Optional[int] = None
        """The version of the weights that made the reply; None before the reply."""
        self.queue_seconds: Optional[float] = None
        """Seconds that the request waited in the broker's queue; None before the reply."""
        self.predict_seconds: Optional[float] = None
        """Seconds that the policy took for the batch it was in; None before the reply."""

    def done(self) -> bool:
        """Whether the result, or an error, is here; reads what has arrived, without waiting."""
        return self.wait(0.0)

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Wait until the request has ended.

        Args:
            timeout: Seconds; None waits until the request's own deadline.

        Returns:
            Whether it has ended, be it in a result or an error.
        """
        return self._done or self._client._wait(self, timeout)

    def result(self) -> Dict[str, Any]:
        """Wait for the reply.

        Returns:
            The policy's output, arrays of shape [N, ...]; the actions under `actions`.

        Raises:
            ClientError: One of its named kinds, at the latest at the request's deadline.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        result: Dict[str, Any] = self._outcome
        return result

    def cancel(self) -> None:
        """Give the request up; the broker is told, so that no worker runs it in vain."""
        if not self._done:
            self._client._cancel(self)

    def _finish(self, outcome: Any = None, error: Optional[ClientError] = None) -> None:
        self._outcome, self._error, self._done = outcome, error, True
        self._buffers = []


class PolicyClient:
    """Asks the policy of a zmqrl pool for actions.

    The loop that calls it:

        with PolicyClient("tcp://127.0.0.1:5757") as policy:
            obs, info = envs.reset()
            while True:
                result = policy.infer(obs)
                obs, reward, terminated, truncated, info = envs.step(result["actions"])

    A client belongs to one thread at a time. After a fork the child's first call opens a socket of its
    own.

    Args:
        endpoint: The broker's frontend, such as `tcp://127.0.0.1:5757`; None for the local default.
        timeout: Seconds that a call may take when it names no timeout itself.
        name: Names this client in the broker's status, and makes a restart under the same name take
            over from the old process. None makes a name up.
        mode: `train` for sampled actions, `eval` for deterministic ones; a call may choose another.
        rank: This env worker's number; normal mode binds requests by it.
        world_size: The number of env workers; normal mode needs it with `rank`.
        max_message_mb: Mebibytes; larger observations are refused before they are sent.

    Raises:
        EndpointError: The endpoint is malformed.
    """

    def __init__(
        self,
        endpoint: Optional[str] = None,
        *,
        timeout: float = 30.0,
        name: Optional[str] = None,
        mode: str = "train",
        rank: Optional[int] = None,
        world_size: Optional[int] = None,
        max_message_mb: int = sockets.MAX_MESSAGE_MB,
    ) -> None:
        self.endpoint = endpoint or sockets.local_endpoint("frontend")
        self.timeout = _checked_timeout(timeout)
        if (rank is None) != (world_size is None):
            raise ValueError("give rank and world_size together")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0 … world_size - 1 ({world_size - 1})")
        if name is not None and not 0 < len(name) <= 200:
            raise ValueError("a name has 1 to 200 characters")
        self.mode = _checked_mode(mode)
        self.name = name or f"client-{os.urandom(4).hex()}"
        self._rank = rank
        self._world_size = world_size
        self._max_message_mb = max_message_mb
        # Later processes of one name have larger numbers; a fork and a rebuilt socket keep theirs.
        self._incarnation = time.time_ns()
        self._next_id = 1
        self._resting: Set[int] = set()
        self._closed = False
        self._open()

    # -- What a user calls

    def infer(
        self,
        observation: Any,
        mode: Optional[str] = None,
        timeout: Optional[float] = None,
        copy: bool = True,
    ) -> Dict[str, Any]:
        """Actions for a batch of observations.

        Args:
            observation: A tree; every array [N, ...], one row a simulator.
            mode: `train` for sampled actions, `eval` for deterministic ones; None for the client's own.
            timeout: Seconds; None for the client's own.
            copy: False promises that the arrays do not change until this returns.

        Returns:
            The policy's output; `actions` [N, ...] and whatever else it returns.

        Raises:
            EncodeError: The observation holds what cannot be sent, or rows that differ; names the path.
            BrokerUnreachable: No broker answered within the timeout.
            PolicyTimeout: The broker did, but no reply came within the timeout.
            PolicyError: The policy failed on this observation; has the remote traceback.
            ClientError: Another of its kinds, see `zmqrl.errors`.
        """
        return self.submit(observation, mode, timeout, copy).result()

    def infer_one(
        self, observation: Any, mode: Optional[str] = None, timeout: Optional[float] = None
    ) -> Dict[str, Any]:
        """Actions for a single observation that has no batch axis.

        Args:
            observation: A tree; arrays [...], scalars and str.
            mode: As in `infer`.
            timeout: As in `infer`.

        Returns:
            The policy's output without its first axis; `actions` [...].

        Raises:
            ClientError, EncodeError: As `infer`.
        """
        result = self.infer(_with_axis(observation), mode, timeout)
        return {key: _without_axis(value) for key, value in result.items()}

    def submit(
        self,
        observation: Any,
        mode: Optional[str] = None,
        timeout: Optional[float] = None,
        copy: bool = True,
        stage: int = 0,
    ) -> Pending:
        """Send a batch of observations without waiting; arguments as for `infer`.

        Args:
            observation: A tree; every array [N, ...].
            mode: `train` or `eval`; None for the client's own.
            timeout: Seconds until the request ends in an error; None for the client's own.
            copy: False promises that the arrays do not change until the result is here.
            stage: The pipeline stage, for an env worker that steps several groups of envs in turn.

        Raises:
            EncodeError, ClientInUse, ClientClosed: At once.
        """
        chosen = self.mode if mode is None else _checked_mode(mode)
        seconds = self.timeout if timeout is None else _checked_timeout(timeout)
        rows = rows_of(observation)
        if rows == 0:
            raise EncodeError("the observation has no rows: there is nothing to act on")
        encoded = encode(observation, copy)
        size = len(encoded.meta) + sum(len(b) for b in encoded.buffers)
        if size > (self._max_message_mb << 20) - HEADER_SIZE:
            raise EncodeError(
                f"the observation has {size / 2**20:.1f} MiB; max_message_mb is {self._max_message_mb}"
            )
        if len(encoded.buffers) > MAX_FRAMES:
            raise EncodeError(
                f"the observation has {len(encoded.buffers)} large arrays; {MAX_FRAMES} go"
            )
        if not 0 <= stage < 256:
            raise ValueError(f"stage must be in 0 … 255, not {stage!r}")
        with self._exclusive():
            header = Header(
                Op.INFER,
                flags=FLAG_EVAL if chosen == "eval" else 0,
                request_id=self._next_id,
                stage=stage,
                frames=len(encoded.buffers),
                rows=rows,
                signature=encoded.signature,
            )
            self._next_id += 1
            pending = Pending(self, header, encoded.meta, list(encoded.buffers))
            pending._deadline = time.monotonic() + seconds
            self._resting.discard(stage)
            self._send(pending)
            self._pending[header.request_id] = pending
            return pending

    def rest(self, stage: int = 0) -> None:
        """Say that this pipeline stage asks no more for now.

        In normal mode a rollout worker waits for all its env workers; from now on not for this one,
        until it asks again. In decoupled mode nobody waits anyway.
        """
        with self._exclusive():
            self._resting.add(stage)
            self._send_frames([Header(Op.REST, stage=stage).pack()])

    def close(self) -> None:
        """Say goodbye and close the socket; pending requests end in `ClientClosed`.

        Raises:
            ClientInUse: Another thread is in a call.
        """
        if self._closed:
            return
        if self._pid != os.getpid():
            self._closed = True
            return  # the socket is the parent's
        with self._exclusive():
            self._closed = True
            for pending in list(self._pending.values()):
                self._end(pending, error=ClientClosed("the client was closed"))
            self._send_frames([Header(Op.BYE).pack()])
            self._socket.close()

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- One caller at a time

    def _exclusive(self) -> _Exclusive:
        if self._closed:
            raise ClientClosed("the client is closed")
        if self._pid != os.getpid():
            # A fork copied the socket's memory but not its I/O thread; never touch it here.
            self.name += f"-{os.getpid()}"
            self._open()
        return _Exclusive(self._lock)

    # -- The socket

    def _open(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pending: Dict[int, Pending] = {}
        self._connect()

    def _connect(self) -> None:
        self._socket = sockets.dealer(zmq.Context.instance(), self.endpoint)
        self._reached = False  # whether the broker has said anything on this socket
        self._asked: Optional[float] = None  # since when a KNOWN is unanswered
        self._hello()

    def _hello(self) -> None:
        self._said_hello = time.monotonic()
        fields: Dict[str, Any] = {
            "role": "client",
            "name": self.name,
            "incarnation": self._incarnation,
            "host": socket.gethostname(),
            "pid": self._pid,
            "mode": self.mode,
        }
        if self._rank is not None:
            fields.update(rank=self._rank, world_size=self._world_size)
        self._send_frames([Header(Op.HELLO).pack() + encode_meta(fields)])
        for stage in self._resting:
            self._send_frames([Header(Op.REST, stage=stage).pack()])

    def _send(self, pending: Pending) -> None:
        now = time.monotonic()
        budget_ms = max(1, min(int((pending._deadline - now) * 1000), 2**32 - 1))
        header = pending._header._replace(budget_ms=budget_ms)
        pending._header = header._replace(attempt=min(header.attempt + 1, 255))
        pending._look_at = min(now + _ASK_AFTER, pending._deadline)
        pending._retry = False
        self._send_frames([header.pack() + pending._meta, *pending._buffers])

    def _send_frames(self, frames: List[Any]) -> None:
        """Send without waiting; what does not fit is asked for again by `_look_after`."""
        last = len(frames) - 1
        try:
            for index, frame in enumerate(frames):
                flags = sockets.NOBLOCK if index == last else sockets.NOBLOCK_SNDMORE
                self._socket.send(frame, flags, copy=index == 0)
        except zmq.Again:
            # Only the first frame can be refused, so no message is left half sent.
            pass

    # -- Waiting

    def _wait(self, pending: Pending, timeout: Optional[float]) -> bool:
        with self._exclusive():
            if self._pending.get(pending._header.request_id) is not pending:
                if not pending._done:  # made before a fork
                    pending._finish(error=ClientError("the request belongs to the parent process"))
                return True
            until = pending._deadline
            if timeout is not None:
                until = min(until, time.monotonic() + timeout)
            while True:
                now = time.monotonic()
                wake = min(until, min(p._look_at for p in self._pending.values()))
                if self._socket.poll(max(0, int((wake - now) * 1000 + 0.999))):
                    self._receive(pending)
                now = time.monotonic()
                if now >= wake:
                    for request in list(self._pending.values()):
                        if now >= request._look_at:
                            self._look_after(request, now)
                if pending._done or now >= until:
                    return pending._done

    def _look_after(self, pending: Pending, now: float) -> None:
        """Do what is due for a request that has no reply yet."""
        if pending._done:
            return
        if now >= pending._deadline:
            self._send_frames([Header(Op.CANCEL, request_id=pending._header.request_id).pack()])
            self._end(pending, error=self._timeout_of(pending))
        elif pending._retry:
            self._send(pending)
        elif self._asked is not None and now >= self._asked + _REBUILD_AFTER:
            # Not even KNOWN is answered: the connection may be half dead, so make a new one.
            self._socket.close(0)
            reached = self._reached
            self._connect()
            self._reached = reached
            for request in self._pending.values():
                self._send(request)
        else:
            if self._asked is None:
                self._asked = now
            pending._look_at = min(now + _ASK_AFTER, pending._deadline)
            self._send_frames([Header(Op.KNOWN, request_id=pending._header.request_id).pack()])

    def _try_again(self, pending: Pending, now: float, seconds: float) -> None:
        """Send a request once more after so many seconds."""
        pending._retry = True
        pending._look_at = min(now + seconds, pending._deadline)

    def _timeout_of(self, pending: Pending) -> ClientError:
        if not self._reached:
            return BrokerUnreachable(
                f"no broker answered at {self.endpoint} within the timeout; "
                "is one running there (bin/start-broker)?"
            )
        state = pending._state or "the broker said nothing about the request"
        return pending._kind(f"no reply from {self.endpoint} within the timeout: {state}")

    def _end(self, pending: Pending, outcome: Any = None, error: Optional[ClientError] = None) -> None:
        del self._pending[pending._header.request_id]
        pending._finish(outcome, error)

    def _cancel(self, pending: Pending) -> None:
        with self._exclusive():
            if self._pending.get(pending._header.request_id) is pending:
                self._send_frames([Header(Op.CANCEL, request_id=pending._header.request_id).pack()])
                self._end(pending, error=ClientError("the request was cancelled"))

    # -- Receiving

    def _receive(self, awaited: Pending) -> None:
        """Read what has arrived, up to the end of the request that is awaited."""
        while not awaited._done:
            try:
                frames = [self._socket.recv(sockets.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more:
                frames.append(self._socket.recv(sockets.NOBLOCK, copy=False))
            try:
                self._handle(frames)
            except VersionMismatch as error:
                for pending in list(self._pending.values()):
                    self._end(pending, error=RequestRefused(f"{self.endpoint}: {error}"))
            except DecodeError:
                continue  # not from a zmqrl broker; the deadline speaks if nothing else comes

    def _handle(self, frames: List[Any]) -> None:
        first = frames[0].bytes
        header = unpack(first)
        now = time.monotonic()
        self._reached = True
        self._asked = None
        pending = self._pending.get(header.request_id)
        if header.op == Op.UNKNOWN:
            if now >= self._said_hello + _RETRY_AFTER:
                self._hello()
                if pending is not None:
                    self._send(pending)
            elif pending is not None:
                self._try_again(pending, now, _RETRY_AFTER)
        elif header.op == Op.ERROR:
            self._error(pending, header.request_id, decode_meta(first[HEADER_SIZE:]), now)
        elif pending is None:
            return  # late: an earlier call gave this request up
        elif header.op == Op.REPLY:
            pending.policy_version = header.policy_version
            pending.queue_seconds = header.queue_us / 1e6
            pending.predict_seconds = header.predict_us / 1e6
            try:
                self._end(pending, outcome=decode(first[HEADER_SIZE:], frames[1:]))
            except DecodeError as error:
                self._end(pending, error=PolicyError(f"the reply cannot be read: {error}"))
        elif header.op == Op.KNOWN:
            pending._kind = PolicyTimeout
            pending._state = str(decode_meta(first[HEADER_SIZE:]).get("state", ""))

    def _error(
        self, pending: Optional[Pending], request_id: int, fields: Dict[str, Any], now: float
    ) -> None:
        code = str(fields.get("code"))
        message = str(fields.get("message", "unexplained error"))
        if request_id == 0:  # about this client as a whole
            for request in list(self._pending.values()):
                self._end(request, error=self._error_of(code, message))
        elif pending is None:
            return
        elif code in ("overloaded", "stopping"):
            # A broker that stops may be started again, and one that is full gets emptier.
            retry_after = fields.get("retry_after_ms")
            wait_ms = retry_after if isinstance(retry_after, int) else 1000 * _RETRY_AFTER
            pending._kind = Overloaded if code == "overloaded" else BrokerStopping
            pending._state = message
            self._try_again(pending, now, min(max(wait_ms / 1000, 0.001), 10.0))
        else:
            self._end(pending, error=self._error_of(code, message))

    def _error_of(self, code: str, message: str) -> ClientError:
        return _FATAL.get(code, ClientError)(f"{self.endpoint}: {message}")


class _Exclusive:
    """Holds a client's lock for one call; refuses a second thread instead of letting it wait."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ClientInUse("the client is in use by another thread; give each thread its own")

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def _checked_timeout(timeout: float) -> float:
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout < 1e7:
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    return float(timeout)


def _checked_mode(mode: str) -> str:
    if mode not in ("train", "eval"):
        raise ValueError(f"mode must be 'train' or 'eval', not {mode!r}")
    return mode


def _with_axis(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _with_axis(child) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_with_axis(child) for child in tree]
    if isinstance(tree, (str, bytes, bytearray)) or tree is None:
        return [tree]
    if hasattr(tree, "unsqueeze"):
        return tree.unsqueeze(0)
    return np.asarray(tree)[None]


def _without_axis(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_axis(child) for key, child in tree.items()}
    if isinstance(tree, list):
        return tree[0] if tree and is_row_list(tree) else [_without_axis(child) for child in tree]
    if isinstance(tree, np.ndarray) and tree.ndim:
        return tree[0]
    return tree
