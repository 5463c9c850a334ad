"""Real pools for the tests: processes of their own, on sockets in a folder of their own."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.pool import Pool, wait_for

__all__ = ["TESTS", "Pool", "wait_for"]

TESTS = Path(__file__).parent


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="zt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def pool(folder: Path) -> Iterator[Pool]:
    pool = Pool(folder, TESTS / "policies.py", "Echo")
    yield pool
    pool.close()


@pytest.fixture
def free_ports() -> list[int]:
    """Two ports that nobody listens on."""
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in (first, second)]
