"""Evaluations that the learner asks for: eval workers wait for them and say when they are done."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import zmq

from zmqrl.errors import AuthenticationFailed, DecodeError, LearnerRefused, VersionMismatch
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode_meta, encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op, unpack
from zmqrl.transport.refusal import Suspicion
from zmqrl.transport.security import Keys

_ASK_EVERY = 0.5
_REBUILD_AFTER = 10.0
"""Seconds without an answer after which the socket is made anew."""


@dataclass(frozen=True, slots=True)
class Order:
    """An evaluation to be done."""

    number: int
    version: int
    """Of the weights that are evaluated."""
    env_steps: int
    """Of training, when it was ordered."""
    epoch: int
    """Of the learner that ordered it: the next one numbers its evaluations from 1 again."""


class Orders:
    """Asks the learner what is to be evaluated.

    Args:
        endpoint: The learner's.
        name: The eval worker's.
        keys: Likewise.
    """

    def __init__(self, endpoint: str, name: str, keys: Keys | None = None) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._suspicion = Suspicion(endpoint, keys)
        self._name = name
        self._done = self._epoch = 0
        self._asked = float("-inf")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connect()

    def next(self, timeout: float) -> Order | None:
        """The next evaluation, if the learner asks for one.

        Args:
            timeout: Seconds to wait.

        Raises:
            LearnerRefused: It speaks another version of the protocol.
            AuthenticationFailed: It does not accept our keys, or has others.
        """
        until = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            if now >= self._heard + _REBUILD_AFTER:
                self._socket.close(0)
                self._connect()
            refusal = self._suspicion.look()
            if refusal is not None and refusal.final:
                raise AuthenticationFailed(f"the learner at {self._endpoint} {refusal.reason}")
            if now >= self._asked + _ASK_EVERY:
                self._ask()
            wake = min(until, self._asked + _ASK_EVERY)
            if self._socket.poll(max(0, int((wake - now) * 1000 + 0.999))):
                order = self._read()
                if order is not None:
                    return order
            if time.monotonic() >= until:
                return None

    def done(self, order: Order) -> None:
        """Say that an evaluation is done."""
        self._done, self._epoch = order.number, order.epoch
        self._heard = time.monotonic()  # nobody has listened meanwhile
        self._ask()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()

    def _connect(self) -> None:
        self._socket = sockets.dealer(self._context, self._endpoint, keys=self._keys)
        self._heard = time.monotonic()
        self._suspicion.begin()

    def _ask(self) -> None:
        self._asked = time.monotonic()
        try:
            header = Header(Op.EVALUATE, request_id=self._done)
            fields = {"name": self._name, "epoch": self._epoch}
            self._socket.send(header.pack() + encode_meta(fields), sockets.NOBLOCK)
        except zmq.Again:
            pass  # it is repeated

    def _read(self) -> Order | None:
        first = self._socket.recv_multipart()[0]
        try:
            header = unpack(first)
            fields = decode_meta(first[HEADER_SIZE:])
            epoch, env_steps = (_number(fields, key) for key in ("epoch", "env_steps"))
        except VersionMismatch as error:
            raise LearnerRefused(f"{self._endpoint}: {error}") from None
        except DecodeError:
            return None
        self._heard = time.monotonic()
        self._suspicion.end()
        if header.op == Op.ERROR and fields.get("code") in ("refused", "revoked"):
            raise AuthenticationFailed(f"the learner at {self._endpoint}: {fields.get('message')}")
        if header.op != Op.EVALUATE or (epoch == self._epoch and header.request_id <= self._done):
            return None
        return Order(header.request_id, header.policy_version, env_steps, epoch)


def _number(fields: dict[str, Any], key: str) -> int:
    value = fields.get(key, 0)
    if type(value) is not int:
        raise DecodeError(f"not an order: its {key} is no number")
    return value
