"""The networks of the built-in algorithms, in plain torch, because rollout workers serve the actors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import (
    AffineTransform,
    Categorical,
    Distribution,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

from zmqrl.config.training import ModelConfig
from zmqrl.errors import ConfigError
from zmqrl.spaces import Spaces
from zmqrl.transport.tree import leaves

_LOG_SCALE = (-10.0, 2.0)
"""Bounds of the log of SAC's standard deviations, in units of half the width of the Box."""


def observation_paths(spaces: Spaces) -> list[str]:
    """The paths of the leaves that the built-in networks read, in the order in which they are joined.

    Raises:
        ConfigError: There are none, or there is text or an image.
    """
    for path, (shape, dtype) in spaces.observation.items():
        text = dtype == "text" or np.dtype(dtype).kind not in "biuf"
        if text or (dtype == "uint8" and len(shape) >= 3):
            raise ConfigError(
                f"the built-in networks read numbers, but the observation {path!r} is "
                f"{'text' if text else 'an image'} ({dtype} {list(shape)}); give networks that "
                "can read it through algorithm.factory"
            )
    if not spaces.observation:
        raise ConfigError("the observation is empty: there is nothing to learn from")
    return sorted(spaces.observation)


def observation_width(spaces: Spaces) -> int:
    """How many numbers the networks read of one observation."""
    return sum(math.prod(shape) for shape, _ in spaces.observation.values())


def features(observation: Any, paths: list[str], rows: tuple[int, ...], like: Tensor) -> Tensor:
    """Join the leaves of an observation.

    Args:
        observation: Tree of tensors `[*rows, ...]`; numbers without rows hold for all of them.
        paths: Of the leaves, in their order.
        rows: The axes in front.
        like: Has the dtype and the device of the result.

    Returns:
        `[*rows, D]`.
    """
    found = dict(leaves(observation))
    flat = []
    for path in paths:
        leaf = torch.as_tensor(found[path], dtype=like.dtype, device=like.device)
        leaf = leaf.reshape(*rows, -1) if leaf.ndim >= len(rows) else leaf.expand(rows)[..., None]
        flat.append(leaf)
    return torch.cat(flat, -1)


def mlp(inputs: int, outputs: int, model: ModelConfig) -> nn.Sequential:
    """A multilayer perceptron, `[..., inputs]` to `[..., outputs]`."""
    activation = nn.ReLU if model.activation == "relu" else nn.Tanh
    sizes = [inputs, *model.hidden_sizes]
    layers: list[nn.Module] = []
    for size, following in itertools.pairwise(sizes):
        layers += [nn.Linear(size, following), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def orthogonal(net: nn.Sequential, last_gain: float) -> nn.Sequential:
    """Initialise as PPO's authors do: orthogonal weights, small ones in the last layer of a policy."""
    linear = [layer for layer in net if isinstance(layer, nn.Linear)]
    for layer in linear:
        nn.init.orthogonal_(layer.weight, last_gain if layer is linear[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)
    return net


class _Onto(AffineTransform):
    """From [-1, 1] onto `[low, high]`, and not a rounding error beyond."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__((low + high) / 2, (high - low) / 2, event_dim=1, cache_size=1)
        self._bounds = low, high

    def _call(self, x: Tensor) -> Tensor:
        # torch leaves this method without types.
        mapped: Tensor = super()._call(x)  # type: ignore[no-untyped-call]
        return mapped.clamp(*self._bounds)


class TanhGaussian(TransformedDistribution):
    """A Gaussian squashed by tanh onto a Box.

    What was sampled last is scored from the numbers it was made of, since tanh rounds to 1 what it
    could then not undo.

    Args:
        loc: Before tanh, `[..., A]`.
        scale: The same.
        low: Bounds of the Box, `[A]`; None for -1.
        high: None for 1.
    """

    def __init__(
        self, loc: Tensor, scale: Tensor, low: Tensor | None = None, high: Tensor | None = None
    ) -> None:
        # No validation: it synchronises with a GPU, and doubles the time on a CPU.
        base = Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False)
        transforms: list[Any] = [TanhTransform(cache_size=1)]
        if low is not None and high is not None:
            transforms.append(_Onto(low, high))
        super().__init__(base, transforms, validate_args=False)

    @property
    def mode(self) -> Tensor:
        """The squashed mean, `[..., A]`: what the deterministic policy does."""
        point: Tensor = self.base_dist.mean
        for transform in self.transforms:
            point = transform(point)
        return point


class SquashedHead(nn.Module):
    """From features `[..., D]` to the `loc` and `scale` `[..., A]` of a `TanhGaussian`."""

    def __init__(self, inputs: int, actions: int, model: ModelConfig) -> None:
        super().__init__()
        self.net = mlp(inputs, 2 * actions, model)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """See above."""
        loc, log_scale = self.net(inputs).chunk(2, -1)
        return loc, log_scale.clamp(*_LOG_SCALE).exp()


class GaussianHead(nn.Module):
    """From features `[..., D]` to the `loc` and `scale` `[..., A]` of a Gaussian.

    Its scale does not depend on the features. Both are in units of half the width of the Box, around its
    middle; in the simulator's units where it has no bounds.
    """

    def __init__(self, inputs: int, low: Tensor, high: Tensor, model: ModelConfig) -> None:
        super().__init__()
        self.net = orthogonal(mlp(inputs, len(low), model), 0.01)
        self.log_scale = nn.Parameter(torch.zeros(len(low)))
        bounded = low.isfinite() & high.isfinite() & (high > low)
        middle = torch.where(bounded, (low + high) / 2, 0)
        unit = torch.where(bounded, (high - low) / 2, 1)
        self.register_buffer("middle", middle, persistent=False)
        self.register_buffer("unit", unit, persistent=False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """See above."""
        unit = self.get_buffer("unit")
        loc = self.get_buffer("middle") + unit * self.net(inputs)
        return loc, (unit * self.log_scale.exp()).expand_as(loc)


class Squashing(nn.Module):
    """Makes the `TanhGaussian` over the Box with the bounds `low` and `high`, `[A]`."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def forward(self, loc: Tensor, scale: Tensor) -> TanhGaussian:
        """See above."""
        return TanhGaussian(loc, scale, self.get_buffer("low"), self.get_buffer("high"))


def gaussian(loc: Tensor, scale: Tensor) -> Distribution:
    """The distribution of a `GaussianHead`."""
    return Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False)


def categorical(logits: Tensor) -> Distribution:
    """The distribution over the actions of a discrete space; `logits` is `[..., n]`."""
    return Categorical(logits=logits, validate_args=False)


class Actor(nn.Module):
    """A policy as rollout workers serve it.

    Args:
        spaces: Of the simulator.
        head: From features to the parameters of a distribution.
        distribution: Makes the distribution of them.
    """

    def __init__(
        self, spaces: Spaces, head: nn.Module, distribution: Callable[..., Distribution]
    ) -> None:
        super().__init__()
        self.head = head
        self._paths = observation_paths(spaces)
        self._action_shape = spaces.action.shape
        self._distribution = distribution

    def forward(self, observation: Any, eval_mask: Tensor) -> dict[str, Tensor]:
        """Choose actions.

        Args:
            observation: Tree of tensors `[N, ...]`.
            eval_mask: bool `[N]`; True where the action is the mode of the distribution.

        Returns:
            `actions`, `[N, ...]` of the space's shape (discrete: int64), and `prev_logprobs`, float32
            `[N]`: the logarithms of their densities (discrete: probabilities).
        """
        rows = tuple(eval_mask.shape)
        like = next(self.head.parameters())
        inputs = features(observation, self._paths, rows, like)
        distribution = self._distribution(*(part.float() for part in self.head(inputs)))
        actions = distribution.sample()
        log_probs = distribution.log_prob(actions)
        if eval_mask.any():
            mode = distribution.mode
            certain = eval_mask.reshape(*rows, *[1] * (actions.ndim - 1))
            log_probs = torch.where(eval_mask, distribution.log_prob(mode), log_probs)
            actions = torch.where(certain, mode, actions)
        return {
            "actions": actions.reshape(*rows, *self._action_shape),
            "prev_logprobs": log_probs.float(),
        }


class QValue(nn.Module):
    """The value `[..., 1]` of an action `[..., A]`, in [-1, 1], upon features `[..., D]`."""

    def __init__(self, inputs: int, actions: int, model: ModelConfig) -> None:
        super().__init__()
        self.net = mlp(inputs + actions, 1, model)

    def forward(self, inputs: Tensor, action: Tensor) -> Tensor:
        """See above."""
        value: Tensor = self.net(torch.cat([inputs, action], -1))
        return value


def box_bounds(spaces: Spaces) -> tuple[Tensor, Tensor]:
    """The bounds of the actions that a policy may choose, `[A]` each, float32."""
    return torch.tensor(spaces.action.low), torch.tensor(spaces.action.high)


def sac_actor(spaces: Spaces, model: ModelConfig) -> Actor:
    """SAC's policy over a bounded Box.

    Raises:
        ConfigError: The actions are no bounded Box, or the networks cannot read the observation.
    """
    if spaces.action.kind != "box":
        raise ConfigError(
            f"sac learns continuous actions in a bounded Box, not {spaces.action.text}; "
            "use algorithm.name ppo, which learns Discrete ones too, or algorithm.factory"
        )
    low, high = box_bounds(spaces)
    if not (low.isfinite() & high.isfinite() & (high > low)).all():
        raise ConfigError(
            f"sac needs a Box with finite bounds, low below high, not {spaces.action.text}; "
            "bound the actions in the simulator (gymnasium.wrappers.RescaleAction), or use "
            "algorithm.name ppo"
        )
    observation_paths(spaces)
    head = SquashedHead(observation_width(spaces), len(low), model)
    return Actor(spaces, head, Squashing(low, high))


def ppo_actor(spaces: Spaces, model: ModelConfig) -> Actor:
    """PPO's policy over a Box or a discrete space.

    Raises:
        ConfigError: The actions are neither, or the networks cannot read the observation.
    """
    observation_paths(spaces)
    width = observation_width(spaces)
    if spaces.action.kind == "discrete":
        net = orthogonal(mlp(width, spaces.action.n, model), 0.01)
        return Actor(spaces, Logits(net), categorical)
    if spaces.action.kind == "box":
        return Actor(spaces, GaussianHead(width, *box_bounds(spaces), model), gaussian)
    raise ConfigError(
        f"ppo learns actions in a Box or a Discrete space, not {spaces.action.text}; give networks "
        "that can choose them through algorithm.factory"
    )


class Logits(nn.Module):
    """From features `[..., D]` to the logits `[..., n]` of the actions, in a tuple."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> tuple[Tensor]:
        """See above."""
        return (self.net(inputs),)


@contextmanager
def seeded(device: torch.device, *seed: int) -> Iterator[None]:
    """Draw random numbers that `seed` alone determines, and leave the global generators as they were.

    A run that is resumed so needs no generator's state, only its seed and how far it was.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device()  # which initialises CUDA, too
        index = index if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    for generator in generators:
        generator.manual_seed(mixed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def saved_parameters(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of parameters by name, in main memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in own.items()}


def check_parameters(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """What differs between the names and shapes of parameters, in words; empty if nothing does."""
    differing = [
        f"{name} is {_shape(saved.get(name))} there and {_shape(own.get(name))} here"
        for name in sorted({*saved, *own})
        if _shape(saved.get(name)) != _shape(own.get(name))
    ]
    more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
    return "; ".join(differing[:3]) + more


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(list(tensor.shape))
