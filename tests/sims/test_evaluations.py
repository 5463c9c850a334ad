"""Each simulator of config/sims is evaluated by its one command."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import TESTS
from sim_environments import OWN_ENVIRONMENTS, environment_of

ROOT = TESTS.parent
CONFIGS = sorted((ROOT / "config" / "sims").glob("*.yaml"))
QUICK = {"fetch_pick_and_place", "own_class"}
"""The others are nearly like these, to zmqrl."""


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem not in QUICK), id=path.stem)
        for path in CONFIGS
    ],
)
def test_it_is_evaluated_by_one_command(
    config: Path, tmp_path: Path, figures: dict[str, dict[str, Any] | str]
) -> None:
    try:
        binaries = environment_of(config.stem)
    except LookupError as error:
        figures[config.stem] = f"skipped: {error}"
        pytest.skip(str(error))
    result_file = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(ROOT / "bin" / "evaluate", "--config", config, "--json", result_file),
            f"runner.logger.log_path={tmp_path}",
        ],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    result = json.loads(result_file.read_text())
    figures[config.stem] = result
    assert result["eval/num_trajectories"] > 0
    assert result["eval/missing_trajectories"] == result["broker/errors"] == 0
    assert result["env_steps_per_s"] > 0
    for call in ("step", "reset"):
        assert 0 < result[f"time/env/{call}_p50"] <= result[f"time/env/{call}_p99"]
        assert re.search(rf"{call}, p99 .* [µm]?s", done.stdout)


def test_each_has_its_command_in_the_docs_and_in_its_own_head() -> None:
    page = (ROOT / "docs" / "simulators.md").read_text()
    for config in CONFIGS:
        own = config.stem in OWN_ENVIRONMENTS
        program = f".venv-{config.stem}/bin/zmqrl evaluate" if own else "bin/evaluate"
        command = f"{program} --config config/sims/{config.name}"
        assert command in config.read_text()
        assert command in page
        if own:
            assert f"bin/setup {config.stem}" in page
