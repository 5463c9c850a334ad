"""Metrics as a file of JSON lines, one record a line."""

from __future__ import annotations

import json
import time
from pathlib import Path

from zmqrl.telemetry.metrics import Metrics


class JsonLines:
    """Appends records to a file; each is on disk when `write` returns.

    Args:
        path: The file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: Metrics) -> None:
        """Append `metrics`, with `time`: seconds since 1970."""
        self._file.write(json.dumps({"time": time.time(), **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
