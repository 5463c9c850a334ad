"""Every drill of `bin/bench faults`, with small numbers."""

from __future__ import annotations

import faults
import pytest


@pytest.mark.parametrize("name", list(faults.DRILLS))
def test_nothing_is_lost_doubled_or_crossed_in_the_drill(name: str) -> None:
    row = faults.DRILLS[name].run(quick=True)
    assert row["ok"], row["note"]
