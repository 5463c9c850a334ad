"""`bin/import-rlinf FILE`: makes a configuration of ours from one of RLinf."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from zmqrl import config
from zmqrl.errors import ConfigError
from zmqrl.rlinf.translation import Imported, own_keys, translate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `bin/import-rlinf`.

    Returns:
        0 on success, 2 on a bad file or command line, 1 if OmegaConf is missing.
    """
    options = _parser().parse_args(arguments)
    try:
        from zmqrl.rlinf import hydra
    except ImportError as error:
        print(f"error: {error}; this command needs pip install 'zmqrl[rlinf]'", file=sys.stderr)
        return 1
    source: Path = options.file
    try:
        for folder in options.config_dir:
            if not folder.is_dir():
                raise ConfigError(f"--config-dir {folder}: there is no such folder")
        composed = hydra.compose(source, options.config_dir)
        made = translate(composed.tree)
        for key, reason in composed.left_out.items():
            made.leave_out(key, reason)
        text = _written(made, source.name)
        _check(text, made, source)
        _write(text, options.output, source)
        print(_report(made, source.name), file=sys.stderr)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(text: str, output: Path | None, source: Path) -> None:
    if output is None:
        print(text, end="")
        return
    if output.exists() and output.samefile(source):
        raise ConfigError(f"--output {output} is the file that is imported")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error.strerror}") from None


def _parser() -> argparse.ArgumentParser:
    text = "Make a configuration from one of RLinf; lists on stderr what changed and what is left out."
    parser = argparse.ArgumentParser(prog="import-rlinf", description=text)
    parser.add_argument("file", metavar="FILE", type=Path, help="a YAML file of RLinf")
    parser.add_argument("--output", metavar="OUT", type=Path, help="where to write it (default: stdout)")
    parser.add_argument(
        "--config-dir",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="where the files of its defaults list are, beside its own folder; can be given again",
    )
    return parser


def _written(made: Imported, source: str) -> str:
    """The YAML of an import, with a head that says what it was made from and what is to be filled in."""
    tree: dict[str, Any] = {}
    for key in own_keys(config.Config):
        if key in made.values:
            *sections, name = key.split(".")
            node: Any = tree
            for section in sections:
                node = node.setdefault(section, {}) if isinstance(node, dict) else None
            if isinstance(node, dict):
                node[name] = made.values[key]
    head = [f"Made by bin/import-rlinf from {source}; run it with", "  bin/train --config THIS_FILE"]
    if made.to_fill_in:
        head += ["To fill in:", *(f"  {line}" for line in made.to_fill_in)]
    comment = "".join(f"# {line}\n" for line in head)
    return comment + "\n" + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _check(text: str, made: Imported, source: Path) -> None:
    """Let our configuration read what was written; its errors then name RLinf's keys."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            config.load(file)
        except ConfigError as error:
            words = "; ".join(line.strip() for line in str(error).replace(f"{file}: ", "").split("\n"))
            # Longest first, so that no key is taken for the beginning of another.
            names = "|".join(re.escape(own) for own in sorted(made.origin, key=len, reverse=True))
            words = re.sub(rf"\b({names})\b", lambda match: made.origin.get(match[0], match[0]), words)
            raise ConfigError(f"{source}: {words}") from None


def _report(made: Imported, source: str) -> str:
    lines = [f"{source}: kept {len(made.kept)} keys"]
    width = max((len(before) for before, _ in made.translated), default=0)
    if made.translated:
        lines += [
            f"translated: {len(made.translated)}",
            *(f"  {old:{width}} -> {new}" for old, new in made.translated),
        ]
    if made.left_out:
        lines += [f"left out: {sum(map(len, made.left_out.values()))}"]
    for reason, keys in made.left_out.items():
        lines += [f"  {reason}:", *_wrapped(", ".join(keys))]
    if made.to_fill_in:
        lines += ["to fill in:", *(f"  {line}" for line in made.to_fill_in)]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    indent = " " * 4
    return textwrap.wrap(
        text, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
