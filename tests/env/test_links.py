"""Emulated links: how late a message is."""

from __future__ import annotations

from typing import Any

import pytest

from zmqrl import config
from zmqrl.env.links import LinkEmulation

PAIR = {"src": ["Env:0", "Env:1"], "dst": "Rollout:0-1", "delay_ms": 10}
MEGABIT = 125_000
"""Bytes that take a second at 1 Mbit/s."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def links(rank: int = 0, clock: Clock | None = None, **keys: Any) -> LinkEmulation:
    section = {"enabled": True, **keys}
    loaded = config.load(None, [f"cluster.net_emulation={section}".replace("True", "true")])
    return LinkEmulation(loaded.cluster.net_emulation, rank, clock or Clock())


def group(members: Any, mbps: float) -> dict[str, Any]:
    return {"members": members, "bandwidth_mbps": mbps}


def test_nothing_is_late_when_the_emulation_is_off() -> None:
    off = links(enabled="false", crossdc_pairs=[PAIR], bandwidth_groups=[group("Env:0", 1)])
    assert off.seconds(MEGABIT, MEGABIT) == 0.0
    assert off.trajectory_seconds(MEGABIT) == 0.0


def test_a_symmetric_link_delays_request_and_reply() -> None:
    assert links(crossdc_pairs=[PAIR]).seconds(10, 10) == pytest.approx(0.02)


def test_a_one_way_link_delays_only_the_way_that_is_named() -> None:
    there = links(crossdc_pairs=[PAIR], symmetric="false")
    back = {"src": "Rollout:1", "dst": "Env:0", "delay_ms": 30}
    both = links(crossdc_pairs=[PAIR, back], symmetric="false")
    assert there.seconds(10, 10) == pytest.approx(0.01)
    assert both.seconds(10, 10) == pytest.approx(0.04)


def test_a_symmetric_link_may_be_named_from_either_end() -> None:
    pair = {"src": "Rollout:0", "dst": "Env:0-1", "delay_ms": 10}
    assert links(crossdc_pairs=[pair]).seconds(10, 10) == pytest.approx(0.02)


def test_an_env_worker_that_no_link_names_is_not_delayed() -> None:
    assert links(rank=2, crossdc_pairs=[PAIR]).seconds(10, 10) == 0.0


def test_the_slowest_rollout_worker_that_may_answer_counts() -> None:
    slow = {"src": "EnvGroup:0-3", "dst": "RolloutGroup:1", "delay_ms": 25}
    assert links(crossdc_pairs=[PAIR, slow]).seconds(10, 10) == pytest.approx(0.05)


def test_the_narrower_of_the_two_groups_limits_a_transfer() -> None:
    groups = [group(["Env:0", "Env:1"], 10), group(["Rollout:0-1"], 2)]
    assert links(bandwidth_groups=groups).seconds(MEGABIT, 2 * MEGABIT) == pytest.approx(0.5 + 1.0)


def test_a_request_waits_for_the_transfer_before_it() -> None:
    clock = Clock()
    emulation = links(clock=clock, bandwidth_groups=[group("Env:0", 1)])
    assert emulation.trajectory_seconds(2 * MEGABIT) == pytest.approx(2.0)
    assert emulation.seconds(MEGABIT, 0) == pytest.approx(2.0 + 1.0)
    clock.now += 10
    assert emulation.seconds(MEGABIT, 0) == pytest.approx(1.0)


def test_the_two_directions_do_not_wait_for_each_other() -> None:
    emulation = links(bandwidth_groups=[group("Env:0", 1)])
    assert emulation.seconds(0, 5 * MEGABIT) == pytest.approx(5.0)
    assert emulation.trajectory_seconds(MEGABIT) == pytest.approx(1.0)


def test_a_trajectory_takes_the_link_to_the_learner_once() -> None:
    pair = {"src": "Env:0", "dst": "Actor:0", "delay_ms": 40}
    emulation = links(crossdc_pairs=[PAIR, pair], bandwidth_groups=[group("Actor:0", 4)])
    assert emulation.seconds(MEGABIT, MEGABIT) == pytest.approx(0.02)
    assert emulation.trajectory_seconds(MEGABIT) == pytest.approx(0.04 + 0.25)
