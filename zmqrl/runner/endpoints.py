"""Local endpoints for a run that names none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zmqrl.config import Config, dump


@contextmanager
def local_endpoints(config: Config) -> Iterator[tuple[Config, Path]]:
    """The same configuration, with sockets in a folder of this run's own where it names no endpoint.

    The folder is open to this user only, and gone at the end.

    Yields:
        The configuration, and a file with it for the parts to read.
    """
    folder = Path(tempfile.mkdtemp(prefix="zmqrl-"))  # mode 0700
    try:
        broker = config.broker.model_copy(
            update={
                "frontend": config.broker.frontend or f"ipc://{folder}/frontend",
                "backend": config.broker.backend or f"ipc://{folder}/backend",
            }
        )
        update = {
            "broker": broker,
            "runner": config.runner.model_copy(
                update={"report": config.runner.report or f"ipc://{folder}/report"}
            ),
        }
        if config.learns:
            endpoint = config.actor.endpoint or f"ipc://{folder}/learner"
            update["actor"] = config.actor.model_copy(update={"endpoint": endpoint})
        complete = config.model_copy(update=update)
        dump(complete, folder / "config.yaml")
        yield complete, folder / "config.yaml"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
