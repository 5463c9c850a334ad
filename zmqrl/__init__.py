"""zmqrl: a ZeroMQ worker pool that serves policy inference to simulators."""

from typing import TYPE_CHECKING, Any

# Deep within other imports it takes CPython 3.11 longer by 30 ms: calls at the end of a chunk of stack.
import numpy as _numpy  # noqa: F401

from zmqrl.client import Pending, PolicyClient
from zmqrl.errors import ZmqrlError

if TYPE_CHECKING:
    from zmqrl.client.aio import AsyncPolicyClient

__all__ = ["AsyncPolicyClient", "Pending", "PolicyClient", "ZmqrlError"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "AsyncPolicyClient":  # asyncio takes longer to import than all else here
        from zmqrl.client.aio import AsyncPolicyClient

        return AsyncPolicyClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
