"""Clients in processes of their own, for drills that kill, freeze or restart them.

`python crowd.py JSON`: one process for each client, all in one process group, so that hundreds can be
killed at once. SIGTERM to the group makes them finish. Each process prints its ledger when it changes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parent.parent)]

from forked import fork_each

from faults.load import Ledger, Load
from zmqrl import errors
from zmqrl.process import StopSignal

_EVERY = 0.25


def ledgers(lines: Sequence[str], child: str) -> list[Ledger]:
    """The last ledger of each process of a crowd.

    Args:
        lines: What the children of a pool have printed.
        child: The crowd's name.
    """
    last: dict[int, Ledger] = {}
    for line in lines:
        if line.startswith(f"[{child}] {{"):
            said = json.loads(line.partition(" ")[2])
            pid = said.pop("pid")
            last[pid] = Ledger.of(said)
    return list(last.values())


def _ask(number: int, endpoint: str, stop: StopSignal, options: dict[str, Any]) -> None:
    """Be one client until it is told to stop, or has asked its `requests`."""
    kinds = tuple(getattr(errors, name) for name in options.pop("expects", ()))
    if "world_size" in options:
        options["rank"] = number % options["world_size"]
    load = Load(endpoint, 1, first=number, expects=kinds, **options)
    said = -1
    while not stop() and load.is_running():
        if load.ledger.requests != said:
            said = load.ledger.requests
            _say(load.ledger)
        time.sleep(_EVERY)
    _say(load.finish())


def _say(ledger: Ledger) -> None:
    # In one piece: the lines of all processes go into one pipe.
    os.write(1, (json.dumps({"pid": os.getpid(), **ledger.plain()}) + "\n").encode())


def main() -> None:
    """Fork the processes, and wait for them."""
    options = json.loads(sys.argv[1])
    endpoint, first = options.pop("endpoint"), options.pop("first")
    numbers = range(first, first + options.pop("processes"))
    fork_each(numbers, lambda number, stop: _ask(number, endpoint, stop, options))


if __name__ == "__main__":
    main()
