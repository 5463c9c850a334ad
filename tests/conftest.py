"""Real pools for the tests: processes of their own, on sockets in a folder of their own."""

from __future__ import annotations

import itertools
import resource
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from faults.pool import Pool, wait_for

from zmqrl import PolicyClient
from zmqrl.errors import ClientError

__all__ = ["TESTS", "Load", "Pool", "no_more_files", "wait_for"]

TESTS = Path(__file__).parent

pytest_plugins = ["figures"]


class Load:
    """Clients in a closed loop, each counting its own answers; the data says whose they are."""

    def __init__(self, pool: Pool, clients: int, **options: object) -> None:
        self.answered: Counter[int] = Counter()
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._loop, args=(pool.frontend, number, options))
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _loop(self, endpoint: str, number: int, options: dict[str, object]) -> None:
        with PolicyClient(endpoint, timeout=30, **options) as client:  # type: ignore[arg-type]
            for step in itertools.count():
                if self._stop.is_set():
                    return
                value = number * 1e6 + step
                try:
                    actions = client.infer({"x": np.full((2, 3), value)})["actions"]
                except ClientError as error:
                    self.wrong.append(f"client {number} step {step}: {error}")
                    return
                if not (actions == value).all():
                    self.wrong.append(f"client {number} step {step} got {actions[0, 0]}")
                self.answered[number] += 1

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests have been answered."""
        goal = self.answered.total() + more
        wait_for(lambda: self.wrong or self.answered.total() >= goal, f"{more} answers", 40)

    def finish(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.wrong == []


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open no file meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


@pytest.fixture(scope="session")
def _echo() -> Iterator[Pool]:
    folder = Path(tempfile.mkdtemp(prefix="zt-"))
    pool = Pool(folder, TESTS / "policies.py", "Echo").start()
    yield pool
    pool.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def echo(_echo: Pool) -> Iterator[Pool]:
    """A pool that is there already, for tests that hurt nobody; they share its counters."""
    yield _echo
    while _echo.clients:
        _echo.clients.pop().close()
    _echo.wait_for_quiet()


@pytest.fixture
def free_ports() -> list[int]:
    """Two ports that nobody listens on."""
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in (first, second)]
