import pytest

from zmqrl.rollout.prefetch import Prefetch


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def decisions(batch_s, gap_s, batches=40, fixed=None):
    """What is decided at the beginning of each batch, if each takes `batch_s` and the next `gap_s`."""
    clock = Clock()
    prefetch = Prefetch(fixed, clock)
    decided = []
    for _ in range(batches):
        decided.append(prefetch.begin())
        clock.now += batch_s
        prefetch.end()
        clock.now += 0.0 if decided[-1] else gap_s
    return decided


def test_batches_as_short_as_the_way_to_the_broker_are_asked_for_early():
    assert decisions(batch_s=0.0005, gap_s=0.0002, batches=1000).count(True) > 930


def test_long_batches_are_not():
    assert not any(decisions(batch_s=0.06, gap_s=0.0002))


def test_an_idle_pool_does_not_look_like_a_long_way():
    clock = Clock()
    prefetch = Prefetch(None, clock)
    for gap_s in [0.0002] + [5.0] * 10:
        assert not prefetch.begin()
        clock.now += 0.06
        prefetch.end()
        clock.now += gap_s


def test_a_pool_that_was_idle_at_first_does_not_ask_early_for_long_batches_for_ever():
    clock = Clock()
    prefetch = Prefetch(None, clock)
    decided = []
    for number in range(100):
        decided.append(prefetch.begin())
        clock.now += 0.06
        prefetch.end()
        if number == 0:
            clock.now += 0.1  # the first step of all simulators
        elif not decided[-1]:
            clock.now += 0.0002
    assert not any(decided[40:])


def test_it_stops_when_batches_become_long():
    clock = Clock()
    prefetch = Prefetch(None, clock)
    decided = []
    for batch_s in [0.0005] * 5 + [0.06] * 5:
        decided.append(prefetch.begin())
        clock.now += batch_s
        prefetch.end()
        clock.now += 0.0 if decided[-1] else 0.0002
    assert decided[1:6] == [True] * 5
    assert not any(decided[7:])


def test_a_batch_that_was_asked_for_before_does_not_make_the_way_look_short():
    clock = Clock()
    prefetch = Prefetch(None, clock)
    decided, is_under_way = [], False
    for _ in range(400):
        decided.append(prefetch.begin())
        clock.now += 0.001
        prefetch.end()
        # The broker gives one for the question and, a moment later, one for the result.
        clock.now += 0.00002 if decided[-1] or is_under_way else 0.0002
        is_under_way = decided[-1]
    assert decided.count(True) > 350


def test_where_nothing_waits_it_asks_but_now_and_then_until_it_helps_again():
    clock = Clock()
    prefetch = Prefetch(None, clock)
    decided = []
    for number in range(600):
        decided.append(prefetch.begin())
        clock.now += 0.0001
        prefetch.end()
        is_waiting = number >= 300  # then the next batch is there already, if it was asked for
        clock.now += 0.0 if is_waiting and decided[-1] else 0.0003
    assert 5 < decided[100:300].count(True) < 20
    assert decided[340:].count(True) > 240


@pytest.mark.parametrize("fixed", [True, False])
def test_a_fixed_choice_is_kept(fixed):
    assert set(decisions(0.06, 0.0002, fixed=fixed)) == {fixed}
