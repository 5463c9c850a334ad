"""Drills: real processes are killed, frozen, flooded and lied to, while clients count their answers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

ABOUT = "Kill, freeze, flood and deceive the parts of a pool, and count what was lost."

COLUMNS = (
    "scenario",
    "requests",
    "answered",
    "errors",
    "reruns",
    "lost",
    "duplicated",
    "crossed",
    "recovery_s",
    "ok",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each drill."""
    yield from ()
