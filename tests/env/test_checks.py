"""`--check-env`, as a user calls it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import TESTS

ODD = f"env.factory={TESTS / 'odd_sims.py'}:odd"


def check(command: str, *overrides: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "zmqrl", command, "--check-env", *overrides],
        capture_output=True,
        text=True,
        timeout=50,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["evaluate", "start-env-worker"])
def test_a_good_simulator_is_described(command: str) -> None:
    code, text = check(command, "env.id=CartPole-v1", "env.eval.total_num_envs=24")
    assert code == 0, text
    assert "Gymnasium's checker is content" in text
    assert "CartPole-v1: 3 rows in SyncVectorEnv, autoreset mode Disabled" in text
    assert "observation: float32 [4]" in text
    assert "actions: Discrete(2)" in text
    assert "a step took" in text
    assert "a reset took" in text
    assert "warning  no info 'success' or 'is_success'" in text


def test_what_leaves_its_space_is_a_warning() -> None:
    code, text = check("evaluate", ODD, "env.kwargs.what=out of range")
    assert "warning  " in text
    assert "observation 'x'[1] is 3.0 in row 0, outside the declared [-1.0, 1.0]" in text
    assert "observation 'sub.y': int64 []" in text
    assert code == ("error" in text), text


def test_a_batched_simulator_that_does_not_reset_by_itself_is_warned_of() -> None:
    stays = f"env.factory={TESTS / 'batched_sims.py'}:Stays"
    code, text = check("evaluate", stays, "env.autoreset_mode=same_step")
    assert "warning  row 0 of Stays has ended an episode in 3 steps running" in text
    assert code == 0, text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([ODD, "env.kwargs.what=wider"], "error    .* row 0: observation.x is float32 [4]"),
        ([ODD, "env.kwargs.what=exits"], "error    .* failed in step: row 0: SystemExit: 3"),
        ([ODD, "env.kwargs.what=incomplete reset"], "error    .*failed in reset: row 0"),
        (["env.id=NoSuchEnv-v0"], "error    .*NoSuchEnv"),
    ],
)
def test_what_is_wrong_is_an_error_and_exits_with_1(overrides: list[str], words: str) -> None:
    code, text = check("evaluate", *overrides)
    assert code == 1, text
    first, _, second = words.partition(".*")
    assert any(line.startswith(first) and second in line for line in text.splitlines()), text


def test_a_configuration_that_names_no_simulator_exits_with_2() -> None:
    assert check("evaluate")[0] == 2
