"""`bin/bench NAME`: puts the pool to the test, with real processes, and prints a table.

Each bench is a module beside this one. It has `ABOUT`, a line for --help; `COLUMNS`, the keys of its
rows that the table shows; `arguments(parser)`, which adds its options; and `run(options)`, which yields
the rows as they are measured. A row with `ok: False` makes the command end with 1. A bench that has
pictures to show has `plot(rows, folder)` too, which draws them; see `pictures`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from rows import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BENCHES = (
    "latency",
    "throughput",
    "scale",
    "large",
    "batching",
    "decoupled",
    "faults",
    "soak",
    "fuzz",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="NAME")
    for name in BENCHES:
        bench = importlib.import_module(name)
        command = commands.add_parser(name, help=bench.ABOUT, description=bench.ABOUT)
        command.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE")
        if hasattr(bench, "plot"):
            command.add_argument("--plot", metavar="FOLDER", type=Path, help="draw pictures into FOLDER")
        bench.arguments(command)
        command.set_defaults(bench=bench)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # which leaves as little behind as Ctrl-C
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    table = Table(options.bench.COLUMNS)
    rows: list[dict[str, Any]] = []
    folder: Path | None = getattr(options, "plot", None)
    if folder is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[train]'")
    try:
        for row in options.bench.run(options):
            rows.append(row)
            table.add(row)
            if options.json is not None:
                options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        table.end()
        print("interrupted: the bench is not complete", file=sys.stderr)
        return 1
    table.end()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        options.bench.plot(rows, folder)
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
