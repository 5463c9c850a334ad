"""What the shared queue is for: a long tail of step times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TESTS


@pytest.mark.alone
@pytest.mark.timeout(240)
def test_with_a_long_tail_the_shared_queue_is_half_as_fast_again_as_fixed_ranks(tmp_path: Path) -> None:
    result = tmp_path / "rows.json"
    subprocess.run(
        [sys.executable, TESTS.parent / "perf" / "modes.py", "--json", result], check=True, timeout=200
    )
    speed = {row["case"]: row["env_steps_per_s"] for row in json.loads(result.read_text())["rows"]}
    assert speed["decoupled"] >= 1.5 * speed["normal"]
