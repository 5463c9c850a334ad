"""The files in which a run keeps its metrics, and the services that show them."""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from zmqrl.errors import ConfigError
from zmqrl.telemetry.jsonl import JsonLines
from zmqrl.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_WANDB_ID = "wandb_id.txt"
"""File with the id of the run in W&B, under which it goes on after a resume."""


class _Log(Protocol):
    """One of the places where metrics go."""

    def write(self, metrics: Metrics) -> None:
        """Add a record, which has `env_steps`."""

    def close(self) -> None:
        """Finish; may take a while."""


class RunLog:
    """Writes the metrics of a run to its folder, to TensorBoard and to W&B.

    A run is not ended by its log: what cannot be written (a full disk, a network that is away) is
    reported once. The files are tried again with each record; TensorBoard and W&B are not.

    Args:
        folder: Of the run; made if it is missing.
        backends: Of `tensorboard` and `wandb`. The files are always written.
        project: In W&B.
        experiment: The run's name in W&B.
        config: The configuration, for W&B.
        resume: Go on with the files in the folder.

    Raises:
        ConfigError: The folder cannot be written, or a backend is not installed or does not start.
    """

    def __init__(
        self,
        folder: Path,
        backends: Sequence[str],
        project: str,
        experiment: str,
        config: dict[str, Any],
        resume: bool = False,
    ) -> None:
        self._files: dict[str, _Log] = {}
        self._backends: dict[str, _Log] = {}
        self._warned: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files["metrics.jsonl"] = JsonLines(folder / "metrics.jsonl")
            self._files["metrics.log"] = _TextLog(folder / "metrics.log")
            if "tensorboard" in backends:
                self._backends["tensorboard"] = _TensorBoard(folder / "tensorboard", resume)
            if "wandb" in backends:
                self._backends["wandb"] = _WeightsAndBiases(folder, project, experiment, config, resume)
        except OSError as error:
            self.close()
            raise ConfigError(f"runner.logger: cannot write to {folder}: {error.strerror}") from None
        except ConfigError:
            self.close()
            raise

    def log(self, metrics: Metrics, env_steps: int) -> None:
        """Add a record.

        Args:
            metrics: What to write. What is not finite is written as null, and text not to the backends.
            env_steps: Of the training so far: the x axis in TensorBoard and W&B.
        """
        record: Metrics = {name: _plain(value) for name, value in metrics.items()}
        record["env_steps"] = int(env_steps)
        for name, file in self._files.items():
            self._attempt(name, file.write, record)
        for name, backend in list(self._backends.items()):
            if not self._attempt(name, backend.write, record):
                del self._backends[name]
                self._attempt(name, backend.close)

    def close(self) -> None:
        """Finish all files and services."""
        for logs in (self._files, self._backends):
            for name, place in logs.items():
                self._attempt(name, place.close)
            logs.clear()

    def _attempt(self, name: str, action: Callable[..., None], *arguments: Metrics) -> bool:
        """Whether `action` succeeded; the first failure of `name` is reported."""
        try:
            action(*arguments)
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                log.warning("%s cannot be written: %s; the run goes on", name, error)
            return False
        return True


def finite(metrics: Metrics) -> Metrics:
    """The same metrics as JSON has them: what is not a finite number is null."""
    return {name: _plain(value) for name, value in metrics.items()}


def _plain(value: Any) -> float | int | str | None:
    """The value as JSON has it: an algorithm may report scalars of NumPy or torch."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


class _TextLog:
    """Records as text, a block each, for people and for `grep`.

    Args:
        path: The file. It is opened for each record, so that a failed write leaves nothing in a buffer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.open("a", encoding="utf-8").close()

    def write(self, metrics: Metrics) -> None:
        """Append a block: time and step, then a group of lines for each first part of a name."""
        width = max(len(name) for name in metrics)
        lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {metrics['env_steps']:,} env steps"]
        ordered = sorted(metrics, key=_group)  # stable: within a group as they came
        for _, names in itertools.groupby(ordered, key=_group):
            lines += [f"  {name:<{width}}  {_text(metrics[name])}" for name in names]
            lines.append("")
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    def close(self) -> None:
        """Nothing is open."""


def _group(name: str) -> str:
    group, slash, _ = name.partition("/")
    return group if slash else ""


def _text(value: float | int | str | None) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else str(value).replace("\n", " ")


class _TensorBoard:
    """Writes an event file with TensorBoard's own record format.

    Neither torch nor TensorFlow is needed, and unlike in TensorBoard's own writer there is no thread,
    from which a full disk would put a traceback on the terminal.

    Args:
        folder: For the event file.
        resume: Hide what earlier event files in the folder say of later steps.
    """

    def __init__(self, folder: Path, resume: bool) -> None:
        try:
            events: Any = import_module("tensorboard.compat.proto.event_pb2")
            summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
            writer: Any = import_module("tensorboard.summary.writer.record_writer")
        except ImportError:
            raise ConfigError(
                "runner.logger.logger_backends names tensorboard, which is not installed: "
                "pip install 'zmqrl[train]'"
            ) from None
        self._event, self._session, self._summary = events.Event, events.SessionLog, summaries.Summary
        self._hides = resume
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = writer.RecordWriter((folder / name).open("wb"))
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, metrics: Metrics) -> None:
        """Add an event with all numbers."""
        now, step = time.time(), metrics["env_steps"]
        if self._hides:
            self._hides = False
            start = self._session(status=self._session.START)
            self._write(self._event(wall_time=now, step=step, session_log=start))
        numbers = _numbers(metrics).items()
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers]
        self._write(self._event(wall_time=now, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Close the event file."""
        self._records.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


class _WeightsAndBiases:
    """Sends metrics to W&B.

    Args:
        folder: Of the run, where W&B keeps its own files.
        project: In W&B.
        experiment: The run's name.
        config: The configuration.
        resume: Go on with the run whose id the folder holds.
    """

    def __init__(
        self, folder: Path, project: str, experiment: str, config: dict[str, Any], resume: bool
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "runner.logger.logger_backends names wandb, which is not installed: "
                "pip install 'zmqrl[wandb]'"
            ) from None
        id_file = folder / _WANDB_ID
        identity = id_file.read_text(encoding="utf-8").strip() if resume and id_file.exists() else None
        try:
            self._run = wandb.init(
                project=project,
                name=experiment,
                dir=str(folder),
                config=config,
                id=identity,
                resume="allow" if identity else None,
                # Else W&B would take up the terminal's output, and with it each picture of the table.
                settings=wandb.Settings(console="off"),
            )
            # Not W&B's own step, which may not go back to a checkpoint.
            self._run.define_metric("*", step_metric="env_steps")
        except Exception as error:
            raise ConfigError(
                f"runner.logger.logger_backends names wandb, which does not start: {error} "
                "(`wandb login`, or WANDB_MODE=offline)"
            ) from error
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, metrics: Metrics) -> None:
        """Send all numbers; W&B's own process does it later."""
        self._run.log(_numbers(metrics))

    def close(self) -> None:
        """Wait until W&B has everything."""
        self._run.finish()
