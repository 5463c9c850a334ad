import pytest
from driver import STEP, Pool, Received

from zmqrl.transport.header import Op

# -- Lost and stuck workers


@pytest.mark.parametrize("way", ["lose", "vanish", "bye", "hello"])
def test_a_lost_workers_requests_are_answered_once_by_another(way):
    pool = Pool(queue_size=2)
    clients = [pool.client(name) for name in "ab"]
    first = pool.worker("first")
    for client in clients:
        client.ask()
    pool.turn()
    second = pool.worker("second")
    getattr(first, way)()
    pool.wait(1.0)  # a probe finds the one that vanished
    assert second.who == [["a1", "b1"]]
    assert [entry.attempt for entry, _ in second.batch.shards] == [1, 1]
    second.answer()
    pool.turn()
    for client in clients:
        assert client.answers == [("REPLY", 1)]
    assert pool.counters["requeued"] == 2
    assert pool.counters["lost_workers"] == (way in ("lose", "vanish"))
    assert pool.holds_nothing()


def test_what_a_lost_worker_held_goes_ahead_of_what_waits():
    pool = Pool(queue_size=2)
    client, first = pool.client("a"), pool.worker("first")
    for _ in range(5):
        client.ask()
    pool.turn()
    first.lose()
    second = pool.worker("second")
    pool.turn()
    assert second.who == [["a1", "a2"]]


def test_a_worker_is_probed_only_when_it_is_busy_for_long_or_silent():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    probes = []

    def wait(seconds):
        probes.clear()
        for _ in range(round(seconds / STEP)):
            pool.now += STEP
            pool.broker.advance(pool.now)
            pool.broker.tick()
            _, to_workers = pool.broker.take_outbox()
            probes.extend(peer for peer, frames in to_workers if Received(frames).op is Op.PROBE)
            pool.turn()
        return len(probes)

    assert wait(2.0) <= 1  # idle, and heard a moment ago
    assert 0 < wait(8.0) <= 4  # silent
    client.ask()
    pool.turn()
    worker.ready(0)  # this READY crosses the batch
    assert 3 <= wait(1.0) <= 4


def test_a_batch_that_crosses_a_workers_goodbye_costs_no_attempt():
    pool = Pool(max_attempts=1)
    client, leaving = pool.client("a"), pool.worker("leaving")
    client.ask()
    pool.broker.dispatch()
    leaving.bye()  # before the batch has arrived
    other = pool.worker("other")
    pool.turn()
    assert [entry.attempt for entry, _ in other.batch.shards] == [0]
    other.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert pool.counters["requeued"] == 0


def test_the_late_result_of_a_worker_that_was_lost_is_told_to_register_and_reaches_nobody():
    pool = Pool()
    client, zombie = pool.client("a"), pool.worker("zombie")
    client.ask()
    pool.turn()
    zombie.lose()
    pool.gone.clear()  # only a connection was lost
    other = pool.worker("other")
    pool.turn()
    zombie.answer()
    other.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert [m.op for m in zombie.inbox] == [Op.UNKNOWN]
    zombie.hello()
    zombie.answer()  # its registration is on the way, and so is the result again
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert pool.counters["late_results"] == 1
    assert pool.counters["answered"] == 1


def test_a_stuck_workers_requests_go_to_another_after_the_attempt_timeout():
    pool = Pool(attempt_timeout=5.0)
    client, stuck = pool.client("a"), pool.worker("stuck")
    client.ask()
    pool.turn()
    other = pool.worker("other")
    pool.wait(4.75)
    assert other.batches == []
    pool.wait(0.5)
    assert other.who == [["a1"]]
    client.ask()
    pool.wait(5.0)
    assert len(stuck.batches) == 1  # nothing more for it


def test_the_late_result_of_a_stuck_worker_is_dropped_and_brings_it_back():
    pool = Pool(attempt_timeout=5.0, queue_size=1)
    client, stuck = pool.client("a"), pool.worker("stuck")
    client.ask()
    pool.turn()
    other = pool.worker("other")
    pool.wait(5.25)
    stuck.answer()
    pool.turn()
    assert client.answers == []
    assert pool.counters["late_results"] == 1
    assert {w["name"]: w["state"] for w in pool.status["workers"]} == {"stuck": "idle", "other": "busy"}
    client.ask()
    pool.turn()
    assert stuck.who == [["a1"], ["a2"]]
    other.answer()
    stuck.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1), ("REPLY", 2)]
    assert pool.counters["answered"] == 2


def test_a_stuck_worker_that_says_ready_is_given_work_again():
    pool = Pool(attempt_timeout=2.0)
    client, stuck = pool.client("a"), pool.worker("stuck")
    client.ask()
    pool.turn()
    pool.wait(2.25)
    stuck.ready()
    pool.turn()
    assert stuck.who == [["a1"], ["a1"]]  # there is no other worker


def test_after_max_attempts_the_client_gets_an_error_that_names_the_workers():
    pool = Pool(max_attempts=3, attempt_timeout=2.0)
    client = pool.client("a")
    client.ask(4)
    for name, way in [("alice", "lose"), ("bob", "bye"), ("carol", None)]:
        worker = pool.worker(name)
        pool.turn()
        assert worker.who == [["a4"]]
        getattr(worker, way)() if way else pool.wait(2.25)
    (error,) = client.inbox
    assert (error.code, error.request_id) == ("attempts", 4)
    for words in ("alice was lost", "bob left", "carol held it for 2 s (rollout.attempt_timeout_s)"):
        assert words in error.fields["message"]
    assert pool.counters["requeued"] == 2
    assert pool.holds_nothing()


def test_a_request_that_kills_its_workers_takes_no_batch_mates_with_it():
    pool = Pool(max_attempts=3, queue_size=4)
    client = pool.client("a")
    poison = client.ask()
    mates = [client.ask() for _ in range(3)]
    worker = pool.worker("w0")
    for number in range(1, 10):
        pool.turn()
        if worker.batches and [client.name, poison] in worker.batch.who:
            worker.lose()
            worker = pool.worker(f"w{number}")
        elif worker.batches:
            worker.answer()
    answers = {request_id: what for what, request_id in client.answers}
    assert answers == {poison: "attempts"} | dict.fromkeys(mates, "REPLY")
    assert pool.counters["lost_workers"] == 3


def test_the_last_attempts_of_batch_mates_go_one_by_one():
    pool = Pool(max_attempts=2, queue_size=4)
    client, first = pool.client("a"), pool.worker("first")
    client.ask()
    client.ask()
    pool.turn()
    first.lose()
    client.ask()
    second = pool.worker("second")
    for _ in range(3):
        pool.turn()
        second.answer()
    assert second.who == [["a1"], ["a2"], ["a3"]]


def test_a_last_attempt_does_not_join_the_batch_of_those_ahead_of_it():
    pool = Pool(max_attempts=2, queue_size=4)
    client, first = pool.client("a"), pool.worker("first")
    client.ask()
    pool.turn()
    second = pool.worker("second")
    client.ask()
    pool.turn()
    first.lose()
    pool.broker.undelivered(second.peer)  # costs no attempt, and returns to the head of the queue
    third = pool.worker("third")
    for _ in range(2):
        pool.turn()
        third.answer()
    assert third.who == [["a2"], ["a1"]]


def test_a_request_avoids_the_worker_that_was_lost_with_it_while_there_is_another():
    pool = Pool(queue_size=1, attempt_timeout=2.0)
    client, bad = pool.client("a"), pool.worker("bad")
    client.ask()
    pool.turn()
    bad.lose()
    other = pool.client("b")
    good = pool.worker("good")
    pool.turn()
    assert good.who == [["a1"]]
    good.lose()
    again = pool.worker("bad")  # restarted under its name
    third = pool.worker("third")
    other.ask()
    pool.turn()
    assert again.who == [["b1"]]  # it passes a1 over, and takes the next
    assert third.who == [["a1"]]


def test_a_request_goes_back_to_the_worker_that_was_lost_with_it_if_there_is_no_other():
    pool = Pool()
    client, bad = pool.client("a"), pool.worker("bad")
    client.ask()
    pool.turn()
    bad.lose()
    again = pool.worker("bad")
    pool.turn()
    assert again.who == [["a1"]]


def test_a_request_waits_for_the_busy_worker_rather_than_the_one_that_was_lost_with_it():
    pool = Pool(queue_size=1)
    client = pool.client("a")
    bad, busy = pool.worker("bad"), pool.worker("busy")
    client.ask()
    client.ask()
    pool.turn()
    bad.lose()
    again = pool.worker("bad")
    pool.turn()
    assert again.batches == []
    busy.answer()
    pool.turn()
    assert busy.who == [["a2"], ["a1"]]


def test_a_request_does_not_wait_for_a_stuck_worker():
    pool = Pool(queue_size=1, attempt_timeout=2.0)
    client, idler = pool.client("a"), pool.client("b")
    bad, stuck = pool.worker("bad"), pool.worker("stuck")
    client.ask()
    idler.ask()
    pool.turn()
    idler.bye()
    bad.lose()
    again = pool.worker("bad")
    pool.turn()
    assert again.batches == []  # the other one is merely busy
    pool.wait(2.25)
    assert (stuck.who, again.who) == ([["b1"]], [["a1"]])


def test_a_batch_that_could_not_be_delivered_costs_no_attempt():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.lose_batches_to.add(worker.peer)
    pool.turn()
    pool.broker.undelivered(worker.peer)
    worker.ready()
    pool.turn()
    ((entry, _),) = worker.batch.shards
    assert entry.attempt == 0
    assert pool.counters["requeued"] == 0


@pytest.mark.parametrize("method", ["worker_unreachable", "client_unreachable", "undelivered"])
def test_news_of_a_peer_that_is_already_forgotten_is_no_news(method):
    pool = Pool()
    getattr(pool.broker, method)(b"nobody")
    assert pool.counters["lost_workers"] == pool.counters["lost_clients"] == 0


# -- READY and lost batches


def test_a_ready_that_crosses_a_batch_does_not_take_it_back():
    pool = Pool()
    client, worker, other = pool.client("a"), pool.worker("w"), pool.worker("other", ready=False)
    client.ask()
    pool.turn()
    worker.ready(0)
    other.ready()
    pool.wait(3.0)
    assert other.batches == []
    worker.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert pool.counters["requeued"] == 0


@pytest.mark.parametrize(
    ("gaps", "requeued"),
    [([0.0], 0), ([0.0, 0.75], 0), ([0.0, 1.0], 1), ([3.0, 0.75], 0), ([0.0, 0.5, 0.5], 1)],
)
def test_a_batch_that_readys_a_second_apart_do_not_know_was_lost(gaps, requeued):
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.lose_batches_to.add(worker.peer)
    pool.turn()
    for gap in gaps:
        pool.wait(gap)
        worker.ready(0)
        pool.turn()
    assert pool.counters["requeued"] == requeued
    assert worker.who == [["a1"]] * requeued


def test_crossings_of_different_batches_do_not_add_up():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    for number in range(3):
        client.ask()
        pool.turn()
        worker.ready(worker.batch.number - 1)
        pool.wait(1.0)
        worker.answer()
        assert len(worker.batches) == number + 1
    assert pool.counters["requeued"] == 0


def test_a_ready_that_knows_the_batch_means_that_its_result_was_lost():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    worker.ready()
    pool.turn()
    assert worker.who == [["a1"], ["a1"]]
    assert pool.counters["requeued"] == 1
    worker.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1)]


@pytest.mark.parametrize(
    ("knows", "words"),
    [(False, "never got it"), (True, "lost its result")],
    ids=["lost batch", "lost result"],
)
def test_the_history_tells_which_way_a_message_was_lost(knows, words):
    pool = Pool(max_attempts=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    for _ in range(2):
        worker.ready(worker.batch.number if knows else 0)
        pool.wait(1.0)
    (error,) = client.inbox
    assert error.code == "attempts"
    assert words in error.fields["message"]
