"""What the two legs of the broker share: peers, open requests, counters, and the outboxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zmqrl.broker.lane import BrokerLane
from zmqrl.broker.policies import Policies, Policy
from zmqrl.broker.records import (
    CLOSED,
    REST,
    STEP,
    WAITING,
    Client,
    Counters,
    Request,
    Worker,
    WorkerTotals,
)
from zmqrl.broker.scheduling import Limits
from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import FLAG_BEGINS, FLAG_EVAL, Header, Op


@dataclass(frozen=True, slots=True)
class Options:
    """How a broker behaves."""

    decoupled: bool = True
    limits: Limits = field(default_factory=Limits)
    attempt_timeout: float = 60.0
    """Seconds that a worker may hold a batch."""
    max_open: int = 100_000
    """Requests held at once."""
    max_open_bytes: int = 4 << 30
    max_client_open: int = 128
    """Requests of one client held at once."""
    max_client_bytes: int = 1 << 30


class Pool:
    """The broker's tables, and what keeps them consistent with each other.

    Args:
        options: How the broker behaves.
        epoch: Names this run of the broker.
        now: Seconds.
        lane: Shared memory; None without.
        send_now: Sends to a client at once, and returns whether it could.
    """

    def __init__(
        self,
        options: Options,
        epoch: int,
        now: float,
        lane: BrokerLane | None,
        send_now: Callable[[bytes, list[Any]], bool],
    ) -> None:
        self.options = options
        self.epoch = epoch
        self.now = now
        self.lane = lane
        self._send_now = send_now
        self.welcome: dict[str, Any] = {"epoch": epoch}
        """What every peer is told that has introduced itself."""
        if lane is not None:
            self.welcome["lane"] = lane.proof
        self.counters = Counters()
        self.clients: dict[bytes, Client] = {}
        self.workers: dict[bytes, Worker] = {}
        self.names: dict[str, Client] = {}
        self.requests: dict[int, Request] = {}
        """The open requests by slot."""
        self.open_bytes = 0
        """Of these requests, those in shared memory too."""
        self.lane_bytes = 0
        """Those in shared memory."""
        self.idle: dict[bytes, Worker] = {}
        """The workers that wait for work, the longest idle first."""
        self.ahead: dict[bytes, Worker] = {}
        """Those that are in their only batch and would take the next one already."""
        self.totals: dict[str, WorkerTotals] = {}
        """By worker name; outlives the worker."""
        self.to_clients: list[tuple[bytes, list[Any]]] = []
        self.to_workers: list[tuple[bytes, list[Any]]] = []
        self.notes: list[str] = []
        """What a person who watches the broker wants to read."""
        self.policies = Policies(options.decoupled, options.limits)
        self._next_slot = 1

    # -- Requests: each one that is opened is closed once, in one of three ways

    def is_full(self, client: Client, size: int) -> bool:
        """Whether a further request of `size` bytes would go over a bound."""
        options = self.options
        return (
            len(self.requests) >= options.max_open
            or self.open_bytes + size > options.max_open_bytes
            or len(client.requests) >= options.max_client_open
            or client.open_bytes + size > options.max_client_bytes
        )

    def open(
        self, client: Client, header: Header, message: list[Any], size: int, in_lane: int = 0
    ) -> None:
        """Take in a request and queue it.

        Args:
            client: Whose it is.
            header: Of it.
            message: It.
            size: Bytes of it.
            in_lane: How many of them are in shared memory.
        """
        slot, now = self._next_slot, self.now
        policy = self.policies.asked_by(client, header.policy_id)
        request = Request(
            slot,
            client,
            policy,
            header.request_id,
            message,
            size,
            header.rows,
            header.flags & FLAG_EVAL != 0,
            header.stage,
            now,
            now + header.budget_ms / 1000,
            in_lane,
            begins=header.flags & FLAG_BEGINS != 0,
        )
        self._next_slot = slot + 1
        self.requests[slot] = client.requests[request.request_id] = request
        self.open_bytes += size
        client.open_bytes += size
        client.phase = STEP  # once it has the reply
        self.counters.requests += 1
        if in_lane:
            self.lane_bytes += in_lane
            self.counters.lane_requests += 1
        policy.schedule.add(request)

    def answer(self, request: Request, reply: list[Any]) -> None:
        """Close a request with the policy's reply."""
        client = request.client
        if client.phase == REST and request.policy is self.policies.default:
            client.phase = STEP  # another of its stages rests; the one that has its actions goes on
        # Before the books are kept: that is done while the reply travels.
        if not self._send_now(client.peer, reply):
            self.to_clients.append((client.peer, reply))
        self._close(request)
        self.counters.answered += 1

    def fail(self, request: Request, error: list[Any]) -> None:
        """Close a request with an ERROR message."""
        self._close(request)
        self.counters.errors += 1
        self.to_clients.append((request.client.peer, error))

    def cancel(self, request: Request) -> None:
        """Close a request that nobody waits for any more."""
        self._close(request)
        self.counters.cancelled += 1

    def _close(self, request: Request) -> None:
        client, size = request.client, request.size
        if request.state is WAITING:
            request.policy.schedule.remove(request)
            self.policies.forget_unused(request.policy)  # one that runs has a worker
        request.state = CLOSED
        request.message = []
        self.open_bytes -= size
        self.lane_bytes -= request.in_lane
        client.open_bytes -= size
        del self.requests[request.slot]
        del client.requests[request.request_id]
        if client.phase == STEP:
            client.phase_since = self.now

    def explain(self, request: Request) -> str:
        """Where a request is, for its client to read."""
        waited = self.now - request.arrived
        text = f"{request.state.value} for {waited:.1f} s, {self._who_serves(request.policy)}"
        return "; ".join([text, *request.history])

    def _who_serves(self, policy: Policy) -> str:
        count = len(policy.peers.workers)
        others = len(self.workers) - count
        if policy is self.policies.default and not others:
            return f"{count} rollout workers connected"
        few = {0: "no rollout worker serves", 1: "1 rollout worker serves"}
        who = few.get(count, f"{count} rollout workers serve")
        names = ", ".join(sorted(str(p) for p in self.policies.served() if p is not policy))
        others_serve = f"{others} {'serves' if others == 1 else 'serve'} others"
        return f"{who} {policy} ({others_serve}{names and ': '}{names})"


def plain(op: Op, fields: dict[str, Any], request_id: int = 0) -> list[Any]:
    """A message without arrays."""
    return [Header(op, request_id=request_id).pack() + encode_meta(fields)]


def revoked() -> list[Any]:
    """The ERROR for a peer whose key is let in no longer."""
    return error("revoked", "the key of this peer has been revoked")


def error(code: str, text: str, request_id: int = 0, **details: int) -> list[Any]:
    """An ERROR message.

    Args:
        code: One of those in docs/protocol.md.
        text: For a person.
        request_id: What it is about; 0 for the peer as a whole.
        details: More fields.
    """
    return plain(Op.ERROR, {"code": code, "message": text, **details}, request_id)
