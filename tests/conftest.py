"""Real pools for the tests: processes of their own, on sockets in a folder of their own."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zmqrl import PolicyClient
from zmqrl.broker.status import StatusClient
from zmqrl.runner.launcher import Launcher

TESTS = Path(__file__).parent


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 20.0) -> Any:
    """Wait until `condition` is true, and return its value."""
    until = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"waited {timeout:g} s in vain for {what}")
        time.sleep(0.01)


class Pool:
    """A broker and rollout workers as real processes; clients are the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.frontend = f"ipc://{folder}/frontend"
        self.backend = f"ipc://{folder}/backend"
        self.lines: list[str] = []
        self.launcher = Launcher(lambda name, line: self.lines.append(f"[{name}] {line}"))
        self.status_client = StatusClient(self.frontend)
        self.clients: list[PolicyClient] = []
        self.overrides = [f"broker.frontend={self.frontend}", f"broker.backend={self.backend}"]

    def start_broker(self, *overrides: str, decoupled: bool = True) -> None:
        mode = f"runner.enable_decoupled_mode={str(decoupled).lower()}"
        self.launcher.start("broker", ["start-broker", *self.overrides, mode, *overrides])

    def start_worker(self, rank: int, policy: str = "Echo", world_size: int = 2, **kwargs: Any) -> None:
        self.launcher.start(
            f"rollout-{rank}",
            [
                "start-rollout-worker",
                *self.overrides,
                f"--policy={TESTS / 'policies.py'}:{policy}",
                f"--rank={rank}",
                f"cluster.component_placement.rollout=0-{world_size - 1}",
                *(f"rollout.policy_kwargs.{key}={value}" for key, value in kwargs.items()),
            ],
        )

    def start(self, workers: int = 1, policy: str = "Echo", **kwargs: Any) -> Pool:
        """A broker and so many workers, all of them connected."""
        self.start_broker()
        self.wait_for_workers(0)
        for rank in range(workers):
            self.start_worker(rank, policy, **kwargs)
        self.wait_for_workers(workers)
        return self

    def client(self, **options: Any) -> PolicyClient:
        client = PolicyClient(self.frontend, **{"timeout": 20.0, **options})
        self.clients.append(client)
        return client

    def status(self) -> dict[str, Any]:
        return wait_for(lambda: self.status_client.ask(0.5), "the broker's status")

    def counters(self) -> dict[str, Any]:
        return self.status()["counters"]

    def wait_for_workers(self, count: int) -> None:
        wait_for(
            lambda: len((self.status_client.ask(0.5) or {}).get("workers", [])) == count,
            f"{count} rollout workers; the output so far: {self.lines}",
        )

    def pid(self, name: str) -> int:
        return self.launcher.children[name].process.pid

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.status_client.close()
        self.launcher.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="zt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def pool(folder: Path) -> Iterator[Pool]:
    pool = Pool(folder)
    yield pool
    pool.close()


@pytest.fixture
def free_ports() -> list[int]:
    """Two ports that nobody listens on."""
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in (first, second)]
