"""The scheduler over an hour of a large pool, against what can be worked out.

With N env workers that step for Z seconds on average, W rollout workers that take
S(n) = base + n * per_row seconds for a batch of n, and a broker that takes no time, the throughput X is:

* N / (Z + S(1)) while the env workers are the limit: somebody is always idle, so every request runs at
  once, and alone.
* W * q / S(q) while the rollout workers are, with batches of at most q: there is always a full batch.
* W * n / S(n) in between, where all are busy with what batches there are, of n requests on average.
  Workers get idle at random moments, so n is also how many wait, and the batch that a request gets into
  is longer than others, 2 * n + 1; X * (Z + S(2 * n + 1)) + n = N gives n. Were all equally long,
  X * Z + W * n = N would, and that is the most that any scheduler could reach.
* Where workers keep state, each of them and its N / W clients are a pool of their own, with as many in a
  batch as came while the one before it ran. So n are in it and n / 2 wait on average:
  X * Z + 3 / 2 * W * n = N.
* In normal mode each of the W groups of m = N / W env workers waits for its slowest:
  m / (Z_max + S(m)), where Z_max is the mean of the longest of m steps; of steps between a and b,
  a + (b - a) * m / (m + 1).

Everything is a few hundred times slower here than in a real pool, so that an hour has as many requests
as can be simulated in seconds. `ZMQRL_SIMULATION=full` takes ten times as many peers: 10,000 env workers
and 256 rollout workers.
"""

from __future__ import annotations

import os
import random
from dataclasses import asdict

import pytest
from simulation import Simulation, held

FULL = os.environ.get("ZMQRL_SIMULATION") == "full"
CLIENTS, WORKERS = (10_000, 256) if FULL else (1_000, 26)
BASE, PER_ROW = 12.0, 0.8
MINUTE = 60.0

pytestmark = pytest.mark.timeout(600 if FULL else 60)


def batch_s(rows: float) -> float:
    return BASE + PER_ROW * rows


class Hour:
    """A pool from its tenth minute to its sixtieth, and the things that must hold of every pool."""

    def __init__(self, clients, workers, step, base=BASE, per_row=PER_ROW, **options):
        self.pool = pool = Simulation(clients, workers, step, base, per_row, **options)
        held_before = self._held(5, 10)
        before = [client.answers for client in pool.clients]
        for client in pool.clients:
            client.longest = 0.0  # all began within a few minutes
        used_before, shards_before = pool.used_s(), self._shards()
        assert self._held(55, 60) < 1.1 * held_before
        seconds = 50 * MINUTE
        self.homes = [worker["homes"] for worker in pool.broker.status()["workers"]]
        counts = [client.answers - b for client, b in zip(pool.clients, before, strict=True)]
        self.rate = sum(counts) / seconds
        self.shares = [count * len(counts) / sum(counts) for count in counts]
        """Of each client, where 1 is its fair one."""
        self.longest = max(client.longest for client in pool.clients)
        self.shards = self._shards() - shards_before
        self.used_s = pool.used_s() - used_before
        """Seconds that workers were alive and did not work in vain."""
        pool.finish()
        self._books_are_right()
        self._nothing_is_left()

    def _shards(self):
        return sum(worker.shards for worker in self.pool.workers)

    def _held(self, first, last):
        """The most objects that the broker holds at the end of one of these minutes."""
        counts = []
        for minute in range(first, last + 1):
            self.pool.run(minute * MINUTE)
            counts.append(held(self.pool.broker))
        return max(counts)

    def _books_are_right(self):
        pool, counters = self.pool, self.pool.broker.counters
        assert pool.crossed == 0
        assert counters.answered == pool.answers
        assert counters.cancelled == pool.given_up
        assert counters.requests == counters.answered + counters.cancelled
        unexpected = ("errors", "duplicates", "overloaded", "malformed", "unknown")
        assert {name: asdict(counters)[name] for name in unexpected} == dict.fromkeys(unexpected, 0)

    def _nothing_is_left(self):
        status = self.pool.broker.status()
        assert (status["open_requests"], status["open_bytes"]) == (0, 0)
        assert (status["clients"], status["workers"]) == ([], [])
        assert held(self.pool.broker) < 2_000 + 10 * WORKERS, (
            "the totals of each worker stay, and little else"
        )


def throughput(clients_at):
    """Of workers that are all busy, and the mean size of their batches: all clients are somewhere."""
    low, high = 0.0, CLIENTS / WORKERS
    while high - low > 1e-6:
        n = (low + high) / 2
        rate = WORKERS * n / batch_s(n)
        low, high = (n, high) if clients_at(rate, n) < CLIENTS else (low, n)
    return rate, n


def between(low, high):
    return lambda random: random.uniform(low, high)


def test_while_env_workers_are_the_limit_every_request_runs_at_once():
    hour = Hour(CLIENTS, WORKERS, between(30, 90), base=0.06, per_row=0.004)
    assert hour.rate == pytest.approx(CLIENTS / (60 + 0.064), rel=0.02)
    assert hour.longest == pytest.approx(0.064)
    assert 0.75 < min(hour.shares) <= max(hour.shares) < 1.25


def test_a_long_tail_of_step_times_holds_up_nobody_else():
    def step(random: random.Random) -> float:
        return 30 + (600 if random.random() < 0.05 else 0)

    hour = Hour(CLIENTS, WORKERS, step, base=0.06, per_row=0.004)
    assert hour.rate == pytest.approx(CLIENTS / (60 + 0.064), rel=0.02)
    assert hour.longest == pytest.approx(0.064)


def test_while_rollout_workers_are_the_limit_all_batches_are_full_and_all_wait_equally():
    hour = Hour(CLIENTS, WORKERS, between(5, 15), queue_size=16)
    best = WORKERS * 16 / batch_s(16)
    assert hour.rate == pytest.approx(best, rel=0.02)
    assert 0.8 < min(hour.shares) <= max(hour.shares) < 1.2
    assert hour.longest < 1.2 * CLIENTS / best, "a round of all"


@pytest.mark.slow
def test_with_the_automatic_cap_nobody_is_idle_and_nobody_waits_for_long():
    hour = Hour(CLIENTS, WORKERS, between(30, 90))
    expected, n = throughput(lambda rate, n: rate * (60 + batch_s(2 * n + 1)) + n)
    best, _ = throughput(lambda rate, n: rate * 60 + WORKERS * n)
    assert hour.rate == pytest.approx(expected, rel=0.02)
    assert hour.rate > 0.9 * best
    assert 0.75 < min(hour.shares) <= max(hour.shares) < 1.25
    assert hour.longest < 3 * batch_s(n)


def test_peers_that_die_cost_what_they_had_in_hand_and_nothing_else():
    hour = Hour(
        CLIENTS,
        WORKERS,
        between(5, 15),
        queue_size=16,
        max_attempts=100,
        mean_life=30 * MINUTE,
        absent=MINUTE,
        mean_client_life=30 * MINUTE,
    )
    counters = hour.pool.broker.counters
    assert counters.lost_workers > WORKERS
    assert counters.requeued > 10 * WORKERS
    assert counters.cancelled > CLIENTS / 4
    best = hour.used_s * 16 / batch_s(16)
    assert 0.98 * best < hour.shards < 1.02 * best
    assert hour.longest < 2 * CLIENTS / (WORKERS * 16 / batch_s(16))


@pytest.mark.slow
def test_a_worker_that_is_ten_times_slower_costs_what_it_does_not_do_itself():
    hour = Hour(400, 4, between(5, 15), base=1.2, per_row=0.08, queue_size=16, slow={2: 10.0})
    batch = 1.2 + 0.08 * 16
    best = 3.1 * 16 / batch
    assert 0.98 * best < hour.rate < 1.02 * best
    assert hour.longest < 10 * batch + 400 / best
    assert 0.8 < min(hour.shares) <= max(hour.shares) < 1.2


def test_in_normal_mode_each_group_waits_for_its_slowest():
    hour = Hour(64, 4, between(5, 15), base=1.2, per_row=0.08, decoupled=False)
    best = 64 / (5 + 10 * 16 / 17 + 1.2 + 0.08 * 16)
    assert hour.rate == pytest.approx(best, rel=0.02)
    assert 0.95 < min(hour.shares) <= max(hour.shares) < 1.05


@pytest.mark.slow
def test_with_homes_each_worker_and_its_clients_are_a_pool_of_their_own():
    hour = Hour(CLIENTS, WORKERS, between(30, 90), sticky=True)
    expected, _ = throughput(lambda rate, n: rate * 60 + 1.5 * WORKERS * n)
    assert hour.rate == pytest.approx(expected, rel=0.03)
    assert 0.75 < min(hour.shares) <= max(hour.shares) < 1.25
    assert 0 <= max(hour.homes) - min(hour.homes) <= 1
    assert sum(hour.homes) == CLIENTS
