"""Records what happens to simulators, and sends it to the learner as trajectories."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, Optional, Tuple

from zmqrl.errors import AuthenticationFailed, LearnerTimeout, LearnerUnreachable
from zmqrl.recording.builder import TrajectoryBuilder
from zmqrl.recording.uplink import Uplink
from zmqrl.spaces import Spaces
from zmqrl.trajectory import Trajectory
from zmqrl.transport.security import Keys

_GONE_AFTER = 5.0
"""Seconds without a word after which the learner is perhaps not there; it answers every second."""

AUTORESET_MODES = ("disabled", "next_step", "same_step")


class Recording:
    """The trajectories of one client, of all its pipeline stages.

    For each step of a stage: `asked` with the observations, `may_begin` until it says yes, `answered`
    with the policy's reply, `outcome` with what the step gave.

    Args:
        endpoint: The learner's.
        name: The client's.
        incarnation: Of the client: its later processes have larger numbers.
        steps: In a trajectory.
        action_space: A Gymnasium space, of one simulator.
        autoreset: How the simulators begin their next episode: `disabled`, `next_step` or `same_step`.
        copy: Copy observations and replies, because their owner may overwrite them.
        sub_steps: Of the chunk of actions that is a step; None if a step is one action.
        late: Says by how many seconds a trajectory of so many bytes is to be late: an emulated link.
        keys: Of a client.

    Raises:
        EndpointError: The endpoint is malformed.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        incarnation: int,
        *,
        steps: int,
        action_space: Any,
        autoreset: str = "disabled",
        copy: bool = True,
        sub_steps: Optional[int] = None,
        late: Optional[Callable[[int], float]] = None,
        keys: Optional[Keys] = None,
    ) -> None:
        if autoreset not in AUTORESET_MODES:
            raise ValueError(f"autoreset must be one of {', '.join(AUTORESET_MODES)}, not {autoreset!r}")
        self._name = name
        self._steps = steps
        self._action_space = action_space
        self._autoreset = autoreset
        self._copy = copy
        self._sub_steps = sub_steps
        self._late = late
        self._held: Deque[Tuple[float, int, Trajectory]] = deque()
        self._builders: Dict[int, TrajectoryBuilder] = {}
        self._dropped_before = 0
        self._resets: Dict[int, Any] = {}  # by stage: rows whose next step is a reset
        self._uplink = Uplink(
            endpoint,
            {
                "role": "env",
                "name": name,
                "incarnation": incarnation,
                "host": socket.gethostname(),
                "pid": os.getpid(),
            },
            keys,
        )

    @property
    def sent(self) -> int:
        """Trajectories sent."""
        return self._uplink.sent

    @property
    def unacknowledged(self) -> int:
        """Trajectories of which the learner has not said that they are there."""
        return self._uplink.unacknowledged

    @property
    def dropped(self) -> int:
        """Trajectories given up, because of numbers that are not finite for instance."""
        return sum(builder.dropped for builder in self._builders.values())

    @property
    def dropped_in_a_row(self) -> int:
        """Those since the last one that was sent."""
        return self.dropped - self._dropped_before

    def problem(self, stage: int) -> str:
        """What was wrong with the latest trajectory of `stage` that was dropped."""
        return self._builders[stage].problem

    def asked(self, stage: int, observation: Any) -> None:
        """Note the observations that actions are asked for, and send the trajectory that they complete.

        Args:
            stage: The pipeline stage.
            observation: A tree of `[N, ...]`.

        Raises:
            ValueError: They are unlike those before them.
            EncodeError: The trajectory cannot be sent.
        """
        builder = self._builders.get(stage)
        if builder is None:
            final_is_next = self._autoreset == "next_step"
            builder = TrajectoryBuilder(
                self._steps, self._name, self._copy, final_is_next, self._sub_steps
            )
            builder.observe(observation)
            if not self._builders:
                self._uplink.introduce(Spaces.of(builder.observation, self._action_space))
            self._builders[stage] = builder
            return
        builder.observe(observation)
        self._send(stage)

    def may_begin(self, stage: int) -> bool:
        """Whether the actions may be asked for: yes within a trajectory, else as the learner says.

        Raises:
            LearnerRefused: It wants nothing from this client.
        """
        self._deliver(time.monotonic())
        builder = self._builders[stage]
        if not builder.begins or builder.leave:
            self._uplink.service()
            return True
        if self._uplink.may_begin(stage, builder.rows * self._steps * (self._sub_steps or 1)):
            self._uplink.begin(stage)
            builder.leave = True
        return builder.leave

    def wait_to_begin(self, stage: int, deadline: float) -> None:
        """Wait until `may_begin`.

        Args:
            stage: The pipeline stage.
            deadline: Of `time.monotonic()`.

        Raises:
            LearnerUnreachable: No learner answered until then.
            AuthenticationFailed: Keys are the reason.
            LearnerTimeout: It did, but lets no trajectory begin.
            LearnerRefused: It wants nothing from this client.
        """
        while not self.may_begin(stage):
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._too_late()
            self._uplink.wait(min(left, 0.25))

    def wait(self, seconds: float) -> None:
        """Wait for a word from the learner.

        Raises:
            LearnerRefused: It wants nothing from this client.
        """
        self._uplink.wait(seconds)

    def answered(self, stage: int, reply: Dict[str, Any], version: Optional[int]) -> None:
        """Note the policy's reply, arrays `[N, ...]`, and the version of its weights."""
        self._builders[stage].act(reply, version or 0)

    def outcome(
        self,
        stage: int,
        reward: Any,
        terminated: Any,
        truncated: Any,
        final_observation: Any = None,
        valid: Any = None,
    ) -> Any:
        """Note what a step gave; see `TrajectoryBuilder.outcome`.

        Raises:
            ValueError: A shape is wrong, or a final observation is missing.
        """
        builder = self._builders[stage]
        if valid is None and stage in self._resets:
            valid = ~self._resets[stage]
        handle = builder.outcome(reward, terminated, truncated, final_observation, valid)
        if self._autoreset == "next_step":
            self._resets[stage] = builder.ended
        return handle

    def abandon(self, stage: int) -> None:
        """Drop the trajectory under way: its simulators are reset in the middle of their episodes."""
        self._resets.pop(stage, None)
        if stage in self._builders:
            self._builders[stage].abandon()

    def late_reward(self, stage: int, handle: Any, reward: Any) -> None:
        """Add the reward of an earlier step, and send the trajectory that it completes.

        Raises:
            ValueError: The shape is wrong.
        """
        self._builders[stage].late_reward(handle, reward)
        self._send(stage)

    def close(self, timeout: float = 1.0) -> None:
        """Say goodbye; what is complete is delivered first, what is not is dropped.

        Args:
            timeout: Seconds to wait for acknowledgements.
        """
        self._deliver(float("inf"))
        self._uplink.close(timeout)

    def _send(self, stage: int) -> None:
        for trajectory in self._builders[stage].take():
            self._dropped_before = self.dropped
            due = 0.0 if self._late is None else time.monotonic() + self._late(trajectory.size)
            self._held.append((due, stage, trajectory))
        self._deliver(time.monotonic())

    def _deliver(self, now: float) -> None:
        """Hand over what has passed its emulated link."""
        while self._held and self._held[0][0] <= now:
            _, stage, trajectory = self._held.popleft()
            self._uplink.send(stage, trajectory)

    def _too_late(self) -> Exception:
        if not self._uplink.reached:
            if self._uplink.suspicion.reason:
                return AuthenticationFailed(
                    f"the learner at {self._uplink.endpoint} {self._uplink.suspicion.reason}"
                )
            return LearnerUnreachable(
                f"no learner answered at {self._uplink.endpoint} within the timeout; "
                "is one running there (bin/start-learner)?"
            )
        silent = time.monotonic() - self._uplink.last_word
        if silent >= _GONE_AFTER:
            why = f"it has said nothing for {silent:.0f} s; is it still running?"
        elif self._uplink.unacknowledged:
            why = f"{self._uplink.unacknowledged} trajectories are not acknowledged yet"
        else:
            why = "it is not ready yet, or its updates have to catch up first"
        return LearnerTimeout(
            f"the learner at {self._uplink.endpoint} let no trajectory begin within the timeout: {why}"
        )
