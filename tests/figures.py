"""A table of what evaluations of simulators gave, at the end of the tests."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from zmqrl.telemetry.sections import Unit, count, written

FIGURES = pytest.StashKey[dict[str, "dict[str, Any] | str"]]()
"""What an evaluation of each simulator gave, or why there was none."""

_COLUMNS = ("env/step_p50", "env/step_p99", "env/reset_p50", "env/reset_p99")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = {}


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> dict[str, dict[str, Any] | str]:
    return pytestconfig.stash[FIGURES]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash.get(FIGURES, {})
    if not found:
        return
    headers = ("simulator", "env steps/s", "step p50", "step p99", "reset p50", "reset p99")
    table = Table(*headers, box=box.SIMPLE_HEAD, title="Evaluations", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    skipped = []
    for name, figures in found.items():
        if isinstance(figures, str):
            skipped.append(f"  {name}: {figures}")
            continue
        times = (written(figures[f"time/{column}"], Unit.SECONDS) for column in _COLUMNS)
        table.add_row(name, count(figures["env_steps_per_s"]), *times)
    text = io.StringIO()
    Console(file=text, width=105).print(table)
    terminalreporter.write_line(text.getvalue().rstrip())
    for line in skipped:
        terminalreporter.write_line(line)
