"""Emulated links: what makes a pool in one room behave like one of several sites."""

from __future__ import annotations

import time
from collections.abc import Callable

from zmqrl.config.pool import Endpoints, NetEmulationConfig


class LinkEmulation:
    """Says by how many seconds the messages of one env worker are late; it never sleeps itself.

    A message is late by the delay of its link, plus its bits over the bandwidth. Which rollout worker
    will answer is not known beforehand, so the link to the slowest one that the configuration names
    counts: the largest delay, and the least bandwidth of its group and the env worker's own.

    A link carries one message at a time in each direction, so a request waits for the trajectory
    before it. That holds for the messages of *this* env worker only: what other members of a
    bandwidth group send meanwhile is not known here, so a group that is full is emulated too fast.

    Example:
        >>> pair = {"src": "Env:0", "dst": "Rollout:0", "delay_ms": 10}
        >>> config = NetEmulationConfig(enabled=True, crossdc_pairs=[pair])
        >>> round(LinkEmulation(config, rank=0).seconds(bytes_out=512, bytes_back=512), 3)
        0.02

    Args:
        config: The section `cluster.net_emulation`.
        rank: The number of the env worker, of either mode.
        clock: Monotonic seconds.
    """

    def __init__(
        self, config: NetEmulationConfig, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._enabled = config.enabled
        self._clock = clock
        self._rollout = _Link(config, rank, "Rollout")
        self._learner = _Link(config, rank, "Actor")
        self._out = _Direction()
        self._back = _Direction()

    def seconds(self, bytes_out: int, bytes_back: int) -> float:
        """The seconds by which a reply is late: the way of the request and its own.

        Args:
            bytes_out: Size of the request.
            bytes_back: Size of the reply.
        """
        if not self._enabled:
            return 0.0
        now, link = self._clock(), self._rollout
        answered = self._out.carry(now, bytes_out * link.seconds_per_byte) + link.delay_out
        arrived = self._back.carry(answered, bytes_back * link.seconds_per_byte) + link.delay_back
        return arrived - now

    def trajectory_seconds(self, bytes: int) -> float:
        """The seconds by which a trajectory of so many `bytes` reaches the learner late."""
        if not self._enabled:
            return 0.0
        now, link = self._clock(), self._learner
        return self._out.carry(now, bytes * link.seconds_per_byte) + link.delay_out - now


class _Link:
    """The slowest link between an env worker and a group.

    Attributes:
        delay_out: Seconds from the env worker.
        delay_back: Seconds to it.
        seconds_per_byte: Of its bandwidth; 0 without a limit.
    """

    def __init__(self, config: NetEmulationConfig, rank: int, group: str) -> None:
        worker, others = Endpoints("Env", rank, rank), Endpoints.all_of(group)
        pairs = config.crossdc_pairs
        out = [pair.delay_ms for pair in pairs if pair.leads(worker, others)]
        back = [pair.delay_ms for pair in pairs if pair.leads(others, worker)]
        if config.symmetric:
            out = back = out + back
        self.delay_out = max(out, default=0.0) / 1000
        self.delay_back = max(back, default=0.0) / 1000
        limits = [g.bandwidth_mbps for g in config.bandwidth_groups if g.has(worker) or g.has(others)]
        self.seconds_per_byte = 8 / (min(limits) * 1e6) if limits else 0.0


class _Direction:
    """One direction of a link, which carries one message at a time."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def carry(self, ready: float, seconds: float) -> float:
        """Carry what is `ready` to leave then, for so many `seconds`; returns when the last bit left."""
        self._free_at = max(ready, self._free_at) + seconds
        return self._free_at
