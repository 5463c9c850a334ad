"""An algorithm of the tests: what it has learned is the number of its updates."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from zmqrl.config import Config
from zmqrl.learner.algorithm import Update
from zmqrl.spaces import Spaces
from zmqrl.trajectory import Trajectory


class Number(nn.Module):
    """Acts with one number, the same in every row."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, observation: Any, eval_mask: Tensor) -> dict[str, Tensor]:
        return {"actions": self.number.expand(len(eval_mask), 1)}


class CountsUpdates:
    """Each update is a global step, takes `seconds`, and raises the number by one."""

    on_policy = False

    def __init__(self, spaces: Spaces, config: Config, seconds: float = 0.002) -> None:
        self.actor = Number()
        self._seconds = seconds
        self._trajectories = 0

    def add(self, trajectory: Trajectory) -> None:
        self._trajectories += 1

    def update(self, progress: float) -> Update | None:
        if not self._trajectories:
            return None
        time.sleep(self._seconds)
        self.actor.number += 1
        return Update(ends_step=True, metrics={"train/number": float(self.actor.number)})

    def metrics(self) -> dict[str, float]:
        return {"train/trajectories": self._trajectories}

    def state_dict(self) -> dict[str, Any]:
        return {"actor": dict(self.actor.state_dict()), "trajectories": self._trajectories}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.actor.load_state_dict(state["actor"])
        self._trajectories = state["trajectories"]
