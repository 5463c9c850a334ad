"""The sections `broker`, `rollout` and `cluster`: the worker pool."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from zmqrl.config.section import PositiveSeconds, Section, checked_endpoint
from zmqrl.transport import sockets


class RolloutConfig(Section):
    """The rollout workers and how their batches are made."""

    policy: str | None = Field(None, description="module:factory or file.py:factory")
    policy_kwargs: dict[str, Any] = Field(default_factory=dict, description="for the factory")
    rollout_queue_size: int = Field(0, ge=0, description="most requests a batch; 0: ceil(env / rollout)")
    max_batch_rows: int = Field(0, ge=0, description="most observations a batch; 0: no limit")
    max_wait_ms: float = Field(0.0, ge=0, le=60_000, description="holds a partial batch open")
    attempt_timeout_s: PositiveSeconds = Field(60.0, description="for one batch, then others take it")
    max_attempts: int = Field(3, ge=1, le=100, description="workers that a request may be lost with")
    device: str = Field("auto", description="cpu, cuda, cuda:1, …; auto: a GPU if there is one")
    torch_threads: int = Field(1, ge=1, description="of each rollout worker")


class BrokerConfig(Section):
    """The broker's two sockets and its bounds."""

    frontend: str | None = Field(None, description="where env workers connect; null: local ipc")
    backend: str | None = Field(None, description="where rollout workers connect; null: local ipc")
    max_queue_messages: int = Field(100_000, ge=1, description="requests open at once")
    max_queue_mb: int = Field(4096, ge=1, description="mebibytes of open requests")
    max_client_messages: int = Field(128, ge=1, le=100_000, description="open at once, of one client")
    max_client_mb: int = Field(1024, ge=1, description="mebibytes of open requests of one client")
    max_message_mb: int = Field(
        sockets.MAX_MESSAGE_MB,
        ge=1,
        le=4095,
        description="mebibytes of one array, or of one batch's rest",
    )
    heartbeat_timeout_s: float = Field(
        sockets.HEARTBEAT_S, ge=0.5, le=600, description="silence after which a peer counts as gone"
    )

    @field_validator("frontend", "backend")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        return checked_endpoint(value)

    @model_validator(mode="after")
    def _two_endpoints(self) -> BrokerConfig:
        fixed = self.frontend is not None and not self.frontend.endswith((":0", ":*"))
        if fixed and self.frontend == self.backend:
            raise ValueError(f"frontend and backend are both {self.frontend}; they are two sockets")
        return self


class PlacementConfig(Section):
    """Rank ranges, such as `0-3`, which give the number of workers."""

    env: str = Field("0-7", description="0-7 means eight env workers")
    rollout: str = Field("0-1", description="0-1 means two rollout workers")
    eval: str | None = Field(None, description="env workers of evaluations; null: as many as env")
    reward: str = Field("0", description="reward workers, if there is a reward model")

    @field_validator("env", "rollout", "eval", "reward", mode="before")
    @classmethod
    def _is_range(cls, value: object) -> object:
        if value is None:
            return None
        text = str(value).strip()
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        words = "expected a range of ranks from 0: 0-2 means three workers, 0 means one"
        if isinstance(value, bool) or match is None:
            raise ValueError(words)
        first, last = int(match[1]), int(match[2] or match[1])
        if first != 0 or last > 9_999:
            raise ValueError(words)
        return text

    def count(self, component: Literal["env", "rollout", "eval", "reward"]) -> int:
        """The number of workers of `component`."""
        return int((getattr(self, component) or self.env).split("-")[-1]) + 1


class ClusterConfig(Section):
    """How many workers there are."""

    component_placement: PlacementConfig = PlacementConfig()
