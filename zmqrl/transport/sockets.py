"""Every socket option in one place, each with its reason; identities and endpoints."""

from __future__ import annotations

import fcntl
import os
import re
from typing import IO, Any, Callable, Optional, Sequence

import zmq

from zmqrl.errors import EndpointError
from zmqrl.transport.security import CURVE_BYTES, Door, Keys

# Plain ints: pyzmq's enum costs over 1 us at every `zmq.SNDMORE | zmq.NOBLOCK`.
NOBLOCK = int(zmq.NOBLOCK)
SNDMORE = int(zmq.SNDMORE)
NOBLOCK_SNDMORE = NOBLOCK | SNDMORE
POLLIN = int(zmq.POLLIN)

MAX_MESSAGE_MB = 256
"""Mebibytes that a frame may have, unless configured otherwise."""

HEARTBEAT_S = 5.0
"""Seconds of silence of a peer's I/O thread after which it counts as gone, likewise."""

_send = super(zmq.Socket, zmq.Socket).send
"""`Socket.send` without what it adds for other kinds of sockets."""

_IPC_LIMIT = 107  # sun_path has 108 bytes, the last one NUL


def dealer(
    context: zmq.Context[Any],
    endpoint: str,
    heartbeat_s: float = HEARTBEAT_S,
    keys: Optional[Keys] = None,
    heartbeat_every_s: Optional[float] = None,
) -> zmq.Socket[bytes]:
    """A connected DEALER with an identity of its own.

    It has no MAXMSGSIZE: a connecting socket that receives a larger frame is deaf from then on, and the
    broker, which this process chose to connect to, keeps to its bounds.

    Args:
        context: Whose I/O thread serves it.
        endpoint: Where to connect.
        heartbeat_s: Seconds of silence of the peer's I/O thread after which it is gone.
        keys: Of this peer.
        heartbeat_every_s: Seconds between two heartbeats; a fifth of `heartbeat_s` unless given.

    Raises:
        EndpointError: The endpoint is malformed.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    # Random and new for each socket: a ROUTER gives two sockets of one identity to one of them only.
    # It must not begin with a zero byte, which marks the identities that libzmq makes up.
    socket.setsockopt(zmq.IDENTITY, b"z" + os.urandom(12))
    _common(socket, heartbeat_s, heartbeat_every_s)
    # Without a bound of its own a DEALER whose broker is away would queue and later replay old requests.
    socket.setsockopt(zmq.SNDHWM, 1000)
    # Above the unread probes of a long computation: a full pipe stops the heartbeats as well.
    socket.setsockopt(zmq.RCVHWM, 10_000)
    # Refused at first because the broker starts later: try often, but not in lock step for ever.
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 400)
    _connect(socket, endpoint, keys)
    return socket


def router(
    context: zmq.Context[Any],
    endpoint: str,
    max_unread: int = 1000,
    max_message_mb: int = MAX_MESSAGE_MB,
    heartbeat_s: float = HEARTBEAT_S,
    door: Optional[Door] = None,
    heartbeat_every_s: Optional[float] = None,
) -> zmq.Socket[bytes]:
    """A bound ROUTER.

    Args:
        context: Whose I/O thread serves it.
        endpoint: Where to bind.
        max_unread: Messages that wait for a peer which does not read; further ones are refused.
        max_message_mb: Mebibytes; a peer that sends a larger frame is cut.
        heartbeat_s: Seconds of silence of a peer's I/O thread after which it is gone.
        door: Who is let in; None for everybody on this machine.
        heartbeat_every_s: Seconds between two heartbeats; a fifth of `heartbeat_s` unless given.

    Raises:
        EndpointError: The endpoint is malformed, taken, cannot be bound here, or open to strangers.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    _common(socket, heartbeat_s, heartbeat_every_s)
    encryption = CURVE_BYTES if door is not None and door.keys is not None else 0
    socket.setsockopt(zmq.MAXMSGSIZE, (max_message_mb << 20) + encryption)
    # A peer that is gone is an error that the broker can count, not a message lost in silence.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A peer that reconnects after a cut takes over its own half-dead connection.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.SNDHWM, max_unread)
    # The broker always reads, and bounds its queues itself.
    socket.setsockopt(zmq.RCVHWM, 10_000)
    socket.setsockopt(zmq.BACKLOG, 4096)
    _bind(socket, endpoint, door or Door())
    return socket


def push(context: zmq.Context[Any], endpoint: str, keys: Optional[Keys] = None) -> zmq.Socket[bytes]:
    """A connected PUSH, for reports.

    Raises:
        EndpointError: The endpoint is malformed.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    # The last report says how the env worker ended; it is worth a wait when the context is terminated.
    socket.setsockopt(zmq.LINGER, 2000)
    _connect(socket, endpoint, keys)
    return socket


def pull(context: zmq.Context[Any], endpoint: str, door: Optional[Door] = None) -> zmq.Socket[bytes]:
    """A bound PULL, for reports; `door` as for `router`.

    Raises:
        EndpointError: The endpoint is malformed, taken, cannot be bound here, or open to strangers.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
    _bind(socket, endpoint, door or Door())
    return socket


def send(socket: zmq.Socket[bytes], frames: Sequence[Any], copied: int = 1) -> bool:
    """Send a message without waiting for the peer.

    Args:
        socket: A DEALER.
        frames: Of the message.
        copied: How many of the first frames are copied, because they are small; the others must not
            change until they are sent.

    Returns:
        Whether there was room for it; nothing of it was sent otherwise.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = NOBLOCK if index == last else NOBLOCK_SNDMORE
        try:
            _send(socket, frame, flags, index < copied)
        except zmq.Again:
            if index == 0:
                return False
            raise  # only the first frame can be refused
    return True


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is a message to read; a third of the price of a `zmq.Again` that says that not."""
    return bool(zmq.zmq_poll([(socket, POLLIN)], 0))  # cheaper than pyzmq's look-up of ZMQ_EVENTS


def sender(socket: zmq.Socket[bytes]) -> Callable[[bytes, Sequence[Any]], None]:
    """A function that sends a message through a ROUTER without waiting for the peer.

    Its arguments are the peer and the frames; what is not bytes is not copied. It raises `zmq.Again` if
    the peer does not read and there is no more room, and `zmq.ZMQError` with EHOSTUNREACH if it is gone;
    then nothing of the message was sent.
    """
    send = super(zmq.Socket, socket).send  # without what the method adds for other kinds of sockets

    def send_to(peer: bytes, frames: Sequence[Any]) -> None:
        # MANDATORY refuses at the identity frame or not at all, so no message is left half sent.
        send(peer, NOBLOCK_SNDMORE)
        last = len(frames) - 1
        if last:
            for frame in frames[:last]:
                send(frame, NOBLOCK_SNDMORE, isinstance(frame, bytes))
        send(frames[last], NOBLOCK, isinstance(frames[last], bytes))

    return send_to


def _connect(socket: zmq.Socket[bytes], endpoint: str, keys: Optional[Keys]) -> None:
    if keys is not None:
        keys.connect(socket)
    try:
        check_endpoint(endpoint)
        if re.search(r":(0|\*)$", endpoint):
            raise EndpointError(f"cannot connect to {endpoint}: give the port that the broker got")
        socket.connect(endpoint)
    except EndpointError:
        socket.close(0)
        raise
    except zmq.ZMQError as error:
        socket.close(0)
        raise EndpointError(f"cannot connect to {endpoint}: {error.strerror}") from None


def _bind(socket: zmq.Socket[bytes], endpoint: str, door: Door) -> None:
    try:
        check_endpoint(endpoint)
        if door.keys is None and is_exposed(endpoint):
            _check_that_it_is_wanted(endpoint, door)
        door.guard(socket)
        socket.bind(endpoint)
    except EndpointError:
        socket.close(0)
        raise
    except zmq.ZMQError as error:
        socket.close(0)
        why = str(error.strerror).partition(" (addr=")[0]  # it is said already
        if error.errno == zmq.EADDRINUSE:
            why += "; perhaps by a pool that still runs: end it, or choose another address"
        raise EndpointError(f"cannot bind {endpoint}: {why}") from None


def _check_that_it_is_wanted(endpoint: str, door: Door) -> None:
    if not door.insecure:
        raise EndpointError(
            f"cannot bind {endpoint}: other machines could reach it, and anybody there could use it. "
            "Make keys (bin/make-keys FOLDER) and set security.keys to FOLDER; or set "
            "security.insecure to true if every machine that can reach it may be trusted"
        )
    import logging  # a client binds nothing, and need not wait for this

    logging.getLogger(__name__).warning(
        "%s can be reached from other machines, by anyone, unencrypted (security.insecure)", endpoint
    )


def _common(socket: zmq.Socket[bytes], heartbeat_s: float, every_s: Optional[float]) -> None:
    # Long enough for a goodbye, too short to keep a process from ending.
    socket.setsockopt(zmq.LINGER, 200)
    # Heartbeats run in libzmq's I/O thread: a policy that holds the GIL does not look dead.
    every_s = heartbeat_s / 5 if every_s is None else every_s
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(100, int(every_s * 1000)))
    # No HEARTBEAT_TTL: it would tell the peer to use our time limit in place of its own.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(heartbeat_s * 1000))
    # A peer that connects and then says nothing must not hold a place for ever.
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    socket.setsockopt(zmq.IPV6, 1)


def check_endpoint(endpoint: str) -> None:
    """Refuse what libzmq would accept in part, or answer with a number.

    Raises:
        EndpointError: Saying what is wrong and what an endpoint looks like.
    """
    if not isinstance(endpoint, str):
        raise EndpointError(f"an endpoint is a str, not a {type(endpoint).__name__}")
    if endpoint.startswith("ipc://") and len(endpoint) > 6:
        length = len(os.fsencode(endpoint[6:]))
        if length > _IPC_LIMIT:
            raise EndpointError(
                f"the path of {endpoint} has {length} bytes; a Unix socket takes {_IPC_LIMIT}. "
                "Use a shorter folder"
            )
        return
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.%a-z]+\]|[^:/\s]+):(\d{1,5}|\*)", endpoint)
    if match is None:
        raise EndpointError(
            f"{endpoint!r} is not an endpoint; expected tcp://HOST:PORT or ipc:///path/to/socket"
        )
    if match[2] != "*" and int(match[2]) > 65_535:
        raise EndpointError(f"{endpoint}: the port must be at most 65535")


def is_exposed(endpoint: str) -> bool:
    """Whether a socket bound to `endpoint` can be reached from other machines."""
    if not endpoint.startswith("tcp://"):
        return False
    import ipaddress  # a client binds nothing

    host = endpoint[6:].rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or the name of a network interface
        return host != "localhost"


def bound_endpoint(socket: zmq.Socket[bytes]) -> str:
    """The endpoint that a socket bound to port 0 or `*` got."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    # An IPv6 socket tells an IPv4 address in a form that only IPv6 sockets can connect to.
    return re.sub(r"\[::ffff:([0-9.]+)\]", r"\1", endpoint.rstrip(b"\0").decode())


def runtime_folder() -> str:
    """The folder of this user's local sockets, open to nobody else; made if need be.

    Raises:
        EndpointError: The folder belongs to another user.
    """
    import tempfile  # nor needs this, with an address

    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = os.path.join(base, f"zmqrl-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise EndpointError(f"{folder} must belong to you, with mode 0700; remove it or fix it")
    return folder


def local_endpoint(name: str) -> str:
    """The endpoint that parts on one machine use when none is configured."""
    return f"ipc://{runtime_folder()}/{name}.ipc"


def lock_endpoint(endpoint: str) -> Optional[IO[str]]:
    """Claim an ipc path until the returned file is closed or the process ends.

    libzmq unlinks an ipc path before it binds, so a second broker would take the path of a living one
    and leave it deaf.

    Returns:
        The open lock file, or None for tcp, where the kernel refuses a second bind.

    Raises:
        EndpointError: The path is in use, or its folder does not exist or cannot be written.
    """
    if not endpoint.startswith("ipc://") or endpoint.startswith("ipc://@"):
        return None
    path = endpoint[6:] + ".lock"
    try:
        lock = open(path, "a")  # noqa: SIM115 - held for the life of the broker
    except OSError as error:
        raise EndpointError(f"cannot bind {endpoint}: {error.strerror} ({path})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise EndpointError(f"cannot bind {endpoint}: it is in use by a running process") from None
    return lock
