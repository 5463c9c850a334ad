"""A request, and what becomes one: arguments are checked, the observation is encoded and bounded."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple, Type

from zmqrl.errors import ClientError, EncodeError, PolicyTimeout
from zmqrl.transport.codec import Encoded, encode
from zmqrl.transport.header import (
    FLAG_EVAL,
    FLAG_LANE,
    FLAG_READS_LANE,
    HEADER_SIZE,
    MAX_FRAMES,
    Header,
    Op,
    policy_id_of,
)
from zmqrl.transport.sharedmem import Lane, Slot
from zmqrl.transport.tree import rows_of

_INFER = int(Op.INFER)  # a member of an enum costs at every look, and to pack


class Request:
    """A request, until it has ended in a result or an error.

    Args:
        header: Without attempt and budget, which are set each time that it is sent.
        meta: What follows the header in the first frame.
        buffers: The large arrays; kept, because the request may have to be sent again.
        deadline: Of `time.monotonic()`.
        borrowed: Whether the caller may change the arrays once the request is sent.
    """

    # In the class, because most requests keep most of them to their end.
    attempt = 0
    size = 0
    """Bytes of the request, without its header, once it is sent; those in shared memory too."""
    reply_size = 0
    look_at = 0.0  # when to do something about it if there is no reply
    retry = False  # whether it is to be sent again then
    kind: Type[ClientError] = PolicyTimeout  # what it ends in when time is up
    state = ""  # what the broker last said of it
    done = False
    result: Any = None
    leaves_memory_out = False  # because the policy kept no states when it was last asked
    carried: Any = None  # state of the rows, which came with the result, for the next request
    error: Optional[ClientError] = None
    reply: Optional[Header] = None
    slot: Optional[Slot] = None  # of shared memory, with the large arrays
    read_once = False  # whether nobody but the worker that replied has read that
    policy = ""  # the name of the policy that is asked; the broker may know its number only
    ended: Optional[Callable[[], None]] = None  # called when it has; must not use the connection

    def __init__(
        self,
        header: Header,
        meta: bytes,
        buffers: List[Any],
        deadline: float,
        borrowed: bool = False,
    ) -> None:
        self.header = header
        self.meta = meta
        self.buffers = buffers
        self.deadline = deadline
        self.borrowed = borrowed

    def settle(self, lane: Lane) -> None:
        """Put the large arrays where they can stay until the request has ended."""
        self.buffers, self.slot = lane.place(self.buffers, self.borrowed)
        if self.slot is not None:
            self.header = self.header._replace(flags=self.header.flags | FLAG_LANE, frames=0)

    def leave(self, lane: Lane) -> None:
        """Have nothing more to do with shared memory: what is sent again goes over the socket."""
        if self.slot is not None:
            self.buffers = [bytes(part) for part in self.slot.parts]
            lane.slots.give_back(self.slot, is_unread=False)
            self.slot = None
        flags = self.header.flags & ~(FLAG_LANE | FLAG_READS_LANE)
        self.header = self.header._replace(flags=flags, frames=len(self.buffers))

    def end(self, result: Any = None, error: Optional[ClientError] = None) -> None:
        """Note how it ended, and free its buffers."""
        self.result, self.error, self.done = result, error, True
        self.buffers = []
        if self.ended is not None:
            self.ended()


def checked_timeout(timeout: float) -> float:
    """The seconds that a call may take.

    Raises:
        ValueError: They are no number above 0.
    """
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout < 1e7:
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    return float(timeout)


def checked_mode(mode: str) -> str:
    """`train` or `eval`.

    Raises:
        ValueError: It is neither.
    """
    if mode not in ("train", "eval"):
        raise ValueError(f"mode must be 'train' or 'eval', not {mode!r}")
    return mode


def checked_name(name: Optional[str]) -> Optional[str]:
    """The name of a client, or None.

    Raises:
        ValueError: It is empty, too long, or not for every terminal.
    """
    if name is not None and not (0 < len(name) <= 200 and name.isprintable()):
        raise ValueError(f"a name has 1 to 200 printable characters, not {name!r}")
    return name


def checked_place(rank: Optional[int], world_size: Optional[int]) -> Dict[str, int]:
    """The fields of HELLO that say which of how many env workers this is.

    Raises:
        ValueError: Only one of them was given, or the rank is not below the number.
    """
    if rank is None and world_size is None:
        return {}
    if rank is None or world_size is None:
        raise ValueError("give rank and world_size together")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0 … world_size - 1 ({world_size - 1})")
    return {"rank": rank, "world_size": world_size}


def encoded_observation(
    observation: Any,
    copy: bool,
    simulators: Optional[int],
    max_message_mb: int,
    what: str = "the observation",
) -> Tuple[Encoded, int]:
    """An observation, ready to send, and its rows.

    Args:
        observation: A tree; every array [N, ...].
        copy: Copy large arrays now.
        simulators: How many there are, and therefore rows; None for any number.
        max_message_mb: Mebibytes that it may have.
        what: What an error calls it that is about its size.

    Raises:
        EncodeError: It holds what cannot be sent, or too much, or rows that differ.
        ValueError: The rows are not those of the simulators.
    """
    parts = encode(observation, copy)
    rows = rows_of(observation) if parts.rows is None else parts.rows
    if simulators is not None and rows != simulators:
        raise ValueError(
            f"the observation has {rows} rows, but envs has {simulators} simulators; infer_one() "
            "takes an observation that has no batch axis"
        )
    if rows == 0:
        raise EncodeError("the observation has no rows: there is nothing to act on")
    size = len(parts.meta) + sum(map(len, parts.buffers))
    if size > (max_message_mb << 20) - HEADER_SIZE:
        raise EncodeError(f"{what} has {size / 2**20:.1f} MiB; max_message_mb is {max_message_mb}")
    if len(parts.buffers) > MAX_FRAMES:
        raise EncodeError(f"{what} has {len(parts.buffers)} large arrays; {MAX_FRAMES} go")
    return parts, rows


def request_of(
    parts: Encoded,
    rows: int,
    deadline: float,
    borrowed: bool,
    request_id: int,
    mode: str,
    flags: int,
    stage: int,
    policy: str,
    version: int,
) -> Request:
    """The request for what `encoded_observation` returned.

    Args:
        parts: The observation.
        rows: How many it has.
        deadline: Of `time.monotonic()`.
        borrowed: Whether the caller may change the arrays once the request is sent.
        request_id: Its number, new for each.
        mode: `train` or `eval`.
        flags: Of the connection.
        stage: The pipeline stage.
        policy: The name of the policy that is asked; empty for the pool's own.
        version: Of the weights that must answer; 0 for the newest.
    """
    header = Header(
        _INFER,
        flags=(FLAG_EVAL if mode == "eval" else 0) | flags,
        request_id=request_id,
        stage=stage,
        frames=len(parts.buffers),
        rows=rows,
        signature=parts.signature,
        policy_id=policy_id_of(policy),
        policy_version=version,
    )
    return Request(header, parts.meta, parts.buffers, deadline, borrowed)
