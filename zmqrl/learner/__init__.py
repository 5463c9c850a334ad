"""The learner: its port to the pool, its loop, and the built-in algorithms."""

from zmqrl.learner.gate import Gate
from zmqrl.learner.port import Learner

__all__ = ["Gate", "Learner"]
