import gc

import numpy as np
import pytest
from driver import STEP, Pool

from zmqrl.broker.records import Request
from zmqrl.transport.header import Op

# -- A request and its reply


@pytest.mark.parametrize("size", [2, 4096], ids=["inline", "large"])
def test_a_request_goes_to_an_idle_worker_and_its_reply_home(size):
    pool = Pool()
    client, other, worker = pool.client("a"), pool.client("b"), pool.worker("w")
    client.ask(3, rows=2, size=size)
    pool.wait(0.5)
    worker.answer()
    pool.turn()
    (reply,) = client.inbox
    assert (reply.op, reply.request_id) == (Op.REPLY, 3)
    np.testing.assert_array_equal(reply.tree["actions"], np.full((2, size), 4))
    assert reply.header.policy_version == 7
    assert other.inbox == []
    assert pool.holds_nothing()
    assert pool.counters["answered"] == 1


def test_the_batch_tells_its_worker_how_long_each_request_waited():
    pool = Pool()
    client = pool.client("a")
    client.ask()
    pool.wait(0.5)
    worker = pool.worker("w")
    pool.turn()
    ((entry, _),) = worker.batch.shards
    assert (entry.queue_us, entry.attempt) == (500_000, 0)
    assert worker.batch.origins == [client.peer]


def test_the_same_request_id_of_two_clients_never_crosses():
    pool = Pool(queue_size=3)
    clients = [pool.client(name) for name in "abcd"]
    workers = [pool.worker("w0"), pool.worker("w1")]
    for number in range(1, 200):
        for client in clients[number % 4 :] + clients[: number % 4]:
            client.ask(number)
        for _ in range(2):
            pool.turn()
            for worker in workers[:: -1 if number % 3 else 1]:
                worker.answer()
        pool.turn()
        for client in clients:
            assert [m.tree["who"] for m in client.take()] == [[client.name, number]]
    assert pool.holds_nothing()


def test_an_error_of_the_policy_goes_home_and_is_counted_as_one():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    client.ask(3)
    pool.turn()
    worker.answer(op=Op.ERROR)
    pool.turn()
    assert client.answers == [("policy", 3)]
    assert (pool.counters["errors"], pool.counters["answered"]) == (1, 0)


def test_a_worker_without_work_waits_for_the_next_request():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    pool.wait(5.0)
    assert worker.batches == []
    client.ask()
    pool.turn()
    assert len(worker.batches) == 1


def test_a_worker_gets_no_batch_before_it_says_that_it_is_ready():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w", ready=False)
    client.ask()
    pool.wait(1.0)
    assert worker.batches == []
    worker.ready()
    pool.turn()
    assert worker.who == [["a1"]]


def test_a_busy_worker_gets_no_second_batch():
    pool = Pool(queue_size=1)
    client, busy = pool.client("a"), pool.worker("busy")
    client.ask()
    pool.turn()
    client.ask()
    pool.wait(10.0)
    assert busy.who == [["a1"]]
    busy.answer()
    pool.turn()
    assert busy.who == [["a1"], ["a2"]]


# -- Duplicates, KNOWN, CANCEL, BYE


@pytest.mark.parametrize("running", [False, True], ids=["queued", "running"])
def test_a_request_sent_again_while_it_is_open_runs_once(running):
    pool = Pool()
    client = pool.client("a")
    worker = pool.worker("w", ready=running)
    client.ask(1)
    pool.turn()
    client.ask(1)
    if not running:
        worker.ready()
    pool.turn()
    worker.answer()
    pool.turn()
    assert worker.who == [["a1"]]
    assert client.answers == [("REPLY", 1)]
    assert pool.counters["duplicates"] == 1
    assert pool.holds_nothing()


def test_a_request_whose_reply_was_lost_can_be_sent_again():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    for _ in range(2):
        client.ask(1)
        pool.turn()
        worker.answer()
        pool.turn()
    assert client.answers == [("REPLY", 1), ("REPLY", 1)]


def test_known_tells_where_an_open_request_is_and_unknown_that_it_is_over():
    pool = Pool()
    client = pool.client("a")
    client.ask(1)
    pool.wait(2.0)
    client.known(1)
    worker = pool.worker("w")
    pool.turn()
    client.known(1)
    pool.send()
    queued, running = client.take()
    assert (queued.op, running.op) == (Op.KNOWN, Op.KNOWN)
    assert "queued" in queued.fields["state"]
    assert "2.0 s" in queued.fields["state"]
    assert "running" in running.fields["state"]
    worker.answer()
    client.known(1)
    pool.send()
    assert [m.op for m in client.inbox] == [Op.REPLY, Op.UNKNOWN]


def test_a_cancelled_request_is_never_sent_to_a_worker():
    pool = Pool(queue_size=1)
    client = pool.client("a")
    for _ in range(3):
        client.ask()
    client.cancel(2)
    worker = pool.worker("w")
    pool.turn()
    worker.answer()
    pool.turn()
    worker.answer()
    pool.turn()
    assert worker.who == [["a1"], ["a3"]]
    assert client.answers == [("REPLY", 1), ("REPLY", 3)]
    assert pool.counters["cancelled"] == 1
    assert pool.holds_nothing()


def test_the_result_for_a_request_that_was_cancelled_while_it_ran_is_dropped():
    pool = Pool(queue_size=2)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask(1)
    client.ask(2)
    pool.turn()
    client.cancel(1)
    worker.answer()
    pool.turn()
    assert client.answers == [("REPLY", 2)]
    assert pool.counters["late_results"] == 1
    assert pool.holds_nothing()


def test_a_cancel_for_a_request_that_is_over_changes_nothing():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    client.ask(1)
    pool.turn()
    worker.answer()
    client.cancel(1)
    client.cancel(77)
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert pool.counters["cancelled"] == 0


@pytest.mark.parametrize("way", ["bye", "lose", "vanish"])
def test_nothing_is_left_of_a_client_that_is_gone(way):
    pool = Pool(queue_size=2)
    client, other = pool.client("a"), pool.client("b")
    worker = pool.worker("w")
    for _ in range(5):
        client.ask(size=4096)
    pool.turn()
    other.ask()
    getattr(client, way)()
    pool.wait(5.0)  # a probe finds the one that vanished
    worker.answer()
    pool.turn()
    worker.answer()
    pool.turn()
    assert client.answers == []
    assert other.answers == [("REPLY", 1)]
    assert [c["name"] for c in pool.status["clients"]] == ["b"]
    assert worker.who == [["a1", "a2"], ["b1"]]
    assert pool.counters["cancelled"] == 5
    assert pool.counters["lost_clients"] == (way != "bye")
    assert pool.holds_nothing()


def test_the_worker_of_a_lost_client_may_be_lost_too():
    pool = Pool(max_attempts=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    client.lose()
    worker.lose()
    pool.wait(1.0)
    assert pool.holds_nothing()
    assert pool.counters["requeued"] == 0


def test_a_client_that_is_back_after_its_goodbye_is_served():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    client.bye()
    client.hello()
    client.ask()
    pool.turn()
    worker.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1)]


@pytest.mark.parametrize("decoupled", [True, False], ids=["shared", "ranks"])
def test_requests_that_are_over_take_no_memory_while_no_worker_is_connected(decoupled):
    pool = Pool(decoupled=decoupled)
    client = pool.client("a", rank=0, world_size=1)
    for _ in range(50):
        client.cancel(client.ask())
        client.ask(budget=0.1)
        pool.turn(STEP)
    pool.wait(1.0)
    assert pool.holds_nothing()
    gc.collect()
    mine = [o for o in gc.get_objects() if type(o) is Request and o.client.peer == client.peer]
    assert len(mine) < 10


# -- Bounds


@pytest.mark.parametrize(
    ("options", "size", "fits"),
    [
        ({"max_open": 3}, 2, 3),
        ({"max_client_open": 2}, 2, 2),
        ({"max_open_bytes": 100_000}, 5000, 4),
    ],
    ids=["messages", "messages of one client", "bytes"],
)
def test_a_request_over_a_bound_is_refused_with_a_time_to_wait(options, size, fits):
    pool = Pool(**options, queue_size=100)
    client = pool.client("a")
    for _ in range(fits + 1):
        client.ask(size=size)
    pool.send()
    assert client.answers == [("overloaded", fits + 1)]
    assert client.take()[0].fields["retry_after_ms"] > 0
    assert pool.counters["overloaded"] == 1
    assert pool.status["open_requests"] == pool.counters["requests"] == fits
    worker = pool.worker("w")
    pool.turn()
    worker.answer()
    client.ask(fits + 1, size=size)
    pool.turn()
    worker.answer()
    pool.turn()
    assert client.answers == [("REPLY", i + 1) for i in range(fits + 1)]


def test_the_bound_of_one_client_is_no_bound_for_another():
    pool = Pool(max_client_open=1)
    greedy, modest = pool.client("greedy"), pool.client("modest")
    greedy.ask()
    greedy.ask()
    modest.ask()
    pool.send()
    assert greedy.answers == [("overloaded", 2)]
    assert modest.answers == []
    assert pool.status["open_requests"] == 2


def test_one_request_larger_than_the_bound_is_refused():
    pool = Pool(max_open_bytes=1000)
    client = pool.client("a")
    client.ask(size=4096)
    pool.send()
    assert client.answers == [("refused", 1)]
    assert pool.holds_nothing()


# -- Time


@pytest.mark.parametrize("running", [False, True], ids=["queued", "running"])
def test_a_request_whose_budget_is_spent_ends_in_an_error(running):
    pool = Pool()
    client = pool.client("a")
    if running:
        pool.worker("w")
    client.ask(budget=2.0)
    pool.wait(1.75)
    assert client.answers == []
    pool.wait(0.5)
    (error,) = client.inbox
    assert (error.code, error.request_id) == ("deadline", 1)
    assert ("running" if running else "0 rollout workers connected") in error.fields["message"]
    assert pool.holds_nothing()


def test_a_request_whose_budget_is_spent_is_not_given_to_a_worker():
    pool = Pool()
    client = pool.client("a")
    client.ask(budget=2.0)
    pool.wait(3.0)
    worker = pool.worker("w")
    pool.turn()
    assert worker.batches == []


@pytest.mark.parametrize("budget", [0.0, 0.05])
def test_a_budget_that_is_spent_between_two_looks_at_the_timers_is_spent(budget):
    pool = Pool()
    client = pool.client("a")
    pool.turn(STEP)
    client.ask(budget=budget)
    pool.now += 0.1
    pool.broker.advance(pool.now)
    worker = pool.worker("w")
    pool.turn()
    assert worker.batches == []
    pool.turn(STEP)
    assert client.answers == [("deadline", 1)]


def test_a_requeued_request_keeps_its_deadline():
    pool = Pool(attempt_timeout=1.0)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask(budget=1.5)
    pool.turn()
    pool.wait(1.25)
    assert client.answers == []
    pool.wait(0.5)
    assert client.answers == [("deadline", 1)]
    assert worker.batches[1:] == []


def test_a_pause_of_the_broker_itself_expires_nothing():
    pool = Pool(attempt_timeout=5.0, queue_size=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask(budget=10.0)
    client.ask(budget=10.0)
    pool.turn()
    for _ in range(3):
        pool.turn(100.0)
    assert client.answers == []
    assert [w["state"] for w in pool.status["workers"]] == ["busy"]
    pool.wait(4.5)
    assert pool.counters["requeued"] == 0
    pool.wait(0.75)
    assert pool.counters["requeued"] == 1
    pool.wait(5.0)
    assert client.answers == [("deadline", 1), ("deadline", 2)]
    assert len(worker.batches) == 1


def test_a_stopping_broker_answers_everything_that_is_open():
    pool = Pool(queue_size=1)
    clients = [pool.client("a"), pool.client("b")]
    pool.worker("w")
    for client in clients:
        client.ask()
        client.ask()
    pool.turn()
    pool.broker.stop()
    pool.send()
    for client in clients:
        assert client.answers == [("stopping", 1), ("stopping", 2)]
    assert pool.counters["errors"] == 4
    assert pool.holds_nothing()


def test_a_result_after_the_stop_reaches_nobody():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    pool.broker.stop()
    worker.answer()
    pool.turn()
    assert client.answers == [("stopping", 1)]


def test_the_loop_is_told_to_look_at_the_timers_four_times_a_second():
    pool = Pool()
    client = pool.client("a")
    assert pool.broker.timeout() == 0.25
    client.ask(budget=0.1)
    assert 0 < pool.broker.timeout() <= 0.25


def test_a_broker_each_turn_of_which_is_a_pause_still_looks_at_its_timers():
    broker, now = Pool().broker, 1000.0
    for _ in range(5):
        now += 1.5  # a machine that swaps, or gives the process little time
        broker.advance(now)
        assert broker.tick()
