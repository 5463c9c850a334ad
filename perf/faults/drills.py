"""The harness of the drills: what a drill is, and what it works with.

A drill is a function that is given a `Trial` and hurts something:

    @drill("worker-killed")
    def worker_killed(trial: Trial) -> None:
        \"\"\"A rollout worker is killed under load; another answers within 1 s.\"\"\"
        trial.pool.start(workers=2, seconds=0.01)         # faults/pool.py: real processes, by name
        load = trial.load(clients=16)                     # faults/load.py: clients in a closed loop
        load.wait_for(trial.size(1000, quick=100))        # so many answers
        moment = trial.pool.kill("rollout-0")
        trial.recovers(moment, within=1.0)                # when what was open then had ended
        load.wait_for(trial.size(1000, quick=100))
        trial.expect(trial.pool.counters()["lost_workers"] == 1, "the broker did not notice the loss")

The first paragraph of its docstring is what `--list` shows. A drill need not count (the row is made of
the ledgers of its loads and of what the policy in faults/policies.py has noted), finish its loads, clean
up, or return anything. Its row is `ok` if nothing was lost, duplicated or crossed, no call ended in an
error that its load was not told to expect (`expects=(PolicyError,)`), no `expect` failed, and it raised
nothing.

Every wait has a deadline. A drill takes 1 to 4 seconds when `trial.quick`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import crowd, policies
from faults.load import Ledger, Load
from faults.pool import Pool, wait_for

DRILLS: dict[str, Drill] = {}
"""Every drill by its name, in the order in which they run."""


@dataclass(frozen=True)
class Drill:
    """A scenario with a name."""

    name: str
    function: Callable[[Trial], None]
    in_suite: bool
    """Whether its quick form is one of the tests; not where others show the same."""

    @property
    def about(self) -> str:
        """What is done, and what must come of it."""
        return (self.function.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")

    def run(self, quick: bool = False) -> dict[str, Any]:
        """Run it, and return its row; `note` says what was wrong."""
        trial = Trial(quick)
        try:
            try:
                self.function(trial)
                trial.end()
            finally:
                trial.close()
        except Skipped as error:
            trial.skipped = str(error)
        except Exception as error:
            trial.notes.append(f"{type(error).__name__}: {error}")
            traceback.print_exc(file=sys.stderr)
        return {"scenario": self.name, **trial.row()}


def drill(
    name: str, in_suite: bool = True
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Make a drill of a function."""

    def register(function: Callable[[Trial], None]) -> Callable[[Trial], None]:
        DRILLS[name] = Drill(name, function, in_suite)
        return function

    return register


class Skipped(Exception):
    """Raised where a drill cannot be done on this machine; says why."""


class Trial:
    """One run of a drill: its pool, its loads, and what it found.

    Args:
        quick: Whether small numbers will do.
    """

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.folder = Path(tempfile.mkdtemp(prefix="zd-"))
        """For the sockets and the notes of the policies; mode 0700."""
        self.pool = Pool(self.folder, Path(policies.__file__), "Tagged", folder=self.folder)
        """Not started yet."""
        self.notes: list[str] = []
        """What was wrong."""
        self.skipped = ""
        """Why the drill was not done."""
        self.ledger = Ledger()
        """What ended loads and crowds have counted."""
        self.recovery_s: float | None = None
        self._runs: Counter[tuple[int, int]] | None = None
        self._loads: list[Load] = []
        self._numbers = itertools.count(0, 1000)
        self._crowds: dict[str, set[str]] = {}  # by child: the errors that it expects

    # -- What a drill uses

    def size(self, full: int, quick: int) -> int:
        """A number that is smaller in a quick run."""
        return quick if self.quick else full

    def load(self, clients: int, endpoint: str | None = None, **options: Any) -> Load:
        """Start clients in this process; see `Load`. Unless given, their numbers follow on."""
        options.setdefault("first", next(self._numbers))
        load = Load(endpoint or self.pool.frontend, clients, **options)
        self._loads.append(load)
        return load

    def crowd(
        self, child: str, processes: int, first: int, within: Sequence[str] = (), **options: Any
    ) -> None:
        """Start clients in processes of their own, as a child of the pool.

        All of them are in its process group, so that the pool's `kill`, `freeze` and `terminate` are for
        the whole crowd.

        Args:
            child: Its name.
            processes: How many; each has one client.
            first: The number of the first client.
            within: What Python is to run before the crowd's program, if anything.
            options: For every client's `Load`, what JSON takes; `expects` are names of errors.
        """
        self._crowds[child] = set(options.get("expects", ()))
        arguments = {"endpoint": self.pool.frontend, "processes": processes, "first": first, **options}
        self.pool.launcher.start(child, [json.dumps(arguments)], program=[*within, crowd.__file__])

    def crowd_ledger(self, child: str) -> Ledger:
        """What a crowd has counted until now."""
        total = Ledger()
        for ledger in crowd.ledgers(self.pool.lines, child):
            total.add(ledger)
        return total

    def recovers(self, moment: float, within: float) -> None:
        """Wait until all calls that were open at `moment` have ended, and note how long that took.

        Args:
            moment: Of `time.monotonic()`; as `Pool.kill` returns it.
            within: Seconds that it may take.
        """
        timeout = within + 30.0
        loads = self._loads
        wait_for(lambda: not any(load.is_open_since(moment) for load in loads), "the recovery", timeout)
        self.recovered(max(load.recovery_s(moment) for load in loads), within)

    def recovered(self, seconds: float, within: float) -> None:
        """Note how long a recovery took; the row shows the longest of a drill."""
        self.recovery_s = max(self.recovery_s or 0.0, seconds)
        self.expect(seconds <= within, f"recovery took {seconds:.2f} s; the bound is {within:g} s")

    def expect(self, condition: Any, otherwise: str) -> None:
        """Note what is wrong unless `condition` holds."""
        if not condition:
            self.notes.append(otherwise)

    def finish(self, load: Load) -> Ledger:
        """Wait until a load has ended, and count it; `end` does so for those that are left."""
        self._loads.remove(load)
        ledger = load.finish()
        self._count(ledger, {kind.__name__ for kind in load.expects})
        return ledger

    def runs(self) -> Counter[tuple[int, int]]:
        """How often each request, `(client, sequence)`, was begun by a policy."""
        return policies.runs(self.folder) if self._runs is None else self._runs

    def reruns(self) -> int:
        """Runs beyond one for each request that was run."""
        runs = self.runs()
        return runs.total() - len(runs)

    # -- What the harness uses

    def end(self) -> None:
        """Finish what still runs, and count."""
        for load in list(self._loads):
            self.finish(load)
        for name, expected in self._crowds.items():
            child = self.pool.launcher.children[name]
            if child.process.poll() is None:
                self.pool.terminate(name)
                child.process.wait(30.0)
            child.reader.join(5.0)
            self.expect(child.process.returncode in (0, -signal.SIGKILL), child.cause())
            self._count(self.crowd_ledger(name), expected)

    def row(self) -> dict[str, Any]:
        """What the drill found, once it has ended."""
        ledger = self.ledger
        for what in ("lost", "duplicated", "crossed"):
            count = getattr(ledger, what)
            self.expect(count == 0, f"{count} {what}")
        row = {
            "requests": ledger.requests,
            "answered": ledger.answered,
            "errors": ledger.errors.total(),
            "reruns": self.reruns(),
            "lost": ledger.lost,
            "duplicated": ledger.duplicated,
            "crossed": ledger.crossed,
            "recovery_s": None if self.recovery_s is None else round(self.recovery_s, 3),
            "ok": not self.notes,
        }
        note = self.skipped or "; ".join(self.notes)
        return {**row, "skipped": bool(self.skipped), "note": note} if note else row

    def close(self) -> None:
        """Leave nothing behind."""
        for load in self._loads:
            load.close()
        pids = [child.process.pid for child in self.pool.launcher.children.values()]
        self.pool.close(grace=False)
        for pid in pids:
            wait_for(lambda group=pid: not _exists(group), f"the end of process group {pid}", 5.0)
        self._runs = self.runs()
        shutil.rmtree(self.folder)

    def _count(self, ledger: Ledger, expected: set[str]) -> None:
        self.ledger.add(ledger)
        others = {kind: n for kind, n in ledger.errors.items() if kind not in expected}
        self.expect(not others, f"errors that the drill is not about: {others}")


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
