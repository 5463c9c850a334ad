"""What becomes a request: arguments are checked, the observation is encoded, its size is bounded."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from zmqrl.connection import Request
from zmqrl.errors import EncodeError
from zmqrl.transport.codec import Encoded, encode
from zmqrl.transport.header import FLAG_EVAL, HEADER_SIZE, MAX_FRAMES, Header, Op, policy_id_of
from zmqrl.transport.tree import rows_of

_INFER = int(Op.INFER)  # a member of an enum costs at every look, and to pack


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
    observation: Any, copy: bool, simulators: Optional[int], max_message_mb: int
) -> Tuple[Encoded, int]:
    """An observation, ready to send, and its rows.

    Args:
        observation: A tree; every array [N, ...].
        copy: Copy large arrays now.
        simulators: How many there are, and therefore rows; None for any number.
        max_message_mb: Mebibytes that it may have.

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
        raise EncodeError(
            f"the observation has {size / 2**20:.1f} MiB; max_message_mb is {max_message_mb}"
        )
    if len(parts.buffers) > MAX_FRAMES:
        raise EncodeError(f"the observation has {len(parts.buffers)} large arrays; {MAX_FRAMES} go")
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
