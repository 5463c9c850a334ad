"""How much of the training data comes from each env worker."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

_RECENT = 100
"""Trajectories that a cap looks at, …"""
_RECENT_EACH = 10
"""… or so many for each sender, if that is more."""

_MOST_SHOWN = 50
"""Env workers whose shares have a metric each."""

_MOST_NAMED = 10_000
_OTHERS = "others"


class Shares:
    """Env steps by env worker, of all trajectories and of the recent ones."""

    def __init__(self) -> None:
        self.env_steps: dict[str, int] = {}
        """Of all trajectories."""
        self.recent: Counter[str] = Counter()
        """Of the latest ones."""
        self._latest: deque[tuple[str, int]] = deque()

    def meet(self, name: str) -> None:
        """An env worker is here, and has its share, be it none."""
        self.env_steps.setdefault(self._named(name), 0)

    def add(self, name: str, env_steps: int, senders: int) -> None:
        """A trajectory has arrived.

        Args:
            name: Of its env worker.
            env_steps: Of it.
            senders: How many env workers there are.
        """
        self.meet(name)
        self.env_steps[self._named(name)] += env_steps
        self.recent[name] += env_steps
        self._latest.append((name, env_steps))
        while len(self._latest) > max(_RECENT, _RECENT_EACH * senders):
            oldest, steps = self._latest.popleft()
            self.recent[oldest] -= steps
            if not self.recent[oldest]:
                del self.recent[oldest]

    def correct(self, name: str, said: int, found: int) -> None:
        """A trajectory has been read: its env steps, as its sender said and as they are."""
        self.env_steps[self._named(name)] += found - said

    def without(self, waiting: Iterable[tuple[str, int]]) -> dict[str, int]:
        """The env steps of all trajectories but those."""
        env_steps = dict(self.env_steps)
        for name, steps in waiting:
            env_steps[self._named(name)] -= steps
        return env_steps

    def metrics(self) -> dict[str, float]:
        """The share of each env worker in all env steps, and the smallest and the largest one."""
        total = sum(self.env_steps.values())
        if not total:
            return {}
        shares = {name: steps / total for name, steps in self.env_steps.items()}
        # In the order of the names, and env-10 after env-9.
        shown = dict(sorted(shares.items(), key=lambda item: (len(item[0]), item[0]))[:_MOST_SHOWN])
        return {
            **{f"train/share/{name}": share for name, share in shown.items()},
            "train/share_min": min(shares.values()),
            "train/share_max": max(shares.values()),
        }

    def _named(self, name: str) -> str:
        return name if name in self.env_steps or len(self.env_steps) < _MOST_NAMED else _OTHERS
