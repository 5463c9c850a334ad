"""The section `runner`: the run as a whole."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from zmqrl.config.section import PositiveSeconds, Section, checked_endpoint


class LoggerConfig(Section):
    """Where a run writes its files."""

    log_path: str = Field("runs", description="folder")
    experiment_name: str = Field("evaluate", description="folder within log_path")
    project_name: str = Field("zmqrl", description="of the run in W&B")
    logger_backends: list[Literal["tensorboard", "wandb"]] = Field(
        ["tensorboard"], description="beside the files, which are always written"
    )


class RunnerConfig(Section):
    """The run as a whole."""

    enable_decoupled_mode: bool = Field(False, description="true: shared queue; false: fixed ranks")
    only_eval: bool = Field(False, description="bin/train evaluates in place of training")
    max_epochs: int = Field(-1, ge=-1, description="as max_steps, whichever is less; -1: no limit")
    max_steps: int = Field(-1, ge=-1, description="global steps of the learner; -1: no limit")
    max_env_steps: int = Field(-1, ge=-1, description="env steps of training; -1: no limit")
    weight_sync_interval: int = Field(1, ge=1, description="global steps between two publications")
    val_check_interval: int = Field(
        -1, ge=-1, description="global steps from one evaluation to the next"
    )
    save_interval: int = Field(-1, ge=-1, description="global steps from one checkpoint to the next")
    resume_dir: str | None = Field(None, description="a checkpoint to go on from")
    ckpt_path: str | None = Field(None, description="a checkpoint whose policy bin/evaluate runs")
    stop_at: dict[str, float] = Field(
        default_factory=dict,
        description="training ends when these metrics of an evaluation reach these values, such as "
        "`{eval/success_once: 0.95}`",
    )
    stop_patience: int = Field(1, ge=1, description="evaluations in a row that must reach them")
    logger: LoggerConfig = LoggerConfig()
    startup_timeout_s: PositiveSeconds = Field(120.0, description="for all parts to come up")
    stall_timeout_s: PositiveSeconds = Field(
        120.0, description="for a step, a later reset or a stuck batch"
    )
    report: str | None = Field(None, description="where env workers report; null: local ipc")

    @field_validator("report")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        return checked_endpoint(value)
