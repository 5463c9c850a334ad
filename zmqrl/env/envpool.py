"""EnvPool: a shard is whatever is ready."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from zmqrl.errors import ConfigError


class PoolEnv(VectorEnv[Any, Any, Any]):
    """An EnvPool, which steps rows in threads and answers with the first `batch_size` that are ready.

    `reset` and `step` therefore return `batch_size` rows: those of `rows`, for which the next actions
    are. A pool is seeded when it is made; for a reset with a seed, and for any reset of a pool with
    rows on their way, a new one is made.

    Args:
        pool: One of `num_envs` rows, with `env_type="gymnasium"`.
        make: Makes another one with a seed, or, if it is None, with any.
        seeded: Whether it heeds the seed.

    Attributes:
        batch_size: The number of rows of an answer.
        rows: Which rows the last answer was about, int64 `[batch_size]`.

    Raises:
        ConfigError: It is not such a pool.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(
        self, pool: Any, make: Callable[[int | None], Any], num_envs: int, seeded: bool
    ) -> None:
        self._pool = pool
        self._make = make
        self._seeded = seeded
        self._used = False
        config = self._pool.config
        space = self._pool.action_space
        if not isinstance(space, spaces.Space) or not hasattr(self._pool, "single_action_space"):
            raise ConfigError(f'{self._pool} has not env_type="gymnasium"')
        if config["num_envs"] != num_envs or config["max_num_players"] != 1:
            raise ConfigError(
                f"{self._pool} should have num_envs={num_envs}, which its factory is given, and "
                "max_num_players=1"
            )
        self.num_envs = num_envs
        self.batch_size = int(config["batch_size"]) or num_envs
        self.rows: npt.NDArray[np.int64] = np.arange(self.batch_size)
        self.single_action_space = space
        self.single_observation_space = _observation_space(pool)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a new episode in every row.

        Args:
            seed: Of the first row; row *i* gets `seed + i`.
            options: Not used.

        Returns:
            The observations of the rows that are ready first.

        Raises:
            ConfigError: A seed is given, but the factory takes none.
        """
        if seed is not None and not self._seeded:
            raise ConfigError(
                "EnvPool is seeded when it is made: give the factory an argument seed, and hand it on"
            )
        if seed is not None or (self._used and self.batch_size < self.num_envs):
            self._pool.close()
            self._pool = self._make(seed)
            _observation_space(self._pool)
        self._used = True
        self._pool.async_reset()
        observation, _, _, _, infos = self._receive()
        return observation, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Hand over the actions of `rows`, and wait for the rows that are ready next."""
        self._pool.send(actions, self.rows.astype(np.int32))
        return self._receive()

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the pool's threads."""
        self._pool.close()

    def _receive(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        answer: tuple[Any, Any, Any, Any, dict[str, Any]] = self._pool.recv()
        self.rows = np.array(answer[4]["env_id"], np.int64)
        return answer


def _observation_space(pool: Any) -> spaces.Space[Any]:
    """It makes that when it is read first, and Gymnasium warns of the bounds that it gives it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*precision lowered by casting")
        return pool.observation_space  # type: ignore[no-any-return]


def is_pool(made: Any) -> bool:
    """Whether `made` is an EnvPool."""
    return all(hasattr(made, name) for name in ("async_reset", "recv", "send", "config"))
