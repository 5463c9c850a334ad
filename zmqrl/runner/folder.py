"""The folder of a run: one run at a time, and nothing of an earlier one is lost."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path

from zmqrl.errors import ConfigError

_EARLIER = "earlier"
"""Folder within the run folder for what earlier runs have left."""

_OF_A_RUN = (
    "config.yaml",
    "metrics.jsonl",
    "metrics.log",
    "tensorboard",
    "wandb_id.txt",
    "learning_curve.png",
    "checkpoints",
    "videos",
)


class RunFolder:
    """Holds the folder of a run, and moves what an earlier run has left in it to `earlier/<number>`.

    Args:
        path: The folder; made if it is missing.
        resumed: Go on with what is there.

    Raises:
        ConfigError: Another run holds it, or it cannot be written.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        self._aside: Path | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(f"runner.logger: cannot write to {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read().strip()
            self._lock.close()
            raise ConfigError(
                f"{path} is the folder of a run that is under way (process {holder}); set "
                "runner.logger.experiment_name"
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        if not resumed:
            self._set_aside()

    def give_back(self) -> None:
        """Undo what a run that never came up has done: the folder is as it was."""
        if self._aside is None:
            return
        for name in _OF_A_RUN:
            new = self.path / name
            with suppress(OSError):
                shutil.rmtree(new) if new.is_dir() else new.unlink()
            with suppress(OSError):
                (self._aside / name).rename(new)
        with suppress(OSError):
            self._aside.rmdir()
            self._aside.parent.rmdir()

    def close(self) -> None:
        """Let the folder go."""
        self._lock.close()

    def _set_aside(self) -> None:
        left = [path for name in _OF_A_RUN if (path := self.path / name).is_file() or path.is_dir()]
        if left:
            places = (self.path / _EARLIER / str(number) for number in itertools.count(1))
            self._aside = next(place for place in places if not place.exists())
            self._aside.mkdir(parents=True)
            for path in left:
                path.rename(self._aside / path.name)
