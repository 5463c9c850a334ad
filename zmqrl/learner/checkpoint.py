"""Checkpoints: written so that a reader never sees half of one, read so that damage has a name.

A checkpoint is a folder `global_step_N` with the actor alone (for evaluations), the whole state of the
learner, and a manifest with the size and checksum of both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch

from zmqrl.errors import CheckpointError

ACTOR = "actor.pt"
STATE = "state.pt"
_MANIFEST = "manifest.json"
_FORMAT = 1
_KEEP = 2
"""Checkpoints of a run that are kept."""


def save(folder: Path, step: int, actor: dict[str, Any], state: dict[str, Any]) -> Path:
    """Write a checkpoint, and remove old ones once it is there.

    Args:
        folder: Of all checkpoints of a run.
        step: Global steps; names the checkpoint.
        actor: What an evaluation needs.
        state: What training needs to go on.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: It cannot be written, a full disk for instance; older ones are as they were.
    """
    final = folder / f"global_step_{step}"
    temporary = folder / f".{final.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        files = {}
        for name, content in ((ACTOR, actor), (STATE, state)):
            torch.save(content, temporary / name)
            files[name] = _measure(temporary / name)
        manifest = {"format": _FORMAT, "step": step, "files": files}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"the checkpoint {final} cannot be written: {error}") from error
    for old in _all_in(folder)[:-_KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def find(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest in a run's folder.

    Raises:
        CheckpointError: There is none.
    """
    if (path / _MANIFEST).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if found := _all_in(folder):
            return found[-1]
    raise CheckpointError(
        f"there is no checkpoint {path}: expected a folder with {_MANIFEST}, such as "
        "runs/NAME/checkpoints/global_step_100, or the folder of a run that has one"
    )


def load(path: Path, name: str) -> dict[str, Any]:
    """Read one file of a checkpoint.

    Args:
        path: The checkpoint's folder.
        name: `ACTOR` or `STATE`.

    Raises:
        CheckpointError: It is missing, cut short, or damaged.
    """
    file = path / name
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        expected = manifest["files"][name]
        if manifest["format"] != _FORMAT:
            raise CheckpointError(f"the checkpoint {path} has the format {manifest['format']}")
        measured = _measure(file)
        if measured != expected:
            raise CheckpointError(
                f"the checkpoint {file} is damaged: it has {measured['bytes']} bytes with the checksum "
                f"{measured['crc32']:08x}; {expected['bytes']} with {expected['crc32']:08x} were written"
            )
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint {file} cannot be read: {error}") from error
    return content


def _all_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = []
    for manifest in folder.glob(f"global_step_*/{_MANIFEST}"):
        match = re.fullmatch(r"global_step_(\d+)", manifest.parent.name)
        if match is not None:
            found.append((int(match[1]), manifest.parent))
    return [path for _, path in sorted(found)]


def _measure(file: Path) -> dict[str, int]:
    size = checksum = 0
    with file.open("rb") as content:
        while chunk := content.read(1 << 20):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": checksum}


def _sync(folder: Path) -> None:
    """Have the files on disk before their folder gets its name."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
