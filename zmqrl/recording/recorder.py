"""What the calls of a client say of its simulators, for the learner."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, Optional, Protocol

from zmqrl.recording.recording import Recording
from zmqrl.transport.security import Keys
from zmqrl.transport.tree import with_axis


class Answer(Protocol):
    """What `Recorder` needs of a request in flight."""

    single: bool

    @property
    def policy_version(self) -> Optional[int]:
        """Of the weights that made the reply."""

    def result(self) -> Dict[str, Any]:
        """Wait for the reply."""


class Recorder:
    """Records what a loop of one's own asks, gets and tells, of all its pipeline stages.

    For each step: `asks`, the request, `asked`, and `tell`.

    Args:
        learner: Its endpoint.
        name: The client's.
        incarnation: Of the client.
        steps: In a trajectory.
        envs: The Gymnasium env or vector env, or None.
        action_space: Of one simulator, if there are no `envs`.
        keys: Of a client.

    Raises:
        EndpointError: The endpoint is malformed.
        ValueError: The vector env does not tell when it begins the next episode.
    """

    def __init__(
        self,
        learner: str,
        name: str,
        incarnation: int,
        *,
        steps: int,
        envs: Any,
        action_space: Any,
        keys: Optional[Keys] = None,
    ) -> None:
        self._recording = Recording(
            learner,
            name,
            incarnation,
            steps=steps,
            action_space=action_space if envs is None else _action_space_of(envs),
            autoreset=_autoreset_of(envs),
            keys=keys,
        )
        self._latest: Dict[int, Answer] = {}  # by stage: what `tell` is about

    def asks(
        self, stage: int, observation: Any, lost: bool, deadline: float, rest: Callable[[int], None]
    ) -> None:
        """Note what is about to be asked, and wait until the learner wants it.

        Args:
            stage: The pipeline stage.
            observation: A tree of `[N, ...]`.
            lost: Whether the simulators were reset since, because their states are lost.
            deadline: Of `time.monotonic()`.
            rest: Called with the stage if there is a wait: nobody else need wait for it.

        Raises:
            LearnerUnreachable, LearnerTimeout, LearnerRefused: As `Recording.wait_to_begin`.
            ValueError: The observations are unlike those before them.
        """
        if lost:
            self._recording.abandon(stage)
        self._recording.asked(stage, observation)
        if not self._recording.may_begin(stage):
            rest(stage)
            self._recording.wait_to_begin(stage, deadline)

    def asked(self, stage: int, answer: Answer) -> None:
        """Note what was asked."""
        self._latest[stage] = answer

    def tell(
        self,
        reward: Any,
        terminated: Any,
        truncated: Any,
        final_observation: Any,
        valid: Any,
        stage: int,
    ) -> None:
        """Note what the step with the latest actions gave; see `PolicyClient.record`.

        Raises:
            ValueError: A shape is wrong, or nothing was asked before.
            ClientError: The latest actions did not come.
        """
        if stage not in self._latest:
            raise ValueError(
                f"there is nothing to record at stage {stage}: each record() needs a call of infer() "
                "before it, in mode train and without policy=…"
            )
        answer = self._latest[stage]
        reply = answer.result()
        if answer.single:
            reward, terminated, truncated = ([value] for value in (reward, terminated, truncated))
            final_observation = None if final_observation is None else with_axis(final_observation)
        self._recording.answered(stage, reply, answer.policy_version)
        self._recording.outcome(stage, reward, terminated, truncated, final_observation, valid)
        del self._latest[stage]

    def close(self) -> None:
        """Say goodbye; what is complete is delivered first, what is not is dropped."""
        self._recording.close()


def _action_space_of(envs: Any) -> Any:
    """The action space of one simulator, of a vector env or of a single one."""
    return getattr(envs, "single_action_space", None) or getattr(envs, "action_space", None)


def _autoreset_of(envs: Any) -> str:
    """How a vector env begins the next episode; what is none leaves it to the caller.

    Gymnasium before 1.0 resets in the same step, 1.0 in the next one, and from 1.1 on it tells; the
    simulators of Isaac Lab (which count in `episode_length_buf`) reset in the same step.

    Raises:
        ValueError: It cannot be known.
    """
    if not hasattr(envs, "single_action_space"):
        return "disabled"
    mode = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if mode is not None:
        return str(getattr(mode, "name", mode)).lower()
    if hasattr(envs, "episode_length_buf"):
        return "same_step"
    libraries = {kind.__module__.partition(".")[0] for kind in type(envs).__mro__}
    if "gymnasium" in libraries:
        version = str(getattr(sys.modules["gymnasium"], "__version__", ""))
        return "same_step" if version.startswith("0.") else "next_step"
    if "gym" in libraries:
        return "same_step"
    raise ValueError(
        f"{type(envs).__name__} does not tell when it begins the next episode: set "
        "envs.metadata = {'autoreset_mode': 'same_step'}, or 'next_step', or 'disabled'"
    )
