"""Wrappers that go around each simulator before it becomes a row of a vector env."""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces

from zmqrl.env.conversion import NUMERIC, check_batchable
from zmqrl.errors import in_a_line
from zmqrl.transport.rows import on_cpu

log = logging.getLogger(__name__)

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
    """Raised in place of an error of one simulator: says its row, and after an empty line the traceback.

    `AsyncVectorEnv` sends the exception itself from a process to another, and waits for ever for one
    that cannot be pickled.
    """


class Row(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Goes around all others but `Park`: with it, whatever is wrong is said with its row.

    What Gymnasium's vector envs would cut, stretch or drop is an error here; rewards and flags may be
    of any type that holds one number. Only row 0 renders: more is not filmed.

    Args:
        env: It.
        info_keys: Infos that the policy wants.
        success_keys: Infos that may tell success. All others are dropped: nobody reads them, and a
            vector env can neither batch arrays that change their size nor hand them over for nothing.
    """

    def __init__(self, env: Env, info_keys: Sequence[str], success_keys: Sequence[str]) -> None:
        super().__init__(env)
        self.zmqrl_row = 0
        self._info_keys = info_keys
        self._kept = {*info_keys, *success_keys}
        # Gymnasium looks for a wrapper's space anew each time that it is asked.
        self._space = env.observation_space
        check_batchable(str(env), env.observation_space, env.action_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the simulator.

        Raises:
            SubEnvError: The simulator raised, or its observation is not one of its space.
        """
        try:
            result = self.env.reset(seed=seed, options=options)
            if not isinstance(result, tuple) or len(result) != 2:
                raise _Odd("reset returned no (observation, info)")
            observation, info = result
            return observation, self._checked("reset", observation, info)
        except (Exception, SystemExit) as error:
            raise self._portable(error) from error

    def step(self, action: Any) -> Transition:
        """Step the simulator.

        Raises:
            SubEnvError: The simulator raised, or returned what is no transition.
        """
        try:
            result = self.env.step(action)
            if not isinstance(result, tuple) or len(result) != 5:
                raise _Odd("step returned no (observation, reward, terminated, truncated, info)")
            observation, reward, terminated, truncated, info = result
            info = self._checked("step", observation, info)
            return (
                observation,
                float(_number("reward", reward)),
                _flag("terminated", terminated),
                _flag("truncated", truncated),
                info,
            )
        except (Exception, SystemExit) as error:
            raise self._portable(error) from error

    def render(self) -> Any:
        """A picture of row 0; None of others, and where the simulator failed to draw it."""
        if self.zmqrl_row:
            return None
        try:
            return self.env.render()
        except (Exception, SystemExit) as error:
            # In a process of AsyncVectorEnv it would end the simulator.
            log.warning("the simulator does not render: %s: %s", type(error).__name__, error)
            return None

    def _checked(self, where: str, observation: Any, info: Any) -> dict[str, Any]:
        """The infos that somebody reads."""
        problem = misfit(self._space, observation, "observation")
        if problem:
            raise _Odd(problem)
        if not isinstance(info, dict):
            raise _Odd(f"the info is a {type(info).__name__}, not a dict")
        missing = [key for key in self._info_keys if key not in info]
        if missing:
            has = ", ".join(map(repr, info)) or "nothing"
            raise _Odd(f"the infos of {where} have no {missing[0]!r} (env.info_keys); they have {has}")
        return {key: info[key] for key in info if key in self._kept}

    def _portable(self, error: BaseException) -> SubEnvError:
        if isinstance(error, _Odd):
            return SubEnvError(f"row {self.zmqrl_row}: {error}")
        return SubEnvError(f"row {self.zmqrl_row}: {in_a_line(error)}\n\n{traceback.format_exc()}")


class _Odd(Exception):
    """Raised when a simulator breaks the rules of Gymnasium."""


def misfit(space: spaces.Space[Any], observation: Any, path: str) -> str:
    """What makes `observation` something else than `space` declares, in words; empty if nothing does.

    Structure, shapes, and kinds of dtypes are looked at, not bounds.
    """
    if (
        isinstance(observation, np.ndarray)
        and observation.shape == space.shape
        and observation.dtype == space.dtype
    ):
        return ""  # as most are; what follows takes longer
    if isinstance(space, spaces.Dict):
        if not isinstance(observation, Mapping):
            return f"{path} is a {type(observation).__name__}, not a dict"
        for key, child in space.spaces.items():
            if key not in observation:
                return f"{path} has no {key!r}"
            problem = misfit(child, observation[key], f"{path}.{key}")
            if problem:
                return problem
        return ""
    if isinstance(space, spaces.Tuple):
        if not isinstance(observation, (list, tuple)) or len(observation) != len(space.spaces):
            return f"{path} is no tuple of {len(space.spaces)}"
        parts = zip(space.spaces, observation, strict=True)
        problems = (misfit(child, part, f"{path}[{i}]") for i, (child, part) in enumerate(parts))
        return next(filter(None, problems), "")
    if isinstance(space, spaces.Text):
        return (
            "" if isinstance(observation, str) else f"{path} is a {type(observation).__name__}, not text"
        )
    if not isinstance(space, NUMERIC):
        return ""
    try:
        array = observation if isinstance(observation, np.ndarray) else np.asarray(on_cpu(observation))
    except (TypeError, ValueError) as error:
        return f"{path} is no array: {error}"
    if array.shape != space.shape or (
        array.dtype != space.dtype and not np.can_cast(array.dtype, space.dtype, "same_kind")
    ):
        if array.dtype == object:
            return f"{path} is a {type(observation).__name__}, declared as {space!s:.80}"
        return f"{path} is {array.dtype} {list(array.shape)}, declared as {space!s:.80}"
    return ""


def _number(what: str, value: Any) -> Any:
    """The one number of a reward or a flag."""
    if isinstance(value, (float, bool, np.bool_, np.number)):
        return value
    array = np.asarray(on_cpu(value))
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise _Odd(f"{what} is {value!r:.80}, not one number")
    return array.reshape(())


def _flag(what: str, value: Any) -> bool:
    number = _number(what, value)
    if number != number:
        raise _Odd(f"{what} is NaN, neither true nor false")
    return bool(number)
