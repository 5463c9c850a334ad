"""What an algorithm is to the learner, and how one is found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from zmqrl.config import Config
from zmqrl.errors import ConfigError
from zmqrl.imports import import_object
from zmqrl.spaces import Spaces
from zmqrl.trajectory import Trajectory

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Update:
    """What one call of `Algorithm.update` did."""

    updates: int = 1
    """Gradient updates."""
    ends_step: bool = False
    """Whether a global step ended: weights may be published, evaluations and checkpoints are due."""
    metrics: dict[str, float] = field(default_factory=dict)
    """By name, such as `train/sac/critic_loss`."""


class Algorithm(Protocol):
    """Learns from trajectories. The learner's loop, in short:

        algorithm = factory(spaces, config)
        publish(algorithm.actor.state_dict())
        while True:
            for trajectory in received():
                algorithm.add(trajectory)
            if ratio_allows():
                done = algorithm.update(progress)
                if done is not None and done.ends_step:
                    publish(algorithm.actor.state_dict())

    A class of this shape is what `algorithm.factory` names; it is called with `(spaces, config)`. The
    rollout workers call it as well, and serve its `actor`.

    Attributes:
        actor: The policy as rollout workers serve it: called with a tree of tensors `[N, ...]` and
            `eval_mask`, bool `[N]`; returns a dict of tensors `[N, ...]` with `actions`. What else it
            returns comes back in the trajectories.
        on_policy: Whether trajectories that lag behind by more than `algorithm.staleness_threshold`
            versions are dropped before `add`.
    """

    actor: torch.nn.Module
    on_policy: bool

    def add(self, trajectory: Trajectory) -> None:
        """Take in a trajectory.

        Raises:
            DataError: It does not fit the algorithm; it is dropped and counted.
        """

    def update(self, progress: float) -> Update | None:
        """Do one gradient update.

        Args:
            progress: The share of the run that is done, from 0 to 1; 0 if it has no end.

        Returns:
            What was done; None if more data is needed first.
        """

    def metrics(self) -> dict[str, float]:
        """What is to be told beside the metrics of the updates, such as the size of a replay buffer."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that a checkpoint needs to go on: networks, optimisers, data.

        It is made of tensors, numbers, str, and dicts and lists of them.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`.

        Raises:
            CheckpointError: The state is that of another algorithm or architecture; says what differs.
        """


def make_algorithm(spaces: Spaces, config: Config) -> Algorithm:
    """Build the algorithm that the section `algorithm` names.

    Raises:
        ConfigError: None is named, it cannot be imported, or it cannot do with these spaces.
    """
    chosen = config.algorithm
    if chosen.factory is not None:
        algorithm: Algorithm = import_object(chosen.factory)(spaces, config, **chosen.kwargs)
        return algorithm
    _check_chunks(spaces, config)
    if chosen.name is not None and config.env.sub_steps not in (None, config.env.num_action_chunks):
        raise ConfigError(
            f"{chosen.name} learns whole chunks of actions, but only {config.env.sub_steps} of "
            f"{config.env.num_action_chunks} are carried out (env.replan_every): leave it out, or use "
            "algorithm.factory"
        )
    if chosen.name == "sac":
        from zmqrl.learner.sac import SAC

        return SAC(spaces, config)
    if chosen.name == "ppo":
        from zmqrl.learner.ppo import PPO

        return PPO(spaces, config)
    raise ConfigError("no algorithm is named: set algorithm.name to sac or ppo, or algorithm.factory")


def make_actor(spaces: Spaces, config: Config) -> torch.nn.Module:
    """Build the actor of that algorithm alone, for a rollout worker.

    Raises:
        ConfigError: As `make_algorithm`.
    """
    # The built-in actors need no TorchRL, which takes seconds to import.
    from zmqrl.learner.networks import ppo_actor, sac_actor

    _check_chunks(spaces, config)
    if config.algorithm.name == "sac":
        return sac_actor(spaces, config.actor.model)
    if config.algorithm.name == "ppo":
        return ppo_actor(spaces, config.actor.model)
    return make_algorithm(spaces, config).actor


def _check_chunks(spaces: Spaces, config: Config) -> None:
    chosen = config.algorithm
    built_in = chosen.factory is None and chosen.name is not None
    if built_in and config.env.sub_steps is not None and spaces.action.kind != "box":
        raise ConfigError(
            f"{chosen.name} learns chunks of actions in a Box only, not {spaces.action.text}: set "
            "env.num_action_chunks to 1, or use algorithm.factory"
        )
