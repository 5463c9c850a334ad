"""Checkpoints: written so that a reader never sees half of one, read so that damage has a name.

A checkpoint is a folder `global_step_N` with the actor alone (for evaluations), the whole state of the
learner, and a manifest with the size and checksum of both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections import OrderedDict
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

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


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
        CheckpointError: It holds what could not be read again, or cannot be written, because of a full
            disk for instance; older ones are as they were.
    """
    final = folder / f"global_step_{step}"
    temporary = folder / f".{final.name}.tmp"
    try:
        _sweep(folder)
        temporary.mkdir(parents=True)
        files = {}
        for name, content in ((ACTOR, actor), (STATE, state)):
            _check_plain(content, name.partition(".")[0])
            torch.save(content, temporary / name)
            files[name] = _measure(temporary / name)
        manifest = {"format": _FORMAT, "step": step, "written": time.time(), "files": files}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _sync(*temporary.iterdir(), temporary)
        if final.exists():
            final.rename(folder / f".{final.name}.old")
        temporary.rename(final)
        _sync(folder)
    except (OSError, RuntimeError, TypeError) as error:  # torch reports a full disk as a RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"the checkpoint {final} cannot be written: {error}") from error
    _sweep(folder)
    for old in _all_in(folder)[:-_KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def check(name: str, content: Any) -> None:
    """Whether a checkpoint can hold something.

    Args:
        name: What it is, for the error.
        content: The thing.

    Raises:
        CheckpointError: Something in it could not be read again; names it.
    """
    try:
        _check_plain(content, name)
    except TypeError as error:
        raise CheckpointError(str(error)) from None


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
    """Read one file of a checkpoint; no code that it may hold is run.

    Args:
        path: The checkpoint's folder.
        name: `ACTOR` or `STATE`.

    Raises:
        CheckpointError: It is missing, cut short, or damaged.
    """
    file = path / name
    expected = _expected(path, name)
    try:
        measured = _measure(file)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {file} cannot be read: {error}") from error
    if measured != expected:
        raise CheckpointError(
            f"the checkpoint {file} is damaged: it has {measured['bytes']} bytes with the checksum "
            f"{measured['crc32']:08x}; {expected['bytes']} with {expected['crc32']:08x} were written"
        )
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a stranger's bytes bring about
        raise CheckpointError(f"the checkpoint {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"the checkpoint {file} holds a {type(content).__name__}, not a dict")
    return content


def _expected(path: Path, name: str) -> dict[str, int]:
    """Size and checksum of a file, as the manifest tells them."""
    file = path / _MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            raise CheckpointError(
                f"the checkpoint {file} has the format {manifest['format']!r}; "
                f"this version of zmqrl reads {_FORMAT}"
            )
        expected = manifest["files"][name]
        return {"bytes": int(expected["bytes"]), "crc32": int(expected["crc32"])}
    except OSError as error:
        raise CheckpointError(f"the checkpoint {file} cannot be read: {error}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {file} is damaged: {error!r}") from error


def _all_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, in the order in which they were written.

    A run that goes on from an earlier one writes lower steps than some that are there already.
    """
    found = []
    for manifest in folder.glob(f"global_step_*/{_MANIFEST}"):
        match = re.fullmatch(r"global_step_(\d+)", manifest.parent.name)
        if match is not None:
            found.append((_written(manifest), int(match[1]), manifest.parent))
    return [path for *_, path in sorted(found)]


def _written(manifest: Path) -> float:
    """When a checkpoint was written; of one that does not tell, when its file was."""
    try:
        return float(json.loads(manifest.read_text(encoding="utf-8"))["written"])
    except (ValueError, LookupError, TypeError, RecursionError, OSError):
        return manifest.stat().st_mtime


def _sweep(folder: Path) -> None:
    """Remove what a save that was killed has left."""
    for old in folder.glob(".global_step_*.old"):
        replaced = folder / old.name[1 : -len(".old")]
        if replaced.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(replaced)
    for unfinished in folder.glob(".global_step_*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_plain(node: Any, path: str) -> None:
    """Refuse what `load` would refuse.

    Raises:
        TypeError: Naming the path.
    """
    if type(node) in (dict, OrderedDict):
        for key, child in node.items():
            _check_plain(key, f"a key of {path}")
            _check_plain(child, f"{path}[{key!r}]")
    elif type(node) in (list, tuple):
        for index, child in enumerate(node):
            _check_plain(child, f"{path}[{index}]")
    elif not (isinstance(node, torch.Tensor) or type(node) in _PLAIN):
        raise TypeError(
            f"{path} is a {type(node).__name__}; only tensors, numbers, str, bytes and None, and dicts, "
            "lists and tuples of them can be read again"
        )


def _measure(file: Path) -> dict[str, int]:
    size = checksum = 0
    with file.open("rb") as content:
        while chunk := content.read(1 << 20):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": checksum}


def _sync(*paths: Path) -> None:
    """Have files, or the names in folders, on disk before anything that comes later."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
