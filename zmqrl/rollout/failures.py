"""What a rollout worker's log says of a policy that fails."""

from __future__ import annotations

import logging
import time
import traceback

log = logging.getLogger(__name__)


class Failures:
    """Logs the policy's failures: the first at once, then how many there were, every ten seconds."""

    def __init__(self) -> None:
        self._count = 0
        self._logged = float("-inf")

    def note(self, text: str, error: Exception) -> None:
        """Count one failure, and log if it is time."""
        self._count += 1
        if time.monotonic() < self._logged + 10.0:
            return
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}"
        log.warning("the policy failed on %d request(s): %s (%s)", self._count, text, where)
        self._count, self._logged = 0, time.monotonic()
