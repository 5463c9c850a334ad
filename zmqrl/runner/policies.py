"""Makes the policy that a rollout worker of a configured pool serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from zmqrl.config import Config
from zmqrl.errors import (
    CheckpointError,
    ConfigError,
    DecodeError,
    PolicyLoadError,
    StartupFailed,
    WeightsError,
)
from zmqrl.rollout.download import WeightsDownload
from zmqrl.rollout.loading import load_policy
from zmqrl.rollout.policy import Policy, TensorPolicy
from zmqrl.rollout.versions import PolicyVersions
from zmqrl.spaces import Spaces
from zmqrl.transport import sockets

log = logging.getLogger(__name__)


def make_policy(
    config: Config, name: str, stopping: Callable[[], bool], serves: str = ""
) -> PolicyVersions | None:
    """The policy as the configuration wants it.

    * one of `rollout.policies`: as it is there; a learner's weights are for the pool's own policy.

    * `runner.ckpt_path`: with the weights of that checkpoint.
    * a pool that learns: with the weights of the learner, newer ones as they come.
    * else: as `rollout.policy` makes it.

    What is run is `rollout.policy`, or, without one, the actor of the algorithm.

    Args:
        config: The whole configuration.
        name: The rollout worker's.
        stopping: Ends the wait for the first weights.
        serves: The name of one of `rollout.policies`; empty for the pool's own.

    Returns:
        None if it was stopped before the first weights came.

    Raises:
        ConfigError: Nothing says which policy to run.
        PolicyLoadError, CheckpointError: It cannot be made, or takes other weights.
    """
    if serves:
        config = config.of_policy(serves)
    if config.runner.ckpt_path is not None:
        return _from_checkpoint(config, Path(config.runner.ckpt_path))
    if serves or not config.learns:
        return PolicyVersions(_own(config))
    # The user's policy first: what is wrong with it shows before a learner is there.
    uses_actor = config.rollout.policy is None and config.algorithm.is_set
    policy = None if uses_actor else _own(config)
    learner = config.actor.endpoint or sockets.local_endpoint("learner")
    download = WeightsDownload(learner, name, config.security.keys_of("worker"))
    try:
        versions = _with_first_weights(config, policy, download, stopping)
    except BaseException:
        download.close()
        raise
    if versions is None:
        download.close()
    return versions


def _with_first_weights(
    config: Config, policy: Policy | None, download: WeightsDownload, stopping: Callable[[], bool]
) -> PolicyVersions | None:
    """Wait for weights, so that no request is ever answered by those that nobody has published."""
    weights = download.wait(stopping)
    if weights is None:
        return None
    if policy is None:
        if weights.spaces is None:
            raise StartupFailed(
                "the learner does not tell the spaces of its simulators, so the policy cannot be built; "
                "set rollout.policy"
            )
        policy = _actor(config, weights.spaces)
    versions = PolicyVersions(policy, download)
    try:
        versions.load(weights)
    except WeightsError as error:
        raise PolicyLoadError(f"the learner at {download.endpoint}: {error}") from error
    return versions


def _own(config: Config) -> Policy:
    rollout = config.rollout
    if rollout.policy is None:
        raise ConfigError("no policy is named: give --policy module:factory, or set rollout.policy")
    return load_policy(
        rollout.policy,
        rollout.policy_kwargs,
        rollout.device,
        rollout.static_batch_sizes,
        rollout.torch_threads,
    )


def _actor(config: Config, spaces: Spaces) -> Policy:
    """The actor of the algorithm, for simulators with these spaces."""
    from zmqrl.learner.algorithm import make_actor

    return TensorPolicy(make_actor(spaces, config), config.rollout.device)


def _from_checkpoint(config: Config, path: Path) -> PolicyVersions:
    from zmqrl.learner import checkpoint

    found = checkpoint.find(path)
    content = checkpoint.load(found, checkpoint.ACTOR)
    try:
        spaces = Spaces.of_fields(content["spaces"])
        version = int(content["version"])
        weights = {name: _as_array(value) for name, value in content["weights"].items()}
    except (AttributeError, KeyError, TypeError, ValueError, DecodeError) as error:
        raise CheckpointError(f"the checkpoint {found} does not hold a policy: {error!r}") from error
    if config.rollout.policy is None and not config.algorithm.is_set:
        raise ConfigError(
            "runner.ckpt_path needs algorithm.name or algorithm.factory, which builds the policy, or "
            "rollout.policy; take the configuration of the run that wrote it"
        )
    policy = _actor(config, spaces) if config.rollout.policy is None else _own(config)
    name = config.rollout.policy or config.algorithm.name or config.algorithm.factory
    load = getattr(policy, "load_state_dict", None)
    if not callable(load):
        raise CheckpointError(f"{name} has no load_state_dict, so it cannot take the weights of {found}")
    try:
        load(weights)
    except Exception as error:
        raise CheckpointError(f"the checkpoint {found} does not fit {name}: {error}") from error
    log.info("the weights are version %d of %s", version, found)
    return PolicyVersions(policy, version=version)


def _as_array(value: Any) -> np.ndarray:
    """A tensor as it would come from a learner."""
    if str(value.dtype) == "torch.bfloat16":
        value = value.float()  # numpy has no bfloat16; float32 holds the same values
    array: np.ndarray = value.numpy(force=True)
    return array
