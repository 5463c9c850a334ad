"""zmqrl: a ZeroMQ worker pool that serves policy inference to simulators."""

from zmqrl.client import PolicyClient
from zmqrl.errors import ZmqrlError
from zmqrl.pending import Pending

__all__ = ["Pending", "PolicyClient", "ZmqrlError"]
__version__ = "0.1.0"
