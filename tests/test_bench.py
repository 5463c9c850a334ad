"""`bin/bench`, as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import TESTS, wait_for
from fuzz import learner, watch

BENCH = TESTS.parent / "perf" / "bench.py"


@pytest.mark.parametrize(
    ("send", "number"),
    [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_ends_a_bench_which_shows_its_rows_and_leaves_nothing(
    folder: Path, send: Callable[[int, int], None], number: signal.Signals
) -> None:
    output = folder / "output.txt"
    with output.open("w") as file:
        bench = subprocess.Popen(
            [sys.executable, str(BENCH), "fuzz", "--messages=20000"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
            start_new_session=True,
        )
    try:
        # Then a process asks, and a thread of it answers.
        wait_for(lambda: list(folder.glob("zb-*/_ask_a_policy")), "the case of replies", 40)
        children = psutil.Process(bench.pid).children(recursive=True)
        assert children
        send(bench.pid, number)
        assert bench.wait(20) == 1
        wait_for(lambda: not any(child.is_running() for child in children), "the end of all processes")
    finally:
        bench.kill()
    text = output.read_text()
    assert "interrupted: the bench is not complete" in text
    assert text.count("headers") == text.count("trees") == 2, "as they came, and in the table"
    assert not list(folder.glob("zb-*"))


def test_a_learner_that_dies_at_once_is_a_row_that_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 1.0)
    monkeypatch.setattr(
        watch, "start", lambda *words: subprocess.Popen(["true"], stdout=subprocess.PIPE, text=True)
    )
    (row,) = learner.measure(messages=40, seed=0)
    assert not row["ok"]
    assert row["crashed"]
    assert row["served"] == 0


@pytest.mark.alone
def test_large_observations_are_measured_over_sockets_and_through_shared_memory(folder: Path) -> None:
    command = [sys.executable, str(BENCH), "large", "--rounds=1", "--seconds=0.1"]
    command += ["--payload=600000", "--clients=1", f"--json={folder / 'rows.json'}", f"--plot={folder}"]
    subprocess.run(command, check=True, capture_output=True, timeout=50)
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["socket", "shared_memory", "memcpy"]
    assert all(row["ok"] and row["gb_per_s"] > 0 for row in rows)
    assert (folder / "large.png").stat().st_size > 1000
