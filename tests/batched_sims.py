"""Simulators of many rows that step with torch tensors, as ManiSkill, Isaac Lab and Genesis do.

Row *i* ends its episodes after `length + i` steps, or is cut off after `limit`. The observation is the
number of steps and the number of the episode; one tensor holds it for good.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Rows:
    """What they have in common."""

    def __init__(self, num_envs: int, length: int = 3, limit: int = 1000) -> None:
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self.lengths = torch.arange(num_envs) + length
        self.limit = limit
        self.state = torch.zeros(num_envs, 2)
        self.actions: list[Any] = []

    def begin(self, ids: torch.Tensor) -> None:
        self.state[ids, 0] = 0
        self.state[ids, 1] += 1

    def advance(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each row has ended, and whether it has been cut off."""
        assert isinstance(actions, torch.Tensor)
        assert actions.device == self.device
        assert len(actions) == self.num_envs
        self.actions.append(actions)
        self.state[:, 0] += 1
        ended = self.state[:, 0] == self.lengths
        return ended, (self.state[:, 0] == self.limit) & ~ended


class Partial(Rows):
    """Resets the rows that it is told to, in ManiSkill's way; with rewards and dones of odd types."""

    single_action_space = spaces.Discrete(2)
    single_observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)

    def __init__(self, num_envs: int, nested: bool = False, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.nested = nested
        self.seeds: list[Any] = []

    def observation(self) -> Any:
        if not self.nested:
            return self.state
        return {
            "state": self.state,
            "deep": {"half": self.state.bfloat16()},
            "task": ["go"] * self.num_envs,
        }

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seeds.append(seed)
        ids = (options or {}).get("env_idx", torch.arange(self.num_envs))
        assert isinstance(ids, torch.Tensor)
        self.begin(ids)
        if seed is not None and options is not None:
            self.state[ids, 1] = seed
        return self.observation(), {"half": self.state[:, 0] / 2}

    def step(self, actions: torch.Tensor) -> Any:
        assert (self.state[:, 0] < self.lengths.clamp(max=self.limit)).all(), "stepped past its end"
        ended, cut = self.advance(actions)
        reward = torch.ones(self.num_envs, 1, dtype=torch.bfloat16, requires_grad=True) * 2
        info = {"success": ended.clone(), "half": self.state[:, 0] / 2}
        return self.observation(), reward, ended[:, None].to(torch.uint8), cut, info


class Undeclared(Partial):
    """Shows neither the keys nor the shapes that it declares."""

    single_observation_space = spaces.Dict(  # type: ignore[assignment]
        {
            "shown": spaces.Box(np.float32([-1, -2, -3]), np.float32([1, 2, 3])),
            "hidden": spaces.Box(-1, 1, (2,), np.float32),
        }
    )
    key = "shown"

    def observation(self) -> Any:
        return {self.key: self.state}


class ByMask(Partial):
    """Is told which rows to reset by a mask, and returns these only."""

    def reset(self, reset_mask: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        everything = torch.ones(self.num_envs, dtype=torch.bool)
        mask = everything if reset_mask is None else reset_mask
        self.begin(torch.nonzero(mask)[:, 0])
        return self.state[mask]


class Rolling(Rows):
    """Resets by itself and tells nothing of the end, in the way of Isaac and Genesis."""

    num_actions = 2

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.episode_length_buf = self.state[:, 0]

    def reset(self) -> Any:
        self.begin(torch.arange(self.num_envs))
        return self.state, None

    def step(self, actions: torch.Tensor) -> Any:
        ended, cut = self.advance(actions)
        done = ended | cut
        self.begin(torch.nonzero(done)[:, 0])
        return self.state, torch.ones(self.num_envs), done.long(), {"time_outs": cut}


class WithFinal(Rows):
    """Resets by itself, and hands over the observation in which the episode ended."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert options is None
        self.begin(torch.arange(self.num_envs))
        return self.state, {}

    def step(self, actions: torch.Tensor) -> Any:
        ended, cut = self.advance(actions)
        final = self.state.clone()
        self.begin(torch.nonzero(ended | cut)[:, 0])
        infos = {"final_observation": final, "success": ended}
        return self.state, torch.ones(self.num_envs, dtype=torch.float64), ended, cut, infos


class Unnamed(Rows):
    """Names no way to reset single rows."""

    num_actions = 2

    def reset(self) -> Any:
        return self.state, {}

    def step(self, actions: torch.Tensor) -> Any:
        return self.state, torch.ones(self.num_envs), *self.advance(actions), {}


class Stays(Rows):
    """Stays at an episode's end: it does not reset by itself, and names no way to reset single rows."""

    num_actions = 2

    def reset(self) -> Any:
        self.begin(torch.arange(self.num_envs))
        return self.state, {}

    def step(self, actions: torch.Tensor) -> Any:
        self.advance(actions)
        return self.state, torch.ones(self.num_envs), self.state[:, 0] >= self.lengths, False, {}


class Gives(Partial):
    """Gives what it is told to: of a reset of single rows, or of a step."""

    def __init__(self, num_envs: int, reset: Any = None, step: Any = None) -> None:
        super().__init__(num_envs, nested=True)
        self.of_reset, self.of_step = reset, step

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        whole = super().reset(seed, options)
        return whole if options is None else (_tensors(self.of_reset), {})

    def step(self, actions: torch.Tensor) -> Any:
        self.lengths[:] = 1
        answer = super().step(actions)
        return answer if self.of_step is None else answer[: self.of_step]


def _tensors(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _tensors(child) for key, child in tree.items()}
    return torch.tensor(tree)


class Careless(Partial):
    """Resets all rows whatever it is told."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.begin(torch.arange(self.num_envs))
        self.state[:, 1] += torch.rand(self.num_envs)
        return self.state.clone(), {}


def partial_of_two(**kwargs: Any) -> Partial:
    """A factory that says nothing of `num_envs`."""
    return Partial(**kwargs)


def _counter() -> Any:
    import sims

    return sims.Counter(length=5)


def thunk() -> Any:
    """A factory of a factory, as there are in many training scripts."""
    return _counter


def _two_counters() -> SyncVectorEnv:
    return SyncVectorEnv([_counter, _counter])


ready = _two_counters()
