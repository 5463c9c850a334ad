"""Films episodes of one simulator."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from zmqrl.env.wrappers import Transition

log = logging.getLogger(__name__)

_FRAMES_PER_SECOND = 30


class Film(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Writes an episode to an mp4 file when it is asked to; costs nothing else.

    Args:
        env: A simulator with the render mode `rgb_array`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.next: Path | None = None
        """Where to film the episode that the next reset begins."""
        self._path: Path | None = None
        self._writer: Any = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, and film it if that is wanted."""
        self._finish()
        result = self.env.reset(**kwargs)
        self._path, self.next = self.next, None
        self._film()
        return result

    def step(self, action: Any) -> Transition:
        """Step the simulator."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._film()
        if terminated or truncated:
            self._finish()
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the simulator; an unfinished film is dropped."""
        self._drop()
        self.env.close()

    def _film(self) -> None:
        """Add a frame. A film that fails is given up: it is not worth an evaluation."""
        if self._path is None:
            return
        try:
            frame = np.asarray(self.env.render(), dtype=np.uint8)
            if self._writer is None:
                self._writer = self._open(self._path)
            self._writer.append_data(frame)
        except Exception as error:
            log.warning("no video: %s: %s", type(error).__name__, error)
            self._drop()

    def _open(self, path: Path) -> Any:
        import imageio

        path.parent.mkdir(parents=True, exist_ok=True)
        rate = self.metadata.get("render_fps") or _FRAMES_PER_SECOND
        return imageio.get_writer(_temporary(path), fps=rate, macro_block_size=2)

    def _finish(self) -> None:
        path, writer = self._path, self._writer
        self._path = self._writer = None
        if path is not None and writer is not None:
            try:
                writer.close()
                os.replace(_temporary(path), path)
            except Exception as error:
                log.warning("no video: %s: %s", type(error).__name__, error)

    def _drop(self) -> None:
        path, writer = self._path, self._writer
        self._path = self._writer = None
        if path is not None and writer is not None:
            with suppress(Exception):
                writer.close()
                _temporary(path).unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.part.mp4")
