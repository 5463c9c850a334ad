"""A ready VectorEnv, with wrappers of its own around all rows."""

import gymnasium
from gymnasium.wrappers.vector import NormalizeObservation


def make(num_envs: int):
    return NormalizeObservation(gymnasium.make_vec("Pendulum-v1", num_envs=num_envs))
