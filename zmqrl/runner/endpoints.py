"""Local endpoints for a run that names none."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from zmqrl.config import Config, dump, load
from zmqrl.errors import ConfigError

_PREFIX = "zmqrl-run-"
_OWNER = "owner.lock"
"""A file in the folder that is locked as long as its run lives."""


@contextmanager
def local_endpoints(config: Config) -> Iterator[tuple[Config, Path]]:
    """The same configuration, with sockets in a folder of this run's own where it names no endpoint.

    The folder is open to this user only, and gone at the end; that of a run which was killed goes when
    the next one begins.

    Yields:
        The configuration, and a file with it for the parts to read.
    """
    _remove_orphans()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
    lock = _claim(folder)
    try:
        broker = config.broker.model_copy(
            update={
                "frontend": config.broker.frontend or f"ipc://{folder}/frontend",
                "backend": config.broker.backend or f"ipc://{folder}/backend",
            }
        )
        update = {
            "broker": broker,
            "runner": config.runner.model_copy(
                update={"report": config.runner.report or f"ipc://{folder}/report"}
            ),
        }
        if config.learns:
            endpoint = config.actor.endpoint or f"ipc://{folder}/learner"
            update["actor"] = config.actor.model_copy(update={"endpoint": endpoint})
        complete = config.model_copy(update=update)
        dump(complete, folder / "config.yaml")
        yield complete, folder / "config.yaml"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def running(config: Config) -> Config | None:
    """The configuration, with all endpoints, of a run of the same name that lives on this machine.

    Args:
        config: With its name, `runner.logger.experiment_name`.
    """
    found = []
    for file in _owner_files():
        with suppress(OSError, ConfigError):
            other = load(str(file.parent / "config.yaml"), [])
            if _is_alive(file) and other.runner.logger == config.runner.logger:
                found.append((file.stat().st_mtime, other))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _owner_files() -> Iterator[Path]:
    """Those of this user's runs, of which some may not live any more."""
    for file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(OSError):
            if file.parent.lstat().st_uid == os.getuid():
                yield file


def _is_alive(owner: Path) -> bool:
    try:
        with owner.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _claim(folder: Path) -> IO[str]:
    lock = (folder / "new.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Under its name only now: whoever finds it there finds it locked.
    (folder / "new.lock").rename(folder / _OWNER)
    return lock


def _remove_orphans() -> None:
    """Remove the folders of this user's runs that do not live any more."""
    for file in _owner_files():
        with suppress(OSError), file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.parent, ignore_errors=True)
