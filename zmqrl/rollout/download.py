"""Fetches weights from a learner, in a thread of its own, while the policy runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from zmqrl.errors import DecodeError, StartupFailed, VersionMismatch
from zmqrl.spaces import Spaces
from zmqrl.transport import sockets
from zmqrl.transport.checksum import checksum_of
from zmqrl.transport.codec import MAX_META, decode, decode_meta, encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op, unpack
from zmqrl.transport.refusal import Suspicion
from zmqrl.transport.security import Keys

log = logging.getLogger(__name__)

_ASK_EVERY = 1.0
"""Seconds after which an unanswered question is repeated; the learner may have been restarted."""

_REBUILD_AFTER = 30.0
"""Seconds without a word, although the question was repeated, after which the socket is made anew; twice
as many each time, until weights come: on a slow link one version takes long."""

_MOST_PATIENCE = 600.0

_HEARTBEAT_S = 60.0
"""Seconds that one array may be on its way. No heartbeat passes it, so with fewer a large one would look
like a dead link, again and again."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One version, as it came."""

    epoch: int
    """Names the learner's life."""
    version: int
    arrays: dict[str, np.ndarray]
    spaces: Spaces | None
    """Of the simulators that the learner's actor was built for, if it says so."""


class WeightsDownload:
    """Keeps the newest weights of a learner at hand, and those that an evaluation is pinned to.

    It asks for what is newer than what it has; the learner answers once there is any. Versions that come
    faster than they arrive are skipped.

    Args:
        endpoint: The learner's.
        name: The rollout worker's.
        keys: Likewise.

    Raises:
        EndpointError: The endpoint is malformed.
    """

    def __init__(self, endpoint: str, name: str, keys: Keys | None = None) -> None:
        sockets.check_endpoint(endpoint)
        self.endpoint = endpoint
        self.loaded = 0
        """How often the policy took weights; told to the learner."""
        self.unfit = 0
        """How often weights did not fit the policy; likewise."""
        self.serving = 0
        """The version that the policy has; likewise."""
        self._damaged = 0
        self._name = name
        self._keys = keys
        self._suspicion = Suspicion(endpoint, keys)
        self._epoch = 0
        self._complaint = ""
        self._lock = threading.Condition()
        self._newest: Weights | None = None
        self._pinned: Weights | None = None
        self._failure: BaseException | None = None
        self._stopping = False
        self._number = 0
        self._patience = _REBUILD_AFTER
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connect()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """Names the life of the learner from which the latest weights came."""
        return self._epoch

    @property
    def failed(self) -> int:
        """How often weights were damaged or did not fit."""
        return self._damaged + self.unfit

    def newest(self) -> Weights | None:
        """The newest weights that have arrived; None before the first of this life of the learner.

        Raises:
            StartupFailed: The thread that fetches them has failed.
        """
        with self._lock:
            self._raise_failure()
            return self._newest

    def of(self, version: int) -> Weights | None:
        """The weights of one version; None if they are not here, or no longer.

        Raises:
            StartupFailed: The thread that fetches them has failed.
        """
        with self._lock:
            self._raise_failure()
            for weights in (self._pinned, self._newest):
                if weights is not None and weights.version == version:
                    return weights
            return None

    def wait(self, stopping: Callable[[], bool]) -> Weights | None:
        """Wait for the first weights, and say now and then that they are awaited.

        Returns:
            None if `stopping` said so first.
        """
        said = time.monotonic()
        while not stopping():
            with self._lock:
                self._raise_failure()
                if self._newest is not None:
                    return self._newest
                self._lock.wait(0.25)
            if time.monotonic() >= said + 5.0:
                said = time.monotonic()
                log.info("waiting for weights from the learner at %s", self.endpoint)
        return None

    def close(self) -> None:
        """End the thread."""
        self._stopping = True
        self._thread.join()
        self._context.term()

    # -- The thread

    def _run(self) -> None:
        try:
            self._want()
            while not self._stopping:
                if self._socket.poll(200):
                    self._handle(self._socket.recv_multipart(copy=False))
                    self._heard = time.monotonic()
                    self._suspicion.end()
                    continue
                now = time.monotonic()
                self._look_for_a_refusal()
                if now >= self._heard + self._patience:
                    self._patience = min(2 * self._patience, _MOST_PATIENCE)
                    self._socket.close(0)
                    self._connect()
                    self._want()
                elif now >= self._asked + _ASK_EVERY:
                    self._ask()
        except BaseException as error:
            with self._lock:
                self._failure = error
                self._lock.notify_all()
        finally:
            self._socket.close(0)

    def _connect(self) -> None:
        self._socket = sockets.dealer(self._context, self.endpoint, _HEARTBEAT_S, self._keys)
        self._heard = time.monotonic()
        self._suspicion.begin()

    def _want(self) -> None:
        """Ask a new question: for what is newer than what is here now."""
        self._number += 1
        self._ask()

    def _ask(self) -> None:
        self._asked = time.monotonic()
        newest, pinned = self._newest, self._pinned
        fields = {
            "name": self._name,
            "epoch": self._epoch,
            "version": 0 if newest is None else newest.version,
            "pinned": 0 if pinned is None else pinned.version,
            "serving": self.serving,
            "loaded": self.loaded,
            "failed": self.failed,
        }
        try:
            header = Header(Op.WANT, request_id=self._number)
            self._socket.send(header.pack() + encode_meta(fields), sockets.NOBLOCK)
        except zmq.Again:
            pass  # it is repeated

    def _handle(self, frames: list[Any]) -> None:
        try:
            header = unpack(frames[0].bytes)
            if header.op == Op.ERROR:
                self._show(str(decode_meta(frames[0].bytes[HEADER_SIZE:]).get("message")))
            if header.op != Op.WEIGHTS:
                return
            weights, pinned = _read(header, frames)
        except VersionMismatch as error:
            raise StartupFailed(f"{self.endpoint}: {error}") from None
        except DecodeError as error:
            self._damaged += 1
            log.warning("weights from %s are damaged, and asked for again: %s", self.endpoint, error)
            self._stop_or_sleep()
        else:
            self._patience = _REBUILD_AFTER
            self._keep(weights, pinned)
        self._want()

    def _look_for_a_refusal(self) -> None:
        """Find out whether keys are the reason of the silence; without weights there is no going on."""
        refusal = self._suspicion.look()
        if refusal is None:
            return
        if refusal.final and self._newest is None:
            raise StartupFailed(f"the learner at {self.endpoint} {refusal.reason}")
        self._show(f"nothing: it {refusal.reason}")

    def _show(self, complaint: str) -> None:
        """Log what is said in place of weights; the same words once."""
        if complaint != self._complaint:
            self._complaint = complaint
            log.warning("%s gives no weights, but says: %s", self.endpoint, complaint)

    def _keep(self, weights: Weights, pinned: bool) -> None:
        with self._lock:
            if weights.epoch != self._epoch:
                # Another life of the learner, whose version 3 is not the one that is here.
                self._epoch, self._newest, self._pinned = weights.epoch, None, None
            if pinned:
                self._pinned = weights
            else:
                self._newest = weights
            self._lock.notify_all()

    def _stop_or_sleep(self) -> None:
        """A moment's rest, so that damage that repeats does not keep the link busy."""
        until = time.monotonic() + 0.5
        while time.monotonic() < until and not self._stopping:
            time.sleep(0.05)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise StartupFailed(f"fetching weights failed: {self._failure}") from self._failure


def weights_signature(version: int, notes: bytes, checksum: int) -> int:
    """What the header of weights has as its signature: damage to any of the three shows.

    Args:
        version: Their number.
        notes: What follows the header.
        checksum: Of the body, 32 bits.
    """
    return checksum_of([version.to_bytes(8, "little"), notes]) << 32 | checksum


def _read(header: Header, frames: list[Any]) -> tuple[Weights, bool]:
    """The weights in a WEIGHTS message, and whether they are those of an evaluation.

    Raises:
        DecodeError: They are not what was sent.
    """
    body = [frame.buffer for frame in frames[1:]]
    if header.frames != len(body) or not body:
        raise DecodeError(f"{len(body)} frames came, the header says {header.frames}")
    words = frames[0].bytes[HEADER_SIZE:]
    if weights_signature(header.policy_version, words, checksum_of(body)) != header.signature:
        raise DecodeError(f"version {header.policy_version} does not have its checksum")
    notes = decode_meta(words, MAX_META)
    arrays = decode(bytes(body[0]), frames[2:])
    if not isinstance(arrays, dict) or type(notes.get("epoch")) is not int:
        raise DecodeError("not weights")
    spaces = Spaces.of_fields(notes["spaces"]) if "spaces" in notes else None
    weights = Weights(notes["epoch"], header.policy_version, arrays, spaces)
    return weights, bool(notes.get("pinned"))
