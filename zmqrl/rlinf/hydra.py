"""Hydra's YAML in, one plain tree out: defaults lists and interpolations, without running code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from zmqrl.errors import ConfigError

_SELF = "_self_"
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_DEEPEST = 64
"""Sections within sections; more means that an interpolation leads into itself."""


@dataclass(slots=True)
class Composed:
    """What a file and its defaults say together.

    Attributes:
        tree: Sections and values, interpolations resolved.
        left_out: Key paths and entries of defaults lists that have no value, each with the reason.
    """

    tree: dict[str, Any]
    left_out: dict[str, str]


def compose(path: Path, folders: Sequence[Path] = ()) -> Composed:
    """Read `path`, and what its defaults list names, as Hydra does.

    Later entries of a defaults list win over earlier ones, and the file itself over all of them unless
    it says `_self_` elsewhere.

    Args:
        path: The primary file.
        folders: Where the files of the defaults list are looked for, after the folder of `path`.

    Raises:
        ConfigError: Naming the file, and the key if one is to blame.
    """
    composer = _Composer([path.parent, *folders])
    tree = composer.read(path, "", None)
    try:
        config = OmegaConf.create(tree)
        resolved = _section(config, (), composer.left_out)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{path}: {where}{_first_line(error)}") from None
    except _Cycle as cycle:
        raise ConfigError(f"{path}: {cycle}: its interpolation leads back to itself") from None
    return Composed(resolved, composer.left_out)


class _Cycle(Exception):
    """An interpolation that leads back to itself; says the key."""


@dataclass(slots=True)
class _Composer:
    folders: Sequence[Path]
    left_out: dict[str, str] = field(default_factory=dict)
    open_files: list[Path] = field(default_factory=list)

    def read(self, path: Path, package: str, group: str | None) -> dict[str, Any]:
        """The tree of `path` and its defaults, placed at the key path `package`.

        Args:
            path: A file.
            package: A key path, "" for the top level.
            group: The folder of `path` within those that are searched; None for the primary file.
        """
        if path in self.open_files:
            raise ConfigError(f"{path}: defaults: the list leads back to this file")
        self.open_files.append(path)
        own = _load(path)
        entries = own.pop("defaults", None) or []
        if not isinstance(entries, list):
            raise ConfigError(f"{path}: defaults: expected a list (got {entries!r})")
        whole: dict[str, Any] = {}
        for entry in entries if _SELF in entries else [*entries, _SELF]:
            if entry == _SELF:
                _merge(whole, _placed(own, package))
                continue
            for choice in self._choices(entry):
                _merge(whole, self._chosen(choice, package, group))
        self.open_files.pop()
        return whole

    def _choices(self, entry: Any) -> Iterator[str]:
        """The files that an entry names, each as `path` or `path@package`."""
        if isinstance(entry, str):
            yield entry
            return
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ConfigError(f"{self.open_files[-1]}: defaults: cannot read the entry {entry!r}")
        [(key, options)] = entry.items()
        words = str(key).split()
        if "override" in words:
            hydra = words[-1].lstrip("/").startswith("hydra/")
            self.left_out[f"defaults: {key}: {options}"] = (
                "of Hydra itself" if hydra else "overrides a default"
            )
            return
        group, at, package = words[-1].partition("@")
        for option in options if isinstance(options, list) else [options]:
            if option is not None:
                yield f"{group}/{option}{at}{package}"

    def _chosen(self, choice: str, parent: str, group: str | None) -> dict[str, Any]:
        name, at, package = choice.removesuffix(".yaml").partition("@")
        option = name if group is None or name.startswith("/") else f"{group}/{name}"
        for folder in self.folders:
            file = folder / f"{option.strip('/')}.yaml"
            if file.is_file():
                own = package if at else _own_package(file) or _dots(name)
                top = name.startswith("/") and not at
                return self.read(file, _joined("" if top else parent, own), _folder(option))
        self.left_out[f"defaults: {choice}"] = "not found: give --config-dir"
        return {}


def _load(path: Path) -> dict[str, Any]:
    try:
        config = OmegaConf.load(path)
        tree = OmegaConf.to_container(config, resolve=False)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path} (looked in {Path.cwd()})") from None
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{path}: {where}{_first_line(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_in_one_line(error)}") from None
    except OSError as error:
        # OmegaConf says so of a file that holds no mapping and no list.
        if error.strerror is None:
            raise ConfigError(f"{path} must hold sections such as 'runner:'") from None
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections such as 'runner:', not a list")
    return {str(key): value for key, value in tree.items()}


def _own_package(file: Path) -> str | None:
    """Where a file wants to be placed, if it says so in its first lines."""
    named = _PACKAGE.search(file.read_text(encoding="utf-8", errors="replace"))
    return None if named is None or named[1] == "_group_" else f"_global_.{named[1]}"


def _folder(option: str) -> str:
    return option.strip("/").rpartition("/")[0]


def _dots(option: str) -> str:
    """The key path of a group such as `env/train`."""
    return _folder(option).replace("/", ".")


def _joined(parent: str, package: str) -> str:
    if package.startswith("_global_"):
        return package.replace("_global_", "").lstrip(".")
    return ".".join(part for part in (parent, package) if part)


def _placed(tree: dict[str, Any], package: str) -> dict[str, Any]:
    for part in reversed(package.split(".") if package else []):
        tree = {part: tree}
    return tree


def _merge(into: dict[str, Any], later: dict[str, Any]) -> None:
    """Merge `later` into `into`; where both have a value, the later one holds."""
    for key, value in later.items():
        present = into.get(key)
        if isinstance(present, dict) and isinstance(value, dict):
            _merge(present, value)
        else:
            into[key] = value


def _section(section: DictConfig, path: tuple[str, ...], left_out: dict[str, str]) -> dict[str, Any]:
    """A section with its interpolations resolved; what has no value goes to `left_out`."""
    tree = {}
    for key in section:
        where = (*path, str(key))
        if len(where) > _DEEPEST:
            raise _Cycle(".".join(where[:4]))
        try:
            value = section[key]
            if isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except RecursionError:
            raise _Cycle(".".join(where)) from None
        except OmegaConfBaseException as error:
            if re.search("recursi|to parent node", str(error), re.IGNORECASE):
                raise _Cycle(".".join(where)) from None
            left_out[".".join(where)] = _reason(error)
            continue
        tree[str(key)] = _section(value, where, left_out) if isinstance(value, DictConfig) else value
    return tree


def _reason(error: OmegaConfBaseException) -> str:
    """Why a key has no value, in a few words."""
    words = _first_line(error)
    variable = re.search(r"Environment variable '(.+?)' not found", words)
    if variable is not None:
        return f"environment variable {variable[1]} is not set"
    if isinstance(error, UnsupportedInterpolationType):
        return f"needs the resolver {words.rsplit(' ', 1)[-1]!r}"
    if isinstance(error, InterpolationKeyError):
        return "refers to a key that is not there"
    if isinstance(error, MissingMandatoryValue):
        return "has no value yet (???)"
    return words


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
