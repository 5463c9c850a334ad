"""What the built-in algorithms share in taking a step: the optimiser, and the averages to report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zmqrl.config.training import OptimConfig
from zmqrl.errors import CheckpointError, RunFailed


class Optimiser:
    """Adam with clipped gradients and a learning rate that may fall until the end of the run."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimConfig) -> None:
        self.lr = config.lr
        self._config = config
        self._parameters = list(parameters)
        self._adam = torch.optim.Adam(self._parameters, lr=config.lr, fused=True)

    def step(self, progress: float) -> Tensor:
        """Follow the gradients, and forget them.

        Args:
            progress: The share of the run that is done, from 0 to 1.

        Returns:
            The norm of the gradients before clipping.
        """
        if self._config.lr_scheduler == "linear":
            self.lr = self._config.lr * (1 - min(max(progress, 0.0), 1.0))
            self._adam.param_groups[0]["lr"] = self.lr
        norm: Tensor = nn.utils.clip_grad_norm_(self._parameters, self._config.clip_grad)
        self._adam.step()
        self._adam.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """A copy of the moments of each parameter, by its index."""
        state = self._adam.state_dict()["state"]
        return {
            str(index): {key: value.to("cpu", copy=True) for key, value in moments.items()}
            for index, moments in state.items()
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if `state` is not that of the same parameters."""
        for index, moments in state.items():
            shape = self._parameters[int(index)].shape if int(index) < len(self._parameters) else None
            if moments["exp_avg"].shape != shape or moments["exp_avg_sq"].shape != shape:
                raise CheckpointError(f"the state of the optimiser's parameter {index} does not fit")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        copied = {
            int(index): {key: value.clone() for key, value in moments.items()}
            for index, moments in state.items()
        }
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": copied, "param_groups": groups})


class Averages:
    """Means over updates, kept as tensors: reading one out would wait for the GPU."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._total: Tensor | None = None
        self._count = 0

    def add(self, values: dict[str, Tensor]) -> None:
        """Count in the values of one update, each of shape `[]`."""
        stacked = torch.stack([value.detach() for value in values.values()])
        self._names = list(values)
        self._total = stacked if self._total is None else self._total + stacked
        self._count += 1

    def take(self) -> dict[str, float]:
        """The means since the last time.

        Raises:
            RunFailed: One is not finite.
        """
        if self._total is None:
            return {}
        means = dict(zip(self._names, (self._total / self._count).tolist(), strict=True))
        self._total, self._count = None, 0
        for name, mean in means.items():
            if not math.isfinite(mean):
                raise RunFailed(
                    f"the loss is not finite: {name} is {mean}; a smaller actor.optim.lr or "
                    "clip_grad, or rewards and observations of smaller size, may help"
                )
        return means


def learner_device(name: str) -> torch.device:
    """The device called `name`; `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
