"""A pool of real processes, whose parts can be started, killed, frozen and thawed by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from zmqrl import PolicyClient
from zmqrl.broker.status import StatusClient
from zmqrl.runner.launcher import Launcher


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 40.0) -> Any:
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
    """A broker and rollout workers as real processes; clients are the caller's own.

    The broker's child is named `broker`, the worker of rank 3 `rollout-3`; further parts are started
    with `launcher.start(NAME, …)` and are then known by that name.

    Args:
        folder: Where the sockets are; its path must be short.
        policies: A Python file of policies.
        policy: What a worker serves unless told otherwise: a name in that file.
        policy_kwargs: What every policy is given.
    """

    def __init__(self, folder: Path, policies: Path, policy: str, /, **policy_kwargs: Any) -> None:
        self.folder = folder
        self.frontend = f"ipc://{folder}/frontend"
        self.backend = f"ipc://{folder}/backend"
        self.overrides = [f"broker.frontend={self.frontend}", f"broker.backend={self.backend}"]
        self.lines: list[str] = []
        """What the processes have printed."""
        self.launcher = Launcher(lambda name, line: self.lines.append(f"[{name}] {line}"))
        self.status_client = StatusClient(self.frontend)
        self.clients: list[PolicyClient] = []
        self._policies, self._policy, self._policy_kwargs = policies, policy, policy_kwargs

    # -- Start

    def start_broker(self, *overrides: str, decoupled: bool = True) -> None:
        """Start the broker, or start it again."""
        mode = f"runner.enable_decoupled_mode={str(decoupled).lower()}"
        self.launcher.start("broker", ["start-broker", *self.overrides, mode, *overrides])

    def start_worker(
        self,
        rank: int,
        policy: str = "",
        world_size: int = 2,
        overrides: tuple[str, ...] = (),
        **kwargs: Any,
    ) -> None:
        """Start a rollout worker, or start it again; `kwargs` are for its policy."""
        self.launcher.start(
            f"rollout-{rank}",
            [
                "start-rollout-worker",
                *self.overrides,
                f"--policy={self._policies}:{policy or self._policy}",
                f"--rank={rank}",
                f"cluster.component_placement.rollout=0-{max(world_size - 1, rank)}",
                *(
                    f"rollout.policy_kwargs.{key}={value}"
                    for key, value in {**self._policy_kwargs, **kwargs}.items()
                ),
                *overrides,
            ],
        )

    def start(self, workers: int = 1, policy: str = "", *broker: str, **kwargs: Any) -> Pool:
        """Start a broker (with the overrides `broker`) and so many workers; all are connected then."""
        self.start_broker(*broker)
        for rank in range(workers):
            self.start_worker(rank, policy, **kwargs)
        self.wait_for_workers(workers)
        return self

    def client(self, **options: Any) -> PolicyClient:
        """A client in this process; `close` closes it."""
        client = PolicyClient(self.frontend, **{"timeout": 20.0, **options})
        self.clients.append(client)
        return client

    # -- Hurt

    def pid(self, name: str) -> int:
        """The process number of a child."""
        return self.launcher.children[name].process.pid

    def kill(self, name: str) -> float:
        """SIGKILL a child and its own children; returns the moment, of `time.monotonic()`."""
        moment = self._signal(name, signal.SIGKILL)
        self.wait_for_exit(name)
        return moment

    def freeze(self, name: str) -> float:
        """SIGSTOP; returns the moment."""
        return self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> float:
        """SIGCONT; returns the moment."""
        return self._signal(name, signal.SIGCONT)

    def terminate(self, name: str) -> float:
        """SIGTERM, after which a child may take its time; returns the moment."""
        return self._signal(name, signal.SIGTERM)

    def _signal(self, name: str, number: signal.Signals) -> float:
        moment = time.monotonic()
        os.killpg(self.pid(name), number)  # each child leads a group of its own
        return moment

    # -- Look

    def wait_for_exit(self, name: str, timeout: float = 10.0) -> int:
        """Wait until a child has ended, and return its exit status."""
        return self.launcher.children[name].process.wait(timeout)

    def status(self) -> dict[str, Any]:
        """The broker's status."""
        return wait_for(lambda: self.status_client.ask(0.5), "the broker's status")

    def counters(self) -> dict[str, Any]:
        """The broker's counters."""
        return self.status()["counters"]

    def worker(self, name: str) -> dict[str, Any]:
        """What the status says of a rollout worker; empty if the broker does not know it."""
        return next((w for w in self.status()["workers"] if w["name"] == name), {})

    def wait_for_workers(self, count: int) -> None:
        """Wait until the broker knows exactly so many rollout workers."""

        def are_there() -> bool:
            status = self.status_client.ask(0.5)  # None until the broker is there
            return status is not None and len(status["workers"]) == count

        wait_for(are_there, f"{count} rollout workers; the output so far: {self.lines}")

    def wait_for_quiet(self, timeout: float = 20.0) -> dict[str, Any]:
        """Wait until the broker holds no request and no worker a batch; returns that status."""

        def quiet() -> dict[str, Any] | None:
            status = self.status()
            idle = all(worker["state"] == "idle" for worker in status["workers"])
            return status if idle and not status["open_requests"] else None

        return wait_for(quiet, "the broker to be quiet", timeout)

    def rss(self, name: str) -> int:
        """Bytes of memory that a child has resident."""
        return int(psutil.Process(self.pid(name)).memory_info().rss)

    def close(self, grace: bool = True) -> None:
        """End all; without `grace` by SIGKILL."""
        for client in self.clients:
            client.close()
        self.status_client.close()
        if not grace:
            for name in self.launcher.children:
                self.launcher.kill(name)
        self.launcher.close()
