"""The section `env`: the simulator, and how env workers step it."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from zmqrl.config.policies import check_names
from zmqrl.config.section import Mode, PositiveSeconds, Seconds, Section


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
    rollout_epoch: int = Field(
        1,
        ge=1,
        description="eval: episodes that each env plays; train: trajectories of each shard that make "
        "a batch of an on-policy algorithm",
    )
    max_steps_per_rollout_epoch: int = Field(
        16, ge=1, le=100_000, description="train: steps in a trajectory (rounded up to whole chunks)"
    )
    max_episode_steps: int | None = Field(None, ge=1, description="null: the simulator's own limit")
    ignore_terminations: bool = Field(False, description="episodes always run to the time limit")
    use_fixed_reset_state_ids: bool = Field(False, description="the same start states each time")
    seed: int = Field(0, ge=0, description="of those start states")
    save_video: bool = Field(False, description="eval: film the first env's first episode (mp4)")
    delay_sampler: DelayConfig | None = Field(None, description="overrides env.delay_sampler")


class EnvConfig(Section):
    """The simulator and how env workers step it."""

    id: str | None = Field(None, description="Gymnasium id, plain or module:EnvId")
    factory: str | None = Field(None, description="module:function or file.py:function")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to the simulator")
    vectorization: Literal["sync", "async", "vector_entry_point", "batched"] = Field(
        "sync",
        description="async: a process for each env; vector_entry_point: the vector env that the id is "
        "registered with; batched: one simulator, made with num_envs",
    )
    autoreset_mode: Literal["disabled", "next_step", "same_step"] = Field(
        "disabled", description="how an env begins its next episode"
    )
    pipeline_stages: int = Field(1, ge=1, le=8, description="groups of envs that are stepped in turn")
    rescale_actions: bool = Field(False, description="map actions from [-1, 1] to the Box")
    clip_actions: bool = Field(False, description="to the Box; else one outside is an error")
    num_action_chunks: int = Field(
        1, ge=1, description="actions that the policy gives at once, if more than one: [N, chunks, …]"
    )
    replan_every: int | None = Field(
        None, ge=1, description="how many of them are carried out; null: all"
    )
    info_keys: list[str] = Field(
        default_factory=list, description="infos that the observation gets, for each env"
    )
    task_description: str | None = Field(
        None, description="for every env, in the observation under task_descriptions"
    )
    success_key: str | None = Field(None, description="null: success, then is_success")
    policies: dict[str, float] = Field(
        default_factory=dict,
        description="weights by which env workers are shared out among named policies, such as "
        "`{base: 3, new: 1}`; {}: each of rollout.policies alike",
    )
    torch_threads: int = Field(1, ge=1, description="of each env worker, if its simulator uses torch")
    request_timeout_s: PositiveSeconds = Field(300.0, description="for actions to come")
    delay_sampler: DelayConfig = DelayConfig()
    train: EnvModeConfig = EnvModeConfig()
    eval: EnvModeConfig = EnvModeConfig()

    @model_validator(mode="after")
    def _one_simulator(self) -> EnvConfig:
        if self.id is not None and self.factory is not None:
            raise ValueError("give either id or factory, not both")
        if self.vectorization == "vector_entry_point" and self.factory is not None:
            raise ValueError("vectorization: vector_entry_point needs id, not factory")
        return self

    @field_validator("policies")
    @classmethod
    def _have_names_and_weights(cls, value: dict[str, float]) -> dict[str, float]:
        check_names(value)
        for name, weight in value.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of {name} must be above 0, not {weight:g}")
        return value

    @model_validator(mode="after")
    def _chunks_are_carried_out_in_one_go(self) -> EnvConfig:
        if (self.replan_every or 1) > self.num_action_chunks:
            raise ValueError(
                f"replan_every is {self.replan_every}, but a chunk has {self.num_action_chunks} "
                "(num_action_chunks)"
            )
        if self.sub_steps is not None and self.autoreset_mode != "disabled":
            raise ValueError(
                f"num_action_chunks needs autoreset_mode disabled, not {self.autoreset_mode}: an "
                "episode that ends within a chunk must not begin anew before the chunk is over"
            )
        return self

    @property
    def sub_steps(self) -> int | None:
        """Steps of the simulator that carry one chunk of actions out; None without chunks."""
        if self.num_action_chunks == 1:
            return None
        return self.replan_every or self.num_action_chunks

    @property
    def trajectory_steps(self) -> int:
        """Actions of the policy, or chunks of them, that make a trajectory."""
        return -(-self.train.max_steps_per_rollout_epoch // (self.sub_steps or 1))

    def of_mode(self, mode: Mode) -> EnvModeConfig:
        """The section of `mode`."""
        return self.train if mode == "train" else self.eval

    def delays_of(self, mode: Mode) -> DelayConfig:
        """The delay sampler that env workers of `mode` use."""
        return self.of_mode(mode).delay_sampler or self.delay_sampler
