"""The share of each env worker in the training data, and its cap."""

from __future__ import annotations

import random

import pytest

from zmqrl.learner import shares as shares_module
from zmqrl.learner.gate import Gate
from zmqrl.learner.ledger import Ledger
from zmqrl.learner.shares import Shares


@pytest.mark.parametrize(
    ("cap", "held", "active", "may"),
    [
        (None, {"a": 9, "b": 1}, 2, True),
        (0.6, {}, 1, True),
        (0.6, {"a": 1}, 2, False),
        (0.6, {"a": 6, "b": 4}, 2, True),
        (0.6, {"a": 61, "b": 39}, 2, False),
        (0.6, {"a": 61, "b": 39}, 1, True),  # b is stuck, or gone
        (0.1, {"a": 3, "b": 3, "c": 3}, 3, True),  # an equal share is everybody's right
        (0.1, {"a": 4, "b": 3, "c": 3}, 3, False),
        (0.1, {"b": 3, "c": 3}, 3, True),
    ],
)
def test_an_env_worker_that_holds_more_than_the_cap_begins_no_trajectory(cap, held, active, may):
    assert Gate(max_env_share=cap).within_share("a", held, active) is may


class Race:
    """Env workers that take so long for a trajectory of 10 env steps, under a fake clock.

    Args:
        cap: The largest share.
        seconds: Of a trajectory, by env worker; infinite for one that is stuck.
        stages: Trajectories that each has under way at once.
    """

    def __init__(self, cap, seconds, stages=1):
        self.gate, self.seconds, self.stages = Gate(max_env_share=cap), seconds, stages
        self.ledger = Ledger()
        self.now = 0.0
        self.senders = [
            self.ledger.hello(b"%d" % i, f"env-{i}", 1, 1, 0.0)[0] for i in range(len(seconds))
        ]
        self.done_at = {}
        self.questions = 0
        self.idle_s = 0.0

    def run(self, seconds):
        until = self.now + seconds
        while self.now < until:
            for (index, stage), done in list(self.done_at.items()):
                if self.now >= done:
                    sender = self.senders[index]
                    self.ledger.arrived(sender, sender.received + 1, stage, 10, self.now)
                    del self.done_at[index, stage]
            self.ask()
            if not self.done_at:
                self.idle_s += 0.05
            self.now += 0.05
        return self.ledger.shares.metrics()

    def ask(self):
        ids = [(i, stage) for i in range(len(self.senders)) for stage in range(self.stages)]
        asking = [key for key in ids if key not in self.done_at]
        held = self.ledger.held(self.now)
        active = self.ledger.active(self.now, (self.senders[i].peer for i, _ in asking))
        for index, stage in asking:
            sender = self.senders[index]
            if self.gate.within_share(sender.name, held, active):
                self.questions += 1
                self.ledger.begun(sender, stage, self.questions, 10, 0, self.now)
                sender.heard = self.now
                held[sender.name] += 10
                self.done_at[index, stage] = self.now + self.seconds[index]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("cap", "seconds", "largest"),
    [
        (None, [0.1, 1.0], 0.91),
        (0.6, [0.1, 1.0], 0.6),
        (0.5, [0.1, 1.0], 0.5),
        (0.2, [0.1, 1.0], 0.5),
        (0.3, [0.1, 0.1, 0.1, 1.0, 1.0], 0.3),
        (0.9, [1.0, 1.0, 1.0], 0.33),
    ],
)
def test_shares_come_down_to_the_cap_and_no_further(stages, cap, seconds, largest):
    metrics = Race(cap, seconds, stages).run(200.0)
    assert metrics["train/share_max"] == pytest.approx(largest, abs=0.03)
    assert sum(metrics[f"train/share/env-{i}"] for i in range(len(seconds))) == pytest.approx(1.0)


@pytest.mark.parametrize("stages", [1, 2])
def test_nobody_waits_for_long_for_one_that_is_stuck_or_lost(stages):
    for lost in (False, True):
        race = Race(0.6, [0.1, 1.0], stages)
        race.run(60.0)
        race.seconds[1] = float("inf")
        for key in [key for key in race.done_at if key[0] == 1]:
            race.done_at[key] = float("inf")
        if lost:
            race.ledger.lost(race.senders.pop().peer)
            for key in [key for key in race.done_at if key[0] == 1]:
                del race.done_at[key]
        else:
            race.run(3 * 1.0 + 5.0 + 1.0)  # until it is a straggler
        before = race.ledger.received
        race.run(10.0)
        assert race.ledger.received - before >= 60 * stages
        assert race.ledger.shares.metrics()["train/share_max"] > 0.6


def test_whatever_the_speeds_somebody_is_always_at_work():
    for seed in range(20):
        rng = random.Random(seed)
        seconds = [rng.choice([0.1, 0.3, 1.0, 3.0]) for _ in range(rng.randint(1, 8))]
        race = Race(rng.choice([0.01, 0.3, 0.6]), seconds, rng.randint(1, 3))
        race.run(60.0)
        assert race.idle_s == 0.0, (seed, seconds)


def test_an_env_worker_that_has_delivered_nothing_has_a_share_of_nothing():
    ledger = Ledger()
    a, _ = ledger.hello(b"a", "a", 1, 1, 0.0)
    ledger.hello(b"b", "b", 1, 1, 0.0)
    assert ledger.shares.metrics() == {}
    ledger.arrived(a, 1, 0, 10, 0.0)
    assert ledger.shares.metrics() == {
        "train/share/a": 1.0,
        "train/share/b": 0.0,
        "train/share_min": 0.0,
        "train/share_max": 1.0,
    }


def test_a_name_keeps_its_share_over_restarts_and_names_without_end_share_one(monkeypatch):
    monkeypatch.setattr(shares_module, "_MOST_NAMED", 10)
    shares = Shares()
    for number in range(1000):
        shares.add(f"env-{number}", 1, 1)
        shares.add("env-0", 1, 1)
    shares.correct("env-999", 1, 0)
    assert len(shares.env_steps) <= 11
    assert shares.env_steps["env-0"] == 1001
    assert sum(shares.env_steps.values()) == 1999
    assert len(shares.recent) <= 100
