"""The line that moves while a run is under way, above it the output of the run's processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from zmqrl.telemetry.metrics import EnvView, summed

_PLAIN_EVERY = 5.0
"""Seconds between two lines where the output is not a terminal."""


class LiveLine:
    """Episodes done, steps/s and the time left: a bar on a terminal, else a line now and then.

    Args:
        console: Where to write.
        episodes: How many there will be.
    """

    def __init__(self, console: Console, episodes: int) -> None:
        self._console = console
        self._episodes = episodes
        self._steps = 0
        self._since = time.monotonic()
        self._rate = 0.0
        self._said = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("episodes  {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=episodes, rate="")
        self._progress.start()

    def say(self, name: str, line: str) -> None:
        """Print a line of the process `name` above the bar; may be called from any thread."""
        self._console.print(Text.assemble((f"[{name}] ", "dim"), line), soft_wrap=True)

    def update(self, envs: Sequence[EnvView]) -> None:
        """Show where the run is."""
        now = time.monotonic()
        if now >= self._since + 1.0:
            steps = summed(envs).env_steps
            self._rate = (steps - self._steps) / (now - self._since)
            self._steps, self._since = steps, now
        done = sum(len(env.episodes) for env in envs)
        stepping = any(env.stepped() for env in envs)
        what = "evaluating" if stepping else "starting"
        rate = f"{self._rate:,.0f} steps/s" if stepping else ""
        by_policy = Counter[str]()
        for env in envs:
            by_policy[env.policy] += len(env.episodes)
        if stepping and len(by_policy) > 1:
            rate += f" ({', '.join(f'{name}: {count}' for name, count in by_policy.items())})"
        self._progress.update(self._task, completed=done, description=what, rate=rate)
        if not self._console.is_terminal and now >= self._said + _PLAIN_EVERY:
            self._said = now
            self._console.print(f"{what}: {done} of {self._episodes} episodes  {rate}")

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()
