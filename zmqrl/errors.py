"""Every exception that zmqrl raises on purpose."""

from typing import Sequence

_LINE = 500
"""Characters of a line."""


class ZmqrlError(Exception):
    """Base class of all errors raised by zmqrl."""


def in_a_line(error: BaseException) -> str:
    """What an error says, with its kind: in one line, since some libraries write pages."""
    try:
        said = str(error)
    except Exception:  # some cannot even say what they are
        said = ""
    words = " ".join(f"{type(error).__name__}: {said}".split()).rstrip(": ")
    return words if len(words) <= _LINE else f"{words[: _LINE // 2]} … {words[-_LINE // 2 :]}"


class ConfigError(ZmqrlError):
    """Raised when a configuration file, an override or an option is wrong."""


class EndpointError(ZmqrlError):
    """Raised when an endpoint is malformed, in use, or cannot be bound."""


class KeysError(ZmqrlError):
    """Raised when keys are missing or damaged, would be overwritten, or can be read by others."""


class EncodeError(ZmqrlError):
    """Raised when a tree holds something that cannot cross the wire; names the path of the leaf."""


class DecodeError(ZmqrlError):
    """Raised when received bytes are not a valid message; nothing of it has been used."""


class VersionMismatch(DecodeError):
    """Raised when the peer speaks another version of the protocol."""


class SharedMemoryLost(DecodeError):
    """Raised when arrays in the shared memory of another process cannot be read; says why."""


class ClientError(ZmqrlError):
    """Base class of the errors that a call of `PolicyClient` ends in."""


class ClientInUse(ClientError):
    """Raised when one client is used from two threads at once."""


class ClientClosed(ClientError):
    """Raised when a closed client is used."""


class BrokerUnreachable(ClientError, ConnectionError):
    """Raised when no broker answered at the endpoint within the timeout."""


class AuthenticationFailed(ClientError, ConnectionError):
    """Raised when a broker or learner and this client do not accept each other's keys; says why."""


class BrokerStopping(ClientError):
    """Raised when the broker shut down and none came back until the timeout."""


class PolicyTimeout(ClientError, TimeoutError):
    """Raised when the broker was reached but no reply came within the timeout."""


class PolicyError(ClientError):
    """Raised when the policy failed on this request; carries the remote traceback."""


class StateLost(ClientError):
    """Raised when the pool no longer has the state of env rows, which must begin a new episode.

    Attributes:
        rows: Of the request.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = list(rows)


class AttemptsExhausted(ClientError):
    """Raised when every rollout worker that took the request was lost; carries the history."""


class Overloaded(ClientError):
    """Raised when the broker's queue stayed full until the timeout."""


class RequestRefused(ClientError):
    """Raised when the broker refuses a request as malformed or not allowed in its mode."""


class Replaced(ClientError):
    """Raised when another process has taken over this client's name."""


class LearnerUnreachable(ClientError, ConnectionError):
    """Raised when no learner answered at the endpoint within the timeout."""


class LearnerTimeout(ClientError, TimeoutError):
    """Raised when the learner held a new trajectory back until the timeout."""


class TrainingEnded(ClientError):
    """Raised when the learner has learned all that it was to learn, and lets no trajectory begin."""


class LearnerRefused(ClientError):
    """Raised when the learner refuses this client, for its spaces or its name; says why."""


class PolicyLoadError(ZmqrlError):
    """Raised when a policy cannot be imported, built or loaded."""


class PolicyOutputError(ZmqrlError):
    """Raised when a policy returns something other than arrays with one row per observation."""


class EnvironmentFailure(ZmqrlError):
    """Raised when a simulator cannot be made, or fails in reset or step."""


class DataError(ZmqrlError):
    """Raised when a trajectory does not fit the algorithm that should learn from it."""


class WeightsError(ZmqrlError):
    """Raised when weights are damaged, or do not fit the policy that should take them."""


class CheckpointError(ZmqrlError):
    """Raised when a checkpoint is missing, damaged, or of another architecture; names it."""


class StartupFailed(ZmqrlError):
    """Raised when a part of a run does not come up, with its name and the cause."""


class RunFailed(ZmqrlError):
    """Raised when a run cannot go on or ends incomplete, with the cause."""
