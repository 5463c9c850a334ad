"""YAML in, a typed configuration out, and precise errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from zmqrl.config.section import Section
from zmqrl.config.whole import Config
from zmqrl.errors import ConfigError


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration.

    Args:
        path: A YAML file; None for the defaults.
        overrides: `section.key=value` strings, the value in YAML; later ones win.

    Raises:
        ConfigError: Naming the key path, the value, what is allowed, and the nearest known key.
    """
    tree: dict[str, Any] = {}
    source = "command line"
    if path is not None:
        source = str(path)
        tree = _read_yaml(Path(path))
    for override in overrides:
        _apply(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, source)) from None


def dump(config: Config, path: Path) -> None:
    """Write `config`, defaults included, as YAML that `load` reads back to an equal configuration."""
    tree = config.model_dump(mode="json")
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


def for_policy(reference: str | None, words: Iterable[str], section: str, key: str) -> list[str]:
    """The overrides of a command line on which a policy may be named.

    Args:
        reference: What names it, such as `module:factory`; None if the command line does not.
        words: `key=value` strings. Where a policy is named, those that are about no section of the
            configuration are for its factory.
        section: That names a policy.
        key: Of it there; the one with `_kwargs` behind it is for the factory.
    """
    if reference is None:
        return list(words)
    overrides = [f"{section}.{key}={reference}"]
    for word in words:
        own = _is_about_a_section(word)
        overrides.append(word if own else f"{section}.{key}_kwargs.{word.strip()}")
    return overrides


def _is_about_a_section(override: str) -> bool:
    """Whether it names a key of a section, or a whole one; `algorithm=PPO` does not."""
    key, _, value = override.partition("=")
    name, dot, _ = key.strip().partition(".")
    return name in Config.model_fields and (bool(dot) or value.strip().startswith("{"))


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, which YAML readers otherwise drop in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                raise yaml.MarkedYAMLError(problem="a key is no text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path} (looked in {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        words = str(error).replace('in "<unicode string>", ', "in ")
        raise ConfigError(f"{path} is not valid YAML: {words}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections such as 'runner:', not a {type(tree).__name__}")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"cannot read the override {override!r}: expected section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"cannot read the value of the override {override!r}") from None
    node = tree
    for part in parts[:-1]:
        child = node.get(part)
        if not isinstance(child, dict):
            child = node[part] = {}
        node = child
    node[parts[-1]] = value


def _explain(error: ValidationError, source: str) -> str:
    lines = [_explain_one(dict(detail)) for detail in error.errors(include_url=False)]
    head = f"{source}: " if len(lines) == 1 else f"{source}: {len(lines)} errors\n  "
    return head + "\n  ".join(lines)


def _explain_one(detail: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        section = ".".join(str(part) for part in detail["loc"][:-1])
        known = list(_section_at(detail["loc"][:-1]).model_fields)
        where = f"in section '{section}'" if section else "at the top level"
        near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key '{path}' {where}; {hint}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "model_type":
        message = "expected a section with keys"
    if not path:
        return message
    value = detail["input"]
    if detail["type"] == "value_error" and isinstance(value, dict):
        return f"{path}: {message}"
    return f"{path}: {message} (got {value!r})"


def _section_at(path: tuple[Any, ...]) -> type[Section]:
    section: type[Section] = Config
    for part in path:
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, Section))
    return section
