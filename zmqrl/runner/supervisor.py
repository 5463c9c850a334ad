"""Keeps the parts of a run up: starts each of them, and starts again what was lost.

The rules, for a part that has ended although the run goes on:

1.  Exit code 2 is a bad configuration: it would end in the same way again, so the run ends.
2.  Before anything was stepped, a part that fails by itself ends the run, for the same reason. One that
    a signal has killed may come up the next time.
3.  The learner is not started again: what it has learned since its last checkpoint is lost, and whether
    to go on from there is for the user to say.
4.  A rollout or reward worker that was told to leave, by SIGTERM, has retired: whoever told it wants its
    place, so it is not started again. The last one of its kind, or of its policy, is missed.
5.  Every other part is lost, however it ended, and is started again: at once, and if it is lost again,
    after 1 s, 2 s, 4 s and so on. After `cluster.max_restarts` times the run ends with the cause. Who
    has lived for ten minutes begins at 0 again, so that a run of days outlives rare losses.
6.  With `cluster.restart: never` nothing is started again. The other workers of its kind go on without
    it, as long as there are any; nothing goes on without the broker, or without episodes that are owed.
7.  Once the run is stopped none of this holds: whoever stops it may have told all its processes at once.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from zmqrl.config import Config
from zmqrl.errors import ConfigError, RunFailed, StartupFailed
from zmqrl.runner.launcher import Launcher

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0
"""Seconds before a restart, at most."""

_PROVEN_AFTER = 600.0
"""Seconds of life after which earlier restarts are forgiven."""

_RETIRED = (0, -signal.SIGTERM, -signal.SIGALRM)
"""How a worker ends that got SIGTERM: by itself, before it could catch it, or cut off in a batch."""


class Kind(Enum):
    """What a part is; the value is for people."""

    BROKER = "broker"
    LEARNER = "learner"
    ROLLOUT = "rollout worker"
    REWARD = "reward worker"
    ENV = "env worker"
    EVAL = "eval worker"


@dataclass(slots=True, eq=False)
class Part:
    """One process of the run, and those that took its place."""

    name: str
    kind: Kind
    command: list[str]
    serves: str = ""
    """The name of the policy that a rollout worker serves, of several."""
    launched: float | None = None
    """`time.monotonic()` when it was last started; None while it is not there."""
    due: float | None = None
    """When it will be started again."""
    restarts: int = 0
    """In a row, without ten minutes of life in between."""
    first_lost: float = 0.0
    """When that row began."""
    why: str | None = None
    """Why it was killed by us."""
    silent_s: float = 0.0
    """Seconds before its end in which it did nothing."""
    gone: bool = False
    """It is not started again."""


class Supervisor:
    """The parts of one run on this machine.

    The loop that calls it looks often, and never waits for a restart:

        for part in supervisor.look():
            if not expected(part):
                supervisor.lost(part)
        if not supervisor.paused():
            for part, why in supervisor.hanging(heard, status):
                supervisor.kill(part, why)

    Args:
        config: With all endpoints.
        config_file: The same, for the parts to read.
        on_line: Called, from a thread for each part, with its name and a line of its output.
        stepped: Whether anything was stepped yet.
        stopping: Whether the run is to end.
    """

    def __init__(
        self,
        config: Config,
        config_file: Path,
        on_line: Callable[[str, str], None],
        stepped: Callable[[], bool],
        stopping: Callable[[], bool],
    ) -> None:
        self._cluster = config.cluster
        self._runner = config.runner
        self._config_file = config_file
        self._stepped = stepped
        self._stopping = stopping
        self._launcher = Launcher(on_line)
        self._parts: dict[str, Part] = {}
        self._causes: dict[tuple[Kind, str], list[str]] = {}
        self._asked = time.monotonic()

    def start(self, name: str, kind: Kind, command: str, *arguments: str, serves: str = "") -> None:
        """Start `zmqrl COMMAND --config FILE ARGUMENTS …` under `name`; `serves` as in `Part`.

        Raises:
            RunFailed: This machine takes no further process.
        """
        words = [command, "--config", str(self._config_file), *arguments]
        self._parts[name] = part = Part(name, kind, words, serves)
        self._launch(part)

    def look(self) -> list[Part]:
        """Start what is due, and see what has ended since the last call.

        Raises:
            RunFailed: This machine takes no further process.
        """
        now = time.monotonic()
        for part in self._parts.values():
            if part.due is not None and now >= part.due:
                self._launch(part)
        return [self._parts[child.name] for child in self._launcher.exits()]

    def named(self, name: str) -> Part:
        """The part that was started under `name`."""
        return self._parts[name]

    def ended_well(self, part: Part) -> bool:
        """Whether a part that has ended did so by itself, and without an error."""
        return self._launcher.children[part.name].process.returncode == 0

    def lost(self, part: Part) -> None:
        """Act on the end of a part that should have stayed.

        Raises:
            ConfigError, StartupFailed, RunFailed: The run cannot go on, with the cause.
        """
        if self._stopping():
            return
        child = self._launcher.children[part.name]
        code, cause = child.process.returncode, part.why or child.cause()
        if part.why is None and code == 2:
            raise ConfigError(cause)
        by_itself = part.why is None and code > 0
        if not self._stepped() and (by_itself or part.kind is Kind.LEARNER):
            raise StartupFailed(cause)
        is_worker = part.kind in (Kind.ROLLOUT, Kind.REWARD)
        if is_worker and part.why is None and code in _RETIRED:
            self._go_on_without(part, f"{part.name} was told to leave (SIGTERM)")
        elif part.kind is Kind.LEARNER:
            raise RunFailed(cause)
        elif self._cluster.restart == "on_failure":
            self._restart(part, cause)
        elif is_worker or part.kind is Kind.ENV:
            self._go_on_without(part, cause)
        else:
            raise RunFailed(cause)

    def paused(self) -> bool:
        """Whether this process has stood still since the last call, so that reports wait to be read.

        After Ctrl-Z and `fg` nothing may be judged by what was heard before.
        """
        before, self._asked = self._asked, time.monotonic()
        return self._asked - before > self._runner.stall_timeout_s / 2

    def hanging(self, heard: Mapping[str, float], status: Mapping[str, Any]) -> list[tuple[Part, str]]:
        """Parts that do not move any more, or env and eval workers that never did, with words for it.

        Args:
            heard: By name of env and eval workers, `time.monotonic()` of the last word of each.
            status: The latest of the broker, see `Broker.status`; may be empty.
        """
        found, now = self._stuck(status.get("workers", ())), time.monotonic()
        for part in self._parts.values():
            if part.kind not in (Kind.ENV, Kind.EVAL) or part.launched is None or part.gone or part.why:
                continue
            last = heard.get(part.name, 0.0)
            came_up = last >= part.launched
            part.silent_s = now - max(last, part.launched)
            if came_up and part.silent_s >= self._runner.stall_timeout_s:
                limit = (
                    f"{self._runner.stall_timeout_s:g} s in a step or a reset (runner.stall_timeout_s)"
                )
                found.append((part, f"{part.name} was silent for {limit}"))
            elif not came_up and part.silent_s >= self._runner.startup_timeout_s:
                limit = f"{self._runner.startup_timeout_s:g} s (runner.startup_timeout_s)"
                found.append((part, f"{part.name} did not come up within {limit}"))
        return found

    def _stuck(self, workers: Sequence[Mapping[str, Any]]) -> list[tuple[Part, str]]:
        """Rollout and reward workers whose call others have taken over long ago, as the broker says."""
        found, limit = [], self._runner.stall_timeout_s
        stuck = {(w["name"], w["pid"]): w["state_s"] for w in workers if w["state"] == "stuck"}
        for part in self._parts.values():
            # The process that has its name now may be another one.
            seconds = stuck.get((part.name, self._launcher.children[part.name].process.pid), 0.0)
            if seconds >= limit and part.launched is not None and not part.gone and not part.why:
                part.silent_s = seconds
                words = (
                    f"{part.name} was stuck in a policy call for {limit:g} s (runner.stall_timeout_s)"
                )
                found.append((part, words))
        return found

    def kill(self, part: Part, why: str) -> None:
        """End a part that hangs; `look` then tells of its end.

        Args:
            why: The cause, in place of the signal.
        """
        part.why = why
        self._launcher.kill(part.name)

    def give_up(self, part: Part) -> None:
        """End a part for good."""
        part.gone, part.due = True, None
        self._launcher.kill(part.name)

    def close(
        self, first: Sequence[Kind], meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, str]:
        """End all parts, those of the kinds `first` before the others; see `Launcher.close`."""
        early = [part.name for part in self._parts.values() if part.kind in first]
        return self._launcher.close(early, meanwhile)

    def _launch(self, part: Part) -> None:
        part.due, part.why, part.silent_s = None, None, 0.0
        try:
            self._launcher.start(part.name, part.command)
        except OSError as error:
            raise RunFailed(f"{part.name} cannot be started: {error}") from None
        part.launched = time.monotonic()

    def _restart(self, part: Part, cause: str) -> None:
        now, most = time.monotonic(), self._cluster.max_restarts
        assert part.launched is not None
        # A worker that hangs has done nothing for long: that is no proof of health.
        if now - part.launched - part.silent_s >= _PROVEN_AFTER:
            part.restarts = 0
        if part.restarts == 0:
            part.first_lost = now
        if part.restarts >= most:
            times = f"{most} time{'s' * (most != 1)}"
            seconds = f" in {now - part.first_lost:.0f} s" if most else ""
            raise RunFailed(f"{cause}; it was restarted {times}{seconds} (cluster.max_restarts)")
        part.restarts += 1
        pause = 0.0 if part.restarts == 1 else min(2.0 ** (part.restarts - 2), _LONGEST_PAUSE)
        part.launched, part.due = None, now + pause
        after = f" after {pause:g} s" if pause else ""
        log.warning("%s; restart %d of %d%s", cause, part.restarts, most, after)

    def _go_on_without(self, part: Part, cause: str) -> None:
        part.gone = True
        causes = self._causes.setdefault((part.kind, part.serves), [])
        causes.append(cause)
        alike = [p for p in self._parts.values() if (p.kind, p.serves) == (part.kind, part.serves)]
        if all(other.gone for other in alike):
            what = f"{part.kind.value} of the policy {part.serves}" if part.serves else part.kind.value
            raise RunFailed(f"no {what} is left: {'; '.join(causes)}")
        log.warning("%s; the others go on", cause)
