"""What the answers of a pool mean to the caller: a reply its output, an error one of the named kinds."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, Type

import numpy as np

from zmqrl.client.asking import Request
from zmqrl.errors import (
    AttemptsExhausted,
    AuthenticationFailed,
    ClientError,
    DecodeError,
    PolicyError,
    PolicyTimeout,
    Replaced,
    RequestRefused,
    StateLost,
)
from zmqrl.transport.codec import decode
from zmqrl.transport.header import FLAG_MEMORY, Header
from zmqrl.transport.tree import leaves

_KINDS: Dict[str, Type[ClientError]] = {
    "policy": PolicyError,
    "attempts": AttemptsExhausted,
    "deadline": PolicyTimeout,
    "memory": RequestRefused,
    "state": StateLost,
    "replaced": Replaced,
    "refused": RequestRefused,
    "revoked": AuthenticationFailed,
}


def output_of(header: Header, meta: bytes, buffers: List[Any]) -> Tuple[Dict[str, Any], Any]:
    """A reply's output, and the states of its rows if it carries them.

    Raises:
        DecodeError: It is no reply of a policy.
    """
    result = decode(meta, buffers)
    if not isinstance(result, dict):
        raise DecodeError(f"it is a {type(result).__name__}, not a dict")
    if not header.flags & FLAG_MEMORY:
        return result, None
    output, state = result.get("output"), result.get("state")
    if not isinstance(output, dict) or state is None:
        raise DecodeError("it has no 'output' and 'state'")
    for path, leaf in leaves(state):
        if not isinstance(leaf, np.ndarray) or leaf.shape[:1] != (header.rows,):
            raise DecodeError(f"the state has no array of {header.rows} rows at {path!r}")
    return output, state


def error_of(endpoint: str, fields: Dict[str, Any], request: Optional[Request] = None) -> ClientError:
    """The error that an ERROR message ends a request in.

    Args:
        endpoint: Whence it came.
        fields: Of the message.
        request: None if it is about the client as a whole.
    """
    code, message = str(fields.get("code")), str(fields.get("message", "unexplained error"))
    if request is not None:
        if code == "memory" and request.leaves_memory_out:
            code = "state"  # the policy is another one now
        if request.policy:
            message = f"the policy {request.policy!r}: {message}"
    error = _KINDS.get(code, ClientError)(f"{endpoint}: {message}")
    if request is not None and isinstance(error, StateLost):
        rows = fields.get("rows", list(range(request.header.rows)))
        if isinstance(rows, list):
            error.rows = [n for n in rows if type(n) is int and 0 <= n < request.header.rows]
    return error
