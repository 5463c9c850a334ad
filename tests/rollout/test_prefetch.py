import pytest

from zmqrl.rollout.prefetch import Prefetch

WAY = 0.0002
"""Seconds from a result to the next batch, if one waits."""


class Worker:
    """A rollout worker and its broker."""

    def __init__(self, fixed=None):
        self.now = 50.0
        self.asked = []
        self._prefetch = Prefetch(fixed, lambda: self.now)
        self._given_ahead = False
        self._queued_s = 0.0

    def run(self, batches, batch_s, way_s=WAY, idle_s=0.0, is_full=True, held_s=0.0):
        """Take so many batches; returns for each whether the next one was asked for in it.

        Args:
            batches: How many.
            batch_s: Seconds that each takes.
            way_s: Seconds from a result to the next batch.
            idle_s: Seconds after the result until somebody asks; 0: the next batch waits already.
            is_full: Whether what waits is enough for a batch that is given ahead.
            held_s: How long the batch is held open, since somebody has asked while the worker was idle.
        """
        for _ in range(batches):
            self.asked.append(self._prefetch.begin(self._given_ahead, self._queued_s))
            self.now += batch_s
            self._prefetch.end()
            self._given_ahead = self.asked[-1] and is_full and not idle_s
            self._queued_s = held_s + 0.00001 if idle_s else batch_s + way_s / 2
            self.now += 0.0 if self._given_ahead else way_s + idle_s + held_s
        return self.asked[-batches:]


def test_batches_as_short_as_the_way_to_the_broker_are_asked_for_early():
    assert Worker().run(1000, batch_s=0.0005).count(True) > 950


def test_long_batches_are_not():
    assert not any(Worker().run(100, batch_s=0.06))


@pytest.mark.parametrize("before", [0, 1, 20], ids=["at first", "after one", "after many"])
def test_an_idle_pool_does_not_look_like_a_long_way(before):
    worker = Worker()
    worker.run(before, batch_s=0.06)
    worker.run(100, batch_s=0.06, idle_s=5.0)
    assert not any(worker.run(100, batch_s=0.06)), (
        "it asked ahead for long batches in the burst that followed"
    )


def test_a_batch_that_is_held_open_does_not_look_like_a_long_way():
    assert not any(Worker().run(100, batch_s=0.5, idle_s=0.001, is_full=False, held_s=0.05))


def test_it_stops_when_batches_become_long():
    worker = Worker()
    assert worker.run(8, batch_s=0.0005)[2:] == [True] * 6
    assert not any(worker.run(5, batch_s=0.06)[2:])


def test_it_begins_when_the_way_becomes_long():
    worker = Worker()
    assert not any(worker.run(50, batch_s=0.01))
    worker.run(16, batch_s=0.01, way_s=0.01)
    assert worker.run(100, batch_s=0.01, way_s=0.01).count(True) > 90


def test_where_no_full_batch_waits_it_asks_but_now_and_then_until_it_helps_again():
    worker = Worker()
    assert 5 < worker.run(300, batch_s=0.0005, is_full=False)[100:].count(True) < 20
    assert worker.run(300, batch_s=0.0005)[40:].count(True) > 240


@pytest.mark.parametrize("fixed", [True, False])
def test_a_fixed_choice_is_kept(fixed):
    assert set(Worker(fixed).run(100, batch_s=0.06)) == {fixed}
