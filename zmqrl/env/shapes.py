"""What a factory may return, and how each becomes a simulator that a shard takes."""

from __future__ import annotations

import inspect
import secrets
import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from zmqrl.env.batched import BatchedEnv, is_batched
from zmqrl.env.dm import DmEnv
from zmqrl.env.envpool import PoolEnv, is_pool
from zmqrl.errors import ConfigError


def is_ready(factory: Any) -> bool:
    """Whether it is no factory but a simulator that has been made already."""
    return hasattr(factory, "reset") and hasattr(factory, "step") and not inspect.isclass(factory)


def makes_all_rows(factory: Any) -> bool:
    """Whether one call of the factory makes all rows: it has an argument `num_envs`."""
    return is_ready(factory) or _takes(factory, "num_envs")


def all_rows(
    name: str, factory: Any, kwargs: Mapping[str, Any], num_envs: int, resets_itself: bool
) -> VectorEnv[Any, Any, Any]:
    """Make all rows in one call of `factory`, or take those that are made already.

    Args:
        name: What errors call it.
        factory: Its argument `seed`, if it has one, gets a random seed.
        kwargs: Its other arguments.
        num_envs: The number of rows.
        resets_itself: Whether a batched simulator that does not say so resets finished rows in the step.

    Raises:
        ConfigError: It gave something else.
    """
    if is_ready(factory):
        return _vector_env(name, factory, num_envs, resets_itself)
    # What envpool makes pools with names none of its arguments.
    of_envpool = str(getattr(factory, "__module__", "")).partition(".")[0] == "envpool"
    seeded = "seed" not in kwargs and (of_envpool or _takes(factory, "seed"))

    def make(seed: int | None) -> Any:
        # A default seed would be the same in every process.
        given = {"seed": secrets.randbelow(2**30) if seed is None else seed} if seeded else {}
        return factory(**kwargs, num_envs=num_envs, **given)

    made = make(None)
    if is_pool(made):
        return PoolEnv(made, make, num_envs, seeded)
    return _vector_env(name, made, num_envs, resets_itself)


def one_row(name: str, made: Any) -> gymnasium.Env[Any, Any]:
    """The simulator of one row: what a factory returned for it.

    Args:
        name: What errors call the factory.
        made: A `gymnasium.Env`, a `dm_env.Environment`, or a function that makes one.

    Raises:
        ConfigError: It is something else.
    """
    if callable(made) and not is_ready(made):
        made = made()
    # Who has made one has imported its module.
    dm_env = sys.modules.get("dm_env")
    if dm_env is not None and isinstance(made, dm_env.Environment):
        return DmEnv(made)
    if is_batched(made) or is_pool(made) or isinstance(made, VectorEnv):
        raise ConfigError(
            f"{name} returned a {type(made).__name__}, which has many rows: give the factory an "
            "argument num_envs, or set env.vectorization to batched"
        )
    if not isinstance(made, gymnasium.Env):
        raise ConfigError(
            f"{name} returned a {type(made).__name__}, expected a gymnasium.Env or a dm_env.Environment "
            "(a factory that makes all rows at once has an argument num_envs)"
        )
    return made


def _vector_env(name: str, made: Any, num_envs: int, resets_itself: bool) -> VectorEnv[Any, Any, Any]:
    if is_pool(made):
        raise ConfigError(f"{name} is an EnvPool; give a function with num_envs and seed that makes one")
    if is_batched(made):
        return BatchedEnv(made, num_envs, resets_itself)
    if isinstance(made, VectorEnv) and made.num_envs == num_envs:
        return made
    raise ConfigError(
        f"{name} returned {made}, expected a VectorEnv or batched simulator with num_envs={num_envs}"
    )


def _takes(factory: Any, argument: str) -> bool:
    try:
        return argument in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some of those in C have none
        return False
