"""Workers that ask for their next batch before they have done the one in hand."""

import pytest
from driver import STEP, Pool

from zmqrl.transport.header import Op


def busy_ahead(asked=2, **options):
    """A pool whose only worker is in a batch of a1 and has asked ahead; `asked` more requests wait."""
    pool = Pool(queue_size=2, **options)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    worker.ahead()
    for _ in range(asked):
        client.ask()
    pool.turn()
    return pool, client, worker


def test_a_worker_that_asks_ahead_is_given_its_next_batch_while_it_is_in_the_first():
    pool, client, worker = busy_ahead()
    assert worker.who == [["a1"], ["a2", "a3"]]
    assert [batch.ahead for batch in worker.batches] == [False, True]
    for batch in list(worker.batches):
        worker.answer(batch)
    pool.turn()
    assert client.answers == [("REPLY", 1), ("REPLY", 2), ("REPLY", 3)]
    assert pool.holds_nothing()
    assert pool.counters["requeued"] == pool.counters["late_results"] == 0


def test_a_batch_for_a_result_is_not_called_one_ahead_although_it_was_asked_for():
    pool, client, worker = busy_ahead(asked=0)
    client.ask()
    client.ask()
    worker.answer()  # before the broker could give them
    pool.turn()
    assert [batch.ahead for batch in worker.batches] == [False, False]


def test_one_batch_more_is_all_that_a_worker_is_given():
    pool, _, worker = busy_ahead(asked=4)
    worker.ahead()  # a worker that does not begin the batch it names
    worker.ahead(worker.batches[0].number)
    pool.turn()
    assert worker.who == [["a1"], ["a2", "a3"]]
    worker.answer(worker.batches[0])
    pool.turn()
    assert len(worker.who) == 2  # done with the first, it begins the second
    worker.ahead()
    pool.turn()
    assert worker.who[2:] == [["a4", "a5"]]


def test_less_than_a_full_batch_is_not_sent_ahead():
    pool = Pool(queue_size=2)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    worker.ahead()
    client.ask()
    pool.turn()
    assert worker.who == [["a1"]]
    client.ask()
    pool.turn()
    assert worker.who == [["a1"], ["a2", "a3"]]


def test_an_idle_worker_comes_before_one_that_asks_ahead():
    pool = Pool(queue_size=2)
    client, busy = pool.client("a"), pool.worker("busy")
    client.ask()
    pool.turn()
    busy.ahead()
    idle = pool.worker("idle")
    client.ask()
    client.ask()
    pool.turn()
    assert (busy.who, idle.who) == ([["a1"]], [["a2", "a3"]])


def test_a_worker_that_asked_ahead_in_vain_is_idle_with_its_result():
    pool, client, worker = busy_ahead(asked=0)
    worker.answer()
    client.ask()
    pool.turn()
    assert worker.who == [["a1"], ["a2"]]
    assert pool.status["workers"][0]["shards"] == 1


@pytest.mark.parametrize("way", ["lose", "vanish", "bye", "hello"])
def test_both_batches_of_a_lost_worker_run_elsewhere_and_only_the_first_counts_an_attempt(way):
    pool, client, worker = busy_ahead()
    other = pool.worker("other")
    if way == "bye":  # it has read the first only: a worker that leaves does not begin another
        worker.batches.pop()
    getattr(worker, way)()
    pool.wait(1.0)
    assert [entry.attempt for entry, _ in other.batch.shards] == [1, 0]
    assert other.who == [["a1", "a2"]]
    other.answer()
    pool.turn()
    assert other.who[1:] == [["a3"]]
    other.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1), ("REPLY", 2), ("REPLY", 3)]
    assert pool.counters["requeued"] == 1


def test_a_batch_that_waited_behind_another_has_all_of_the_attempt_timeout():
    pool, _, worker = busy_ahead(attempt_timeout=4.0)
    pool.wait(3.0)
    worker.answer(worker.batches[0])
    pool.wait(3.0)
    assert pool.status["workers"][0]["state"] == "busy"
    pool.wait(1.5)
    assert pool.status["workers"][0]["state"] == "stuck"


def test_a_worker_that_goes_from_batch_to_batch_is_not_shown_as_busy_with_one_for_long():
    pool, client, worker = busy_ahead()
    for _ in range(8):
        pool.turn(STEP)
        worker.answer(worker.batches[-2])
        worker.ahead()
        client.ask()
        client.ask()
        pool.turn()
    pool.turn(STEP)
    assert len(worker.batches) == 10
    (shown,) = pool.status["workers"]
    assert (shown["state"], shown["state_s"]) == ("busy", STEP)


def test_a_worker_that_is_stuck_in_its_first_batch_gives_both_back():
    pool, client, worker = busy_ahead(attempt_timeout=4.0)
    other = pool.worker("other", ready=False)
    pool.wait(4.5)
    other.ready()
    pool.turn()
    assert other.who == [["a1", "a2"]]
    for batch in list(worker.batches):  # it comes back after all
        worker.answer(batch)
    pool.turn()
    assert client.answers == []
    assert pool.counters["late_results"] == 2
    assert worker.who[2:] == [["a3"]]


def test_a_worker_that_was_stuck_gets_no_work_before_it_is_done_with_what_was_taken_back():
    pool, _, worker = busy_ahead(attempt_timeout=4.0)
    pool.wait(4.25)
    worker.answer(worker.batches[0])
    pool.turn()
    assert len(worker.batches) == 2  # it computes the second, although nobody waits for that
    worker.answer(worker.batches[1])
    pool.turn()
    assert worker.who[2:] == [["a1", "a2"]]


def test_a_batch_sent_ahead_that_got_lost_on_the_way_runs_again():
    pool = Pool(queue_size=2)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    worker.ahead()
    pool.lose_batches_to.add(worker.peer)
    client.ask()
    client.ask()
    pool.turn()
    assert len(pool.lost_batches) == 1
    worker.answer()
    for _ in range(3):
        pool.wait(0.75)
        worker.ready()
    pool.turn()
    assert worker.who == [["a1"], ["a2", "a3"]]
    assert pool.counters["requeued"] == 2


def test_a_ready_before_the_batch_sent_ahead_has_come_does_not_take_it_back_at_once():
    pool, _, worker = busy_ahead()
    worker.answer(worker.batches[0])
    worker.ready(worker.batches[0].number)
    pool.turn()
    assert pool.counters["requeued"] == 0
    worker.answer(worker.batches[1])
    pool.turn()
    assert pool.holds_nothing()


def test_the_result_of_the_second_batch_tells_that_that_of_the_first_was_lost():
    pool, client, worker = busy_ahead()
    worker.answer(worker.batches[1])
    pool.turn()
    assert client.answers == [("REPLY", 2), ("REPLY", 3)]
    assert worker.who[2:] == [["a1"]]
    worker.answer()
    pool.turn()
    assert pool.holds_nothing()


def test_a_batch_that_cannot_be_sent_ahead_leaves_the_first_where_it_is():
    pool, _, worker = busy_ahead(asked=0)
    second = pool.client("b")
    second.ask()
    second.ask()
    pool.broker.dispatch()
    pool.broker.take_outbox()
    pool.broker.undelivered(worker.peer)
    assert pool.status["workers"][0]["shards"] == 1
    assert pool.status["open_requests"] == 3
    worker.answer()
    pool.turn()
    assert worker.who == [["a1"], ["b1", "b2"]]
    assert [entry.attempt for entry, _ in worker.batch.shards] == [0, 0]


def test_in_normal_mode_nothing_is_sent_ahead():
    pool = Pool(decoupled=False)
    clients = [pool.client(name, rank=i, world_size=2) for i, name in enumerate("ab")]
    worker = pool.worker("w", rank=0, world_size=1)
    for client in clients:
        client.ask()
    pool.turn()
    worker.ahead()
    for client in clients:
        client.ask()
    pool.turn()
    assert worker.who == [["a1", "b1"]]


def test_a_worker_that_holds_nothing_asks_ahead_in_vain():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w", ready=False)
    worker.ahead(7)
    client.ask()
    pool.turn()
    assert worker.who == []
    assert [m.op for m in worker.inbox if m.op is Op.ERROR] == []
