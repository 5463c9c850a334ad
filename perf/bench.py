"""`bin/bench NAME`: puts the pool to the test, with real processes, and prints a table.

Each bench is a module beside this one. It has `ABOUT`, a line for --help; `COLUMNS`, the keys of its
rows that the table shows; `arguments(parser)`, which adds its options; and `run(options)`, which yields
the rows as they are measured. A row with `ok: False` makes the command end with 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import signal
import sys
from pathlib import Path

from rows import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BENCHES = ("faults", "throughput", "soak", "fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="NAME")
    for name in BENCHES:
        bench = importlib.import_module(name)
        command = commands.add_parser(name, help=bench.ABOUT, description=bench.ABOUT)
        command.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE")
        bench.arguments(command)
        command.set_defaults(bench=bench)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # which leaves as little behind as Ctrl-C
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    table = Table(options.bench.COLUMNS)
    rows = []
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
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
