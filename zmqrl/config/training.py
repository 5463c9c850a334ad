"""The sections `algorithm`, `actor` and `reward`: what a learner does with trajectories."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from zmqrl.config.section import PositiveSeconds, Section, checked_endpoint


class OptimConfig(Section):
    """An Adam optimiser."""

    lr: float = Field(3e-4, gt=0, allow_inf_nan=False, description="learning rate")
    clip_grad: float = Field(10.0, gt=0, allow_inf_nan=False, description="largest norm of the gradient")
    lr_scheduler: Literal["constant", "linear"] = Field(
        "constant", description="linear: falls to 0 at the end of the run, and needs one"
    )


class EntropyTuningConfig(Section):
    """SAC: the temperature alpha."""

    alpha_type: Literal["softplus", "exp", "fixed_alpha"] = Field(
        "exp", description="how alpha is kept above 0 while it is tuned; fixed_alpha: it is not tuned"
    )
    initial_alpha: float = Field(0.1, gt=0, allow_inf_nan=False)
    target_entropy: float | None = Field(None, allow_inf_nan=False, description="null: -action_dim")
    optim: OptimConfig = OptimConfig()


class ReplayBufferConfig(Section):
    """SAC: the replay buffer. A trajectory is one rollout of one shard (see `env.train`)."""

    cache_size: int = Field(5000, ge=1, description="trajectories kept")
    sample_window_size: int = Field(5000, ge=1, description="newest trajectories that are sampled from")
    min_buffer_size: int = Field(1, ge=1, description="trajectories before the first update")


class AlgorithmConfig(Section):
    """What is learned, and how data and updates keep pace with each other."""

    name: Literal["sac", "ppo"] | None = Field(None, description="a built-in algorithm")
    factory: str | None = Field(None, description="module:Class or file.py:Class, in place of name")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="for the factory")
    gamma: float = Field(0.99, ge=0, le=1, description="discount")
    bootstrap_type: Literal["standard", "always"] = Field(
        "standard", description="standard: no value after a termination; always: through every done"
    )
    update_epoch: int = Field(
        32, ge=1, description="sac: updates in a global step; ppo: passes over its batch"
    )
    updates_per_env_step: float | None = Field(
        None, gt=0, le=1000, description="ratio that learner and env workers keep; null: none"
    )
    ratio_slack_steps: int | None = Field(
        None,
        ge=1,
        description="env steps by which the env workers may be ahead of the ratio; null: twice those "
        "of all trajectories under way, which is twice the least",
    )
    staleness_threshold: int | None = Field(
        None, ge=0, description="versions by which a trajectory may lag behind; null: any"
    )
    max_env_share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="largest share of the env steps that one env worker has; an equal share is always "
        "allowed; null: any",
    )
    # SAC
    tau: float = Field(0.005, gt=0, le=1, description="sac: how far targets follow, an update")
    agg_q: Literal["min", "mean"] = Field("min", description="sac: how the two critics are combined")
    target_update_freq: int = Field(1, ge=1, description="sac: updates between two of the target")
    entropy_tuning: EntropyTuningConfig = EntropyTuningConfig()
    replay_buffer: ReplayBufferConfig = ReplayBufferConfig()
    # PPO
    gae_lambda: float = Field(0.95, ge=0, le=1, description="ppo: lambda of GAE")
    clip_ratio: float = Field(0.2, gt=0, lt=1, description="ppo: bound of the ratio of probabilities")
    entropy_bonus: float = Field(0.0, ge=0, allow_inf_nan=False, description="ppo: its weight")
    value_coef: float = Field(0.5, ge=0, allow_inf_nan=False, description="ppo: its weight")
    normalize_advantages: bool = Field(True, description="ppo: per minibatch")

    @model_validator(mode="after")
    def _one_algorithm(self) -> AlgorithmConfig:
        if self.name is not None and self.factory is not None:
            raise ValueError("give either name or factory, not both")
        return self

    @model_validator(mode="after")
    def _a_window_within_the_buffer(self) -> AlgorithmConfig:
        buffer = self.replay_buffer
        if buffer.min_buffer_size > buffer.cache_size:
            raise ValueError(
                f"replay_buffer.min_buffer_size ({buffer.min_buffer_size}) is above "
                f"cache_size ({buffer.cache_size}): learning would never begin"
            )
        return self

    @property
    def is_set(self) -> bool:
        """Whether there is an algorithm."""
        return self.name is not None or self.factory is not None


class ModelConfig(Section):
    """The built-in networks: multilayer perceptrons over all arrays of the observation."""

    hidden_sizes: list[int] = Field([128, 128], description="units of each hidden layer")
    activation: Literal["relu", "tanh"] = Field("relu", description="ppo often learns better with tanh")

    @field_validator("hidden_sizes")
    @classmethod
    def _are_positive(cls, value: list[int]) -> list[int]:
        if not all(size > 0 for size in value):
            raise ValueError("a layer has at least one unit")
        return value


class ActorConfig(Section):
    """The learner (RLinf calls its workers the actor group)."""

    endpoint: str | None = Field(None, description="where the learner listens; null: local ipc")
    device: str = Field("auto", description="cpu, cuda, cuda:1, …; auto: a GPU if there is one")
    torch_threads: int = Field(1, ge=1, description="of the learner")
    seed: int = Field(0, ge=0, description="of networks, and of what the learner draws")
    global_batch_size: int = Field(256, ge=1, description="transitions in one update")
    optim: OptimConfig = OptimConfig()
    critic_optim: OptimConfig | None = Field(None, description="sac; null: as optim")
    model: ModelConfig = ModelConfig()

    @field_validator("endpoint")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        return checked_endpoint(value)


class RewardConfig(Section):
    """Reward workers: rollout workers that serve the policy named `reward`."""

    use_reward_model: bool = Field(False, description="rewards come from the model, not the simulator")
    model: str | None = Field(None, description="module:factory or file.py:factory")
    model_kwargs: dict[str, Any] = Field(default_factory=dict, description="for the factory")
    when: Literal["step", "terminal"] = Field(
        "step", description="step: for each one; terminal: for the last of an episode, the others get 0"
    )
    timeout_s: PositiveSeconds = Field(300.0, description="for a reward to come")

    @model_validator(mode="after")
    def _a_model(self) -> RewardConfig:
        if self.use_reward_model and self.model is None:
            raise ValueError("use_reward_model needs a model: set reward.model to module:factory")
        return self
