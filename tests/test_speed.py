"""The benches of speed: small runs, with real processes. How fast anything is, is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import pytest
from conftest import TESTS

BENCH = TESTS.parent / "perf" / "bench.py"

PARTS = {"broker", "io", "worker", "client"}


def bench(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of a short run, which draws its pictures too."""
    result = folder / "rows.json"
    command = [sys.executable, BENCH, *words, "--json", result, "--plot", folder, "--rounds=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    rows: list[dict[str, Any]] = json.loads(result.read_text())["rows"] if result.exists() else []
    assert rows, done.stderr
    # On a machine that does other things a bar may be missed, and nothing else may be wrong.
    assert done.returncode == (0 if all(row.get("ok") in (None, True) for row in rows) else 1), (
        done.stderr
    )
    pictures = list(folder.glob("*.png"))
    assert pictures
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    return rows


def test_latency_tells_the_round_trip_of_each_case_beside_that_of_the_c_proxy(folder: Path) -> None:
    rows = bench(folder, "latency", "--seconds=0.1", "--payloads", "100", "10000", "--transports=tcp")
    assert [(row["payload_bytes"], row["case"]) for row in rows] == [
        (payload, case)
        for payload in (100, 10_000)
        for case in cases.CASES
        if not case.endswith("curve")
    ]
    reference = {row["payload_bytes"]: row for row in rows if row["case"] == "c_proxy"}
    for row in rows:
        assert row["transport"] == "tcp"
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["p999_us"]
        other = reference[row["payload_bytes"]]
        assert row["to_c_proxy"] == pytest.approx(row["p50_us"] / other["p50_us"])
    assert {row["case"] for row in rows if "ok" in row} == {"zmqrl_raw", "zmqrl"}


def test_throughput_tells_what_each_request_costs_whom(folder: Path) -> None:
    rows = bench(folder, "throughput", "--seconds=0.1", "--clients", "1", "64")
    assert [(row["clients"], row["case"]) for row in rows] == [
        (clients, case) for clients in (1, 64) for case in cases.CASES
    ]
    reference = {row["clients"]: row for row in rows if row["case"] == "c_proxy"}
    for row in rows:
        assert (row["transport"], row["payload_bytes"]) == ("ipc", 512)
        assert set(row["cpu_us"]) == PARTS
        idle = {"broker", "io"} if row["case"] == "direct_echo" else set()
        assert {part for part, spent in row["cpu_us"].items() if spent == 0} == idle
        other = reference[row["clients"]]
        rate = row["requests_per_s"] / other["requests_per_s"]
        assert row["to_c_proxy"] == pytest.approx(rate)
        spent, others = (sum(one["cpu_us"][part] for part in PARTS - {"client"}) for one in (row, other))
        assert row["cpu_to_c_proxy"] == pytest.approx(spent / others)
    assert {(row["clients"], row["case"]) for row in rows if "ok" in row} == {
        (64, "zmqrl_raw"),
        (64, "zmqrl"),
    }


@pytest.mark.slow
def test_throughput_takes_the_broker_of_another_checkout(folder: Path) -> None:
    words = ("--seconds=0.1", "--clients=4", "--cases=zmqrl_raw", f"--against={TESTS.parent}")
    first, second = bench(folder, "throughput", *words)
    assert second["case"] == "zmqrl_raw_against"
    ratio = first["requests_per_s"] / second["requests_per_s"]
    assert first["to_zmqrl_raw_against"] == pytest.approx(ratio)


@pytest.mark.slow
def test_scale_tells_what_many_clients_and_workers_cost_the_broker(folder: Path) -> None:
    rows = bench(
        folder, "scale", "--seconds=0.2", "--paced-seconds=0.2", "--clients", "4", "40", "--workers=2"
    )
    theirs, ours = ([row for row in rows if row["case"] == case] for case in ("c_proxy", "zmqrl_raw"))
    for some in (theirs, ours):
        assert [(row["load"], row["clients"], row["workers"]) for row in some] == [
            ("closed", 4, 1),
            ("closed", 40, 1),
            ("paced", 4, 1),
            ("paced", 40, 1),
            ("closed", 256, 2),
        ]
    for row in rows:
        assert set(row["cpu_us"]) == PARTS
        assert row["rss_mb"] > 1
        assert row["load"] == "paced" or 0 <= row["fairness"] <= 1
        assert ("cpu_to_fewest" in row) == (row["clients"] == 40)
        assert ("bytes_per_client" in row) == (row["clients"] == 40 and row["load"] == "closed")
        assert ("ok" in row) == (row in ours)
