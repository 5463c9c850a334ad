"""Find the user's own code: a factory or a policy by its reference."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from zmqrl.errors import ConfigError, in_a_line


def import_object(reference: str) -> Any:
    """Import what `reference` names.

    Args:
        reference: `module:name` or `path/to/file.py:name`. Modules are also looked for in the current
            directory, and a file may import its neighbours. A file is run once in a process.

    Raises:
        ConfigError: The reference is malformed, or the module, the file or the name is missing; or
            the import itself raised, with that error as its cause.
    """
    source, separator, name = reference.rpartition(":")
    if not separator or not source or not name.isidentifier():
        raise ConfigError(
            f"cannot read the reference {reference!r}: expected module:name or path/to/file.py:name"
        )
    make_importable(Path.cwd())
    module = _import_file(source) if source.endswith(".py") else _import_module(source)
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{source} has no {name!r}; {_hint(module, name)}") from None


def make_importable(directory: Path) -> None:
    """Let modules of `directory` be imported, as `python -m` does for the current directory."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    # Without this, a module written a moment ago may not be seen.
    importlib.invalidate_caches()


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"there is no module {name!r} ({error}); is it installed, or in {Path.cwd()}?"
            ) from None
        raise _raised(name, error) from error
    except (Exception, SystemExit) as error:
        raise _raised(name, error) from error


def _import_file(source: str) -> ModuleType:
    path = Path(os.path.expanduser(source)).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {source} (looked for {path})")
    # The path is part of the name, so that two files named policy.py do not meet.
    name = f"{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{source} cannot be imported as Python")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _raised(source, error) from error
    return module


def _raised(source: str, error: BaseException) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(frame for frame in reversed(frames) if not frame.filename.startswith("<frozen"))
    return ConfigError(
        f"importing {source} raised {in_a_line(error)} ({frame.filename}, line {frame.lineno})"
    )


def _hint(module: ModuleType, name: str) -> str:
    public = [known for known in vars(module) if not known.startswith("_")]
    near = difflib.get_close_matches(name, public, n=3)
    if near:
        return f"did you mean {' or '.join(repr(known) for known in near)}?"
    return f"it has {', '.join(public[:12]) or 'no public names'}"
