"""Makes the bundles of keys that `security` reads, adds to them, and revokes keys."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import contextmanager, suppress
from typing import Iterator

import zmq.auth

from zmqrl.errors import KeysError
from zmqrl.transport.security import CLIENTS, WORKERS

_LISTS = {"client": CLIENTS, "worker": WORKERS}


def make_bundles(folder: str) -> None:
    """Make the bundles `server`, `client` and `worker` in a folder.

    Raises:
        KeysError: One of them is there already.
    """
    for name in ("server", "client", "worker"):
        if os.path.lexists(os.path.join(folder, name)):
            raise KeysError(
                f"{os.path.join(folder, name)} is there already, and keys are never overwritten; name "
                "another folder, or add a key with --client NAME or --worker NAME"
            )
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with _new_bundle(folder, "server") as bundle:
        _make_pair(bundle, "server")
        for name in (CLIENTS, WORKERS):
            os.mkdir(os.path.join(bundle, name), mode=0o700)
    add_bundle(folder, "client", "client")
    add_bundle(folder, "worker", "worker")


def add_bundle(folder: str, role: str, name: str) -> None:
    """Make one more key pair, as a bundle of its own, and let it in.

    Args:
        folder: Where `make_bundles` has made some.
        role: `client` or `worker`.
        name: Of the bundle, and of the public key on the allow-list.

    Raises:
        KeysError: The name is taken or cannot be one, or there are no keys of a server.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise KeysError(f"{name!r} cannot be the name of a key; use letters, digits, _ and -")
    server = os.path.join(folder, "server")
    if not os.path.exists(os.path.join(server, "server.key")):
        raise KeysError(f"{folder} has no server/server.key; make keys there first: make-keys {folder}")
    for taken in (os.path.join(folder, name), *(_entry(folder, kind, name) for kind in _LISTS)):
        if os.path.lexists(taken):
            raise KeysError(
                f"{taken} is there already, and keys are never overwritten; use another name"
            )
    with _new_bundle(folder, name) as bundle:
        _make_pair(bundle, role)
        shutil.copyfile(os.path.join(server, "server.key"), os.path.join(bundle, "server.key"))
    entry = _entry(folder, role, name)
    shutil.copyfile(os.path.join(folder, name, f"{role}.key"), entry + ".new")
    os.rename(entry + ".new", entry)  # a server that looks finds it whole


def revoke(folder: str, name: str) -> None:
    """Take a key off the allow-lists, and remove its bundle.

    Raises:
        KeysError: No allow-list has it.
    """
    roles = [role for role in _LISTS if os.path.lexists(_entry(folder, role, name))]
    if not roles:
        raise KeysError(f"no key {name!r} is let in: {_entry(folder, 'client', name)} is not there")
    for role in roles:  # both, if somebody has put it there by hand
        os.remove(_entry(folder, role, name))
        for file in (f"{role}.key_secret", f"{role}.key", "server.key"):
            with suppress(OSError):
                os.remove(os.path.join(folder, name, file))
    with suppress(OSError):
        os.rmdir(os.path.join(folder, name))


def _entry(folder: str, role: str, name: str) -> str:
    """The file that lets a key in."""
    return os.path.join(folder, "server", _LISTS[role], f"{name}.key")


@contextmanager
def _new_bundle(folder: str, name: str) -> Iterator[str]:
    """A folder that nobody else can look into, and which gets its name once it is complete."""
    draft = tempfile.mkdtemp(prefix=f".{name}-", dir=folder)  # mode 0700
    try:
        yield draft
        os.rename(draft, os.path.join(folder, name))
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _make_pair(bundle: str, role: str) -> None:
    _, secret = zmq.auth.create_certificates(bundle, role)
    os.chmod(secret, 0o600)
