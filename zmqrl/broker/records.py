"""What the broker knows: clients, rollout workers, requests and batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from zmqrl.errors import DecodeError

if TYPE_CHECKING:
    from zmqrl.broker.policies import Policy


WAIT = "wait"
"""What a client does that has a request open."""

STEP = "step"
"""What a client does that has its actions."""

REST = "rest"
"""What a client does that has said that it asks no more for now."""

MAX_PHASE = 50


class State(Enum):
    """Where a request is."""

    WAITING = "queued"
    RUNNING = "running"
    CLOSED = "closed"


# By names of their own: the look at a member of an enum is felt with each request.
WAITING, RUNNING, CLOSED = State.WAITING, State.RUNNING, State.CLOSED


@dataclass(slots=True, eq=False)
class Client:
    """A peer of the frontend: an env worker, or anyone's simulator loop."""

    peer: bytes
    name: str
    incarnation: int
    rank: int | None
    world_size: int | None
    host: str
    pid: int
    since: float
    heard: float
    eval: bool | None = False
    """What it says that it will ask for, until it asks; None once it has asked for a named policy."""
    probed: float = 0.0
    key: str = ""
    """Its public key; empty without keys."""
    requests: dict[int, Request] = field(default_factory=dict)
    """Its open requests by request id."""
    open_bytes: int = 0
    phase: str = "connected"
    """What it does while it has no request open."""
    phase_since: float = 0.0
    modes: dict[int, bool | None] = field(default_factory=dict)
    """Normal mode: per pipeline stage, whether its latest request for the default policy was an eval
    one; None while the stage rests."""

    def enters(self, phase: str, now: float) -> None:
        """Note what it does from now on."""
        self.phase, self.phase_since = phase, now

    def doing(self) -> tuple[str, float]:
        """What it does, and since when: what it has said that it does, else it waits or steps."""
        if self.requests and self.phase in (STEP, REST):
            return WAIT, next(iter(self.requests.values())).arrived
        return self.phase, self.phase_since


@dataclass(slots=True, eq=False)
class Request:
    """One shard of observations; the broker's until it is answered."""

    slot: int
    client: Client
    policy: Policy
    request_id: int
    message: list[Any]
    """Its frames, forwarded as they are: header and meta as bytes, then the large buffers."""
    size: int
    rows: int
    eval: bool
    stage: int
    arrived: float
    deadline: float
    in_lane: int = 0
    """Bytes of it that are in the shared memory of its client."""
    taken_back: bool = False
    """Whether a worker that may still be reading it had it before."""
    state: State = WAITING
    history: tuple[str, ...] = ()
    """One line for each attempt that failed."""
    released: bool = False
    """Normal mode: its barrier has opened, so it need not wait for others again."""
    begins: bool = False
    """Whether it needs no state that is kept for its client."""
    avoid: frozenset[str] = frozenset()
    """Names of the workers that were lost with it."""


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that one worker holds."""

    number: int
    sent: float
    begun: float
    """When it was sent, or when the batch before it was done."""
    requests: dict[int, Request]
    """By slot."""


@dataclass(slots=True)
class WorkerTotals:
    """What a worker of one name has done, over all its restarts."""

    batches: int = 0
    shards: int = 0
    rows: int = 0
    predict_s: float = 0.0
    policy_version: int = 0


@dataclass(slots=True, eq=False)
class Worker:
    """A peer of the backend: a rollout worker."""

    peer: bytes
    name: str
    policy: Policy
    rank: int | None
    world_size: int | None
    host: str
    pid: int
    since: float
    heard: float
    totals: WorkerTotals
    key: str = ""
    """Its public key; empty without keys."""
    sticky: bool = False
    """Whether it keeps state for its clients, whose requests should come to it again."""
    homes: int = 0
    """The connected clients whose requests do."""
    ready: bool = False
    """Whether it has been idle."""
    probed: float = 0.0
    changed: float = 0.0
    """When it last became idle or busy."""
    batches: dict[int, Batch] = field(default_factory=dict)
    """What it holds, by number: the first it computes, one more may wait behind it."""
    given: int = 0
    """The number of the batch that it was given last."""
    quarantined: bool = False
    """Its last batch was taken back because it took too long; over with its next sign of idleness."""
    reads_lane: bool = False
    """Whether it can read the shared memory of clients."""
    unaware_since: float | None = None
    """Since when its READYs do not know a batch that it holds."""

    @property
    def batch(self) -> Batch | None:
        """The batch that it computes."""
        return next(iter(self.batches.values()), None)


@dataclass(frozen=True, slots=True)
class Introduction:
    """The checked fields of a HELLO message."""

    name: str
    incarnation: int
    rank: int | None
    world_size: int | None
    host: str
    pid: int
    eval: bool
    policy: str
    """What a worker serves; "" is the default policy."""
    sticky: bool
    """Whether a worker keeps state for its clients."""

    @classmethod
    def of(cls, fields: dict[str, Any], role: str) -> Introduction:
        """Check what a peer says of itself.

        Args:
            fields: Of the HELLO message.
            role: Who connects to this socket: `client` or `worker`.

        Raises:
            DecodeError: Naming the field that is wrong.
        """
        said = fields.get("role", role)
        if said != role:
            places = {"client": "broker.frontend", "worker": "broker.backend", "env": "actor.endpoint"}
            right = places.get(str(said), "another one")
            what = "what records for a learner" if said == "env" else f"a {said}"
            raise DecodeError(
                f"HELLO: this socket is for a broker's {role}s; {what} connects to {right}"
            )
        name, host = fields.get("name"), fields.get("host", "")
        # They are shown in terminals and logs, which obey some characters.
        if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
            raise DecodeError("HELLO: name must be a str of 1 to 200 printable characters")
        if not isinstance(host, str) or len(host) > 300 or not host.isprintable():
            raise DecodeError("HELLO: host must be a short printable str")
        mode = fields.get("mode", "train")
        if mode not in ("train", "eval"):
            raise DecodeError("HELLO: mode must be train or eval")
        policy = fields.get("policy", "")
        if not isinstance(policy, str) or len(policy) > 100 or not policy.isprintable():
            raise DecodeError("HELLO: policy must be a str of at most 100 printable characters")
        sticky = fields.get("sticky", False)
        if type(sticky) is not bool:
            raise DecodeError("HELLO: sticky must be true or false")
        numbers = {}
        for key in ("incarnation", "pid"):
            numbers[key] = fields.get(key, 0)
        rank, world_size = fields.get("rank"), fields.get("world_size")
        if (rank is None) != (world_size is None):
            raise DecodeError("HELLO: rank and world_size go together")
        if rank is not None:
            numbers["rank"], numbers["world_size"] = rank, world_size
        for key, number in numbers.items():
            if type(number) is not int or not 0 <= number < 2**63:
                raise DecodeError(f"HELLO: {key} must be a number of at least 0")
        if rank is not None and rank >= world_size:
            raise DecodeError(f"HELLO: rank {rank} is not below world_size {world_size}")
        return cls(
            name,
            numbers["incarnation"],
            rank,
            world_size,
            host,
            numbers["pid"],
            mode == "eval",
            policy,
            sticky,
        )


@dataclass(slots=True)
class Counters:
    """What happened since the broker started.

    At any time `requests == answered + errors + cancelled + open requests`.
    """

    requests: int = 0
    """Requests taken in."""
    answered: int = 0
    """Ended in a reply of the policy."""
    errors: int = 0
    """Ended in an ERROR."""
    cancelled: int = 0
    """Given up by their client, or their client was lost."""
    requeued: int = 0
    """Times that a request went back to the queue because its worker was lost or stuck."""
    dropped: int = 0
    """Messages that could not be delivered to a client."""
    late_results: int = 0
    """Results for attempts that no longer counted."""
    duplicates: int = 0
    """Requests sent again by their client while they were still open."""
    overloaded: int = 0
    """Requests refused because the queue was full."""
    malformed: int = 0
    """Messages that were not valid."""
    unknown: int = 0
    """Messages from peers that had to register again."""
    revoked: int = 0
    """Peers turned out, and messages of such peers, because their keys are let in no longer."""
    lane_requests: int = 0
    """Requests whose large arrays are in shared memory."""
    lane_replies: int = 0
    """Replies of that kind."""
    inlined: int = 0
    """Times that the broker put them into the message, for a worker that cannot read the memory."""
    lost_clients: int = 0
    lost_workers: int = 0
    batches: int = 0
    shards: int = 0
    rows: int = 0
    queue_s: float = 0.0
    """Summed over the answered requests."""
