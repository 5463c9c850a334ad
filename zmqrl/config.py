"""The configuration: YAML in, typed sections out, and precise errors.

Keys that RLinf has keep their names and meaning, so that a configuration can be moved over.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from zmqrl.errors import ConfigError, EndpointError
from zmqrl.transport import sockets

Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Mode = Literal["train", "eval"]


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _checked_endpoint(value: str | None) -> str | None:
    if value is not None:
        try:
            sockets.check_endpoint(value)
        except EndpointError as error:
            raise ValueError(str(error)) from None
    return value


class StallConfig(Section):
    """One env worker that stops once: `rank` sleeps `seconds` at its step `at_step`."""

    rank: int = Field(ge=0)
    at_step: int = Field(ge=0)
    seconds: Seconds


_DELAY_KEYS: dict[str, set[str]] = {
    "constant": {"delay"},
    "uniform": {"low", "high"},
    "exponential": {"mean"},
    "gaussian": {"mean", "std"},
    "tail": {"base", "probability", "extra"},
}


class DelayConfig(Section):
    """Seconds added to each step and reset of an env worker, to emulate an uneven simulator.

    * `constant`: `delay`
    * `uniform`: between `low` and `high`
    * `exponential`: with mean `mean`
    * `gaussian`: `mean` and `std`, cut off at 0
    * `tail`: `base`, and with `probability` a further `extra`
    """

    type: Literal["constant", "uniform", "exponential", "gaussian", "tail"] = "constant"
    delay: Seconds = 0.0
    low: Seconds = 0.0
    high: Seconds = 0.0
    mean: Seconds = 0.0
    std: Seconds = 0.0
    base: Seconds = 0.0
    probability: float = Field(0.0, ge=0, le=1)
    extra: Seconds = 0.0
    seed: int = Field(0, ge=0, description="makes the delays repeatable")
    per_worker: dict[int, float] = Field(default_factory=dict, description="rank: factor")
    stall: StallConfig | None = None

    @model_serializer(mode="wrap")
    def _without_the_keys_of_other_types(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        others = set().union(*_DELAY_KEYS.values()) - _DELAY_KEYS[self.type]
        return {key: value for key, value in handler(self).items() if key not in others}

    @model_validator(mode="after")
    def _only_the_keys_of_its_type(self) -> DelayConfig:
        own = _DELAY_KEYS[self.type]
        foreign = sorted((self.model_fields_set & set().union(*_DELAY_KEYS.values())) - own)
        if foreign:
            raise ValueError(
                f"type {self.type!r} takes {', '.join(sorted(own))}; it has no {foreign[0]!r}"
            )
        if "type" in self.model_fields_set and not self.model_fields_set & own:
            raise ValueError(f"type {self.type!r} needs {', '.join(sorted(own))}")
        if self.type == "uniform" and self.high < self.low:
            raise ValueError(f"high ({self.high:g}) is below low ({self.low:g})")
        negative = [rank for rank, factor in self.per_worker.items() if rank < 0 or factor < 0]
        if negative:
            raise ValueError(f"per_worker: rank {negative[0]} or its factor is negative")
        return self


class EnvModeConfig(Section):
    """How env workers run in one mode (`env.train` or `env.eval`)."""

    total_num_envs: int | None = Field(
        None, ge=1, description="over all env workers, shared out evenly; null: one a worker and stage"
    )
    rollout_epoch: int = Field(1, ge=1, description="eval: episodes that each env plays")
    max_episode_steps: int | None = Field(None, ge=1, description="null: the simulator's own limit")
    ignore_terminations: bool = Field(False, description="episodes always run to the time limit")
    use_fixed_reset_state_ids: bool = Field(False, description="the same start states each time")
    seed: int = Field(0, ge=0, description="of those start states")
    delay_sampler: DelayConfig | None = Field(None, description="overrides env.delay_sampler")


class EnvConfig(Section):
    """The simulator and how env workers step it."""

    id: str | None = Field(None, description="Gymnasium id, plain or module:EnvId")
    factory: str | None = Field(None, description="module:function or file.py:function")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to the simulator")
    vectorization: Literal["sync", "async"] = Field("sync", description="async: a process for each env")
    autoreset_mode: Literal["disabled", "next_step", "same_step"] = Field(
        "disabled", description="how an env begins its next episode"
    )
    pipeline_stages: int = Field(1, ge=1, le=8, description="groups of envs that are stepped in turn")
    rescale_actions: bool = Field(False, description="map actions from [-1, 1] to the Box")
    success_key: str | None = Field(None, description="null: success, then is_success")
    request_timeout_s: PositiveSeconds = Field(300.0, description="for actions to come")
    delay_sampler: DelayConfig = DelayConfig()
    train: EnvModeConfig = EnvModeConfig()
    eval: EnvModeConfig = EnvModeConfig()

    @model_validator(mode="after")
    def _one_simulator(self) -> EnvConfig:
        if self.id is not None and self.factory is not None:
            raise ValueError("give either id or factory, not both")
        return self

    def of_mode(self, mode: Mode) -> EnvModeConfig:
        """The section of `mode`."""
        return self.train if mode == "train" else self.eval

    def delays_of(self, mode: Mode) -> DelayConfig:
        """The delay sampler that env workers of `mode` use."""
        return self.of_mode(mode).delay_sampler or self.delay_sampler


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
        return _checked_endpoint(value)

    @model_validator(mode="after")
    def _two_endpoints(self) -> BrokerConfig:
        fixed = self.frontend is not None and not self.frontend.endswith((":0", ":*"))
        if fixed and self.frontend == self.backend:
            raise ValueError(f"frontend and backend are both {self.frontend}; they are two sockets")
        return self


class LoggerConfig(Section):
    """Where a run writes its files."""

    log_path: str = Field("runs", description="folder")
    experiment_name: str = Field("evaluate", description="folder within log_path")


class RunnerConfig(Section):
    """The run as a whole."""

    enable_decoupled_mode: bool = Field(False, description="true: shared queue; false: fixed ranks")
    logger: LoggerConfig = LoggerConfig()
    startup_timeout_s: PositiveSeconds = Field(120.0, description="for all parts to come up")
    stall_timeout_s: PositiveSeconds = Field(120.0, description="for one step or reset of an env worker")
    report: str | None = Field(None, description="where env workers report; null: local ipc")

    @field_validator("report")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        return _checked_endpoint(value)


class PlacementConfig(Section):
    """Rank ranges, such as `0-3`, which give the number of workers."""

    env: str = Field("0-7", description="0-7 means eight env workers")
    rollout: str = Field("0-1", description="0-1 means two rollout workers")

    @field_validator("env", "rollout", mode="before")
    @classmethod
    def _is_range(cls, value: object) -> object:
        text = str(value).strip()
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        words = "expected a range of ranks from 0: 0-2 means three workers, 0 means one"
        if isinstance(value, bool) or match is None:
            raise ValueError(words)
        first, last = int(match[1]), int(match[2] or match[1])
        if first != 0 or last > 9_999:
            raise ValueError(words)
        return text

    def count(self, component: Literal["env", "rollout"]) -> int:
        """The number of workers of `component`."""
        return int(getattr(self, component).split("-")[-1]) + 1


class ClusterConfig(Section):
    """How many workers there are."""

    component_placement: PlacementConfig = PlacementConfig()


class Config(Section):
    """The whole configuration."""

    runner: RunnerConfig = RunnerConfig()
    cluster: ClusterConfig = ClusterConfig()
    broker: BrokerConfig = BrokerConfig()
    rollout: RolloutConfig = RolloutConfig()
    env: EnvConfig = EnvConfig()

    @model_validator(mode="after")
    def _enough_envs(self) -> Config:
        workers, stages = self.env_workers, self.env.pipeline_stages
        for mode in ("train", "eval"):
            total = self.env.of_mode(mode).total_num_envs
            if total is not None and total < workers * stages:
                raise ValueError(
                    f"env.{mode}.total_num_envs is {total}, but {workers} env workers with "
                    f"{stages} pipeline stages need at least {workers * stages}"
                )
        return self

    @model_validator(mode="after")
    def _delayed_workers_exist(self) -> Config:
        for where, delays in (
            ("env", self.env.delay_sampler),
            ("env.train", self.env.train.delay_sampler),
            ("env.eval", self.env.eval.delay_sampler),
        ):
            named = [] if delays is None else list(delays.per_worker)
            if delays is not None and delays.stall is not None:
                named.append(delays.stall.rank)
            if named and max(named) >= self.env_workers:
                raise ValueError(
                    f"{where}.delay_sampler names env worker {max(named)}, but there are only "
                    f"{self.env_workers} (cluster.component_placement.env)"
                )
        return self

    @property
    def env_workers(self) -> int:
        """The number of env workers."""
        return self.cluster.component_placement.count("env")

    @property
    def rollout_workers(self) -> int:
        """The number of rollout workers."""
        return self.cluster.component_placement.count("rollout")

    def total_envs(self, mode: Mode) -> int:
        """The number of envs over all env workers."""
        return self.env.of_mode(mode).total_num_envs or self.env_workers * self.env.pipeline_stages

    def envs_of(self, mode: Mode, rank: int) -> int:
        """How many of the envs the env worker `rank` steps (uneven counts are allowed)."""
        share, rest = divmod(self.total_envs(mode), self.env_workers)
        return share + (rank < rest)

    def stage_sizes(self, mode: Mode, rank: int) -> list[int]:
        """How many envs are in each pipeline stage of the env worker `rank`."""
        stages = self.env.pipeline_stages
        share, rest = divmod(self.envs_of(mode, rank), stages)
        return [share + (stage < rest) for stage in range(stages)]

    def first_env_of(self, mode: Mode, rank: int) -> int:
        """The index, over all env workers, of the first env of env worker `rank`."""
        share, rest = divmod(self.total_envs(mode), self.env_workers)
        return rank * share + min(rank, rest)


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration.

    Args:
        path: A YAML file; None for the defaults.
        overrides: `section.key=value` strings, the value in YAML; later ones win.

    Raises:
        ConfigError: Naming the key path, the value, what is allowed, and the nearest known key.
    """
    tree: dict[str, Any] = {}
    source = "command line"
    if path is not None:
        source = str(path)
        tree = _read_yaml(Path(path))
    for override in overrides:
        _apply(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, source)) from None


def dump(config: Config, path: Path) -> None:
    """Write `config`, defaults included, as YAML that `load` reads back to an equal configuration."""
    tree = config.model_dump(mode="json")
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, which YAML readers otherwise drop in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                raise yaml.MarkedYAMLError(problem="a key is no text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path} (looked in {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections such as 'runner:', not a {type(tree).__name__}")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"cannot read the override {override!r}: expected section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"cannot read the value of the override {override!r}") from None
    node = tree
    for part in parts[:-1]:
        child = node.get(part)
        if not isinstance(child, dict):
            child = node[part] = {}
        node = child
    node[parts[-1]] = value


def _explain(error: ValidationError, source: str) -> str:
    lines = [_explain_one(dict(detail)) for detail in error.errors(include_url=False)]
    head = f"{source}: " if len(lines) == 1 else f"{source}: {len(lines)} errors\n  "
    return head + "\n  ".join(lines)


def _explain_one(detail: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        section = ".".join(str(part) for part in detail["loc"][:-1])
        known = list(_section_at(detail["loc"][:-1]).model_fields)
        where = f"in section '{section}'" if section else "at the top level"
        near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key '{path}' {where}; {hint}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "model_type":
        message = "expected a section with keys"
    if not path:
        return message
    value = detail["input"]
    if detail["type"] == "value_error" and isinstance(value, dict):
        return f"{path}: {message}"
    return f"{path}: {message} (got {value!r})"


def _section_at(path: tuple[Any, ...]) -> type[Section]:
    section: type[Section] = Config
    for part in path:
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, Section))
    return section
