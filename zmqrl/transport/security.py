"""Keys: who a part is, whom it talks to, and who is let in (CURVE).

A *bundle* is a folder with the keys of one part, and all that is copied to the machine of that part:

* `server/`: the key pair of broker, learner and runner, and the allow-lists `clients/` and `workers/`,
  which hold the public keys of those that are let in, a `NAME.key` file each.
* `client/`: a key pair of clients and env workers, and the server's public key.
* `worker/`: a key pair of rollout workers, and the server's public key.

The files are those of `zmq.auth`. With keys, everything on the wire is encrypted, the server proves that
it has the secret of `server.key`, and a peer that it has one of those on an allow-list.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Optional, Sequence, Set, Tuple, Union

import zmq

from zmqrl.errors import KeysError

if TYPE_CHECKING:
    import logging

    from zmq.auth.thread import ThreadAuthenticator

CLIENTS = "clients"
WORKERS = "workers"

CURVE_BYTES = 33
"""By which a frame grows when it is encrypted."""

_LOOK_EVERY = 1.0
"""Seconds after which an allow-list is looked at again."""

_SETTLED_NS = 100_000_000
"""Nanoseconds after which a further change of a folder shows in its time for sure."""


@dataclass(frozen=True)
class Keys:
    """A bundle, loaded."""

    folder: str
    server: bytes
    """The server's public key."""
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: Union[str, os.PathLike[str]], role: str) -> Keys:
        """Read the bundle of a role.

        Args:
            folder: The bundle itself, or the folder of `bin/make-keys`, which has it within.
            role: `server`, `client` or `worker`. The server may do what a client may.

        Raises:
            KeysError: It is not there, is damaged, or others can read its secret or let themselves in.
        """
        bundle = _bundle_of(os.fspath(folder), role)
        role = role if os.path.exists(os.path.join(bundle, f"{role}.key_secret")) else "server"
        public, secret = _secret_of(os.path.join(bundle, f"{role}.key_secret"))
        server = public_key_of(os.path.join(bundle, "server.key"))
        for place in (bundle, os.path.join(bundle, CLIENTS), os.path.join(bundle, WORKERS)):
            if os.path.isdir(place) and os.stat(place).st_mode & 0o022:
                raise KeysError(f"others can add keys to {place}, or exchange them; chmod 700 it")
        return cls(bundle, server, public, secret)

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """Let a socket that will connect use these keys, and talk to nobody but their server."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def _bundle_of(folder: str, role: str) -> str:
    for name in (role, "server") if role == "client" else (role,):
        for bundle in (os.path.join(folder, name), folder):
            if os.path.exists(os.path.join(bundle, f"{name}.key_secret")):
                return bundle
    raise KeysError(
        f"{folder} has no keys of a {role}: neither {role}.key_secret nor {role}/{role}.key_secret is "
        "there (bin/make-keys makes them; a bundle is for one role)"
    )


def public_key_of(path: str) -> bytes:
    """The public key in a file.

    Raises:
        KeysError: There is none.
    """
    from zmq.auth import load_certificate  # only where there are keys

    try:
        public, _ = load_certificate(path)
    except (OSError, ValueError) as error:
        raise KeysError(f"cannot read the key {path}: {error}") from None
    if not re.fullmatch(rb"[!-~]{40}", public):
        raise KeysError(f"{path} is damaged: a public key has 40 characters")
    return public


def _secret_of(path: str) -> Tuple[bytes, bytes]:
    """The key pair in a file that nobody else can read."""
    from zmq.auth import load_certificate

    try:
        if os.stat(path).st_mode & 0o077:
            raise KeysError(f"others can read the secret key {path}; chmod 600 it, or make new keys")
        public, secret = load_certificate(path)
        if secret is None or zmq.curve_public(secret) != public:
            raise KeysError(f"{path} is damaged: its secret and its public key do not belong together")
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise KeysError(f"cannot read the secret key {path}: {error}") from None
    return public, secret


# -- Who is let in


class Door:
    """Who may connect to one bound socket.

    An allow-list may be changed at any time: a key that is added is let in at once. A key that is gone
    is turned away from then on, and `changed` tells whoever owns the socket, within a second, to look
    at those that are in.

    Args:
        keys: The server's; None lets everybody in who reaches the socket.
        lists: Of `CLIENTS` and `WORKERS`, those that are let in. The server's own key always is.
        insecure: Without keys: whether the socket may be one that other machines can reach.
    """

    def __init__(
        self, keys: Optional[Keys] = None, lists: Sequence[str] = (CLIENTS,), insecure: bool = False
    ) -> None:
        self.keys = keys
        self.insecure = insecure
        self.domain = "+".join(lists)
        self._lists = {name: _AllowList(keys, name) for name in lists} if keys is not None else {}
        self._seen = self._current()
        self._turned_away = 0

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Set the options of a socket that will be bound."""
        if self.keys is None:
            return
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, self.domain.encode())
        # Without this, libzmq lets every key in while nobody answers its questions.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def lets_in(self, key: str, *lists: str) -> bool:
        """Whether a peer with this key may be here.

        Args:
            key: Of `key_of`.
            lists: It must be on one of these; none of them means any.
        """
        if self.keys is None or key == self.keys.public.decode():
            return True
        return any(key in self._lists[name].current() for name in lists or self._lists)

    def changed(self) -> bool:
        """Whether a key has gone since the last call."""
        before, self._seen = self._seen, self._current()
        return before != self._seen and any(not b <= n for b, n in zip(before, self._seen))

    def callback(self, domain: str, key: bytes) -> bool:
        """Answer libzmq, which asks at each handshake; called by the authenticator's thread."""
        try:
            return self._answer(key.decode())
        except Exception:  # it would end the thread, and with it all hope of later ones
            _log().exception("a peer is turned away: its key could not be looked up")
            return False

    def _answer(self, key: str) -> bool:
        for allowed in self._lists.values():
            allowed.look_for(key)
        if self.lets_in(key):
            return True
        self._turned_away += 1
        if (
            self._turned_away & (self._turned_away - 1) == 0
        ):  # the 1st, 2nd, 4th …: nobody floods the log
            _log().warning(
                "a peer is turned away (number %d): its key %s is not in %s",
                *(self._turned_away, key, " or ".join(a.folder for a in self._lists.values())),
            )
        return False

    def _current(self) -> List[FrozenSet[str]]:
        return [allowed.current() for allowed in self._lists.values()]


def key_of(door: Door, frame: zmq.Frame) -> str:
    """The key of the peer that a frame comes from; empty at a door without keys."""
    return "" if door.keys is None else str(frame.get("User-Id"))


def answer_handshakes(context: zmq.Context[Any], *doors: Door) -> Optional[ThreadAuthenticator]:
    """Answer libzmq's questions about keys, in a thread; call it before the sockets are bound.

    Returns:
        What must be stopped before the context is terminated; None if no door has keys.
    """
    guarded = [door for door in doors if door.keys is not None]
    if not guarded:
        return None
    from zmq.auth.thread import ThreadAuthenticator  # brings asyncio, which a client needs not

    authenticator = ThreadAuthenticator(context)
    for door in guarded:
        authenticator.configure_curve_callback(door.domain, door)
    authenticator.start()
    return authenticator


_Stamp = Tuple[int, int, int]


class _AllowList:
    """The public keys in a folder of the server's bundle, as they are now."""

    def __init__(self, keys: Keys, name: str) -> None:
        self.folder = os.path.join(keys.folder, name)
        self._lock = threading.Lock()
        self._stamps: Dict[str, _Stamp] = {}
        self._by_file: Dict[str, str] = {}
        self._file_of: Dict[str, str] = {}
        self._settled: Optional[_Stamp] = None  # of the folder, if all that is in it has been read
        self._keys: FrozenSet[str] = frozenset()
        self._complaints: Set[str] = set()
        self._looked = 0.0
        self.look()

    def current(self) -> FrozenSet[str]:
        """The keys, at most a second old."""
        if time.monotonic() >= self._looked + _LOOK_EVERY:
            self.look()
        return self._keys

    def look_for(self, key: str) -> None:
        """Look, unless nothing has changed that could matter to this key.

        Strangers bring that about as often as they like, and a look at a thousand files takes
        milliseconds.
        """
        with self._lock:
            file = self._file_of.get(key)
            seen = self._settled if file is None else self._stamps[file]
            with suppress(OSError):
                if _stamp_of(os.stat(file or self.folder)) == seen:
                    return
            self._look()

    def look(self) -> None:
        """Read what has changed since the last look."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        self._looked = time.monotonic()
        try:
            folder, stamps = _stamps_in(self.folder)
        except OSError as error:  # no file can be opened at the moment, for instance
            self._complain(f"cannot look into {self.folder}, whose keys stay as they were: {error}")
            return
        for path, stamp in stamps.items():
            if stamp != self._stamps.get(path):
                self._read(path, stamp)
        # A file that is moved away and back has the stamp that it had: it must be read again.
        self._stamps = {path: stamp for path, stamp in self._stamps.items() if path in stamps}
        self._by_file = {path: key for path, key in self._by_file.items() if path in stamps}
        self._file_of = {key: path for path, key in self._by_file.items()}
        self._settled = folder if self._stamps == stamps else None
        self._keys = frozenset(self._file_of)

    def _read(self, path: str, stamp: _Stamp) -> None:
        try:
            self._by_file[path] = public_key_of(path).decode()
            self._stamps[path] = stamp
        except KeysError as error:  # it is being written, perhaps: until then, it is what it was
            self._complain(str(error))

    def _complain(self, text: str) -> None:
        if text not in self._complaints:
            self._complaints.add(text)
            _log().warning("%s", text)


def _stamps_in(folder: str) -> Tuple[Optional[_Stamp], Dict[str, _Stamp]]:
    """Of a folder (None if it has changed just now) and its key files: what tells a later change."""
    stamps = {}
    try:
        before = os.stat(folder)
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return None, {}
    for entry in entries:
        if entry.name.endswith(".key"):
            try:
                stamps[entry.path] = _stamp_of(entry.stat())
            except FileNotFoundError:
                continue  # just removed
    return _stamp_of(before) if time.time_ns() > before.st_mtime_ns + _SETTLED_NS else None, stamps


def _stamp_of(status: os.stat_result) -> _Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ino


def _log() -> logging.Logger:
    import logging  # for which a client without keys need not wait

    return logging.getLogger(__name__)
