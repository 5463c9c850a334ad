"""The client's connection: requests out, replies back, and what to do when neither comes."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional

from zmqrl.client.answers import error_of, output_of
from zmqrl.client.asking import Request
from zmqrl.client.link import Link
from zmqrl.errors import (
    AuthenticationFailed,
    BrokerStopping,
    BrokerUnreachable,
    ClientError,
    DecodeError,
    Overloaded,
    PolicyError,
    PolicyTimeout,
    RequestRefused,
    SharedMemoryLost,
    VersionMismatch,
)
from zmqrl.transport.codec import decode_meta, encode_meta
from zmqrl.transport.header import FLAG_LANE, FLAG_READS_LANE, HEADER_SIZE, Header, Op, unpack
from zmqrl.transport.refusal import Refusal
from zmqrl.transport.security import Keys
from zmqrl.transport.sharedmem import KEPT_S, Lane

_REPLY = int(Op.REPLY)  # a member of an enum costs at every look

_ASK_AFTER = 1.0
"""Seconds without a word about a request, after which the client asks whether it is known; half of the
time that the request has, if that is less: what it ends in should say what it waits for."""

_REBUILD_AFTER = 2.0
"""Seconds without a word from the broker after that question, after which the socket is made anew; twice
as many each time, until a reply comes: on a slow link the words wait behind a large message."""

_SUSPECT_AFTER = 0.3
"""Seconds without a word from the broker on a new socket, after which it is looked whether keys are why;
less for a request that has less time."""

_SLOW_LINK = 10e6
"""Bytes per second that a link is taken to have at least."""

_RETRY_AFTER = 0.2
"""Seconds between two tries where the broker cannot take a request yet."""

_AT_EASE = KEPT_S
"""Seconds until somebody who awaits nothing need look again: then shared memory is let go of."""

_NO_REQUEST = Request(Header(Op.INFER), b"", [], float("inf"))
"""Never done: who awaits it reads all that has arrived."""


class Connection:
    """A socket to the broker, and the requests that are open on it.

    It never blocks but in `wait`, and there only until the time that it is given. A request that stays
    silent is asked about (KNOWN); if the broker does not know it, it is sent again; if the broker does
    not even answer that, the socket is made anew.

    Args:
        endpoint: The broker's frontend.
        introduction: The fields of HELLO.
        keys: Of a client.

    Raises:
        EndpointError: The endpoint is malformed.
    """

    def __init__(self, endpoint: str, introduction: Dict[str, Any], keys: Optional[Keys] = None) -> None:
        self.endpoint = endpoint
        self.requests: Dict[int, Request] = {}
        self._link = Link(endpoint, introduction, keys)
        self._patience = _REBUILD_AFTER
        self._refusal = (float("-inf"), "")  # when the broker last said that it is full, and how
        self._lane = Lane()
        self._untold = False  # whether a request has ended since the last `catch_up`

    @property
    def shares_memory(self) -> bool:
        """Whether large arrays go through shared memory, for now."""
        return self._lane.is_open

    @property
    def flags(self) -> int:
        """What the header of a request says of this client."""
        return FLAG_READS_LANE if self._lane.is_open else 0

    def start(self, request: Request) -> None:
        """Send a new request."""
        if self._link.asked is not None:
            self._receive(request)  # the answer may have come since the last call
            if self._is_deaf(time.monotonic()):
                self._rebuild()
        if self._link.suspicion.reason:  # libzmq gives a socket up that was refused
            self._link.suspicion.end()
            self._link.renew()
        if not self._link.reached and not self.requests:
            left = request.deadline - time.monotonic()
            self._link.suspicion.begin(after=min(_SUSPECT_AFTER, left / 2))
        self._link.goes_on(request.header.stage)
        request.size = len(request.meta) + sum(map(len, request.buffers))
        if request.buffers:
            request.settle(self._lane)
        try:
            self._send(request)
        except BaseException:
            if request.slot is not None:  # it may be on its way all the same
                self._lane.slots.give_back(request.slot, is_unread=False)
            raise
        self.requests[request.header.request_id] = request
        self._lane.look(time.monotonic())

    def wait(self, request: Request, until: float) -> None:
        """Wait until `request` has ended, but no longer than `until` (of `time.monotonic()`)."""
        until, suspicion = min(until, request.deadline), self._link.suspicion
        while not request.done:
            if request.header.request_id not in self.requests:
                self._end(request, error=ClientError("Ctrl-C came with the reply, which is lost"))
                return
            now = wake = time.monotonic()
            if now < until:
                wake = min(until, suspicion.due, min(r.look_at for r in self.requests.values()))
            self._receive(request, wake - now)
            if request.done:
                return
            now = time.monotonic()
            if now >= suspicion.due:
                self._look_for_a_refusal(request.deadline - now)
                now = time.monotonic()
            if now >= wake:
                for due in list(self.requests.values()):
                    if now >= due.look_at:
                        self._look_after(due, now)
            if now >= until:
                return

    def catch_up(self) -> float:
        """Take in all that has arrived, and do what is due.

        Returns:
            Seconds until more is due; 0 if a request has ended since the last call.
        """
        while True:
            self._receive(_NO_REQUEST)
            pause = _AT_EASE
            if self.requests:
                now = time.monotonic()
                wake = min(self._link.suspicion.due, min(r.look_at for r in self.requests.values()))
                if now >= wake:
                    if now >= self._link.suspicion.due:
                        self._heed(self._link.suspicion.glance())
                    for request in list(self.requests.values()):
                        if now >= request.look_at:
                            self._look_after(request, now)
                    continue  # what was sent has taken the sign of what has come meanwhile
                pause = min(wake - now, _AT_EASE)
            else:
                self._link.suspicion.rest()
                self._lane.look(time.monotonic())
            untold, self._untold = self._untold, False
            return 0.0 if untold else pause

    def fileno(self) -> int:
        """A file that is readable when `catch_up` has something to do; the same until `close`."""
        return self._link.fileno()

    def cancel(self, request: Request) -> None:
        """Give a request up, and tell the broker."""
        self._link.send([Header(Op.CANCEL, request_id=request.header.request_id).pack()])
        self._end(request, error=ClientError("the request was cancelled"))

    def rest(self, stage: int) -> None:
        """Say that a pipeline stage asks no more for now; said again to every new broker."""
        self._link.rest(stage)

    def phase(self, phase: str) -> None:
        """Say what this client does until its next request."""
        self._link.send([Header(Op.PHASE).pack() + encode_meta({"phase": phase})])

    def close(self, error: ClientError) -> None:
        """Say goodbye; what is open ends in `error`."""
        for request in list(self.requests.values()):
            self._end(request, error=error)
        self._link.send([Header(Op.BYE).pack()])
        self._link.close()
        self._lane.close()

    # -- Sending

    def _send(self, request: Request) -> None:
        now = time.monotonic()
        budget_ms = max(1, min(int((request.deadline - now) * 1000), 2**32 - 1))
        first = request.header.pack_again(request.attempt, budget_ms)
        first += request.meta if request.slot is None else request.slot.descriptor + request.meta
        left = request.deadline - now
        request.look_at = now + min(_ASK_AFTER, left if request.attempt else left / 2)
        request.attempt = min(request.attempt + 1, 255)
        request.retry = False
        self._link.send([first, *request.buffers])

    # -- Looking after what is silent

    def _look_for_a_refusal(self, time_left: float) -> None:
        """End what is open if keys are the reason that nobody answers."""
        self._heed(self._link.suspicion.look(min(0.3, time_left / 2)))

    def _heed(self, refusal: Optional[Refusal]) -> None:
        if refusal is not None and refusal.final:
            for request in list(self.requests.values()):
                self._end(request, error=self._authentication_failed())

    def _authentication_failed(self) -> AuthenticationFailed:
        return AuthenticationFailed(f"the broker at {self.endpoint} {self._link.suspicion.reason}")

    def _look_after(self, request: Request, now: float) -> None:
        """Do what is due for a request that has no reply yet."""
        if request.done:
            return
        if now >= request.deadline:
            self._ask(request, now)  # any answer tells the next call that the socket is alive
            self._link.send([Header(Op.CANCEL, request_id=request.header.request_id).pack()])
            self._end(request, error=self._timeout_of(request))
        elif request.retry:
            self._send(request)
        elif self._is_deaf(now):
            self._rebuild()
        else:
            request.look_at = min(now + _ASK_AFTER, request.deadline)
            self._ask(request, now)

    def _ask(self, request: Request, now: float) -> None:
        """Ask whether the broker has a request."""
        if self._link.asked is None:
            self._link.asked = now
        self._link.send([Header(Op.KNOWN, request_id=request.header.request_id).pack()])

    def _is_deaf(self, now: float) -> bool:
        """Whether not even KNOWN is answered: the connection may be half dead."""
        asked = self._link.asked
        return asked is not None and now >= asked + self._patience + self._transfer_s()

    def _rebuild(self) -> None:
        """Make the socket anew, and send again what is open."""
        self._patience *= 2
        self._link.renew()
        for request in self.requests.values():
            self._send(request)

    def _transfer_s(self) -> float:
        """Seconds that what is open may take on a slow link."""
        return sum(len(b) for request in self.requests.values() for b in request.buffers) / _SLOW_LINK

    def _try_again(self, request: Request, now: float, seconds: float) -> None:
        """Send a request once more after so many seconds."""
        request.retry = True
        request.look_at = min(now + seconds, request.deadline)

    def _timeout_of(self, request: Request) -> ClientError:
        if not self._link.reached and self._link.suspicion.reason:
            return self._authentication_failed()
        if not self._link.reached and request.kind is PolicyTimeout:
            return BrokerUnreachable(
                f"no broker answered at {self.endpoint} within the timeout; "
                "is one running there (bin/start-broker)?"
            )
        kind, state = request.kind, request.state
        refused, words = self._refusal
        if not state and time.monotonic() < refused + 2 * _ASK_AFTER:
            # Of many refusals at once some are dropped on the way; this one's will have been among them.
            kind, state = Overloaded, words
        state = state or "the broker said nothing about the request"
        of = f" of the policy {request.policy!r}" if request.policy else ""
        return kind(f"no reply{of} from {self.endpoint} within the timeout: {state}")

    def _end(self, request: Request, result: Any = None, error: Optional[ClientError] = None) -> None:
        # Ctrl-C may have broken off a call of this; by now the slot may be that of another request.
        self.requests.pop(request.header.request_id, None)
        slot, request.slot = request.slot, None
        if slot is not None:
            self._lane.slots.give_back(slot, request.read_once)
        if request.ended is None:
            self._untold = True
        request.end(result, error)

    # -- Receiving

    def _receive(self, awaited: Request, seconds: float = 0.0) -> None:
        """Read what arrives, up to the end of the request that is awaited; wait this long for it."""
        while not awaited.done:
            first = self._link.first(seconds)
            if first is None:
                return
            seconds = 0.0
            try:
                self._handle(first)
            except VersionMismatch as error:
                for other in list(self.requests.values()):
                    self._end(other, error=RequestRefused(f"{self.endpoint}: {error}"))
            except DecodeError:
                continue  # not from a zmqrl broker; the deadline speaks if nothing else comes

    def _handle(self, first: bytes) -> None:
        """Act on a message, of which the first frame has been read."""
        header = unpack(first)
        buffers = self._link.others() if header.frames else []
        self._link.heard()
        request = self.requests.get(header.request_id)
        if header.op == _REPLY:
            if request is not None:
                self._reply(request, header, first[HEADER_SIZE:], buffers)
            elif header.flags & FLAG_LANE:  # late: an earlier call gave this request up
                self._lane.reader.dismiss(first[HEADER_SIZE:])
        elif header.op == Op.UNKNOWN:
            now = time.monotonic()
            if now >= self._link.said_hello + _RETRY_AFTER:
                self._link.hello()
                if request is not None:
                    self._send(request)
            elif request is not None:
                self._try_again(request, now, _RETRY_AFTER)
        elif header.op == Op.WELCOME:
            self._lane.welcome(decode_meta(first[HEADER_SIZE:]))
        elif header.op == Op.ERROR:
            self._error(request, header.request_id, decode_meta(first[HEADER_SIZE:]))
        elif header.op == Op.KNOWN and request is not None:
            request.kind = PolicyTimeout
            request.state = str(decode_meta(first[HEADER_SIZE:]).get("state", ""))

    def _reply(self, request: Request, header: Header, meta: bytes, buffers: List[Any]) -> None:
        self._patience = _REBUILD_AFTER
        request.reply = header
        request.read_once = request.attempt == 1 and header.attempt == 0
        try:
            if header.flags & FLAG_LANE:
                meta, copies = self._lane.reader.copies(meta)
                buffers = [*copies, *buffers]
            request.reply_size = len(meta) + sum(map(len, buffers))
            result, request.carried = output_of(header, meta, buffers)
            self._end(request, result=result)
        except SharedMemoryLost:
            self._leave_the_lane(request)
        except DecodeError as error:
            self._end(request, error=PolicyError(f"the reply cannot be read: {error}"))

    def _error(self, request: Optional[Request], request_id: int, fields: Dict[str, Any]) -> None:
        code = fields.get("code")
        if request_id == 0:  # about this client as a whole
            for other in list(self.requests.values()):
                self._end(other, error=error_of(self.endpoint, fields))
        elif request is None:
            return
        elif code in ("overloaded", "stopping"):
            # A broker that stops may be started again, and one that is full gets emptier.
            retry_after = fields.get("retry_after_ms")
            wait_ms = retry_after if isinstance(retry_after, int) else 1000 * _RETRY_AFTER
            now = time.monotonic()
            request.kind = Overloaded if code == "overloaded" else BrokerStopping
            request.state = str(fields.get("message", ""))
            if code == "overloaded":
                self._refusal = (now, request.state)
            self._try_again(request, now, min(max(wait_ms / 1000, 0.001), 10.0))
        elif code == "lane" and request.slot is not None:
            self._leave_the_lane(request)
        else:
            self._end(request, error=error_of(self.endpoint, fields, request))

    def _leave_the_lane(self, request: Request) -> None:
        """A peer cannot read this process's memory, or the other way round; send over the socket."""
        self._lane.give_up()
        request.leave(self._lane)
        self._send(request)
