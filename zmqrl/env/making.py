"""Makes the simulators that a configuration asks for."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.error import CustomSpaceError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from zmqrl.config import Config, EnvConfig, EnvModeConfig, Mode
from zmqrl.env import shapes, wrappers
from zmqrl.env.adapters import AnyVectorEnv, SeedOf, ShardEnv, errors_named, success_keys
from zmqrl.env.chunks import Chunks, Park
from zmqrl.env.conversion import has_text
from zmqrl.env.seeds import Seeds, no_seed
from zmqrl.env.stage import Stage
from zmqrl.errors import ConfigError
from zmqrl.imports import import_object, make_importable

log = logging.getLogger(__name__)


def make_stages(config: Config, mode: Mode, rank: int) -> list[Stage]:
    """Make the simulators of an env worker, in its pipeline stages.

    Args:
        config: The whole configuration.
        mode: The env worker's.
        rank: Its number.

    Raises:
        ConfigError: As `make_shard`; or a learner cannot use what they give.
        EnvironmentFailure: As `make_shard`.
    """
    section = config.env.of_mode(mode)
    first = config.first_env_of(mode, rank)
    start, total = config.start_states_of(mode, rank)
    quota = section.rollout_epoch if mode == "eval" else None
    stages = []
    for index, rows in enumerate(config.stage_sizes(mode, rank)):
        seeds = Seeds(section.seed, start, total) if section.use_fixed_reset_state_ids else None
        filmed = mode == "eval" and section.save_video and rank == 0 and index == 0
        stage = index if config.env.pipeline_stages > 1 else None
        shard = make_shard(config.env, mode, rows, seeds or no_seed, filmed, stage)
        if shard.answers_in_parts and mode == "train" and config.learns:
            raise ConfigError(
                f"{shard.name} answers with the rows that are ready, and trajectories need all: "
                "to train, let its batch_size be its num_envs"
            )
        stages.append(Stage(shard, index, first, quota, seeds))
        first += rows
        start += rows
    return stages


def make_shard(
    config: EnvConfig,
    mode: Mode,
    num_envs: int,
    seed_of: SeedOf,
    filmed: bool = False,
    stage: int | None = None,
) -> ShardEnv:
    """Make the simulators of one stage.

    Args:
        config: The section `env`.
        mode: Whose limits and seeds apply.
        num_envs: The number of rows.
        seed_of: Called with the row each time one of its episodes is about to begin; the seed of that
            episode, or None to let the simulator go on. Where the vector env resets by itself, only
            the seeds asked for in `reset` are used.
        filmed: Make the first row one that can be filmed (`ShardEnv.film`), if it can render.
        stage: The pipeline stage, for errors: each numbers its rows from 0. None if there is only one.

    Raises:
        ConfigError: The configuration asks for what this simulator cannot do, or its factory cannot
            be imported.
        EnvironmentFailure: The simulator does not exist, or cannot be made.
    """
    name = config.id or config.factory
    if name is None:
        raise ConfigError("no simulator is configured; give env.id or env.factory")
    _silence_notice_about_adroit_hand(name)
    make_importable(Path.cwd())
    build = _registered if config.id else _from_factory
    with errors_named(name, "construction", quiet=config.vectorization == "async"):
        vector_env = _with_film(build, name, config, mode, num_envs) if filmed else None
        if vector_env is None:
            vector_env = build(name, config, mode, num_envs)
    shard = ShardEnv(
        vector_env,
        seed_of,
        name=name if stage is None else f"{name} (stage {stage})",
        success_key=config.success_key,
        rescale_actions=config.rescale_actions,
        clip_actions=config.clip_actions,
        info_keys=config.info_keys,
        task_description=config.task_description,
        action_chunks=_chunks_of(config),
    )
    if config.sub_steps is not None and shard.autoreset_mode is not AutoresetMode.DISABLED:
        shard.close()
        raise ConfigError(
            f"env.num_action_chunks needs autoreset_mode disabled, but {name} has "
            f"{shard.autoreset_mode.value}: an episode that ends within a chunk would begin anew"
        )
    if not filmed:
        shard.film = None
    elif shard.film is None:
        log.warning("%s does not render (render_mode rgb_array), so there is no video", name)
    if config.of_mode(mode).use_fixed_reset_state_ids and not shard.seeds_every_episode:
        shard.close()
        raise ConfigError(
            f"env.{mode}.use_fixed_reset_state_ids needs autoreset_mode disabled, but {name} has "
            f"{shard.autoreset_mode.value}: it chooses the start states by itself"
        )
    return shard


def _chunks_of(config: EnvConfig) -> Chunks | None:
    return None if config.sub_steps is None else Chunks(config.num_action_chunks, config.sub_steps)


def _with_film(
    build: Callable[[str, EnvConfig, Mode, int], AnyVectorEnv],
    name: str,
    config: EnvConfig,
    mode: Mode,
    num_envs: int,
) -> AnyVectorEnv | None:
    """The simulators with render mode `rgb_array`; None if they have none."""
    kwargs = {"render_mode": "rgb_array", **config.kwargs} if config.id else config.kwargs
    try:
        return build(name, config.model_copy(update={"kwargs": kwargs}), mode, num_envs)
    except (Exception, SystemExit) as error:
        log.warning("%s cannot be made so that it renders: %s", name, error)
        return None


def _registered(env_id: str, config: EnvConfig, mode: Mode, num_envs: int) -> AnyVectorEnv:
    limits = config.of_mode(mode)
    kwargs = dict(config.kwargs)
    if config.vectorization == "batched":
        _refuse_without_single_envs(env_id, config, mode, "ignore_terminations", "max_episode_steps")
        make = functools.partial(gymnasium.make, env_id, disable_env_checker=True)
        return shapes.all_rows(env_id, make, kwargs, num_envs, config.autoreset_mode == "same_step")
    if limits.max_episode_steps is not None:
        kwargs["max_episode_steps"] = limits.max_episode_steps
    if config.vectorization == "vector_entry_point":
        _refuse_without_single_envs(env_id, config, mode, "ignore_terminations")
        made = gymnasium.make_vec(env_id, num_envs, config.vectorization, **kwargs)
        return _stepped_past_ends(env_id, config, made)

    def build(vector_kwargs: dict[str, Any]) -> AnyVectorEnv:
        return gymnasium.make_vec(
            env_id,
            num_envs=num_envs,
            vectorization_mode=config.vectorization,
            vector_kwargs=vector_kwargs,
            wrappers=_row_wrappers(config, limits),
            **kwargs,
        )

    return _vectorise(build, config)


def _from_factory(reference: str, config: EnvConfig, mode: Mode, num_envs: int) -> AnyVectorEnv:
    factory = import_object(reference)
    limits = config.of_mode(mode)
    if config.vectorization == "batched" or shapes.makes_all_rows(factory):
        _refuse_without_single_envs(reference, config, mode, "ignore_terminations", "max_episode_steps")
        if shapes.is_ready(factory) and config.pipeline_stages > 1:
            raise ConfigError(
                f"{reference} is one simulator, which the {config.pipeline_stages} env.pipeline_stages "
                "cannot share; give a function with an argument num_envs that makes it"
            )
        resets_itself = config.autoreset_mode == "same_step"
        ready = shapes.all_rows(reference, factory, config.kwargs, num_envs, resets_itself)
        return _stepped_past_ends(reference, config, ready)
    one = functools.partial(_one_env, reference, config, limits)
    vectorizer = SyncVectorEnv if config.vectorization == "sync" else AsyncVectorEnv
    return _vectorise(lambda kwargs: vectorizer([one] * num_envs, **kwargs), config)


def _refuse_without_single_envs(name: str, config: EnvConfig, mode: Mode, *keys: str) -> None:
    for key in keys:
        if getattr(config.of_mode(mode), key):
            raise ConfigError(
                f"env.{mode}.{key} needs single envs, but {name} makes all rows at once; "
                "do it in the factory, or by env.kwargs"
            )


def _stepped_past_ends(name: str, config: EnvConfig, vector_env: AnyVectorEnv) -> AnyVectorEnv:
    """The vector env, if it may be asked for that: with chunks of actions its rows cannot be parked."""
    base = vector_env.unwrapped
    if config.sub_steps is not None and isinstance(base, (SyncVectorEnv, AsyncVectorEnv)):
        vector_env.close()
        raise ConfigError(
            f"env.num_action_chunks needs single envs, but {name} makes a {type(base).__name__} of "
            "them, which does not step a row on whose episode is over; let the factory make one env, "
            "without num_envs"
        )
    return vector_env


def _one_env(reference: str, config: EnvConfig, limits: EnvModeConfig) -> wrappers.Env:
    env: wrappers.Env = shapes.one_row(reference, import_object(reference)(**config.kwargs))
    if limits.max_episode_steps is not None:
        env = gymnasium.wrappers.TimeLimit(env, limits.max_episode_steps)
    for wrap in _row_wrappers(config, limits):
        env = wrap(env)
    return env


def _row_wrappers(config: EnvConfig, limits: EnvModeConfig) -> Sequence[Callable[[Any], Any]]:
    chosen: list[Callable[[Any], Any]] = []
    if limits.ignore_terminations:
        chosen.append(wrappers.IgnoreTerminations)
    if config.autoreset_mode == "same_step":
        chosen.append(wrappers.KeepFinalObservation)
    chosen.append(
        functools.partial(
            wrappers.Row, info_keys=config.info_keys, success_keys=success_keys(config.success_key)
        )
    )
    if config.sub_steps is not None:
        chosen.append(Park)
    return chosen


def _vectorise(build: Callable[[dict[str, Any]], AnyVectorEnv], config: EnvConfig) -> AnyVectorEnv:
    kwargs: dict[str, Any] = {"autoreset_mode": AutoresetMode[config.autoreset_mode.upper()]}
    try:
        vector_env = build(kwargs)
    except ValueError as error:
        if not isinstance(error.__cause__, CustomSpaceError):
            raise
        # Spaces of the simulator's own, such as MiniGrid's missions, do not go into shared memory.
        vector_env = build({**kwargs, "shared_memory": False})
    shared = isinstance(vector_env, AsyncVectorEnv) and vector_env.shared_memory
    if shared and has_text(vector_env.single_observation_space):
        # AsyncVectorEnv reads text from its shared memory once, and shows that text for ever.
        vector_env.close()
        vector_env = build({**kwargs, "shared_memory": False})
    if isinstance(vector_env, (SyncVectorEnv, AsyncVectorEnv)):
        vector_env.set_attr("zmqrl_row", list(range(vector_env.num_envs)))
    return vector_env


def _silence_notice_about_adroit_hand(name: str) -> None:
    """Gymnasium-Robotics prints a notice about one of its simulators whichever one is made."""
    if "AdroitHand" in name:
        return
    try:
        from farama_notifications import notifications  # type: ignore[import-untyped]
    except ImportError:
        return
    notifications.pop("gymnasium_robotics", None)
