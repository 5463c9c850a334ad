"""Films episodes of the first row of a shard."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from zmqrl.transport.rows import on_cpu

log = logging.getLogger(__name__)

_FRAMES_PER_SECOND = 30


class Film:
    """Writes an episode to an mp4 file when it is asked to; costs nothing else.

    A film that fails is given up: it is not worth an evaluation.

    Args:
        render: Returns a picture of each row, or of the first alone: uint8 `[height, width, 3]`.
        rate: Frames per second; None for the usual.
    """

    def __init__(self, render: Callable[[], Any], rate: float | None = None) -> None:
        self.next: Path | None = None
        """Where to film the episode that the next reset of all rows begins."""
        self._render = render
        self._rate = rate or _FRAMES_PER_SECOND
        self._path: Path | None = None
        self._writer: Any = None

    def began(self) -> None:
        """All rows were reset: film the first one's episode, if that is wanted."""
        self._finish()
        self._path, self.next = self.next, None
        self._add_frame()

    def stepped(self, over: bool, shown: bool) -> None:
        """All rows were stepped.

        Args:
            over: Whether the episode of the first one ended.
            shown: Whether that row still shows its end, because it was not yet reset.
        """
        if self._path is not None:
            if shown or not over:
                self._add_frame()
            if over:
                self._finish()

    def close(self) -> None:
        """Drop an unfinished film."""
        path, writer = self._path, self._writer
        self._path = self._writer = None
        if path is not None and writer is not None:
            with suppress(Exception):
                writer.close()
                _temporary(path).unlink(missing_ok=True)

    def _add_frame(self) -> None:
        if self._path is None:
            return
        try:
            frame = _first(self._render())
            if self._writer is None:
                self._writer = self._open(self._path)
            self._writer.append_data(frame)
        except (Exception, SystemExit) as error:
            log.warning("no video: %s: %s", type(error).__name__, error)
            self.close()

    def _open(self, path: Path) -> Any:
        import imageio

        path.parent.mkdir(parents=True, exist_ok=True)
        return imageio.get_writer(_temporary(path), fps=self._rate, macro_block_size=2)

    def _finish(self) -> None:
        path, writer = self._path, self._writer
        self._path = self._writer = None
        if path is not None and writer is not None:
            try:
                writer.close()
                os.replace(_temporary(path), path)
            except Exception as error:
                log.warning("no video: %s: %s", type(error).__name__, error)


def _first(pictures: Any) -> np.ndarray:
    """The picture of the first row."""
    if isinstance(pictures, (list, tuple)):
        pictures = pictures[0]
    if pictures is None:
        raise ValueError("render() gave no picture")
    picture = np.asarray(on_cpu(pictures))
    if picture.ndim == 4:
        picture = picture[0]
    if picture.ndim != 3 or picture.shape[2] not in (3, 4) or picture.dtype != np.uint8:
        raise ValueError(
            f"render() gave {picture.dtype} {list(picture.shape)}, not a picture: "
            "uint8 [height, width, 3]"
        )
    return picture[..., :3]


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.part.mp4")
