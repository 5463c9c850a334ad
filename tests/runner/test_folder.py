"""The folder of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zmqrl.errors import ConfigError
from zmqrl.runner.folder import RunFolder


def fill(folder: Path, words: str) -> None:
    for name in ("metrics.jsonl", "config.yaml"):
        (folder / name).write_text(words)
    (folder / "checkpoints" / "global_step_1").mkdir(parents=True)
    (folder / "checkpoints" / "global_step_1" / "state.pt").write_text(words)


def test_a_second_run_at_the_same_time_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, resumed=False)
    with pytest.raises(ConfigError, match=f"under way .process {os.getpid()}.*experiment_name"):
        RunFolder(tmp_path, resumed=True)
    first.close()
    RunFolder(tmp_path, resumed=False).close()


def test_a_new_run_keeps_what_earlier_ones_have_left(tmp_path: Path) -> None:
    for number in ("1", "2"):
        RunFolder(tmp_path, resumed=False).close()
        fill(tmp_path, number)
    RunFolder(tmp_path, resumed=False).close()
    for number in ("1", "2"):
        place = tmp_path / "earlier" / number
        assert (place / "metrics.jsonl").read_text() == number
        assert (place / "checkpoints" / "global_step_1" / "state.pt").read_text() == number
    assert not (tmp_path / "checkpoints").exists()


def test_a_resumed_run_goes_on_with_what_is_there(tmp_path: Path) -> None:
    fill(tmp_path, "earlier")
    RunFolder(tmp_path, resumed=True).close()
    assert (tmp_path / "config.yaml").read_text() == "earlier"


def test_a_run_that_never_came_up_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    fill(tmp_path, "good")
    folder = RunFolder(tmp_path, resumed=False)
    fill(tmp_path, "bad")
    (tmp_path / "learning_curve.png").write_text("bad")
    folder.give_back()
    folder.close()
    assert (tmp_path / "config.yaml").read_text() == "good"
    assert (tmp_path / "checkpoints" / "global_step_1" / "state.pt").read_text() == "good"
    assert not (tmp_path / "learning_curve.png").exists()
    assert not (tmp_path / "earlier").exists()


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runner\.logger"):
        RunFolder(tmp_path / "file" / "run", resumed=False)
