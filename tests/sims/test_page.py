"""The commands of docs/simulators.md, as a reader would try them in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import TESTS
from sim_environments import environment_of

ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "simulators.md").read_text()
COMMANDS = [block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) if "bin/evaluate" in block]
FILES = dict(re.findall(r"```\w+\n# (\w+\.\w+)\n(.*?)```", PAGE, re.S))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] * (number > 0), id=str(number))
        for number, command in enumerate(COMMANDS)
    ],
)
def test_a_command_of_the_page_works_in_an_empty_folder(command: str, tmp_path: Path) -> None:
    name = "envpool" if "envpool" in command else "maniskill" if "mani_skill" in command else ""
    if name == "maniskill" and shutil.which("nvidia-smi") is None:
        pytest.skip("ManiSkill needs a GPU for more than one env")
    try:
        binaries = environment_of(name)
    except LookupError as error:
        pytest.skip(str(error))
    for file, code in FILES.items():
        (tmp_path / file).write_text(code)
    done = subprocess.run(
        ["sh", "-c", re.sub("^pip .*$", "", command, flags=re.M).replace("bin/", f"{ROOT}/bin/")],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"episodes +│ +\d", done.stdout)
