"""SAC's replay buffer: a ring of trajectories, sampled by transition."""

from __future__ import annotations

import logging
from collections import deque
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import Storage
from torchrl.data.replay_buffers.samplers import RandomSampler

from zmqrl.config.training import ReplayBufferConfig
from zmqrl.errors import CheckpointError

# It tells, in colour, of each storage that it makes.
logging.getLogger("torchrl").setLevel(logging.WARNING)


class _NewestSampler(RandomSampler):  # type: ignore[misc]
    """Samples uniformly among the `window` transitions written before `cursor`."""

    def __init__(self) -> None:
        self.cursor = 0
        self.window = 0

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Choose indices, `[batch_size]`."""
        age = torch.randint(1, self.window + 1, (batch_size,), device=storage.device)
        return (self.cursor - age) % storage.max_size, {}


class ReplayBuffer:
    """Keeps the transitions of the newest `cache_size` trajectories.

    How many transitions a trajectory has is not known beforehand: env workers may have shards of
    different sizes. So the storage, which is a ring of transitions, is made larger when they no longer
    fit, up to `cache_size` times the longest trajectory.
    """

    def __init__(self, config: ReplayBufferConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._lengths: deque[int] = deque(maxlen=config.cache_size)
        self._capacity = 0
        self._sampler = _NewestSampler()
        self._ring: Any = None

    @property
    def ready(self) -> bool:
        """Whether there is enough to learn from."""
        return len(self._lengths) >= self._config.min_buffer_size and self._sampler.window > 0

    def add(self, transitions: TensorDict) -> None:
        """Add the transitions `[K]` of one trajectory, after which the oldest may be forgotten."""
        self._lengths.append(len(transitions))
        total = sum(self._lengths)
        if total > self._capacity:
            self._grow(self._newest(total - len(transitions)))
        self._write(transitions)

    def sample(self, batch_size: int) -> TensorDict:
        """Draw transitions of the newest `sample_window_size` trajectories, with replacement."""
        return self._ring.sample(batch_size)

    def transitions(self) -> TensorDict | None:
        """All transitions that are kept, `[K]`, the oldest first; None if there are none."""
        return self._newest(sum(self._lengths))

    def metrics(self) -> dict[str, float]:
        """Its sizes, by the names of metrics."""
        return {
            "train/replay_buffer/num_trajectories": float(len(self._lengths)),
            "train/replay_buffer/total_samples": float(sum(self._lengths)),
            "train/replay_buffer/cache_size": float(self._config.cache_size),
        }

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that is kept."""
        kept = self.transitions()
        return {
            "lengths": list(self._lengths),
            "transitions": {} if kept is None else kept.cpu().to_dict(),
        }

    @classmethod
    def of_state(
        cls, state: dict[str, Any], config: ReplayBufferConfig, device: torch.device
    ) -> ReplayBuffer:
        """The reverse of `state_dict`; keeps the newest where `cache_size` is smaller than it was.

        Raises:
            CheckpointError: The lengths do not fit the transitions.
        """
        buffer = cls(config, device)
        lengths = [int(length) for length in state["lengths"]]
        buffer._lengths.extend(lengths)
        transitions = state["transitions"]
        total = len(transitions["observation"]) if transitions else 0
        if total != sum(lengths):
            raise CheckpointError(f"the replay buffer has {total} transitions, not {sum(lengths)}")
        if sum(buffer._lengths):
            kept = TensorDict.from_dict(transitions, batch_size=[total])
            buffer._grow(kept[total - sum(buffer._lengths) :])
        return buffer

    def _newest(self, count: int) -> TensorDict | None:
        if count == 0:
            return None
        age = torch.arange(count, 0, -1, device=self._device)
        return self._ring[(self._sampler.cursor - age) % self._capacity]

    def _grow(self, kept: TensorDict | None) -> None:
        most = self._config.cache_size * max(self._lengths)
        self._capacity = max(sum(self._lengths), min(2 * self._capacity, most))
        self._sampler.cursor = 0
        self._ring = TensorDictReplayBuffer(
            storage=LazyTensorStorage(self._capacity, device=self._device),
            sampler=self._sampler,
        )
        if kept is not None:
            self._write(kept)

    def _write(self, transitions: TensorDict) -> None:
        if len(transitions):
            self._ring.extend(transitions.to(self._device))
            self._sampler.cursor = (self._sampler.cursor + len(transitions)) % self._capacity
        recent = islice(reversed(self._lengths), self._config.sample_window_size)
        self._sampler.window = sum(recent)
