"""What a run leaves behind of its metrics, and what happens if it cannot."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zmqrl.errors import ConfigError
from zmqrl.telemetry.loggers import RunLog
from zmqrl.telemetry.metrics import Metrics


def opened(folder: Path, *backends: str, resume: bool = False) -> RunLog:
    return RunLog(folder, backends, "zmqrl", "experiment", {"seed": 1}, resume)


def lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the package, which is not installed here, and keeps what it is told."""
    told = SimpleNamespace(started=[], logged=[], finished=0, error=None)

    class Run:
        id = "run1"

        def define_metric(self, name: str, step_metric: str) -> None:
            assert (name, step_metric) == ("*", "env_steps")

        def log(self, values: dict[str, float]) -> None:
            if told.error:
                raise told.error
            told.logged.append(values)

        def finish(self) -> None:
            told.finished += 1

    def init(**options: Any) -> Run:
        if told.error:
            raise told.error
        told.started.append(options)
        return Run()

    module = ModuleType("wandb")
    module.init, module.Settings = init, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return told


def test_a_record_is_a_line_with_time_and_env_steps(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.log({"train/sac/alpha": 0.1, "bottleneck": "env"}, 100)
    (line,) = lines(tmp_path)  # before it is closed
    log.close()
    assert line.pop("time") > 1e9
    assert line == {"train/sac/alpha": 0.1, "bottleneck": "env", "env_steps": 100}


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.log({"a": math.nan, "b": math.inf, "c": None}, 1)
    log.close()
    (line,) = lines(tmp_path)
    assert (line["a"], line["b"], line["c"]) == (None, None, None)


def test_scalars_of_numpy_are_numbers(tmp_path: Path) -> None:
    log = opened(tmp_path)
    reported: Any = {"a": np.float32(0.5), "b": np.int64(3), "c": np.float32("nan"), "d": np.zeros(())}
    log.log(reported, 1)
    log.close()
    (line,) = lines(tmp_path)
    assert [line[name] for name in "abcd"] == [0.5, 3, None, 0.0]


def test_the_log_is_readable_text_in_groups(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.log(
        {"train/sac/alpha": 0.125, "eval/return": -3.5, "bottleneck": "the\nenv", "train/x": None}, 1200
    )
    log.close()
    first, *rest = (tmp_path / "metrics.log").read_text().splitlines()
    assert first.endswith("1,200 env steps")
    assert rest == [
        "  bottleneck       the env",
        "  env_steps        1200",
        "",
        "  eval/return      -3.5",
        "",
        "  train/sac/alpha  0.125",
        "  train/x          -",
        "",
    ]


def test_tensorboard_has_the_finite_numbers_over_env_steps(tmp_path: Path) -> None:
    log = opened(tmp_path, "tensorboard")
    log.log({"eval/return": -3.5, "bottleneck": "env", "a": math.nan, "updates": 7}, 100)
    log.log({"eval/return": -2.5}, 200)
    log.close()
    found = scalars(tmp_path)
    assert found["eval/return"] == [(100, -3.5), (200, -2.5)]
    assert found["updates"] == [(100, 7.0)]
    assert set(found) == {"eval/return", "updates", "env_steps"}


def test_without_tensorboard_there_is_no_such_folder(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.log"]


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path: Path) -> None:
    for resume, steps in ((False, (100, 200, 300)), (True, (200, 250))):
        log = opened(tmp_path, "tensorboard", resume=resume)
        for step in steps:
            log.log({"a": float(step) + resume}, step)
        log.close()
    assert [line["env_steps"] for line in lines(tmp_path)] == [100, 200, 300, 200, 250]
    assert scalars(tmp_path)["a"] == [(100, 100.0), (200, 201.0), (250, 251.0)]


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.log"])
def test_a_full_disk_is_reported_once_and_the_run_goes_on(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    log = opened(tmp_path)
    for step in range(3):
        log.log({"a": 1.0}, step)
    log.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{name} cannot be written" in caplog.text
    assert "No space left" in caplog.text
    other = "metrics.log" if name == "metrics.jsonl" else "metrics.jsonl"
    assert (tmp_path / other).read_text().count("env_steps") == 3


def test_tensorboard_on_a_full_disk_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path, "tensorboard")
    with Path("/dev/full").open("wb") as full:
        backend: Any = log._backends["tensorboard"]
        backend._records._writer.close()
        monkeypatch.setattr(backend._records, "_writer", full)
        log.log({"a": 1.0}, 1)
        log.log({"a": 1.0}, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tensorboard cannot be written" in caplog.text
    log.close()
    assert len(lines(tmp_path)) == 2


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"runner\.logger: cannot write to .*file/run: Not a directory"
    ):
        opened(tmp_path / "file" / "run")


def test_wandb_that_is_not_installed_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as raised:
        opened(tmp_path, "wandb")
    assert str(raised.value) == (
        "runner.logger.logger_backends names wandb, which is not installed: pip install 'zmqrl[wandb]'"
    )


def test_wandb_that_does_not_start_is_a_configuration_error(
    tmp_path: Path, wandb: SimpleNamespace
) -> None:
    wandb.error = RuntimeError("api_key not configured")
    with pytest.raises(ConfigError, match="wandb, which does not start: api_key not configured"):
        opened(tmp_path, "wandb")


def test_wandb_has_the_finite_numbers_and_the_configuration(
    tmp_path: Path, wandb: SimpleNamespace
) -> None:
    log = opened(tmp_path, "wandb")
    log.log({"a": 1.0, "b": math.nan, "bottleneck": "env"}, 5)
    log.close()
    assert wandb.started[0]["config"] == {"seed": 1}
    assert wandb.started[0]["project"] == "zmqrl"
    assert wandb.started[0]["name"] == "experiment"
    assert wandb.logged == [{"a": 1.0, "env_steps": 5}]
    assert wandb.finished == 1


def test_a_resumed_run_is_the_same_run_in_wandb(tmp_path: Path, wandb: SimpleNamespace) -> None:
    for resume in (False, True, False):
        opened(tmp_path, "wandb", resume=resume).close()
    assert [options["id"] for options in wandb.started] == [None, "run1", None]


def test_wandb_that_fails_later_is_reported_once_and_given_up(
    tmp_path: Path, wandb: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    log = opened(tmp_path, "wandb")
    wandb.error = ConnectionError("the network is away")
    metrics: Metrics = {"a": 1.0}
    with caplog.at_level(logging.WARNING):
        log.log(metrics, 1)
        wandb.error = None
        log.log(metrics, 2)
    log.close()
    assert caplog.text.count("wandb cannot be written: the network is away") == 1
    assert wandb.logged == []
    assert len(lines(tmp_path)) == 2


def test_neither_torch_nor_tensorflow_is_loaded_for_the_log(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from zmqrl.telemetry.loggers import RunLog;"
        "log = RunLog(pathlib.Path(sys.argv[1]), ['tensorboard'], 'p', 'e', {});"
        "log.log({'a': 1.0}, 1); log.close();"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=30)
