"""What the shared queue and pipeline stages are for: nobody waits who need not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TESTS


def bench(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of a run of `bin/bench decoupled`."""
    result = tmp_path / "rows.json"
    program = [sys.executable, TESTS.parent / "perf" / "bench.py", "decoupled", "--json", result]
    subprocess.run([*program, *options], timeout=200, check=False)
    return json.loads(result.read_text())["rows"]


@pytest.mark.alone
@pytest.mark.timeout(240)
def test_with_a_long_tail_the_shared_queue_is_half_as_fast_again_as_fixed_ranks(tmp_path: Path) -> None:
    rows = bench(tmp_path, "--only=tail", "--policies=0.5 ms", "--rounds=2", "--seconds=5")
    (decoupled,) = (row for row in rows if row["case"] == "decoupled")
    assert decoupled["to_normal"] >= 1.5


@pytest.mark.alone
@pytest.mark.timeout(240)
def test_two_pipeline_stages_step_while_the_policy_runs(tmp_path: Path) -> None:
    rows = bench(tmp_path, "--only=stages", "--rounds=2", "--seconds=5")
    gains = {row["policy"]: row["to_1_stage"] for row in rows if row["case"] == "2 stages"}
    assert gains["10 ms"] > 1.3
