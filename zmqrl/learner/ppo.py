"""Proximal policy optimisation, on TorchRL's loss and advantage estimator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from zmqrl.config import Config
from zmqrl.errors import CheckpointError, DataError
from zmqrl.learner.algorithm import Update
from zmqrl.learner.networks import (
    categorical,
    check_parameters,
    gaussian,
    mlp,
    observation_width,
    orthogonal,
    ppo_actor,
    saved_parameters,
    seeded,
)
from zmqrl.learner.optimiser import Averages, Optimiser, learner_device
from zmqrl.learner.transitions import TransitionReader, check_finite
from zmqrl.spaces import Spaces
from zmqrl.trajectory import Trajectory


class PPO:
    """PPO with a clipped objective (Schulman et al., arXiv:1707.06347), on-policy.

    A batch is as many trajectories as the training env workers have shards, times `rollout_epoch`;
    whose they are does not matter. Advantages are estimated once for it; what comes while it is learned
    from waits for the next.

    Raises:
        ConfigError: The actions are neither in a Box nor discrete, or the observation holds text or
            images.
    """

    on_policy = True

    def __init__(self, spaces: Spaces, config: Config) -> None:
        self._config = config
        self._device = learner_device(config.actor.device)
        self._averages = Averages()
        with seeded(self._device, config.actor.seed):
            actor = ppo_actor(spaces, config.actor.model)
            self._critic = orthogonal(mlp(observation_width(spaces), 1, config.actor.model), 1.0)
        self.actor: nn.Module = actor.to(self._device)
        self._critic.to(self._device)
        self._reader = TransitionReader(spaces, config.algorithm.gamma)
        self._batch_size = (
            config.env_workers("train") * config.env.pipeline_stages * config.env.train.rollout_epoch
        )
        """In trajectories."""
        self._waiting: list[TensorDict] = []
        self._batch: TensorDict | None = None
        self._batches = 0
        self._position = 0
        """Minibatches of the batch that are done, over all passes."""
        self._order = torch.empty(0)
        self._explained_variance = 0.0
        self._loss = _loss(actor.head, self._critic, spaces.action.kind == "discrete", config)
        self._loss.to(self._device)
        self._estimator = GAE(
            gamma=config.algorithm.gamma,
            lmbda=config.algorithm.gae_lambda,
            value_network=None,
            vectorized=False,
            device=self._device,
        )
        self._optimisers = {
            "actor": Optimiser(self.actor.parameters(), config.actor.optim),
            "critic": Optimiser(
                self._critic.parameters(), config.actor.critic_optim or config.actor.optim
            ),
        }

    def add(self, trajectory: Trajectory) -> None:
        """See `Algorithm.add`."""
        transitions = self._reader.read(trajectory)
        transitions["log_prob"] = _replied_log_probs(trajectory)
        self._waiting.append(transitions)

    def update(self, progress: float) -> Update | None:
        """See `Algorithm.update`."""
        while self._batch is None:
            if len(self._waiting) < self._batch_size:
                return None
            self._begin_batch()
        minibatches = self._minibatches(self._batch)
        losses = self._loss(self._minibatch(self._batch, minibatches))
        loss = losses["loss_objective"] + losses["loss_entropy"]
        value_loss = losses.get("loss_critic", torch.zeros_like(loss))
        (loss + value_loss).backward()
        norms = {name: optimiser.step(progress) for name, optimiser in self._optimisers.items()}
        self._averages.add(
            {
                "train/ppo/policy_loss": losses["loss_objective"],
                "train/ppo/value_loss": value_loss / (self._config.algorithm.value_coef or 1.0),
                "train/ppo/entropy": losses["entropy"],
                "train/ppo/approx_kl": losses["kl_approx"],
                "train/ppo/clip_fraction": losses["clip_fraction"],
                **{f"train/{name}/grad_norm": norm for name, norm in norms.items()},
            }
        )
        self._position += 1
        if self._position < minibatches * self._config.algorithm.update_epoch:
            return Update()
        return Update(ends_step=True, metrics=self._end_batch())

    def metrics(self) -> dict[str, float]:
        """See `Algorithm.metrics`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """See `Algorithm.state_dict`."""
        return {
            "algorithm": "ppo",
            "batches": self._batches,
            "position": self._position,
            "explained_variance": self._explained_variance,
            "parameters": saved_parameters(self._parameters()),
            "optimisers": {name: o.state_dict() for name, o in self._optimisers.items()},
            "waiting": [transitions.cpu().to_dict() for transitions in self._waiting],
            "batch": {} if self._batch is None else self._batch.cpu().to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`."""
        try:
            waiting, batch = self._checked(state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"this is no state of ppo: {type(error).__name__}: {error}") from error
        with torch.no_grad():
            for name, tensor in self._parameters().items():
                tensor.copy_(state["parameters"][name])
        for name, optimiser in self._optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])
        self._waiting, self._batch = waiting, batch
        self._batches, self._position = int(state["batches"]), int(state["position"])
        self._explained_variance = float(state["explained_variance"])
        self._order = torch.empty(0)
        self._averages = Averages()

    def _checked(self, state: dict[str, Any]) -> tuple[list[TensorDict], TensorDict | None]:
        if state.get("algorithm") != "ppo":
            raise CheckpointError(f"algorithm is {state.get('algorithm')} there and ppo here")
        difference = check_parameters(state["parameters"], self._parameters())
        if difference:
            raise CheckpointError(f"the networks differ: {difference}")
        for name, optimiser in self._optimisers.items():
            optimiser.check(state["optimisers"][name])
        for name in ("batches", "position", "explained_variance"):
            float(state[name])
        waiting = [TensorDict.from_dict(t, batch_size=t["valid"].shape) for t in state["waiting"]]
        if not state["batch"]:
            return waiting, None
        batch = TensorDict.from_dict(state["batch"], batch_size=state["batch"]["advantage"].shape[:1])
        return waiting, batch.to(self._device)

    def _begin_batch(self) -> None:
        """Put the next batch together; None where it has no transition at all."""
        chosen, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
        batch = torch.cat([self._with_advantages(t.to(self._device)) for t in chosen])
        if len(batch) == 0:
            return
        self._batch = batch
        self._explained_variance = _explained_variance(batch)
        self._batches += 1
        self._position = 0

    @torch.no_grad()
    def _with_advantages(self, transitions: TensorDict) -> TensorDict:
        """From the steps `[T, N]` of a trajectory to its transitions `[K]` with their advantages."""
        after = transitions["next"]
        transitions["state_value"] = self._critic(transitions["observation"])
        after["state_value"] = self._critic(after["observation"])
        if self._config.algorithm.bootstrap_type == "always":
            after["terminated"] = torch.zeros_like(after["terminated"])
        # The trace of an advantage may neither cross a step that was no transition nor come from one.
        gap = ~transitions["valid"][..., None]
        after["done"] = after["done"] | gap
        after["done"][:-1] |= gap[1:]
        by_row = self._estimator(transitions.transpose(0, 1))
        used = ("observation", "action", "log_prob", "advantage", "value_target", "state_value")
        return by_row[by_row["valid"]].select(*used)

    def _minibatches(self, batch: TensorDict) -> int:
        """How many make one pass: as many as brings their size nearest to `global_batch_size`."""
        return max(1, round(len(batch) / self._config.actor.global_batch_size))

    def _minibatch(self, batch: TensorDict, minibatches: int) -> TensorDict:
        epoch, place = divmod(self._position, minibatches)
        if place == 0 or len(self._order) != len(batch):
            with seeded(self._device, self._config.actor.seed, self._batches, epoch):
                self._order = torch.randperm(len(batch), device=self._device)
        return batch[self._order.tensor_split(minibatches)[place]]

    def _end_batch(self) -> dict[str, float]:
        self._batch = None
        metrics = self._averages.take()
        metrics["train/ppo/explained_variance"] = self._explained_variance
        for name, optimiser in self._optimisers.items():
            metrics[f"train/{name}/lr"] = optimiser.lr
        return metrics

    def _parameters(self) -> dict[str, Tensor]:
        """All that is learned, by name."""
        nets = {"actor": self.actor, "critic": self._critic}
        return {
            f"{name}.{key}": tensor
            for name, net in nets.items()
            for key, tensor in net.state_dict().items()
        }


def _loss(head: nn.Module, critic: nn.Module, discrete: bool, config: Config) -> ClipPPOLoss:
    keys = ["logits"] if discrete else ["loc", "scale"]
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(head, in_keys=["observation"], out_keys=keys),
        ProbabilisticTensorDictModule(
            in_keys=keys,
            out_keys=["action"],
            distribution_class=categorical if discrete else gaussian,
            return_log_prob=True,
        ),
    )
    loss = ClipPPOLoss(
        policy,
        TensorDictModule(critic, in_keys=["observation"], out_keys=["state_value"]),
        clip_epsilon=config.algorithm.clip_ratio,
        entropy_coeff=config.algorithm.entropy_bonus,
        critic_coeff=config.algorithm.value_coef,
        loss_critic_type="l2",
        normalize_advantage=config.algorithm.normalize_advantages,
        log_explained_variance=False,
    )
    loss.set_keys(sample_log_prob="log_prob")
    return loss


def _replied_log_probs(trajectory: Trajectory) -> Tensor:
    """What the policy that acted said of its actions, float32 `[T, N]`."""
    replied = trajectory.policy.get("prev_logprobs")
    if replied is None:
        raise DataError(
            "the policy's replies have no 'prev_logprobs', the log-probabilities of its actions, "
            "which ppo needs; serve an actor that returns them"
        )
    array, shape = np.asarray(replied), trajectory.terminated.shape
    if array.dtype.kind != "f" or array.shape not in (shape, (*shape, 1)):
        raise DataError(
            f"'prev_logprobs' is {array.dtype} {list(array.shape)}, not floating {list(shape)}"
        )
    tensor = torch.tensor(array.reshape(shape), dtype=torch.float32)
    check_finite("'prev_logprobs'", tensor)
    return tensor


def _explained_variance(batch: TensorDict) -> float:
    target, value = batch["value_target"], batch["state_value"]
    total = target.var(correction=0)
    if total == 0:
        return 0.0
    return float(1 - (target - value).var(correction=0) / total)
