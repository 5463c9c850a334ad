"""Prints docs/configuration.md: every key of the configuration, from the code that reads it.

.venv/bin/python docs/make_configuration.py > docs/configuration.md
"""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any

from pydantic.fields import FieldInfo

from zmqrl.config import Config, Section

HEAD = """# Configuration

Every key, with its default. A file gives the keys that it wants to change, in sections:

```yaml
runner:
  enable_decoupled_mode: true
rollout:
  rollout_queue_size: 4
```

`section.key=value` on the command line overrides the file. An unknown key, a wrong type or an impossible
value is an error that names the key. Paths are relative to the current folder. The run folder of
`bin/train` and `bin/evaluate` has a `config.yaml` with all keys as they were in force.
"""


def section_of(annotation: Any) -> type[Section] | None:
    """The section in an annotation such as `DelayConfig | None`."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(candidate) and issubclass(candidate, Section):
            return candidate
    return None


def type_name(annotation: Any) -> str:
    """An annotation as a reader of YAML would say it."""
    names = {int: "int", float: "number", str: "text", bool: "bool", types.NoneType: "null", dict: "map"}
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in typing.get_args(annotation))
    return names.get(origin or annotation, str(annotation))


def default_of(field: FieldInfo) -> str:
    """A default in YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "{}" if value == {} else str(value)


def rows(section: type[Section]) -> list[str]:
    """The table of one section's own keys."""
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        if section_of(field.annotation) is None:
            text = field.description or ""
            lines.append(
                f"| `{name}` | {type_name(field.annotation)} | `{default_of(field)}` | {text} |"
            )
    return lines if len(lines) > 2 else []


def document(section: type[Section], path: str, seen: dict[type[Section], str]) -> list[str]:
    """A heading, the docstring and the table of a section, then those within it."""
    lines = []
    if section in seen:
        return [f"## {path}", "", f"The same keys as `{seen[section]}`.", ""]
    seen[section] = path
    if path:
        lines += [f"## {path}", "", inspect.cleandoc(section.__doc__ or ""), ""]
        table = rows(section)
        lines += [*table, ""] if table else []
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            lines += document(inner, f"{path}.{name}" if path else name, seen)
    return lines


def page() -> str:
    """The whole page."""
    return (HEAD + "\n" + "\n".join(document(Config, "", {}))).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
