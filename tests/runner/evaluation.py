"""One `zmqrl evaluate` as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import TESTS, wait_for

from zmqrl.broker.status import StatusClient

POLICY = f"rollout.policy={TESTS / 'policies.py'}:Balance"
SIM = f"env.factory={TESTS / 'sims.py'}"
SLOW = ("env.kwargs.length=150", "env.delay_sampler={type: constant, delay: 0.03}")
"""A simulator whose episodes take seconds: parts of the run can be killed meanwhile."""

BOTH_MODES = pytest.mark.parametrize("decoupled", [True, pytest.param(False, marks=pytest.mark.slow)])


def frontend(folder: Path) -> str:
    return f"broker.frontend=ipc://{folder}/frontend"


def status_client(folder: Path) -> Iterator[StatusClient]:
    """Asks the broker of a run whose frontend is `frontend(folder)`; for a fixture."""
    client = StatusClient(f"ipc://{folder}/frontend")
    yield client
    client.close()


class Run:
    """Its process, its parts and its result."""

    def __init__(self, folder: Path, *overrides: str, decoupled: bool = True, policy: str = POLICY):
        self.json = folder / "result.json"
        self.output = folder / "output.txt"
        self._file = self.output.open("w")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "zmqrl", "evaluate", f"--json={self.json}"),
                f"runner.enable_decoupled_mode={str(decoupled).lower()}",
                f"runner.logger.log_path={folder}",
                policy,
                *overrides,
            ],
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )

    def text(self) -> str:
        return self.output.read_text()

    def wait(self, timeout: float = 100) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()
            self._file.close()

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.json.read_text())
        return result

    def part(self, *words: str) -> psutil.Process:
        """The process of a part, by words of its command line."""
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.ZombieProcess):
                if all(word in child.cmdline() for word in words):
                    return child
        raise LookupError(words)

    def rollout(self, rank: int) -> psutil.Process:
        return self.part("start-rollout-worker", str(rank))

    def env(self, rank: int) -> psutil.Process:
        return self.part("start-env-worker", str(rank))

    def wait_until_it_steps(self) -> None:
        wait_for(lambda: "evaluating" in self.text() or self.process.poll() is not None, "steps", 80)
        assert self.process.poll() is None, self.text()

    def wait_for_answers(self, broker: StatusClient, count: int, timeout: float = 80) -> dict[str, Any]:
        """Wait until the broker has answered so many requests; its counters then."""

        def answered() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.text()
            counters: dict[str, Any] = (broker.ask(0.5) or {}).get("counters", {})
            return counters if counters.get("answered", 0) >= count else None

        counters: dict[str, Any] = wait_for(answered, f"{count} answers", timeout)
        return counters
