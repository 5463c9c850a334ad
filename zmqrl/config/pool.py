"""The sections `broker`, `rollout` and `cluster`: the worker pool."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, field_validator, model_validator

from zmqrl.config.policies import Entry, NamedPolicyConfig, check_names
from zmqrl.config.section import PositiveSeconds, Section, checked_endpoint
from zmqrl.transport import sockets


class RolloutConfig(Section):
    """The rollout workers and how their batches are made."""

    policy: str | None = Field(None, description="module:factory or file.py:factory")
    policy_kwargs: dict[str, Any] = Field(default_factory=dict, description="for the factory")
    policies: dict[str, NamedPolicyConfig] = Field(default_factory=dict)
    rollout_queue_size: int = Field(0, ge=0, description="most requests a batch; 0: ceil(env / rollout)")
    max_batch_rows: int = Field(0, ge=0, description="most observations a batch; 0: no limit")
    static_batch_sizes: list[int] = Field(
        default_factory=list,
        description="the only numbers of observations of a policy call, which is padded; []: any",
    )
    max_wait_ms: float | None = Field(
        None, ge=0, le=60_000, description="holds a partial batch open; auto (null): a tenth of its time"
    )
    prefetch: bool | None = Field(
        None, description="ask for a batch before the last is done; auto (null): if batches are short"
    )
    affinity: Literal["none", "sticky"] = Field(
        "none",
        description="states of a policy with memory: clients carry them; sticky: workers keep",
    )
    state_mb: int = Field(
        1024, ge=1, description="mebibytes of states that a worker keeps; the least recently used go"
    )
    attempt_timeout_s: PositiveSeconds = Field(60.0, description="for one batch, then others take it")
    max_attempts: int = Field(3, ge=1, le=100, description="workers that a request may be lost with")
    device: str = Field("auto", description="cpu, cuda, cuda:1, …; auto: a GPU if there is one")
    torch_threads: int = Field(1, ge=1, description="of each rollout worker")

    @field_validator("max_wait_ms", "prefetch", mode="before")
    @classmethod
    def _auto_is_none(cls, value: object) -> object:
        return None if value == "auto" else value

    @field_validator("policies")
    @classmethod
    def _have_names(cls, value: dict[str, NamedPolicyConfig]) -> dict[str, NamedPolicyConfig]:
        check_names(value)
        return value

    @model_validator(mode="after")
    def _one_policy_or_several(self) -> RolloutConfig:
        if self.policies and (self.policy is not None or self.policy_kwargs):
            raise ValueError("give either policy (with policy_kwargs) or policies, not both")
        return self

    @property
    def most_rows(self) -> int:
        """The most observations of a batch; 0 if nothing limits them."""
        return self.max_batch_rows or max(self.static_batch_sizes, default=0)

    @model_validator(mode="after")
    def _sizes_hold_every_batch(self) -> RolloutConfig:
        sizes = self.static_batch_sizes
        if sizes != sorted(set(sizes)) or min(sizes, default=1) < 1:
            raise ValueError(f"static_batch_sizes are {sizes}; they must ascend, from 1 or more")
        if sizes and self.max_batch_rows > sizes[-1]:
            raise ValueError(
                f"max_batch_rows is {self.max_batch_rows}, but the largest of static_batch_sizes is "
                f"{sizes[-1]}: a full batch would take several calls"
            )
        return self


class BrokerConfig(Section):
    """The broker's two sockets and its bounds."""

    frontend: str | None = Field(None, description="where env workers connect; null: local ipc")
    backend: str | None = Field(None, description="where rollout workers connect; null: local ipc")
    max_queue_messages: int = Field(100_000, ge=1, description="requests open at once")
    max_queue_mb: int = Field(4096, ge=1, description="mebibytes of open requests")
    max_client_messages: int = Field(128, ge=1, le=100_000, description="open at once, of one client")
    max_client_mb: int = Field(
        0, ge=0, description="the same of one client; 0: a quarter of max_queue_mb, so others have room"
    )
    max_message_mb: int = Field(
        sockets.MAX_MESSAGE_MB,
        ge=1,
        le=4095,
        description="mebibytes of one array, or of one batch's rest",
    )
    heartbeat_timeout_s: float = Field(
        sockets.HEARTBEAT_S,
        ge=0.5,
        le=600,
        description="silence after which a peer counts as gone; a decoupled client: up to twice it",
    )

    shared_memory: bool = Field(
        True, description="large arrays of peers on the broker's host go through shared memory"
    )

    @property
    def max_client_bytes(self) -> int:
        """What open requests of one client may have, in bytes."""
        return self.max_client_mb << 20 if self.max_client_mb else (self.max_queue_mb << 20) // 4

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


_GROUPS = ("Env", "Rollout", "Actor")


class Endpoints(NamedTuple):
    """Workers of one group, `first` to `last`."""

    group: str
    first: int
    last: int

    @classmethod
    def read(cls, name: str) -> Endpoints:
        """Read a name such as `Env:0` or `Rollout:0-3`; RLinf also writes `EnvGroup:0`.

        Raises:
            ValueError: It is none.
        """
        match = re.fullmatch(r"(\w+):(\d{1,4})(?:-(\d{1,4}))?", name.strip())
        group = "" if match is None else match[1].removesuffix("Group")
        if match is None or group not in _GROUPS:
            raise ValueError(
                f"{name!r} is no endpoint; expected Env, Rollout or Actor with ranks, as in Env:0-3"
            )
        first, last = int(match[2]), int(match[3] or match[2])
        if last < first:
            raise ValueError(f"the ranks of {name!r} run backwards")
        return cls(group, first, last)

    @classmethod
    def all_of(cls, group: str) -> Endpoints:
        """Every worker of `group`."""
        return cls(group, 0, 9_999)

    def overlaps(self, other: Endpoints) -> bool:
        """Whether a worker is in both."""
        return self.group == other.group and self.first <= other.last and other.first <= self.last


def _endpoint_names(value: object) -> object:
    """One name or a list of them, as a list of checked names."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError("expected an endpoint such as Env:0 or Env:0-3, or a list of them")
    for name in names:
        Endpoints.read(name)
    return names


_Names = Annotated[list[str], BeforeValidator(_endpoint_names)]


class LinkConfig(Entry):
    """A list; each entry delays what `src` sends to `dst` (each one name or a list)."""

    src: _Names
    dst: _Names
    delay_ms: float = Field(ge=0, le=3_600_000, allow_inf_nan=False, description="one way")

    def leads(self, src: Endpoints, dst: Endpoints) -> bool:
        """Whether one of `src` is delayed on its way to one of `dst`."""
        return _overlap(self.src, src) and _overlap(self.dst, dst)


class BandwidthConfig(Entry):
    """A list; each entry limits what its `members` send and receive."""

    members: _Names
    bandwidth_mbps: float = Field(gt=0, allow_inf_nan=False, description="megabits a second")

    def has(self, worker: Endpoints) -> bool:
        """Whether one of `worker` is a member."""
        return _overlap(self.members, worker)


def _overlap(names: list[str], other: Endpoints) -> bool:
    return any(Endpoints.read(name).overlaps(other) for name in names)


class NetEmulationConfig(Section):
    """Slow links between env workers and the rest, to emulate sites that are far apart.

    Workers are named by group and rank, as in `Env:0` or `Env:0-3`. The groups are `Env` (of both
    modes), `Rollout` and `Actor` (the learner).
    """

    enabled: bool = False
    symmetric: bool = Field(True, description="each pair delays the way back as well")
    crossdc_pairs: list[LinkConfig] = Field(default_factory=list)
    bandwidth_groups: list[BandwidthConfig] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_group_a_worker(self) -> NetEmulationConfig:
        seen: list[Endpoints] = []
        for name in (name for group in self.bandwidth_groups for name in group.members):
            endpoints = Endpoints.read(name)
            if any(endpoints.overlaps(other) for other in seen):
                raise ValueError(f"{name} is in bandwidth_groups twice")
            seen.append(endpoints)
        return self

    def names(self) -> list[str]:
        """All endpoints that are named."""
        pairs = [name for pair in self.crossdc_pairs for name in pair.src + pair.dst]
        return pairs + [name for group in self.bandwidth_groups for name in group.members]


class ClusterConfig(Section):
    """How many workers there are, what becomes of lost ones, and how far apart they are."""

    component_placement: PlacementConfig = PlacementConfig()
    restart: Literal["never", "on_failure"] = Field(
        "on_failure", description="whether a part that was lost is started again"
    )
    max_restarts: int = Field(
        3, ge=0, description="of one part, unless it lived for ten minutes in between"
    )
    net_emulation: NetEmulationConfig = NetEmulationConfig()

    @model_validator(mode="after")
    def _linked_workers_exist(self) -> ClusterConfig:
        count = self.component_placement.count
        workers = {"Env": max(count("env"), count("eval")), "Rollout": count("rollout")}
        for name in self.net_emulation.names() if self.net_emulation.enabled else []:
            group, _, last = Endpoints.read(name)
            if last >= workers.get(group, math.inf):
                raise ValueError(
                    f"net_emulation names {name}, but there are only {workers[group]} "
                    f"{group.lower()} workers (component_placement)"
                )
        return self
