"""The whole configuration."""

from __future__ import annotations

import math

from pydantic import model_validator

from zmqrl.config.env import EnvConfig
from zmqrl.config.policies import assigned
from zmqrl.config.pool import BrokerConfig, ClusterConfig, RolloutConfig
from zmqrl.config.runner import RunnerConfig
from zmqrl.config.section import Mode, Section
from zmqrl.config.security import SecurityConfig
from zmqrl.config.training import ActorConfig, AlgorithmConfig, RewardConfig


class Config(Section):
    """The whole configuration."""

    runner: RunnerConfig = RunnerConfig()
    cluster: ClusterConfig = ClusterConfig()
    broker: BrokerConfig = BrokerConfig()
    rollout: RolloutConfig = RolloutConfig()
    env: EnvConfig = EnvConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    reward: RewardConfig = RewardConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _enough_envs(self) -> Config:
        stages = self.env.pipeline_stages
        modes: tuple[Mode, ...] = ("train", "eval")
        for mode in modes:
            workers = self.env_workers(mode)
            total = self.env.of_mode(mode).total_num_envs
            if total is not None and total < workers * stages:
                raise ValueError(
                    f"env.{mode}.total_num_envs is {total}, but {workers} env workers with "
                    f"{stages} pipeline stages need at least {workers * stages}"
                )
        return self

    @model_validator(mode="after")
    def _an_env_worker_for_each_policy(self) -> Config:
        served = self.rollout.policies
        foreign = [name for name in self.env.policies if served and name not in served]
        if foreign:
            raise ValueError(
                f"env.policies names {foreign[0]!r}, but rollout.policies are {', '.join(served)}"
            )
        if served and self.runner.ckpt_path is not None:
            raise ValueError("with rollout.policies each of them has a ckpt_path, not runner")
        workers = self.env_workers("eval")
        without = set(self.policy_weights) - set(assigned(self.policy_weights, workers))
        if without:
            raise ValueError(
                f"of {workers} env workers none is for the policy {min(without)!r}: more of them "
                "(cluster.component_placement), or other weights (env.policies)"
            )
        return self

    @model_validator(mode="after")
    def _delayed_workers_exist(self) -> Config:
        train, evaluation = self.env_workers("train"), self.env_workers("eval")
        for where, delays, workers in (
            ("env", self.env.delay_sampler, max(train, evaluation)),
            ("env.train", self.env.train.delay_sampler, train),
            ("env.eval", self.env.eval.delay_sampler, evaluation),
        ):
            named = [] if delays is None else list(delays.per_worker)
            if delays is not None and delays.stall is not None:
                named.append(delays.stall.rank)
            if named and max(named) >= workers:
                raise ValueError(
                    f"{where}.delay_sampler names env worker {max(named)}, but there are only "
                    f"{workers} (cluster.component_placement)"
                )
        return self

    @model_validator(mode="after")
    def _an_end_for_what_falls_until_the_end(self) -> Config:
        optims = (self.actor.optim, self.actor.critic_optim, self.algorithm.entropy_tuning.optim)
        if any(o is not None and o.lr_scheduler == "linear" for o in optims) and not self.has_an_end:
            raise ValueError(
                "actor.optim.lr_scheduler is linear, which falls to 0 at the end of the run, but the "
                "run has no end: set runner.max_env_steps or runner.max_steps"
            )
        return self

    @model_validator(mode="after")
    def _slack_for_what_is_under_way(self) -> Config:
        slack, least = self.algorithm.ratio_slack_steps, self.least_slack_steps
        if slack is not None and slack < least:
            raise ValueError(
                f"algorithm.ratio_slack_steps is {slack}, but the trajectories under way alone have "
                f"{least} env steps: with less, learner and env workers would wait for each other"
            )
        return self

    @property
    def learns(self) -> bool:
        """Whether there is a learner, ours or the user's own."""
        return self.algorithm.is_set or self.actor.endpoint is not None

    @property
    def has_an_end(self) -> bool:
        """Whether training ends by itself, whatever is learned."""
        return self.last_step is not None or self.runner.max_env_steps >= 0

    @property
    def last_step(self) -> int | None:
        """The global step after which training ends; None if no number of them ends it."""
        limits = [n for n in (self.runner.max_epochs, self.runner.max_steps) if n >= 0]
        return min(limits) if limits else None

    @property
    def least_slack_steps(self) -> int:
        """Env steps of all trajectories that can be under way at once, or of one update."""
        trajectory = self.env.trajectory_steps * (self.env.sub_steps or 1)
        under_way = self.total_envs("train") * trajectory
        ratio = self.algorithm.updates_per_env_step
        return max(under_way, 0 if ratio is None else math.ceil(1 / ratio))

    def env_workers(self, mode: Mode) -> int:
        """The number of env workers of `mode`."""
        return self.cluster.component_placement.count("env" if mode == "train" else "eval")

    @property
    def rollout_workers(self) -> int:
        """The number of rollout workers, of all policies."""
        named = sum(policy.workers for policy in self.rollout.policies.values())
        return named or self.cluster.component_placement.count("rollout")

    def rollout_names(self) -> dict[str, str]:
        """What each rollout worker is called that a run starts, and the policy that it serves."""
        if not self.rollout.policies:
            return {f"rollout-{rank}": "" for rank in range(self.rollout_workers)}
        return {
            f"rollout-{name}-{rank}": name
            for name, policy in self.rollout.policies.items()
            for rank in range(policy.workers)
        }

    @property
    def policy_weights(self) -> dict[str, float]:
        """By which env workers are shared out among the named policies; empty if there are none."""
        return self.env.policies or dict.fromkeys(self.rollout.policies, 1.0)

    def policies_of(self, mode: Mode) -> list[str]:
        """The policy that each env worker of `mode` asks, by rank; "" is the pool's own."""
        return assigned(self.policy_weights, self.env_workers(mode))

    def of_policy(self, name: str) -> Config:
        """The configuration of a pool that serves this one of `rollout.policies` alone."""
        policy = self.rollout.policies[name]
        fields = {"policy": policy.policy, "policy_kwargs": policy.policy_kwargs, "policies": {}}
        runner = self.runner.model_copy(update={"ckpt_path": policy.ckpt_path})
        rollout = self.rollout.model_copy(update=fields)
        return self.model_copy(update={"rollout": rollout, "runner": runner})

    def total_envs(self, mode: Mode) -> int:
        """The number of envs over all env workers."""
        return self.env.of_mode(mode).total_num_envs or self.env_workers(mode) * self.env.pipeline_stages

    def envs_of(self, mode: Mode, rank: int) -> int:
        """How many of the envs the env worker `rank` steps (uneven counts are allowed)."""
        share, rest = divmod(self.total_envs(mode), self.env_workers(mode))
        return share + (rank < rest)

    def stage_sizes(self, mode: Mode, rank: int) -> list[int]:
        """How many envs are in each pipeline stage of the env worker `rank`."""
        stages = self.env.pipeline_stages
        share, rest = divmod(self.envs_of(mode, rank), stages)
        return [share + (stage < rest) for stage in range(stages)]

    def first_env_of(self, mode: Mode, rank: int) -> int:
        """The index, over all env workers, of the first env of env worker `rank`."""
        share, rest = divmod(self.total_envs(mode), self.env_workers(mode))
        return rank * share + min(rank, rest)

    def start_states_of(self, mode: Mode, rank: int) -> tuple[int, int]:
        """Which start states an env worker plays, with `use_fixed_reset_state_ids`.

        Returns:
            The number of the first, and how many all env workers of its policy play in a round: each
            policy begins with the same ones.
        """
        policies = self.policies_of(mode)
        envs = [self.envs_of(mode, r) * (name == policies[rank]) for r, name in enumerate(policies)]
        return sum(envs[:rank]), sum(envs)
