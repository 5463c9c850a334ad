"""The live table of a training run, above it the output of the run's processes."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from zmqrl.telemetry.metrics import Metrics
from zmqrl.telemetry.sections import Row, Section, count, duration, sections, written

_EVERY = 0.25
"""Seconds between two pictures on a terminal."""

_PLAIN_EVERY = 5.0
"""Seconds between two lines where the output is not a terminal."""

_NARROWEST, _WIDEST, _GAP = 25, 38, 2
"""Cells of a column of the table, and between two."""

_LIMITS = {
    "env": "env workers",
    "queue": "the queue",
    "rollout": "rollout workers",
    "learner": "the learner",
}

_ASCII = str.maketrans({"━": "=", "─": "-", "…": "~", "µ": "u"})

Line = list[tuple[str, str]]
"""Pieces of text, each with its style."""


class TrainingView:
    """Where a training run is: a table on a terminal, else a line now and then.

    Args:
        console: Where to write.
        title: What the run is called.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._metrics: Metrics = {}
        self._progress: float | None = None
        self._eta_s: float | None = None
        self._began = self._shown = time.monotonic()
        self._evaluation: object = None
        self._closed = False
        self._live: Live | None = None
        self._redirected: list[logging.StreamHandler[TextIO]] = []
        if console.is_terminal and not console.is_dumb_terminal:
            self._shown -= _EVERY
            self._live = Live(
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
                vertical_overflow="crop",
            )
            self._start(self._live)

    def say(self, name: str, line: str) -> None:
        """Print a line of the process `name` above the table; may be called from any thread."""
        self._console.print(Text.assemble((f"[{name}] ", "dim"), line), soft_wrap=True)

    def update(self, metrics: Metrics, progress: float | None, eta_s: float | None) -> None:
        """Show where the run is; cheap enough to be called in a loop.

        Args:
            metrics: What is new. A metric that is not among them keeps its value, one that is None goes.
            progress: Share of the run that is done; None if it has no known end.
            eta_s: Seconds that it will still take; None if that is not known.
        """
        if self._closed:
            return
        self._metrics.update(metrics)
        self._progress, self._eta_s = progress, eta_s
        now = time.monotonic()
        if self._live is not None:
            if now >= self._shown + _EVERY:
                self._shown = now
                self._live.update(self._table(self._console.height - 1), refresh=True)
            return
        self._say_evaluation()
        if now >= self._shown + _PLAIN_EVERY:
            self._shown = now
            self._print(_plain(self._metrics, progress))

    def close(self) -> None:
        """End the live display; the last table stays, whole."""
        if self._closed:
            return
        self._closed = True
        if self._live is not None:
            self._live.stop()
        for handler in self._redirected:
            handler.setStream(sys.stderr)
        if self._metrics:
            self._console.print(self._table(None))

    def _start(self, live: Live) -> None:
        """Show the live display, and let the lines of this process's log pass above it."""
        stderr = sys.stderr
        live.start()
        for handler in logging.getLogger().handlers:
            # Live replaces sys.stderr, but a handler keeps the stream that it was made with.
            if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:
                handler.setStream(sys.stderr)
                self._redirected.append(handler)
        live.update(self._table(self._console.height - 1), refresh=True)

    def _say_evaluation(self) -> None:
        """Print the evaluation if it is another than the last."""
        get = self._metrics.get
        number = get("eval/number")
        which = (get("eval/policy_version"), get("eval/num_trajectories")) if number is None else number
        if which in (self._evaluation, (None, None)):
            return
        self._evaluation = which
        self._print(_evaluation(self._metrics))

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _table(self, height: int | None) -> Text:
        """The header and those rows of the sections that fit into `height` lines."""
        width = max(1, self._console.width - 1)  # the last column is where some terminals wrap
        elapsed = time.monotonic() - self._began
        header = [_progress_line(self._title, self._progress, self._eta_s, elapsed, width)]
        header += _packed(_facts(self._metrics) or ["starting"], width)
        room = None if height is None else height - len(header) - 1
        body = _body(sections(self._metrics), width, room)
        return self._text([*header, [], *body] if body else header)

    def _text(self, lines: list[Line]) -> Text:
        text = Text(no_wrap=True, overflow="crop")
        for index, line in enumerate(lines):
            text.append("\n" if index else "")
            for piece, style in line:
                text.append(self._encodable(piece), style)
        return text

    def _encodable(self, piece: str) -> str:
        if not self._console.options.ascii_only:
            return piece
        encoding = self._console.encoding
        return piece.translate(_ASCII).encode(encoding, "replace").decode(encoding)


def _progress_line(
    title: str, progress: float | None, eta_s: float | None, elapsed: float, width: int
) -> Line:
    """The title, how much of the run is done, and the times; what does not fit is left out."""
    times = f"elapsed {duration(elapsed):<7}"
    if eta_s is not None and math.isfinite(eta_s) and progress is not None:
        times = f"ETA {duration(max(0.0, eta_s)):<7}  {times}"
    share = 0.0
    if progress is not None and math.isfinite(progress):
        share = min(1.0, max(0.0, progress))
        times = f"{math.floor(100 * share):3d}%  {times}"
    title = _cropped(title, max(8, width // 3))
    between = width - cell_len(title) - len(times) - 4
    if between < 0:
        return [(_cropped(times, width), "")]
    if progress is None or between < 4:
        return [(title, "bold"), (" " * (between + 4), ""), (times.rstrip(), "")]
    done = round(share * between)
    return [
        (f"{title}  ", "bold"),
        ("━" * done, "cyan"),
        ("─" * (between - done), "dim"),
        (f"  {times.rstrip()}", ""),
    ]


def _facts(metrics: Metrics) -> list[str]:
    """What the header says in words."""
    facts = []
    if (steps := _finite(metrics, "env_steps")) is not None:
        facts.append(f"{count(steps)} env steps")
    if (rate := _finite(metrics, "env_steps_per_s")) is not None:
        facts.append(f"{_rate(rate)} steps/s")
    if (version := _finite(metrics, "policy_version")) is not None:
        lag = _lag(metrics)
        facts.append(f"version {version:.0f}" + ("" if lag is None else f", lag {lag}"))
    if (limit := metrics.get("bottleneck")) is not None:
        facts.append(f"limited by {_LIMITS.get(str(limit), limit)}")
    return facts


def _lag(metrics: Metrics) -> str | None:
    """Versions by which the rollout workers are behind; if they do not say, the trajectories."""
    newest, held = _finite(metrics, "policy_version"), _finite(metrics, "rollout/policy_version")
    if newest is not None and held is not None:
        return f"{max(0.0, newest - held):.0f}"
    stale = _finite(metrics, "train/staleness/mean")
    return None if stale is None else f"{stale:.1f}"


def _rate(value: float) -> str:
    return count(value) if value >= 100 else f"{value:.1f}"


def _finite(metrics: Metrics, name: str) -> float | None:
    value = metrics.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _packed(facts: list[str], width: int) -> list[Line]:
    """The facts beside each other, on as many lines as they need."""
    lines = [facts[0]]
    for fact in facts[1:]:
        if cell_len(lines[-1]) + 3 + cell_len(fact) <= width:
            lines[-1] += f"   {fact}"
        else:
            lines.append(fact)
    return [[(_cropped(line, width), "")] for line in lines]


def _body(shown: list[Section], width: int, room: int | None) -> list[Line]:
    """The sections in columns, in at most `room` lines."""
    if not shown or (room is not None and room < 2):
        return []
    columns = min(len(shown), max(1, (width + _GAP) // (_NARROWEST + _GAP)))
    cells = min(_WIDEST, (width + _GAP) // columns - _GAP)
    filled = [_fitted(column, room) for column in _arranged(shown, columns)]
    blocks = [_block(column, max(1, cells)) for column in filled]
    blank: Line = [(" " * cells, "")]
    gap = (" " * _GAP, "")
    rows = itertools.zip_longest(*blocks, fillvalue=blank)
    return [[piece for line in row for piece in [*line, gap]][:-1] for row in rows]


def _arranged(shown: list[Section], columns: int) -> list[list[Section]]:
    """The sections in order, cut into columns of which the longest is as short as possible."""
    sizes = [len(section.rows) + 2 for section in shown]

    def longest(cuts: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(sizes))))

    cuts = min(itertools.combinations(range(1, len(shown)), columns - 1), key=longest)
    return [shown[a:b] for a, b in itertools.pairwise((0, *cuts, len(shown)))]


def _fitted(column: list[Section], room: int | None) -> list[tuple[Section, int]]:
    """The sections without the least important rows, each with how many those are."""
    kept = [(section, list(section.rows)) for section in column]
    while room is not None and sum(len(rows) + 2 for _, rows in kept if rows) - 1 > room:
        heaviest = [(row.weight, len(rows), rows) for _, rows in kept for row in rows]
        weight, _, rows = max(heaviest, key=lambda entry: entry[:2])
        del rows[max(index for index, row in enumerate(rows) if row.weight == weight)]
    return [
        (Section(section.title, rows), len(section.rows) - len(rows)) for section, rows in kept if rows
    ]


def _block(column: list[tuple[Section, int]], cells: int) -> list[Line]:
    """The lines of one column, each `cells` wide."""
    lines: list[Line] = []
    for section, hidden in column:
        if lines:
            lines.append([(" " * cells, "")])
        more = f" +{hidden}" if hidden else ""
        title = _cropped(section.title, max(1, cells - len(more)))
        lines.append([(title, "bold cyan"), (more.ljust(cells - cell_len(title)), "dim")])
        lines += [_row(row, cells) for row in section.rows]
    return lines


def _row(row: Row, cells: int) -> Line:
    value = _cropped(row.value, cells)
    label = max(0, cells - cell_len(value) - 1)
    text = set_cell_size(_cropped(row.label, label), label)
    style = "red" if row.value in ("nan", "inf", "-inf") else ""
    return [(set_cell_size(f"{text} ", cells - cell_len(value)), "dim"), (value, style)]


def _cropped(text: str, cells: int) -> str:
    text = "".join(character if character.isprintable() else " " for character in text)
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, cells - 1).rstrip() + "…" if cells > 0 else ""


def _plain(metrics: Metrics, progress: float | None) -> str:
    """The line that stands for the table where the output is not a terminal."""
    parts = [] if progress is None or not math.isfinite(progress) else [f"{progress:.0%}"]
    facts = _facts(metrics)
    if (updates := _finite(metrics, "learner_updates")) is not None:
        facts.insert(min(2, len(facts)), f"{count(updates)} updates")
    if (result := _results(metrics)) is not None:
        facts.insert(max(0, len(facts) - 1), f"evaluation: {result}")
    return "  ".join([*parts, *facts]) or "starting"


def _evaluation(metrics: Metrics) -> str:
    """The line of a finished evaluation."""
    number, version = metrics.get("eval/number"), _finite(metrics, "eval/policy_version")
    steps = _finite(metrics, "eval/env_steps")
    episodes = _finite(metrics, "eval/num_trajectories")
    line = "evaluation" if number is None else f"evaluation {number}"
    if version is not None:
        line += f" of version {version:.0f}"
    if steps is not None:
        line += f" at {count(steps)} env steps"
    line += f": {_results(metrics) or 'no result'}"
    return line if episodes is None else f"{line}, {count(episodes)} episodes"


def _results(metrics: Metrics) -> str | None:
    """Success and return of the last evaluation."""
    success, total = _finite(metrics, "eval/success_once"), _finite(metrics, "eval/return")
    parts = [] if success is None else [f"success {success:.1%}"]
    parts += [] if total is None else [f"return {written(float(total))}"]
    return ", ".join(parts) or None
