"""Whether a rollout worker asks for its next batch before it has done the one in hand."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_ROUND_TRIPS = 30.0
"""A batch of more round trips than this gains little from a next one that is there already, and what is
there cannot be taken by another worker."""

_LOOK_EVERY = 32
"""Batches of which one does not ask ahead: how long the way is, only the one after it tells."""

_LOOKS = 16
"""Looks at the way that count, the latest; the shortest of them is the way."""

_IN_VAIN = 8
"""Batches in a row that were asked for ahead and not given, after which it asks but now and then: where
less waits than a batch holds, each such question is a message for nothing."""

_TRY_EVERY = 16
"""Batches of which one asks ahead then."""

_SHARE = 0.1
"""What the latest batch counts in the mean duration of a batch."""


class Prefetch:
    """Decides, batch by batch, from how long batches and the way to the broker take.

    Args:
        fixed: What it decides, whatever they take; None to measure.
        clock: Seconds.
    """

    def __init__(self, fixed: bool | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._fixed = fixed
        self._clock = clock
        self._began = 0.0
        self._ended: float | None = None
        self._asked = False
        self._count = 0  # of batches
        self._in_vain = 0  # of them, the latest that were asked for ahead and not given
        self._gaps: deque[float] = deque(maxlen=_LOOKS)
        """Seconds from a result to the next batch, where that waited at the broker for the result."""
        self._batch: float | None = None
        """Seconds that a batch takes, in the mean."""

    def begin(self, given_ahead: bool, queued_s: float) -> bool:
        """A batch has come: whether to ask for the next one now.

        Args:
            given_ahead: Whether it was given for the question in the batch before.
            queued_s: Seconds that it had waited at the broker.
        """
        self._began = self._clock()
        self._count += 1
        if given_ahead:
            self._in_vain = 0
        elif self._ended is not None:
            gap = self._began - self._ended
            if queued_s > gap:  # it was there before the result: nobody waited for it, or held it open
                self._gaps.append(gap)
            self._in_vain += self._asked
        self._asked = self._is_worth_it() if self._fixed is None else self._fixed
        return self._asked

    def end(self) -> None:
        """The batch has been answered."""
        self._ended = self._clock()
        took = self._ended - self._began
        self._batch = took if self._batch is None else self._batch + _SHARE * (took - self._batch)

    def _is_worth_it(self) -> bool:
        if self._batch is None or self._count % _LOOK_EVERY == 0:
            return False
        if self._in_vain >= _IN_VAIN and self._count % _TRY_EVERY != 1:
            return False
        return self._batch < _ROUND_TRIPS * min(self._gaps, default=0.0)
