"""Whether a rollout worker asks for its next batch before it has done the one in hand."""

from __future__ import annotations

import time
from collections.abc import Callable

_ROUND_TRIPS = 30.0
"""A batch of more round trips than this gains little from a next one that is there already, and what is
there cannot be taken by another worker."""

_LOOK_EVERY = 32
"""Batches of which two in a row do not ask ahead: the way is seen after no others, and it may have
looked long because nobody had anything to ask."""

_GAPS = 16
"""Looks at the way that are judged together; the third shortest counts, since in some of them a batch
was under way that had been asked for earlier."""

_IN_VAIN = 8
"""Batches in a row that were asked for ahead and came no sooner, after which it asks but now and then:
where less waits than a batch holds, each such question is a message for nothing."""

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
        self._ended: float | None = None
        self._began = 0.0
        self._asked = False
        self._asked_before = False  # for the batch in hand
        self._round_trip = float("inf")
        """Seconds from a result to the next batch, without asking ahead: the least that was seen;
        the other times nobody may have had anything to ask."""
        self._gaps: list[float] = []
        self._is_sure = False  # whether it is of as many looks as are judged together
        self._count = 0  # of batches
        self._in_vain = 0  # of them, the latest that were asked for ahead and came no sooner
        self._batch: float | None = None
        """Seconds that a batch takes, in the mean."""

    def begin(self) -> bool:
        """A batch has come: whether to ask for the next one now."""
        self._began = self._clock()
        self._count += 1
        if self._ended is not None:
            gap = self._began - self._ended
            if not self._asked:
                if not self._asked_before:
                    self._see(gap)
            elif gap < self._round_trip / 2:
                self._in_vain = 0
            else:
                self._in_vain += 1
        self._asked_before = self._asked
        self._asked = self._is_worth_it() if self._fixed is None else self._fixed
        return self._asked

    def end(self) -> None:
        """The batch has been answered."""
        self._ended = self._clock()
        took = self._ended - self._began
        self._batch = took if self._batch is None else self._batch + _SHARE * (took - self._batch)

    def _see(self, gap: float) -> None:
        self._gaps.append(gap)
        if len(self._gaps) == _GAPS:
            gap = sorted(self._gaps)[2]
            self._gaps.clear()
            self._round_trip = min(self._round_trip, gap) if self._is_sure else gap
            self._is_sure = True
        elif not self._is_sure:
            self._round_trip = min(self._round_trip, gap)

    def _is_worth_it(self) -> bool:
        if self._batch is None or self._count % _LOOK_EVERY >= _LOOK_EVERY - 2:
            return False
        if self._in_vain >= _IN_VAIN and self._count % _TRY_EVERY != 1:
            return False
        return self._batch < _ROUND_TRIPS * self._round_trip
