"""Clients in a closed loop, many of them in one thread, each checking every answer that it gets."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from faults.envs import Envs, Told
from faults.policies import is_answer_to, observation
from faults.pool import wait_for
from zmqrl import PolicyClient
from zmqrl.client import Pending
from zmqrl.errors import (
    BrokerUnreachable,
    ClientClosed,
    ClientError,
    PolicyTimeout,
    Replaced,
    StateLost,
)
from zmqrl.transport.codec import decode_meta
from zmqrl.transport.header import HEADER_SIZE, Op, op_of, request_id_of

_IDLE = 0.001
_ALONE = 0.25  # hundreds of processes that look about every millisecond take all the time there is
_LONGEST = 120.0
_GRACE = 3.0
"""Seconds past its deadline after which a call that has not ended counts as hanging."""


@dataclass
class Ledger:
    """How calls ended, as their callers saw it; of callers that were killed, the calls they saw end."""

    requests: int = 0
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Explicit errors by the name of their class."""
    lost: int = 0
    """Calls that ended in neither within their time, or not at all."""
    duplicated: int = 0
    """Replies and final errors that came for a call that had one already."""
    crossed: int = 0
    """Answers that were made of other data than was asked about, of another state, or by other weights
    than they say."""

    def add(self, other: Ledger) -> None:
        """Add the counts of another ledger."""
        self.requests += other.requests
        self.answered += other.answered
        self.errors += other.errors
        self.lost += other.lost
        self.duplicated += other.duplicated
        self.crossed += other.crossed

    def plain(self) -> dict[str, Any]:
        """As what JSON takes."""
        return dict(vars(self))

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Ledger:
        """What `plain` gave."""
        return cls(**{**plain, "errors": Counter(plain["errors"])})


@dataclass(frozen=True)
class Failure:
    """A call that ended in an error."""

    client: int
    sequence: int
    error: ClientError


class Load:
    """Clients that each ask again as soon as they have their answer; it runs from its making on.

    The rows of a request are 1 to 3, and every other client's arrays travel in frames of their own.

    Args:
        endpoint: The broker's frontend.
        clients: How many.
        first: The number of the first client. Two loads on one pool must share no number.
        requests: How many to ask in all; None goes on until `finish`.
        depth: How many calls a client keeps open.
        timeout: Seconds that a call may take. One that ends in `PolicyTimeout` or `BrokerUnreachable` is
            lost, unless the drill expects that error.
        width: Numbers in a row; None mixes small and large ones.
        envs: Of each client, if the policy has a memory; see `faults.envs`.
        stay: Whether their states stay in one process for all of an episode.
        expects: The errors that the drill is about.
        mark: Gives the `Command` for a request, from the numbers of the client and of the request.
        options: For every `PolicyClient`; callables are called with the client's number.
    """

    def __init__(
        self,
        endpoint: str,
        clients: int,
        *,
        first: int = 0,
        requests: int | None = None,
        depth: int = 1,
        timeout: float = 30.0,
        width: int | None = None,
        envs: int = 0,
        stay: bool = False,
        expects: tuple[type[ClientError], ...] = (),
        mark: Callable[[int, int], int] = lambda client, sequence: 0,
        **options: Any,
    ) -> None:
        self.ledger = Ledger()
        self.expects = expects
        self.failures: list[Failure] = []
        """The calls that ended in an error."""
        self.told: list[Told] = []
        """What the clients were told of lost states."""
        self.ended: list[tuple[float, float]] = []
        """When each call began and ended."""
        self._left = float("inf") if requests is None else requests
        self._timeout, self._width, self._mark, self._stay = timeout, width, mark, stay
        self._stopping = self._broken_off = False
        self._failure: BaseException | None = None
        self._clients = {
            number: _Witness(
                endpoint,
                timeout=timeout,
                **{key: value(number) if callable(value) else value for key, value in options.items()},
            )
            for number in range(first, first + clients)
        }
        self._seats = [
            _Seat(client, number, sequence, depth, Envs(envs) if envs else None)
            for sequence in range(depth)
            for number, client in self._clients.items()
        ]
        self._begun = [float("inf")] * len(self._seats)  # of each seat's open call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # -- For the drill

    def wait_for(self, more: int, timeout: float = 40.0) -> None:
        """Wait until so many more calls have been answered."""
        goal = self.ledger.answered + more
        wait_for(lambda: self._failed() or self.ledger.answered >= goal, f"{more} answers", timeout)

    def is_running(self) -> bool:
        """Whether it asks, or waits for answers."""
        return self._thread.is_alive()

    def is_open_since(self, moment: float) -> bool:
        """Whether a call that was open at `moment` still is."""
        self._failed()
        return min(self._begun) <= moment

    def recovery_s(self, moment: float) -> float:
        """Seconds after `moment` until all calls that were open then had ended; 0 if none was."""
        return max((end - moment for begin, end in self.ended if begin <= moment < end), default=0.0)

    def longest_s(self, moment: float) -> float:
        """Seconds of the longest call that has ended since `moment`, not counting those before it."""
        return max((end - max(begin, moment) for begin, end in self.ended if end > moment), default=0.0)

    def finish(self) -> Ledger:
        """Wait until all `requests` have ended, or else ask no more and wait for what is open.

        The clients are closed then. A call that is open past its deadline is lost.
        """
        self._stopping = self._left == float("inf")
        self._thread.join((0.0 if self._stopping else _LONGEST) + self._timeout + _GRACE)
        if self._thread.is_alive():
            self.ledger.lost += sum(begin < float("inf") for begin in self._begun)
            self.close()
        self._failed()
        return self.ledger

    def close(self) -> None:
        """Break off."""
        self._broken_off = True
        self._thread.join(self._timeout + _GRACE)

    def _failed(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return False

    # -- The thread

    def _run(self) -> None:
        try:
            while not self._broken_off and self._sweep():
                pass
            for client in self._clients.values():
                client.drain()
                self.ledger.duplicated += client.duplicated
                client.close()
        except BaseException as error:
            self._failure = error

    def _sweep(self) -> bool:
        """Look at every client once; whether there is anything to wait for."""
        moved = False
        for place, seat in enumerate(self._seats):
            if seat.pending is not None and seat.pending.wait(0.0):
                self._end(seat)
                self._begun[place] = float("inf")
                moved = True
            if seat.pending is not None or seat.retired:
                continue
            if self._stopping or self._left <= 0:
                seat.retired = True
                seat.client.rest()  # in normal mode the others wait for it otherwise
            else:
                self._left -= 1
                self._begun[place] = self._begin(seat)
                moved = True
        if not moved and self._seats[0].pending is not None:
            self._seats[0].pending.wait(_IDLE if len(self._seats) > 1 else _ALONE)
        elif not moved:
            time.sleep(_IDLE)
        return any(seat.pending is not None or not seat.retired for seat in self._seats)

    def _begin(self, seat: _Seat) -> float:
        width = self._width or (2000 if seat.number % 2 else 16)
        rows = 1 + (seat.number + seat.sequence) % 3
        command = self._mark(seat.number, seat.sequence)
        seat.asked = observation(seat.number, seat.sequence, rows, width, command)
        seat.begun = time.monotonic()
        memory = {} if seat.envs is None else seat.envs.ask(seat.sequence, rows)
        seat.pending = seat.client.submit(seat.asked, **memory)
        return seat.begun

    def _end(self, seat: _Seat) -> None:
        ledger, pending, seat.pending = self.ledger, seat.pending, None
        assert pending is not None
        try:
            answer = pending.result()
            weights = answer.get("weights", pending.policy_version)
            is_right = is_answer_to(seat.asked, answer) and np.all(weights == pending.policy_version)
            if seat.envs is not None:
                is_right &= seat.envs.take(seat.asked["tag"], answer, self._stay)
            ledger.crossed += not is_right
            ledger.answered += 1
        except ClientError as error:
            self.failures.append(Failure(seat.number, seat.sequence, error))
            if isinstance(error, StateLost) and seat.envs is not None:
                self.told.append(seat.envs.lose(str(error), error.rows))
            if isinstance(error, (PolicyTimeout, BrokerUnreachable)) and not isinstance(
                error, self.expects
            ):
                ledger.lost += 1
            else:
                ledger.errors[type(error).__name__] += 1
            seat.retired = isinstance(error, (Replaced, ClientClosed))
        ledger.requests += 1
        seat.sequence += seat.stride
        self.ended.append((seat.begun, time.monotonic()))


class _Witness(PolicyClient):
    """A client that notes what is delivered, also what a client has no use for."""

    duplicated = 0
    """Replies and final errors beyond the first for a request."""

    def drain(self) -> None:
        """Read what has come after the last answer."""
        self.catch_up()

    def _open(self) -> None:
        super()._open()
        handle, seen = self._connection._handle, set()

        def noting(first: bytes) -> None:
            if op_of(first) == Op.REPLY or (op_of(first) == Op.ERROR and _is_final(first)):
                request_id = request_id_of(first)  # 0: about the client, not about a request
                self.duplicated += request_id in seen
                seen.update({request_id} - {0})
            handle(first)

        self._connection._handle = noting  # type: ignore[method-assign]


def _is_final(error: bytes) -> bool:
    return decode_meta(error[HEADER_SIZE:]).get("code") not in ("overloaded", "stopping", "replaced")


@dataclass
class _Seat:
    """A client, and one call that it waits for."""

    client: _Witness
    number: int
    sequence: int
    stride: int
    envs: Envs | None
    asked: dict[str, Any] = field(default_factory=dict)
    pending: Pending | None = None
    begun: float = 0.0
    retired: bool = False
    """It asks no more: all is asked, or its name was taken over."""
