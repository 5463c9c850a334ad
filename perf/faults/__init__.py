"""Drills: real processes are killed, frozen, flooded and lied to, while clients count their answers.

How a drill is written: see `faults.drills`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

from faults.drills import DRILLS

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

MODULES = (
    "workers",
    "clients",
    "broker",
    "states",
    "links",
    "hostile",
    "runs",
    "network",
    "security",
)
"""What is hurt; the drills of each run in this order."""

for _name in MODULES:
    importlib.import_module(f"faults.{_name}")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=list(DRILLS), help="these drills; see --list"
    )
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="run them N times in a row")
    parser.add_argument("--quick", action="store_true", help="with small numbers")
    parser.add_argument("--list", action=_List, help="say what the drills are, and run none")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each drill."""
    for number in range(options.runs):
        for name in options.only or DRILLS:
            row = DRILLS[name].run(options.quick)
            yield {**row, "run": number} if options.runs > 1 else row


class _List(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *others: Any) -> None:
        for drill in DRILLS.values():
            print(f"{drill.name}: {drill.about}")
        parser.exit()
