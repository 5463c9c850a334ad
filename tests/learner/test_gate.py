"""The gates: the pace of both sides, and that they never wait for each other."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hand_made import config

from zmqrl.learner.gate import Gate, Progress, gate_of
from zmqrl.learner.ledger import Ledger

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("ratio", "updates", "env_steps", "may"),
    [(None, 10**9, 0, True), (1.0, 0, 0, False), (1.0, 0, 1, True), (1.0, 1, 1, False),
     (0.5, 0, 1, False), (0.5, 0, 2, True), (2.0, 1, 1, True), (2.0, 2, 1, False)],
)  # fmt: skip
def test_the_learner_makes_no_more_updates_than_the_env_steps_allow(ratio, updates, env_steps, may):
    assert Gate(ratio).may_update(Progress(updates=updates, env_steps=env_steps)) is may


def busy(**progress):
    """Progress of a learner that has begun."""
    return Progress(**{"hungry": False, **progress})


@pytest.mark.parametrize(
    ("progress", "may"),
    [
        (busy(updates=100, env_steps=100), True),
        (busy(updates=90, env_steps=100), True),
        (busy(updates=89, env_steps=100), False),
        (busy(updates=99, env_steps=100, under_way=1, env_steps_under_way=10), False),
        (busy(updates=100, env_steps=100, under_way=1, env_steps_under_way=10), True),
        (busy(updates=100, env_steps=100, under_way=1, env_steps_under_way=11), False),
        (Progress(updates=0, env_steps=100), True),
    ],
)
def test_env_workers_get_no_further_ahead_than_the_slack(progress, may):
    assert Gate(1.0, slack_steps=20).may_begin(progress, 10) is may


def test_a_trajectory_larger_than_the_slack_may_begin_when_the_learner_has_nothing_else():
    gate = Gate(1.0, slack_steps=0)
    assert gate.may_begin(busy(updates=8, env_steps=8), 2**31)
    assert not gate.may_begin(busy(updates=7, env_steps=8), 1)
    assert not gate.may_begin(busy(updates=8, env_steps=8, under_way=1, env_steps_under_way=1), 1)


@pytest.mark.parametrize(
    ("threshold", "trajectories", "under_way", "versions", "oldest", "may"),
    [
        (None, 99, 99, 0, 0, True),
        (0, 0, 3, 0, 0, True),
        (0, 0, 4, 0, 0, False),
        (0, 4, 0, 0, None, False),
        (0, 4, 0, 1, None, True),
        (1, 4, 3, 0, 0, True),
        (1, 4, 4, 0, 0, False),
        (1, 8, 1, 2, 1, True),
        (1, 8, 1, 2, 0, False),
    ],
)
def test_begun_trajectories_are_bounded_by_the_versions(
    threshold, trajectories, under_way, versions, oldest, may
):
    gate = Gate(staleness_threshold=threshold, trajectories_per_version=4)
    progress = busy(
        trajectories=trajectories, under_way=under_way, versions=versions, oldest_under_way=oldest
    )
    assert gate.may_begin(progress, 1) is may


# -- Random schedules


class Pace:
    """A pool under a fake clock: `W` workers with trajectories of `T` steps, and a learner.

    Args:
        gate: Under test.
        workers: W.
        steps: T.
        rng: Chooses who moves.
        learns_in_steps: Like PPO: each version takes as many trajectories as the gate says. Otherwise
            an update is made whenever the gate allows.
        stuck: A worker that never finishes.
    """

    def __init__(self, gate, workers, steps, rng, learns_in_steps=False, stuck=None):
        self.gate, self.steps, self.rng = gate, steps, rng
        self.learns_in_steps, self.stuck = learns_in_steps, stuck
        self.ledger = Ledger()
        self.senders = [self.ledger.hello(b"%d" % w, f"env-{w}", 1, 1, 0.0)[0] for w in range(workers)]
        self.speed = [rng.choice((1, 1, 1, 8)) for _ in range(workers)]
        self.begun_at = {}
        self.now = 0.0
        self.updates = self.versions = self.at_hand = self.questions = 0
        self.inbox, self.updating, self.lags = [], False, []
        self.finished = [0] * workers

    def progress(self):
        afoot = self.ledger.under_way(self.now)
        return busy(
            updates=self.updates,
            env_steps=self.ledger.env_steps,
            trajectories=self.ledger.received,
            versions=self.versions,
            under_way=afoot.count,
            env_steps_under_way=afoot.env_steps,
            oldest_under_way=afoot.oldest_version,
        )

    def begin(self, worker):
        if not self.gate.may_begin(self.progress(), self.steps):
            return False
        self.questions += 1
        sender = self.senders[worker]
        self.ledger.begun(sender, 0, self.questions, self.steps, self.versions, self.now)
        self.begun_at[worker] = self.versions
        return True

    def finish(self, worker):
        sender = self.senders[worker]
        self.ledger.arrived(sender, sender.received + 1, 0, self.steps, self.now)
        self.inbox.append(self.begun_at.pop(worker))
        self.finished[worker] += 1

    def learn(self):
        """One move of the learner, if there is one."""
        if self.updating:
            self.updating = False
            self.versions += 1
            return True
        self.lags += [self.versions - begun for begun in self.inbox]
        self.at_hand += len(self.inbox)
        self.inbox.clear()
        if self.learns_in_steps:
            needed = self.gate.trajectories_per_version
            if self.at_hand < needed:
                return False
            self.at_hand -= needed
            self.updating = True
            return True
        if not self.gate.may_update(self.progress()):
            return False
        self.updates += 1
        return True

    def move(self):
        """Something that can happen happens; fails if nothing can."""
        self.now += 0.01
        workers = list(range(len(self.senders)))
        self.rng.shuffle(workers)
        kinds = ["learn", "workers"]
        self.rng.shuffle(kinds)
        for kind in kinds:
            if kind == "learn" and self.learn():
                return
            for worker in workers if kind == "workers" else ():
                if worker not in self.begun_at:
                    if self.begin(worker):
                        return
                elif worker != self.stuck and self.rng.random() < 1 / self.speed[worker]:
                    self.finish(worker)
                    return
        if not [worker for worker in self.begun_at if worker != self.stuck]:
            assert self.stuck is not None, f"everybody waits: {self.progress()}"
            self.now += 1.0  # until the straggler no longer counts


@pytest.mark.parametrize("ratio", [0.004, 0.01, 0.1, 0.3, 1.0, 2.5])
@pytest.mark.parametrize(("workers", "steps"), [(1, 1), (1, 16), (3, 7), (5, 16)])
def test_with_the_least_legal_slack_nobody_waits_for_ever_and_the_ratio_holds(ratio, workers, steps):
    overrides = (
        f"algorithm.updates_per_env_step={ratio}",
        f"env.train.total_num_envs={workers}",
        f"env.train.max_steps_per_rollout_epoch={steps}",
        f"cluster.component_placement.env=0-{workers - 1}",
    )
    slack = config("sac", *overrides).least_slack_steps
    gate = gate_of(config("sac", *overrides, f"algorithm.ratio_slack_steps={slack}"))
    assert gate.slack_steps == slack
    for seed in range(10):
        pace = Pace(gate, workers, steps, random.Random(seed))
        for _ in range(300):
            pace.move()
            progress = pace.progress()
            assert progress.updates <= progress.env_steps * ratio
            ahead = progress.env_steps + progress.env_steps_under_way
            assert ahead <= progress.updates / ratio + slack + math.ceil(1 / ratio)
        assert pace.updates > 0 or ratio * pace.ledger.env_steps < 1
        assert sum(pace.finished) > 5


@pytest.mark.parametrize("threshold", [0, 1, 2])
@pytest.mark.parametrize(("workers", "per_version"), [(1, 1), (4, 4), (4, 8), (5, 3), (3, 1)])
def test_no_trajectory_lags_behind_by_more_than_the_threshold(threshold, workers, per_version):
    gate = Gate(staleness_threshold=threshold, trajectories_per_version=per_version)
    lags = set()
    for seed in range(20):
        pace = Pace(gate, workers, 4, random.Random(seed), learns_in_steps=True)
        for _ in range(400):
            pace.move()
        assert pace.versions > 5
        lags |= set(pace.lags)
    assert max(lags) <= threshold
    if workers > 1:
        assert max(lags) == threshold, "the gate holds back more than it has to"


@pytest.mark.parametrize(
    "gate",
    [
        Gate(1.0, slack_steps=3 * 4),
        Gate(staleness_threshold=0, trajectories_per_version=2),
        Gate(staleness_threshold=2, trajectories_per_version=3),
    ],
)
def test_a_worker_that_is_stuck_for_ever_does_not_stop_the_others(gate):
    for seed in range(5):
        rng = random.Random(seed)
        in_steps = gate.staleness_threshold is not None
        pace = Pace(gate, 3, 4, rng, learns_in_steps=in_steps, stuck=0)
        for _ in range(1000):
            pace.move()
        assert pace.finished[0] == 0
        assert min(pace.finished[1:]) > 10


@pytest.mark.parametrize(
    "waits",
    [
        Progress(trajectories=100, hungry=True),
        Progress(trajectories=100, hungry=False, updates=10, env_steps=10),
    ],
    ids=["for data", "for the ratio"],
)
def test_a_threshold_that_lets_in_too_little_for_the_next_version_slows_down_but_does_not_stop(waits):
    gate = Gate(
        updates_per_env_step=0.5, slack_steps=64, staleness_threshold=1, trajectories_per_version=4
    )
    assert gate.may_begin(waits, 16)
    assert not gate.may_begin(replace(waits, under_way=1, oldest_under_way=0), 16)
    assert not gate.may_begin(replace(waits, waiting=1), 16)
