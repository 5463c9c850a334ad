"""Chunks of actions: what the policy gives at once, carried out one action after another.

One step of a shard then takes several steps of its simulators, its *sub-steps*. A row whose episode ends
within a chunk is parked until the chunk is over, and only then reset: it is not stepped past its end,
and the other rows go on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from zmqrl.env.conversion import NUMERIC
from zmqrl.env.wrappers import Env, Transition
from zmqrl.transport.rows import merged

if TYPE_CHECKING:
    from zmqrl.env.adapters import Step

_TERMINATED, _TRUNCATED = "zmqrl_terminated", "zmqrl_truncated"
"""Infos by which a parked simulator says how its episode ended."""


@dataclass(frozen=True)
class Chunks:
    """How many actions the policy gives at once.

    Args:
        size: The number of actions, C.
        sub_steps: How many of them are carried out, k.
    """

    size: int
    sub_steps: int

    def space(self, single: spaces.Space[Any]) -> spaces.Space[Any]:
        """The space of a chunk of actions of the space `single`."""
        if isinstance(single, spaces.Dict):
            return spaces.Dict({key: self.space(child) for key, child in single.items()})
        if isinstance(single, spaces.Tuple):
            return spaces.Tuple([self.space(child) for child in single.spaces])
        # Gymnasium makes Boxes of these, in which choices would pass for quantities.
        if isinstance(single, spaces.MultiDiscrete):
            counts, start = (np.stack([each] * self.size) for each in (single.nvec, single.start))
            return spaces.MultiDiscrete(counts, single.dtype, start=start)
        if isinstance(single, spaces.MultiBinary):
            return spaces.MultiBinary((self.size, *single.shape))
        return batch_space(single, self.size)

    def carry_out(
        self,
        single: spaces.Space[Any],
        actions: Any,
        advance: Callable[[Any], tuple[Step, dict[str, Any]]],
        go_on: Callable[[], bool],
    ) -> tuple[Step, dict[str, Any]]:
        """Carry out a chunk in every row.

        Args:
            single: The space of one action of one row.
            actions: A batch of chunks of them.
            advance: Steps the simulators, and returns what that gave, with the infos.
            go_on: Asked before each sub-step but the first; if it says no, the rest is left out.

        Returns:
            One step, whose `reward` and `valid` are `[N, k]`, and whose observation is that of the last
            sub-step of each row; and the infos of the last sub-step.
        """
        total, infos = advance(_sub_action(single, actions, 0))
        rows = len(total.reward)
        rewards = np.zeros((rows, self.sub_steps))
        valid = np.zeros((rows, self.sub_steps), np.bool_)
        rewards[:, 0], valid[:, 0] = total.reward, total.valid
        for number in range(1, self.sub_steps):
            over = total.terminated | total.truncated
            if over.all() or not go_on():
                break
            step, infos = advance(_sub_action(single, actions, number))
            valid[:, number] = ~over
            rewards[:, number] = np.where(over, 0.0, step.reward)
            total.terminated |= step.terminated & ~over
            total.truncated |= step.truncated & ~over
            if step.success is not None and step.succeeded is not None:
                before = np.zeros(rows, np.bool_) if total.success is None else total.success
                once = before if total.succeeded is None else total.succeeded
                total.success = np.where(over, before, step.success)
                total.succeeded = once | (step.succeeded & ~over)
            if over.any():
                total.observation = merged(step.observation, total.observation, over)
            else:
                total.observation = step.observation
            total.step_seconds += step.step_seconds
        total.reward, total.valid = rewards, valid
        return total, infos


class Park(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Stays at the end of its episode until it is reset, whatever it is told to do.

    The vector env is not told of that end: it would refuse to step the other rows on. It is told in the
    infos, for `ends`.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._end: Transition | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._end = None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Transition:
        """Step the simulator, unless its episode is over."""
        if self._end is not None:
            return self._end
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info = {**info, _TERMINATED: bool(terminated), _TRUNCATED: bool(truncated)}
            self._end = observation, 0.0, False, False, info
        return observation, reward, False, False, info


def ends(infos: dict[str, Any]) -> tuple[Any, Any]:
    """The rows that are parked because they terminated, and those because they were truncated."""
    return infos.get(_TERMINATED, False), infos.get(_TRUNCATED, False)


def _sub_action(single: spaces.Space[Any], actions: Any, number: int) -> Any:
    """The action with that number of every chunk."""
    if isinstance(single, spaces.Dict):
        return {key: _sub_action(child, actions[key], number) for key, child in single.items()}
    if isinstance(single, spaces.Tuple):
        parts = zip(single.spaces, actions, strict=True)
        return tuple(_sub_action(child, part, number) for child, part in parts)
    if isinstance(single, NUMERIC):
        return np.ascontiguousarray(actions[:, number])
    return actions[number]  # text, or a space of the simulator's own: a list of C batches
