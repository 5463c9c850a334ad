"""The thin client, for a loop of one's own and for the env workers."""

from zmqrl.client.client import PolicyClient
from zmqrl.client.pending import Pending

__all__ = ["Pending", "PolicyClient"]
