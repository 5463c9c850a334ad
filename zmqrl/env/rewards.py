"""Rewards that a model gives: asked of the reward workers, without waiting for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqrl.client import Pending, PolicyClient
from zmqrl.config import RewardConfig
from zmqrl.env.adapters import Step
from zmqrl.recording import Recording
from zmqrl.transport.header import REWARD
from zmqrl.transport.rows import merged

_MOST_ASKED = 64
"""Steps whose rewards are on their way. With more, the simulators wait for a model that cannot keep
pace: the broker takes twice as many requests of one client, then turns those for actions away too."""


@dataclass(slots=True)
class _Asked:
    """The rewards of one step, on their way."""

    pending: Pending
    stage: int
    handle: Any
    """What the recording wants with them."""
    rows: np.ndarray
    """bool `[N]`: which rows the model's rewards are for; the others get 0."""
    valid: np.ndarray
    """Of the step, bool `[N]` or `[N, k]`."""


class RewardRequests:
    """Asks the policy named `reward` about steps, and gives what it says to the recording.

    The model gets, for N transitions, a dict of `observation`, `actions`, `next_observation` (the final
    one where an episode ended), `terminated` and `truncated`, and returns `rewards`, `[N]`. A chunk of
    actions is one transition, and its reward is given to the last of its sub-steps.

    Args:
        config: The section `reward`.
        client: The env worker's.
        recording: Where rewards go.
    """

    def __init__(self, config: RewardConfig, client: PolicyClient, recording: Recording) -> None:
        self._config = config
        self._client = client
        self._recording = recording
        self._asked: deque[_Asked] = deque()

    def record(self, stage: int, observation: Any, actions: Any, step: Step) -> None:
        """Record a step whose rewards are still to come.

        Raises:
            ClientError: Earlier rewards did not come.
        """
        done = step.terminated | step.truncated
        moved = step.valid if step.valid.ndim == 1 else step.valid[:, 0]
        rows = moved if self._config.when == "step" else done
        late = bool(rows.any())
        handle = self._recording.outcome(
            stage,
            None if late else np.zeros(step.valid.shape),
            step.terminated,
            step.truncated,
            step.final_observation,
            step.valid,
        )
        if late:
            following = step.observation if step.final_observation is None else step.final_observation
            tree = {
                "observation": observation,
                "actions": actions,
                "next_observation": merged(step.observation, following, done),
                "terminated": step.terminated,
                "truncated": step.truncated,
            }
            pending = self._client.submit(
                tree, timeout=self._config.timeout_s, copy=False, stage=stage, policy=REWARD
            )
            self._asked.append(_Asked(pending, stage, handle, rows, step.valid))
        self.collect()

    def may_go_on(self, timeout: float) -> bool:
        """Whether few enough rewards are on their way for another step.

        Args:
            timeout: Seconds to wait for the oldest ones.

        Raises:
            ClientError: Rewards did not come, with the reason.
        """
        if len(self._asked) > _MOST_ASKED:
            self._asked[0].pending.wait(timeout)
            self.collect()
        return len(self._asked) <= _MOST_ASKED

    def collect(self) -> None:
        """Give the recording what has come, without waiting.

        Raises:
            ClientError: Rewards did not come, with the reason.
        """
        while self._asked and self._asked[0].pending.done():
            asked = self._asked.popleft()
            rewards = np.reshape(asked.pending.result()["rewards"], -1)
            rewards = np.where(asked.rows, rewards, 0.0)
            if asked.valid.ndim == 2:
                rewards = _at_the_last(rewards, asked.valid)
            self._recording.late_reward(asked.stage, asked.handle, rewards)


def _at_the_last(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """One reward a chunk, `[N]`, as that of its last sub-step, `[N, k]`."""
    spread = np.zeros(valid.shape)
    spread[np.arange(len(valid)), valid.sum(1) - 1] = rewards
    return spread
