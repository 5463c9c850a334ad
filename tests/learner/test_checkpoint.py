"""Checkpoints: a reader gets what was written, or an error that names the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import wait_for

from zmqrl.errors import CheckpointError

torch = pytest.importorskip("torch")

from zmqrl.learner import checkpoint  # noqa: E402 - it needs torch

FILES = [checkpoint.ACTOR, checkpoint.STATE]


def actor(value: float = 1.0) -> dict[str, Any]:
    return {"version": 3, "weights": {"layer.weight": torch.full((30, 40), value)}}


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "step": 5,
        "names": ["a", "b"],
        "nothing": None,
        "nested": {"half": torch.full((3,), value, dtype=torch.bfloat16), "count": torch.tensor(7)},
        1: (2.5, True, b"bytes"),
    }


def save(folder: Path, step: int, value: float = 1.0) -> Path:
    return checkpoint.save(folder, step, actor(value), state(value))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def saving_process(folder: Path, step: int, prelude: str = "") -> subprocess.Popen[bytes]:
    """A process that saves a checkpoint of 40 MB."""
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from zmqrl.learner import checkpoint\n"
        f"{prelude}\n"
        "big = {'weights': torch.zeros(5_000_000)}\n"
        f"checkpoint.save(Path({str(folder)!r}), {step}, big, big)\n"
    )
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 12, 4.0)
    assert path == tmp_path / "global_step_12"
    loaded = checkpoint.load(path, checkpoint.ACTOR)
    assert loaded["version"] == 3
    assert torch.equal(loaded["weights"]["layer.weight"], actor(4.0)["weights"]["layer.weight"])
    loaded = checkpoint.load(path, checkpoint.STATE)
    nested = loaded.pop("nested")
    expected = state(4.0)
    assert torch.equal(nested["half"], expected["nested"]["half"])
    assert (nested["count"].shape, nested["count"].item()) == ((), 7)
    del expected["nested"]
    assert loaded == expected


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 1, 100, -1])
def test_a_file_cut_short_is_an_error_that_names_it(tmp_path: Path, name: str, left: int) -> None:
    file = save(tmp_path, 1) / name
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=f"global_step_1/{name} is damaged"):
        checkpoint.load(file.parent, name)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_byte_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, 1) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"global_step_1/{name} is damaged"):
        checkpoint.load(file.parent, name)


@pytest.mark.parametrize("missing", [checkpoint.STATE, "manifest.json"])
def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path, missing: str) -> None:
    path = save(tmp_path, 1)
    (path / missing).unlink()
    with pytest.raises(CheckpointError, match=f"global_step_1/{missing} cannot be read"):
        checkpoint.load(path, checkpoint.STATE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"{}",
        b'{"format": 1}',
        b'{"format": 1, "files": []}',
        b'{"format": 1, "files": {"actor.pt": 5}}',
        b'{"format": 1, "files": {"actor.pt": {"bytes": "x", "crc32": null}}}',
    ],
    ids=lambda content: repr(content[:40]),
)
def test_a_garbage_manifest_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"global_step_1/manifest\.json is damaged"):
        checkpoint.load(path, checkpoint.ACTOR)
    assert checkpoint.find(tmp_path) == path


def test_a_checkpoint_of_another_format_says_so(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(json.dumps({"format": 2, "parts": {}}))
    with pytest.raises(CheckpointError, match=r"manifest\.json has the format 2; .* reads 1"):
        checkpoint.load(path, checkpoint.ACTOR)


class Hostile:
    """Creates a file when it is unpickled the careless way."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    path, canary = save(tmp_path, 1), tmp_path / "canary"
    file = path / checkpoint.ACTOR
    torch.save({"version": 3, "weights": Hostile(canary)}, file)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][checkpoint.ACTOR] = checkpoint._measure(file)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"global_step_1/actor\.pt cannot be read"):
        checkpoint.load(path, checkpoint.ACTOR)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.ones(3), r"state\['algorithm'\]\[1\] is a ndarray"),
        (np.float64(1), r"state\['algorithm'\]\[1\] is a float64"),
        (Path("x"), r"state\['algorithm'\]\[1\] is a PosixPath"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path, value: Any, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        checkpoint.save(tmp_path, 1, actor(), {"algorithm": [1, value]})
    assert names(tmp_path) == set()


def test_only_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, step)
    assert names(tmp_path) == {"global_step_10", "global_step_11"}


def test_a_run_that_goes_on_from_an_earlier_step_keeps_and_finds_what_it_has_written(
    tmp_path: Path,
) -> None:
    for step in (100, 110, 20):
        save(tmp_path, step)
    assert checkpoint.find(tmp_path).name == "global_step_20"
    assert names(tmp_path) == {"global_step_110", "global_step_20"}


def test_the_same_step_saved_twice_is_the_later_one(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    path = save(tmp_path, 1, 2.0)
    assert checkpoint.load(path, checkpoint.ACTOR)["weights"]["layer.weight"].max() == 2
    assert names(tmp_path) == {"global_step_1"}


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/global_step_11"])
def test_a_checkpoint_is_found_by_its_run_its_folder_and_itself(tmp_path: Path, where: str) -> None:
    save(tmp_path / "checkpoints", 9)
    newest = save(tmp_path / "checkpoints", 11)
    assert checkpoint.find(tmp_path / where) == newest


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch])
def test_where_there_is_no_checkpoint_the_error_says_where_it_looked(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*/run: expected"):
        checkpoint.find(tmp_path / "run")


def test_a_disk_that_gets_full_leaves_the_older_checkpoints_and_nothing_half_written(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    # The kernel refuses to let a file grow beyond a megabyte, as a full disk does.
    prelude = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    )
    process = saving_process(tmp_path, 3, prelude)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"CheckpointError: the checkpoint" in errors
    assert b"global_step_3 cannot be written" in errors
    assert names(tmp_path) == {"global_step_1", "global_step_2"}
    for step in (1, 2):
        assert checkpoint.load(tmp_path / f"global_step_{step}", checkpoint.STATE)["step"] == 5


def test_a_save_that_is_killed_leaves_the_last_good_one_and_the_next_save_tidies_up(
    tmp_path: Path,
) -> None:
    good = save(tmp_path, 1)
    process = saving_process(tmp_path, 2)
    temporary = tmp_path / ".global_step_2.tmp"
    wait_for(lambda: (temporary / checkpoint.ACTOR).exists(), "the save to begin")
    process.kill()
    process.communicate()
    assert temporary.exists()
    assert checkpoint.find(tmp_path) == good
    assert checkpoint.load(good, checkpoint.STATE)["step"] == 5
    newer = save(tmp_path, 3)
    assert checkpoint.find(tmp_path) == newer
    assert names(tmp_path) == {"global_step_1", "global_step_3"}


def test_a_checkpoint_that_was_set_aside_when_its_replacement_was_killed_comes_back(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, 1.0).rename(tmp_path / ".global_step_1.old")
    save(tmp_path, 2)
    kept = checkpoint.load(tmp_path / "global_step_1", checkpoint.ACTOR)
    assert kept["weights"]["layer.weight"].max() == 1


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/global_step_1 cannot be written"):
        save(tmp_path / "file", 1)
