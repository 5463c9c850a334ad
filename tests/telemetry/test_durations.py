"""Histograms of how long calls took."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest

from zmqrl.errors import DecodeError
from zmqrl.telemetry.durations import Durations
from zmqrl.telemetry.metrics import EnvView, Sample, run_metrics
from zmqrl.telemetry.report import EnvTotals, Report, unpack
from zmqrl.transport.codec import encode_meta


def durations_of(*seconds: float) -> Durations:
    durations = Durations()
    for value in seconds:
        durations.add(value)
    return durations


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("calls", [1, 2, 99, 10_000])
def test_a_quantile_is_off_by_at_most_what_the_docstring_says(share: float, calls: int) -> None:
    drawn = np.random.default_rng(calls).lognormal(mean=-6, sigma=3, size=calls)
    seconds = np.sort(drawn.clip(1e-6, 1000))
    exact = seconds[max(1, math.ceil(share * calls)) - 1]
    assert durations_of(*seconds).quantile(share) == pytest.approx(exact, rel=0.022)


def test_what_lies_beyond_the_buckets_counts_at_their_ends() -> None:
    durations = durations_of(0.0, 1e-9, 1e6)
    assert durations.quantile(0.5) == pytest.approx(1e-6, rel=0.1)
    assert durations.quantile(1.0) == pytest.approx(1074, rel=0.1)
    assert Durations().quantile(0.5) is None


def test_sums_and_differences_are_exact() -> None:
    first, second = durations_of(0.001, 2.0), durations_of(0.003)
    assert first + second == durations_of(0.001, 2.0, 0.003)
    assert (first + second - first).quantile(0.5) == second.quantile(0.5)


def test_workers_and_their_restarts_add_up_and_a_report_carries_them() -> None:
    views = []
    for name in ("eval-0", "eval-1"):
        view = EnvView(name)
        for incarnation, steps in ((1, [0.002] * 101), (2, [0.010] * 98 + [1.0])):
            totals = EnvTotals(step_times=durations_of(*steps))
            totals.count_reset(0.5)
            report = unpack(Report(name, 0, incarnation, totals=totals).pack())
            assert isinstance(report, Report)
            view.take(report, 0.0)
        views.append(view)
    metrics = run_metrics(views, {}, 1)
    assert metrics["time/env/step_p50"] == pytest.approx(0.002, rel=0.022)
    assert metrics["time/env/step_p99"] == pytest.approx(0.010, rel=0.022)
    assert metrics["time/env/reset_p50"] == metrics["time/env/reset_p99"]
    assert views[0].totals().resets == 2


def test_a_time_without_calls_has_no_quantiles() -> None:
    sample = Sample.of(EnvTotals(step_times=durations_of(1.0)), {})
    assert sample.since(sample).totals.step_times.quantile(0.5) is None
    assert not [
        name for name in run_metrics([EnvView("eval-0")], {}, 1) if "_p50" in name or "_p99" in name
    ]


@pytest.mark.parametrize("counts", [None, 3, [1.5], [-1], [True], ["1"], [0] * 481, {"0": 1}])
def test_a_report_with_another_histogram_is_refused(counts: object) -> None:
    tree = asdict(Report("eval-0", 0))
    tree["totals"]["step_times"] = {"counts": counts}
    with pytest.raises(DecodeError):
        unpack(encode_meta(tree))
    tree["totals"]["step_times"] = counts
    with pytest.raises(DecodeError):
        unpack(encode_meta(tree))
