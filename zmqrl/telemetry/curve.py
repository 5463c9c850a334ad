"""The learning curve of a run, as a picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zmqrl.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = npt.NDArray[np.float64]
"""[N, 2]: env steps and value."""

_EVALUATION, _TRAINING, _GRID, _INK = "#0072B2", "#E69F00", "#DDDDDD", "#333333"
"""Blue and orange of Okabe and Ito's palette, which colour-blind people tell apart."""


_DRAWN = frozenset({"env_steps", "wall_s", "env/success_once", "env/return"})

_TITLE = 70
"""Characters of a title that fit beside the legend."""


def read(path: Path) -> list[Metrics]:
    """The records of a `metrics.jsonl`, without a line that was cut when its writer died.

    Raises:
        OSError: The file cannot be read.
    """
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def part_of(record: Metrics) -> Metrics:
    """What `draw` needs of a record: a run of days has many of them."""
    return {key: value for key, value in record.items() if key in _DRAWN or key.startswith("eval/")}


def draw(records: Sequence[Metrics], path: Path, title: str) -> None:
    """Draw success and return over env steps and minutes, of evaluations and, behind them, of training.

    Args:
        records: As in `metrics.jsonl`: `env_steps` and `wall_s`, `eval/*` of an evaluation, `env/*` of
            training. Those that a resumed run has overtaken are left out.
        path: The PNG file; a reader never sees half of it.
        title: Above the picture.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    _fill(figure, _current(records), title if len(title) <= _TITLE else f"{title[:_TITLE]}…")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _fill(figure: Figure, records: list[Metrics], title: str) -> None:
    """A panel for success, if it is reported, and one for the return."""
    evaluations = _evaluations(records)
    panels = [
        (label, _points(evaluations, f"eval/{name}"), _points(records, f"env/{name}"))
        for label, name in (("success rate", "success_once"), ("return (sum of rewards)", "return"))
    ]
    shown = [panel for panel in panels if len(panel[1]) or len(panel[2])]
    if not any(len(evaluated) for _, evaluated, _ in shown):
        title += "\nthere is no evaluation yet"
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=13, parse_math=False)
    if not shown:
        return
    all_axes = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for axes, (label, evaluated, trained) in zip(all_axes, shown, strict=True):
        _panel(axes, label, evaluated, trained)
    furthest = max(points[:, 0].max() for panel in shown for points in panel[1:] if len(points))
    all_axes[-1].set_xlim(0, 1.02 * furthest or 1.0)
    all_axes[-1].set_xlabel("env steps", color=_INK)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False, labelcolor=_INK)
    figure.align_ylabels()
    _clock(all_axes[0], records)


def _panel(axes: Axes, label: str, evaluated: Points, trained: Points) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter

    if len(trained):
        steps, values = trained[:, 0], trained[:, 1]
        axes.plot(steps, values, color=_TRAINING, alpha=0.45, linewidth=1.2, label="training")
    if len(evaluated):
        steps, values = evaluated[:, 0], evaluated[:, 1]
        axes.plot(
            steps, values, "o-", color=_EVALUATION, linewidth=1.8, markersize=5, label="evaluation"
        )
    axes.set_ylabel(label, color=_INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if label == "success rate":
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)


def _clock(axes: Axes, records: list[Metrics]) -> None:
    """An axis above `axes` that says at which minute the run was where."""
    from matplotlib.ticker import MaxNLocator

    walls = _points(records, "wall_s")
    if len(walls) < 2:
        return
    steps, wall = walls[:, 0], walls[:, 1]
    # A run that was resumed may count from 0 again.
    passed = wall[0] + np.concatenate([[0.0], np.cumsum(np.maximum(0.0, np.diff(wall)))])
    unit, length = _clock_unit(float(passed[-1]))
    ticks = np.array(MaxNLocator(8).tick_values(0.0, passed[-1] / length))
    places = np.interp(ticks * length, passed, steps, left=np.nan, right=np.nan)
    inside = np.isfinite(places)
    above = axes.secondary_xaxis("top")
    above.set_xticks(places[inside], [f"{tick:g}" for tick in ticks[inside]])
    above.set_xlabel(f"wall-clock time ({unit})", color=_INK)
    above.tick_params(colors=_INK)
    above.spines["top"].set_color(_INK)


def _clock_unit(seconds: float) -> tuple[str, float]:
    """The unit that suits a run of so many seconds, and its length."""
    if seconds < 120:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def _current(records: Sequence[Metrics]) -> list[Metrics]:
    """The records without those after the checkpoint from which a later run has gone on."""
    kept: list[Metrics] = []
    furthest = -math.inf
    for record in records:
        steps = _finite(record, "env_steps")
        if steps is None:
            continue
        # An evaluation may be of a policy from before the latest record of training.
        if steps < furthest and record.get("eval/num_trajectories") is None:
            kept = [earlier for earlier in kept if (_finite(earlier, "env_steps") or 0.0) <= steps]
            furthest = steps
        furthest = max(furthest, steps)
        kept.append(record)
    return kept


def _evaluations(records: list[Metrics]) -> list[Metrics]:
    """One record for each evaluation, with `env_steps` of the policy that was evaluated."""
    found: list[Metrics] = []
    for record in records:
        if record.get("eval/num_trajectories") is None:
            continue
        number = record.get("eval/number")
        if number is not None and found and found[-1].get("eval/number") == number:
            continue
        steps = _finite(record, "eval/env_steps")
        found.append(record if steps is None else {**record, "env_steps": steps})
    return found


def _points(records: list[Metrics], name: str) -> Points:
    """Where `name` has a value: [N, 2]."""
    pairs = [(_finite(record, "env_steps"), _finite(record, name)) for record in records]
    return np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)


def _finite(record: Metrics, name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
