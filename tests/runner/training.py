"""One `zmqrl train` as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from conftest import TESTS, wait_for

COUNTS = f"algorithm.factory={TESTS / 'algorithms.py'}:CountsUpdates"
LINE = f"env.factory={TESTS / 'training_sims.py'}:make"
SMALL = [
    "cluster.component_placement={env: 0-1, eval: 0, rollout: 0}",
    "env.train={total_num_envs: 4, max_steps_per_rollout_epoch: 8}",
    "env.eval={total_num_envs: 2, rollout_epoch: 1}",
]
COUNTING = [*SMALL, COUNTS, LINE]
"""A small training that only counts its updates."""


class Training:
    """Its process, its parts and its files."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        config: str | None = None,
        name: str = "run",
        decoupled: bool = True,
    ):
        self.folder = folder / name
        self.json = folder / f"{name}.json"
        self.output = folder / f"{name}.txt"
        self._file = self.output.open("a")
        named = [f"--config={TESTS.parent / 'config' / config}"] if config else []
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "zmqrl", "train", f"--json={self.json}", *named),
                *overrides,
                # Last, because an override may give a whole section.
                f"runner.enable_decoupled_mode={str(decoupled).lower()}",
                f"runner.logger={{log_path: {folder}, experiment_name: {name}}}",
            ],
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )
        self.children: set[psutil.Process] = set()

    def text(self) -> str:
        return self.output.read_text()

    def wait(self, timeout: float = 100) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            with suppress(psutil.Error):
                self.note_children()
            self.process.kill()
            self._file.close()

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.json.read_text())
        return result

    def records(self) -> list[dict[str, Any]]:
        """What has been written so far."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for_record(self, key: str, at_least: float, timeout: float = 80) -> None:
        wait_for(
            lambda: (
                any((record.get(key) or 0) >= at_least for record in self.records())
                or self.process.poll() is not None
            ),
            f"{key} >= {at_least}; so far: {self.text()}",
            timeout,
        )
        assert self.process.poll() is None, self.text()

    def part(self, *words: str) -> psutil.Process:
        """The process of a part, by words of its command line."""
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):
                if all(word in child.cmdline() for word in words):
                    return child
        raise LookupError(words)

    def note_children(self) -> None:
        self.children |= set(psutil.Process(self.process.pid).children(recursive=True))

    def stop(self, number: signal.Signals) -> None:
        self.note_children()
        os.kill(self.process.pid, number)

    def left(self) -> list[psutil.Process]:
        """The children that are still there."""
        return [child for child in self.children if child.is_running() and child.status() != "zombie"]
