import pytest

from zmqrl.rollout.prefetch import Prefetch

WAY = 0.0002
"""Seconds from a result to the next batch, if something waits."""


class Worker:
    """A rollout worker whose broker always has a batch for it, unless told otherwise."""

    def __init__(self, fixed=None):
        self.now = 50.0
        self.asked = []
        self._prefetch = Prefetch(fixed, lambda: self.now)
        self._given_ahead = False

    def run(self, batches, batch_s, gap_s=WAY, is_waiting=True):
        """Take so many batches; returns for each whether the next one was asked for in it."""
        for _ in range(batches):
            self.asked.append(self._prefetch.begin(self._given_ahead))
            self.now += batch_s
            self._prefetch.end()
            self._given_ahead = self.asked[-1] and is_waiting
            self.now += 0.0 if self._given_ahead else gap_s
        return self.asked[-batches:]


def test_batches_as_short_as_the_way_to_the_broker_are_asked_for_early():
    assert Worker().run(1000, batch_s=0.0005).count(True) > 950


def test_long_batches_are_not():
    assert not any(Worker().run(100, batch_s=0.06)[1:])


def test_an_idle_pool_does_not_look_like_a_long_way():
    worker = Worker()
    worker.run(2, batch_s=0.06)
    assert not any(worker.run(10, batch_s=0.06, gap_s=5.0))


def test_a_pool_that_was_idle_at_first_does_not_ask_early_for_long_batches_for_ever():
    worker = Worker()
    worker.run(1, batch_s=0.06, gap_s=0.1)  # the first step of all simulators
    assert not any(worker.run(100, batch_s=0.06)[40:])


def test_it_stops_when_batches_become_long():
    worker = Worker()
    assert worker.run(6, batch_s=0.0005)[1:] == [True] * 5
    assert not any(worker.run(5, batch_s=0.06)[2:])


def test_it_begins_when_the_way_becomes_long():
    worker = Worker()
    assert not any(worker.run(50, batch_s=0.01)[1:])
    worker.run(16, batch_s=0.01, gap_s=0.01)
    assert worker.run(100, batch_s=0.01, gap_s=0.01).count(True) > 90


def test_where_nothing_waits_it_asks_but_now_and_then_until_it_helps_again():
    worker = Worker()
    assert 5 < worker.run(300, batch_s=0.0001, is_waiting=False)[100:].count(True) < 20
    assert worker.run(300, batch_s=0.0001)[40:].count(True) > 240


@pytest.mark.parametrize("fixed", [True, False])
def test_a_fixed_choice_is_kept(fixed):
    assert set(Worker(fixed).run(100, batch_s=0.06)) == {fixed}
