"""zmqrl: a ZeroMQ worker pool that serves policy inference to simulators."""

from zmqrl.client import Pending, PolicyClient
from zmqrl.errors import ZmqrlError

__all__ = ["Pending", "PolicyClient", "ZmqrlError"]
__version__ = "0.1.0"
