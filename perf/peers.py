"""What the processes of a bench have in common: where they find zmqrl, and how they connect."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from zmqrl.transport import sockets

MAX_SOCKETS = 8192
"""Of a context; libzmq's own limit is 1023."""


def dealer(endpoint: str, role: str, keys: Sequence[str] = ()) -> zmq.Socket[bytes]:
    """A DEALER of the process's own context, connected; with the keys in a folder, if one is named."""
    context = zmq.Context.instance()
    if not keys:
        return sockets.dealer(context, endpoint)
    from zmqrl.transport.security import Keys

    return sockets.dealer(context, endpoint, keys=Keys.load(keys[0], role))
