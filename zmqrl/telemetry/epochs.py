"""The statuses of a broker over all its restarts, as one."""

from __future__ import annotations

from typing import Any

_SUMMED = ("batches", "shards", "rows", "predict_s")
"""Of the totals of a rollout worker."""


class BrokerEpochs:
    """Adds the counters of a broker to those of its predecessors, which began at 0 as well.

    What a broker that was killed did after it was last asked is not known. Requests that it had open
    are left out of its own: they were sent again to the next one, which counts them.
    """

    def __init__(self) -> None:
        self._latest: dict[str, Any] = {}
        self._counters: dict[str, float] = {}
        self._totals: dict[str, dict[str, Any]] = {}

    def take(self, status: dict[str, Any] | None) -> None:
        """Note a status (see `Broker.status`), or None if the broker did not answer."""
        if status is None:
            return
        if self._latest and status["epoch"] != self._latest["epoch"]:
            ended = self.status()
            ended["counters"]["requests"] -= ended["open_requests"]
            self._counters, self._totals = ended["counters"], ended["totals"]
        self._latest = status

    def status(self) -> dict[str, Any]:
        """The latest status, with the counters and the workers' totals of all epochs."""
        if not self._latest:
            return {}
        now = self._latest["counters"]
        counters = {key: value + self._counters.get(key, 0) for key, value in now.items()}
        totals = dict(self._totals)
        for name, worker in self._latest["totals"].items():
            earlier = totals.get(name, {})
            totals[name] = {**worker, **{key: worker[key] + earlier.get(key, 0) for key in _SUMMED}}
        return {**self._latest, "counters": counters, "totals": totals}
