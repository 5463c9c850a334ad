"""Simulators with the interface of dm_env, such as those of dm_control."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from zmqrl.env.wrappers import Transition

log = logging.getLogger(__name__)

_RENDERED = (480, 640)
"""Height and width of a picture."""


class DmEnv(gymnasium.Env[Any, Any]):
    """A `dm_env.Environment` as a Gymnasium one.

    The last step of an episode with discount 0 is a termination, one with a higher discount is a
    truncation. `info["discount"]` has it.

    Args:
        env: It is seeded by way of its `random_state` or of its task's, where it has one, and rendered
            by its physics.
    """

    def __init__(self, env: Any) -> None:
        self.observation_space = space_of(env.observation_spec())
        self.action_space = space_of(env.action_spec())
        self._env = env
        self._can_be_seeded = True
        if hasattr(env, "physics"):
            self.render_mode = "rgb_array"
        self.metadata = {"render_modes": ["rgb_array"] if self.render_mode else []}
        if hasattr(env, "control_timestep"):
            self.metadata["render_fps"] = max(1, round(1 / env.control_timestep()))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; options are not used."""
        super().reset(seed=seed)
        if seed is not None and not _seed(self._env, seed) and self._can_be_seeded:
            self._can_be_seeded = False
            log.warning(
                "%s has no random_state that could be seeded, nor has its task: its episodes are not "
                "those of the seed",
                type(self._env).__name__,
            )
        step = self._env.reset()
        return _plain(step.observation, self.observation_space), {"discount": 1.0}

    def step(self, action: Any) -> Transition:
        """Step the simulator."""
        step = self._env.step(action)
        discount = 0.0 if step.last() else 1.0  # where the simulator gives none
        if step.discount is not None:
            discount = float(np.mean(step.discount))
        observation = _plain(step.observation, self.observation_space)
        reward = 0.0 if step.reward is None else float(step.reward)
        terminated = bool(step.last()) and discount == 0
        truncated = bool(step.last()) and not terminated
        return observation, reward, terminated, truncated, {"discount": discount}

    def render(self) -> Any:
        """A picture of the first camera: uint8 `[480, 640, 3]`."""
        height, width = _RENDERED
        return self._env.physics.render(height, width, camera_id=0)

    def close(self) -> None:
        """Close the simulator."""
        self._env.close()


def space_of(spec: Any) -> spaces.Space[Any]:
    """The Gymnasium space of a dm_env spec, or of a dict, list or tuple of specs.

    Raises:
        TypeError: There is none for such a spec.
    """
    if hasattr(spec, "items"):
        return spaces.Dict({key: space_of(child) for key, child in spec.items()})
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple([space_of(child) for child in spec])
    dtype = np.dtype(spec.dtype)
    if hasattr(spec, "num_values"):
        return spaces.Discrete(int(spec.num_values))
    if dtype.kind in "OSU":
        return spaces.Text(max_length=1_000_000, min_length=0)
    if dtype.kind == "b":
        return spaces.Box(0, 1, spec.shape, np.bool_)
    if dtype.kind not in "iuf":
        raise TypeError(f"there is no space for {spec}")
    low, high = _bounds(spec, dtype)
    return spaces.Box(low, high, spec.shape, dtype.type)


def _bounds(spec: Any, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if hasattr(spec, "minimum"):
        low, high = spec.minimum, spec.maximum
    elif dtype.kind == "f":
        low, high = -np.inf, np.inf
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.full(spec.shape, low, dtype), np.full(spec.shape, high, dtype)


def _plain(observation: Any, space: spaces.Space[Any]) -> Any:
    """The observation in the types that its space holds."""
    if isinstance(space, spaces.Dict):
        return {key: _plain(observation[key], child) for key, child in space.items()}
    if isinstance(space, spaces.Tuple):
        pairs = zip(observation, space.spaces, strict=True)
        return tuple(_plain(child, part) for child, part in pairs)
    if isinstance(space, spaces.Text):
        text = observation.item() if isinstance(observation, np.ndarray) else observation
        return text.decode() if isinstance(text, bytes) else str(text)
    # Some tasks give numbers where their spec has an array.
    return np.asarray(observation, space.dtype)


def _seed(env: Any, seed: int) -> bool:
    """Seed what `env` draws its start states from; whether there is such a thing."""
    for owner in (env, getattr(env, "task", None)):
        for name in ("random_state", "random"):
            generator = getattr(owner, name, None)
            if isinstance(generator, np.random.RandomState):
                generator.seed(seed % 2**32)
                return True
            if isinstance(generator, np.random.Generator):
                bits: Any = generator.bit_generator
                bits.state = type(bits)(seed).state
                return True
    return False
