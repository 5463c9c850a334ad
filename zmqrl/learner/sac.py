"""Soft actor-critic, on TorchRL's loss."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torchrl.objectives import SACLoss, SoftUpdate, ValueEstimators

from zmqrl.config import Config
from zmqrl.errors import CheckpointError
from zmqrl.learner.algorithm import Update
from zmqrl.learner.networks import (
    QValue,
    TanhGaussian,
    box_bounds,
    check_parameters,
    observation_width,
    sac_actor,
    saved_parameters,
    seeded,
)
from zmqrl.learner.optimiser import Averages, Optimiser, learner_device
from zmqrl.learner.replay import ReplayBuffer
from zmqrl.learner.transitions import TransitionReader
from zmqrl.spaces import Spaces
from zmqrl.trajectory import Trajectory


class SAC:
    """Soft actor-critic with two critics (Haarnoja et al., arXiv:1812.05905), off-policy.

    The critics and the entropy are those of actions scaled to [-1, 1], so that neither depends on the
    bounds of the Box.

    Raises:
        ConfigError: The actions are no bounded Box, or the observation holds text or images.
    """

    on_policy = False

    def __init__(self, spaces: Spaces, config: Config) -> None:
        self._config = config
        self._device = learner_device(config.actor.device)
        self._updates = 0
        self._averages = Averages()
        with seeded(self._device, config.actor.seed):
            actor = sac_actor(spaces, config.actor.model)
            critics = _critics(spaces, config)
        self.actor: nn.Module = actor.to(self._device)
        self._reader = TransitionReader(spaces, config.algorithm.gamma)
        low, high = box_bounds(spaces)
        self._middle, self._unit = (low + high) / 2, (high - low) / 2
        self._replay = ReplayBuffer(config.algorithm.replay_buffer, self._device)
        self._loss = _Loss(actor.head, critics, len(low), config).to(self._device)
        with warnings.catch_warnings():
            # TorchRL doubts that a tau above 0.5 is meant; the configuration says that it is.
            warnings.filterwarnings("ignore", "Found an eps value")
            self._targets = SoftUpdate(self._loss, tau=config.algorithm.tau)
        self._optimisers = self._make_optimisers()

    def add(self, trajectory: Trajectory) -> None:
        """See `Algorithm.add`."""
        transitions = self._reader.read(trajectory)
        transitions = transitions[transitions["valid"]].exclude("valid")
        action = (transitions["action"] - self._middle) / self._unit
        transitions["action"] = action.clamp(-1, 1)
        if self._config.algorithm.bootstrap_type == "always":
            transitions["next", "terminated"] = torch.zeros_like(transitions["next", "terminated"])
        # TorchRL asks for `done`, of which its one-step targets make no use.
        transitions["next", "done"] = transitions["next", "terminated"]
        self._replay.add(transitions)

    def update(self, progress: float) -> Update | None:
        """See `Algorithm.update`."""
        if not self._replay.ready:
            return None
        chosen = self._config.algorithm
        with seeded(self._device, self._config.actor.seed, self._updates + 1):
            losses = self._loss(self._replay.sample(self._config.actor.global_batch_size))
        (losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]).backward()
        norms = {name: optimiser.step(progress) for name, optimiser in self._optimisers.items()}
        self._updates += 1
        if self._updates % chosen.target_update_freq == 0:
            self._targets.step()
        self._averages.add(_values(losses, norms, self._loss.q_data))
        if self._updates % chosen.update_epoch:
            return Update()
        metrics = self._averages.take()
        for name in ("critic", "actor"):
            metrics[f"train/{name}/lr"] = self._optimisers[name].lr
        return Update(ends_step=True, metrics=metrics)

    def metrics(self) -> dict[str, float]:
        """See `Algorithm.metrics`."""
        return self._replay.metrics()

    def state_dict(self) -> dict[str, Any]:
        """See `Algorithm.state_dict`."""
        return {
            "algorithm": "sac",
            "alpha_type": self._config.algorithm.entropy_tuning.alpha_type,
            "updates": self._updates,
            "parameters": saved_parameters(self._parameters()),
            "optimisers": {name: o.state_dict() for name, o in self._optimisers.items()},
            "replay": self._replay.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`."""
        try:
            replay = self._checked(state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"this is no state of sac: {type(error).__name__}: {error}") from error
        with torch.no_grad():
            for name, tensor in self._parameters().items():
                tensor.copy_(state["parameters"][name])
        for name, optimiser in self._optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])
        self._replay = replay
        self._updates = int(state["updates"])
        self._averages = Averages()

    def _checked(self, state: dict[str, Any]) -> ReplayBuffer:
        alpha_type = self._config.algorithm.entropy_tuning.alpha_type
        for key, mine in (("algorithm", "sac"), ("alpha_type", alpha_type)):
            if state.get(key) != mine:
                raise CheckpointError(f"{key} is {state.get(key)} there and {mine} here")
        difference = check_parameters(state["parameters"], self._parameters())
        if difference:
            raise CheckpointError(f"the networks differ: {difference}")
        for name, optimiser in self._optimisers.items():
            optimiser.check(state["optimisers"][name])
        int(state["updates"])
        kept = state["replay"]["transitions"]
        if kept:
            kept["steps_to_next_obs"]  # earlier versions had none
        return ReplayBuffer.of_state(state["replay"], self._config.algorithm.replay_buffer, self._device)

    def _make_optimisers(self) -> dict[str, Optimiser]:
        actor, tuning = self._config.actor, self._config.algorithm.entropy_tuning
        critics = self._loss.qvalue_network_params.parameters()
        optimisers = {
            "critic": Optimiser(critics, actor.critic_optim or actor.optim),
            "actor": Optimiser(self.actor.parameters(), actor.optim),
        }
        if tuning.alpha_type != "fixed_alpha":
            optimisers["alpha"] = Optimiser([self._loss.log_alpha], tuning.optim)
        return optimisers

    def _parameters(self) -> dict[str, Tensor]:
        """All that is learned, by name."""
        found = {f"actor.{name}": tensor for name, tensor in self.actor.state_dict().items()}
        for name, params in (
            ("critics", self._loss.qvalue_network_params),
            ("target_critics", self._loss.target_qvalue_network_params),
        ):
            found |= {f"{name}.{key}": tensor.data for key, tensor in params.flatten_keys(".").items()}
        return {**found, "log_alpha": self._loss.log_alpha.data}


class _Loss(SACLoss):  # type: ignore[misc]
    """TorchRL's loss, with softplus as another way to keep alpha above 0, and with means of critics."""

    def __init__(
        self, head: nn.Module, critics: list[TensorDictModule], actions: int, config: Config
    ) -> None:
        tuning = config.algorithm.entropy_tuning
        target = -float(actions) if tuning.target_entropy is None else tuning.target_entropy
        super().__init__(
            _policy(head),
            critics,
            num_qvalue_nets=len(critics),
            loss_function="l2",
            alpha_init=tuning.initial_alpha,
            fixed_alpha=tuning.alpha_type == "fixed_alpha",
            target_entropy=target,
        )
        self.make_value_estimator(ValueEstimators.TD0, gamma=config.algorithm.gamma)
        self.q_data = torch.zeros(())
        self._softplus = tuning.alpha_type == "softplus"
        self._mean = config.algorithm.agg_q == "mean"
        if self._softplus:
            # The inverse of softplus, in the form that does not overflow.
            raw = tuning.initial_alpha + math.log(-math.expm1(-tuning.initial_alpha))
            self.log_alpha.data.fill_(raw)

    @property
    def _alpha(self) -> Tensor:
        raw: Tensor = self.log_alpha.detach()
        return nn.functional.softplus(raw) if self._softplus else raw.exp()

    def _make_vmap(self) -> None:
        super()._make_vmap()
        critics: Callable[..., Any] = self._vmap_qnetworkN0
        self._vmap_qnetworkN0: Callable[..., Any] = functools.partial(self._evaluated, critics)

    def _evaluated(self, critics: Callable[..., Any], batch: TensorDict, params: Any) -> TensorDict:
        """Evaluate the critics, `[2, B, 1]`.

        The loss takes the minimum of what it does not train, which of equal values is the mean.
        """
        result: TensorDict = critics(batch, params)
        values = result["state_action_value"]
        if params is self.qvalue_network_params:
            self.q_data = values.detach().mean()
        elif self._mean:
            result["state_action_value"] = values.mean(0, keepdim=True).expand_as(values)
        return result


def _policy(head: nn.Module) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(head, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=TanhGaussian,
            return_log_prob=True,
        ),
    )


def _critics(spaces: Spaces, config: Config) -> list[TensorDictModule]:
    width, actions = observation_width(spaces), len(spaces.action.low)
    return [
        TensorDictModule(
            QValue(width, actions, config.actor.model),
            in_keys=["observation", "action"],
            out_keys=["state_action_value"],
        )
        for _ in range(2)
    ]


def _values(losses: TensorDict, norms: dict[str, Tensor], q_data: Tensor) -> dict[str, Tensor]:
    actor_loss, alpha, entropy = losses["loss_actor"], losses["alpha"], losses["entropy"]
    return {
        "train/sac/critic_loss": losses["loss_qvalue"],
        "train/sac/actor_loss": actor_loss,
        "train/sac/alpha_loss": losses["loss_alpha"],
        "train/sac/alpha": alpha,
        "train/critic/grad_norm": norms["critic"],
        "train/critic/q_data": q_data,
        "train/actor/grad_norm": norms["actor"],
        "train/actor/entropy": entropy,
        # The actor's loss is alpha times the log-probability, less this.
        "train/actor/q_pi": -actor_loss - alpha * entropy,
    }
