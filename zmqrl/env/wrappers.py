"""Wrappers that go around each simulator before it becomes a row of a vector env."""

from __future__ import annotations

import copy
import traceback
from typing import Any, SupportsFloat

import gymnasium

Env = gymnasium.Env[Any, Any]
Transition = tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]


class IgnoreTerminations(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Never terminates: episodes run to the time limit. Infos, and success in them, are kept."""

    def step(self, action: Any) -> Transition:
        """Step the simulator, with `terminated` forced to False."""
        observation, reward, _, truncated, info = self.env.step(action)
        return observation, reward, False, truncated, info


class KeepFinalObservation(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Copies the observation that ends an episode.

    In SAME_STEP the vector env resets the simulator before anyone has read that observation, and a
    simulator that reuses its arrays would overwrite it.
    """

    def step(self, action: Any) -> Transition:
        """Step the simulator; the last observation of an episode has its own memory."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            observation = copy.deepcopy(observation)
        return observation, reward, terminated, truncated, info


class SubEnvError(Exception):
    """Raised in place of an error of a simulator that runs in a process of its own."""


class PortableErrors(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Turns every error into a `SubEnvError` with its traceback as text.

    `AsyncVectorEnv` sends the exception itself, and waits for ever for one that cannot be pickled.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the simulator.

        Raises:
            SubEnvError: The simulator raised.
        """
        try:
            return self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise _portable(error) from None

    def step(self, action: Any) -> Transition:
        """Step the simulator.

        Raises:
            SubEnvError: The simulator raised.
        """
        try:
            return self.env.step(action)
        except Exception as error:
            raise _portable(error) from None


def _portable(error: Exception) -> SubEnvError:
    return SubEnvError(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
