"""What a client records of its simulators, and its way to the learner."""

from zmqrl.recording.recording import Recording

__all__ = ["Recording"]
