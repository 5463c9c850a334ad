"""What the processes of a bench have in common: where they find zmqrl, and how they connect."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from zmqrl.transport import sockets

MAX_SOCKETS = 8192
"""Of a context; libzmq's own limit is 1023."""


def dealer(endpoint: str, role: str, keys: Sequence[str] = ()) -> zmq.Socket[bytes]:
    """A DEALER of the process's own context, connected; with the keys in a folder, if one is named."""
    own = None
    if keys:
        from zmqrl.transport.security import Keys

        own = Keys.load(keys[0], role)
    every_s = sockets.HEARTBEAT_S if role == "client" else None  # as zmqrl's own peers have it
    return sockets.dealer(zmq.Context.instance(), endpoint, keys=own, heartbeat_every_s=every_s)
