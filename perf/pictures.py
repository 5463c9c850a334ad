"""Pictures of the rows of benches: one look for all of them.

The `plot(rows, folder)` of a bench makes its figure with `figure`, and ends with `save`:

    canvas, (left, right) = figure(1, 2)
    left.plot(…, color=colour_of("zmqrl_raw"), label="zmqrl_raw")
    save(canvas, folder / "throughput.png")

matplotlib is imported here alone, so a bench imports this module within `plot`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {
    "direct_echo": "#999999",
    "c_proxy": "#000000",
    "c_proxy_multipart": "#666666",
    "textbook_broker": "#D55E00",
    "zmqrl_raw": "#0072B2",
    "zmqrl": "#009E73",
    "zmqrl_raw_curve": "#CC79A7",
    "socket": "#E69F00",
    "shared_memory": "#0072B2",
    "memcpy": "#999999",
}
"""Each case looks the same in every picture; told apart by the colour-blind too."""

_OTHERS = ("#E69F00", "#56B4E9", "#F0E442")


def colour_of(case: str) -> str:
    """The colour of a case."""
    return COLOURS.get(case) or _OTHERS[sum(case.encode()) % len(_OTHERS)]


def figure(
    rows: int = 1, columns: int = 1, width: float = 9.0, height: float = 3.8
) -> tuple[Figure, Any]:
    """A figure and its axes, `height` inches for each row of axes; what `Figure.subplots` returns."""
    canvas = Figure(figsize=(width, height * rows), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots(rows, columns)
    for one in axes.flat if rows * columns > 1 else [axes]:
        one.grid(alpha=0.3)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return canvas, axes


def save(canvas: Figure, path: Path) -> None:
    """Write a PNG, and say so."""
    canvas.savefig(path, dpi=110)
    print(f"drawn: {path}")


def bars(axes: Any, heights: dict[str, list[float | None]], groups: list[str]) -> None:
    """Groups of bars, one for each case, each with its height above it."""
    width = 0.8 / max(1, len(heights))
    for index, (case, values) in enumerate(heights.items()):
        left = [group + (index - (len(heights) - 1) / 2) * width for group in range(len(groups))]
        drawn = axes.bar(
            left, [value or 0 for value in values], width, color=colour_of(case), label=case
        )
        texts = ["" if value is None else number_text(value) for value in values]
        axes.bar_label(drawn, texts, fontsize=6, rotation=90, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.15)


def number_text(value: float) -> str:
    """Three digits of a number: `1,020`, `43.1`."""
    return f"{float(f'{value:.3g}'):,.10g}"


def size_text(payload_bytes: int) -> str:
    """A size in words: `200 KB`."""
    for unit, name in ((10**6, "MB"), (10**3, "KB")):
        if payload_bytes >= unit:
            return f"{payload_bytes / unit:g} {name}"
    return f"{payload_bytes} B"
