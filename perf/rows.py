"""Shows the rows of a bench while they come in, and all of them as a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable


class Table:
    """Prints rows.

    Args:
        columns: The keys that are shown, in this order.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._rows: list[dict[str, Any]] = []
        # Without a terminal there is no width to keep to.
        self._console = Console(width=None if sys.stdout.isatty() else 160)

    def add(self, row: dict[str, Any]) -> None:
        """Say in a line that a row has come in; the whole table comes at the end."""
        self._rows.append(row)
        given = [key for key in self._columns[1:] if row.get(key) is not None]
        words = [f"{key.replace('_', ' ')} {_text(row[key])}" for key in given if key != "ok"]
        if "ok" in given:
            words.append(_text(row["ok"]))
        self._console.print(f"{row[self._columns[0]]}: {', '.join(words)}", style="dim", markup=False)
        if row.get("note"):
            self._console.print(f"  {row['note']}", style="red", markup=False)

    def end(self) -> None:
        """Print the table."""
        table = RichTable(box=box.SIMPLE_HEAD)
        for index, column in enumerate(self._columns):
            words = column.replace("_", " ")
            is_name = index == 0
            justify = "left" if is_name else "right"
            table.add_column(words, justify=justify, overflow="fold", no_wrap=is_name)
        for row in self._rows:
            style = None if row.get("ok", True) else "bold red"
            table.add_row(*(_text(row.get(key)) for key in self._columns), style=style)
        self._console.print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "ok" if value else "FAILED"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
