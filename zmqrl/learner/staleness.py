"""How old trajectories are when they arrive."""

from __future__ import annotations


class Staleness:
    """By how many versions trajectories lag behind at their arrival."""

    def __init__(self) -> None:
        self._count = self._dropped = 0
        self._sum = self._max = 0

    def note(self, lag: int, dropped: bool) -> None:
        """Add one trajectory."""
        self._count += 1
        self._sum += lag
        self._max = max(self._max, lag)
        self._dropped += dropped

    def metrics(self) -> dict[str, float]:
        """Mean and maximum over all trajectories, and how many were dropped for it."""
        return {
            "train/staleness/mean": self._sum / max(1, self._count),
            "train/staleness/max": self._max,
            "train/staleness/dropped": self._dropped,
        }
