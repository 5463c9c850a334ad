"""Artificial delays: what makes an even simulator behave like an uneven one."""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

from zmqrl.config import DelayConfig

_MEDIAN_WINDOW = 10_000


class DelaySampler:
    """Draws the seconds by which one env worker is delayed; it never sleeps itself.

    The sequence depends on the seed of the configuration and the rank alone, so that it can be
    repeated, and env workers are independent of each other.

    Example:
        >>> sampler = DelaySampler(DelayConfig(type="constant", delay=0.5), rank=0)
        >>> sampler.sample(step=0)
        0.5
    """

    def __init__(self, config: DelayConfig, rank: int) -> None:
        """Make the sampler of the env worker `rank`."""
        self._config = config
        self._factor = config.per_worker.get(rank, 1.0)
        self._stall = config.stall if config.stall and config.stall.rank == rank else None
        self._rng = np.random.default_rng([config.seed, rank])
        self._recent: deque[float] = deque(maxlen=_MEDIAN_WINDOW)
        self._count = 0
        self._total = 0.0
        self._max = 0.0
        self._min = 0.0

    def sample(self, step: int) -> float:
        """The seconds to wait at step number `step` (from 0) of this env worker."""
        seconds = self._draw() * self._factor
        if self._stall is not None and self._stall.at_step == step:
            seconds += self._stall.seconds
            self._stall = None
        self._record(seconds)
        return seconds

    def metrics(self) -> dict[str, float]:
        """The `average`, `median`, `max` and `min` of the sampled seconds; 0 when there are none.

        The median is that of the 10 000 most recent ones.
        """
        return {
            "average": self._total / self._count if self._count else 0.0,
            "median": median(self._recent) if self._recent else 0.0,
            "max": self._max,
            "min": self._min,
        }

    def _draw(self) -> float:
        config, rng = self._config, self._rng
        if config.type == "constant":
            return config.delay
        if config.type == "uniform":
            return float(rng.uniform(config.low, config.high))
        if config.type == "exponential":
            return float(rng.exponential(config.mean))
        if config.type == "gaussian":
            return max(0.0, float(rng.normal(config.mean, config.std)))
        return config.base + (config.extra if rng.random() < config.probability else 0.0)

    def _record(self, seconds: float) -> None:
        self._max = max(self._max, seconds) if self._count else seconds
        self._min = min(self._min, seconds) if self._count else seconds
        self._recent.append(seconds)
        self._total += seconds
        self._count += 1
