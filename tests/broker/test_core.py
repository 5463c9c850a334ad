import gc

import msgpack
import numpy as np
import pytest
from driver import EPOCH, STEP, Pool, Received

from zmqrl.broker.records import Request
from zmqrl.transport.header import Header, Op, Table, join_batch

# -- Registration


@pytest.mark.parametrize("kind", ["client", "worker"])
def test_a_peer_that_says_hello_is_welcomed_and_told_the_epoch(kind):
    pool = Pool()
    peer = pool.stranger("a") if kind == "client" else pool.strange_worker("a")
    for _ in range(2):  # it may not have got the first answer
        peer.hello(rank=1, world_size=2, host="there", pid=3, incarnation=4)
    pool.send()
    assert [m.op for m in peer.inbox] == [Op.WELCOME, Op.WELCOME]
    assert peer.inbox[0].fields == {"epoch": EPOCH}
    assert [p["name"] for p in pool.status[f"{kind}s"]] == ["a"]


@pytest.mark.parametrize("op", [Op.INFER, Op.KNOWN])
def test_a_client_that_the_broker_does_not_know_is_told_to_register(op):
    pool = Pool()
    client = pool.stranger()
    worker = pool.worker("w")
    client.ask(5) if op is Op.INFER else client.known(5)
    pool.turn()
    assert [(m.op, m.request_id) for m in client.inbox] == [(Op.UNKNOWN, 5)]
    assert worker.batches == []
    assert pool.counters["unknown"] == 1


@pytest.mark.parametrize("op", [Op.READY, Op.RESULT])
def test_a_worker_that_the_broker_does_not_know_is_told_to_register(op):
    pool = Pool()
    client, worker = pool.client("a"), pool.strange_worker()
    client.ask()
    if op is Op.READY:
        worker.ready()
    else:
        worker.send(join_batch(Table(EPOCH, 1, []), Op.RESULT, []))
    pool.turn()
    assert [m.op for m in worker.inbox] == [Op.UNKNOWN]
    assert worker.batches == []
    assert pool.counters["unknown"] == 1


@pytest.mark.parametrize("op", [Op.BYE, Op.CANCEL])
def test_the_goodbye_of_an_unknown_client_needs_no_answer(op):
    pool = Pool()
    client = pool.stranger()
    client.bye() if op is Op.BYE else client.cancel(1)
    pool.turn()
    assert client.inbox == []


def test_anyone_may_ask_for_the_status():
    pool = Pool()
    stranger = pool.stranger()
    stranger.send([Header(Op.STATUS, request_id=9).pack()])
    pool.turn()
    (answer,) = stranger.inbox
    assert (answer.op, answer.request_id) == (Op.STATUS, 9)
    assert answer.fields["open_requests"] == 0


def test_the_status_is_plain_data_that_tells_what_each_peer_does():
    pool = Pool(attempt_timeout=1.0, queue_size=1)
    client = pool.client("a", host="there", pid=11)
    stuck = pool.worker("stuck")
    client.ask()
    pool.turn()
    pool.wait(1.0)
    busy = pool.worker("busy", pid=12)
    pool.turn()
    pool.worker("idle")
    pool.turn()
    status = msgpack.unpackb(msgpack.packb(pool.status))
    assert status["decoupled"] is True
    assert {w["name"]: w["state"] for w in status["workers"]} == {
        "stuck": "stuck",
        "busy": "busy",
        "idle": "idle",
    }
    (row,) = status["clients"]
    assert (row["name"], row["host"], row["pid"], row["open_requests"]) == ("a", "there", 11, 1)
    busy.answer()
    stuck.answer()
    assert pool.status["totals"]["busy"]["shards"] == 1
    assert pool.status["totals"]["busy"]["policy_version"] == 7


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
    assert (entry.queue_us, entry.attempt, entry.origin) == (500_000, 0, client.peer)


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
    worker.ready() if not running else None
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
    pool = Pool()
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
    assert sum(worker.who, []) == ["a1", "a3"]
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
@pytest.mark.xfail(strict=True, reason="closed requests stay in the queue while no worker is idle")
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
    mine = [o for o in gc.get_objects() if isinstance(o, Request) and o.client.peer == client.peer]
    assert len(mine) < 10


# -- Bounds


@pytest.mark.parametrize(
    ("options", "size", "fits"),
    [
        ({"max_open": 3}, 2, 3),
        ({"max_client_open": 2}, 2, 2),
        ({"max_open_bytes": 100_000}, 5000, 4),
    ],
    ids=["messages", "bytes of all", "messages of one client"],
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
    assert client.answers == [("overloaded", 1)]
    assert pool.holds_nothing()


# -- Names and incarnations


def test_a_restarted_client_takes_over_its_name_and_the_old_one_is_told():
    pool = Pool()
    old = pool.client("a", incarnation=1)
    old.ask()
    new = pool.client("a", incarnation=2)
    pool.turn()
    assert [(m.code, m.request_id) for m in old.inbox] == [("replaced", 0)]
    assert pool.counters["cancelled"] == 1
    assert len(pool.status["clients"]) == 1
    new.ask()
    worker = pool.worker("w")
    pool.turn()
    worker.answer()
    pool.turn()
    assert new.answers == [("REPLY", 1)]
    assert len(old.inbox) == 1


def test_the_reply_that_an_old_incarnation_waited_for_does_not_reach_the_new_one():
    pool = Pool()
    old, worker = pool.client("a", incarnation=1), pool.worker("w")
    old.ask(1)
    pool.turn()
    new = pool.client("a", incarnation=2)
    new.ask(1)
    worker.answer()
    pool.turn()
    assert new.answers == []
    assert pool.counters["late_results"] == 1
    worker.answer()
    pool.turn()
    assert new.answers == [("REPLY", 1)]
    assert [m.code for m in old.inbox] == ["replaced"]


def test_an_older_incarnation_is_refused():
    pool = Pool()
    new = pool.client("a", incarnation=2)
    new.ask()
    old = pool.stranger("a")
    old.hello(incarnation=1)
    old.ask(5)
    pool.send()
    assert [(m.op, m.code if m.op is Op.ERROR else "") for m in old.inbox] == [
        (Op.ERROR, "replaced"),
        (Op.UNKNOWN, ""),
    ]
    assert pool.status["open_requests"] == 1
    assert new.inbox == []


def test_the_same_incarnation_on_a_new_socket_takes_over_silently():
    pool = Pool()
    before = pool.client("a", incarnation=3)
    before.ask(1)
    after = pool.client("a", incarnation=3)
    after.ask(1)  # as it is not answered yet
    worker = pool.worker("w")
    pool.turn()
    worker.answer()
    pool.turn()
    assert before.inbox == []
    assert after.answers == [("REPLY", 1)]
    assert worker.who == [["a1"]]
    assert len(pool.status["clients"]) == 1
    assert pool.holds_nothing()


def test_the_loss_of_a_replaced_socket_does_not_touch_its_successor():
    pool = Pool()
    before = pool.client("a", incarnation=3)
    after = pool.client("a", incarnation=3)
    after.ask()
    before.lose()
    before.bye()
    newest = pool.stranger("a")
    newest.hello(incarnation=2)
    pool.send()
    assert [m.code for m in newest.inbox] == ["replaced"]  # the name is still taken
    assert pool.status["open_requests"] == 1


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
            probes.extend(p for p, f in pool.broker.to_workers if Received(f).op is Op.PROBE)
            pool.turn()
        return len(probes)

    assert wait(2.0) == 0  # idle, and heard a moment ago
    assert 0 < wait(8.0) <= 4  # silent
    client.ask()
    pool.turn()
    worker.ready(0)  # this READY crosses the batch
    assert 3 <= wait(1.0) <= 4


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
    for words in ("alice was lost", "bob left", "carol held it for 2 s"):
        assert words in error.fields["message"]
    assert pool.counters["requeued"] == 2
    assert pool.holds_nothing()


def test_a_request_that_kills_its_workers_takes_no_batch_mates_with_it():
    pool = Pool(max_attempts=3, queue_size=4)
    client = pool.client("a")
    poison = client.ask()
    mates = [client.ask() for _ in range(3)]
    for number in range(10):
        worker = pool.worker(f"w{number}")
        pool.turn()
        while worker.batches and not client_done(client, 4):
            if [client.name, poison] in worker.batch.who:
                worker.lose()
                break
            worker.answer()
            pool.turn()
        pool.turn()
    answers = dict((request_id, what) for what, request_id in client.answers)
    assert answers == {poison: "attempts"} | dict.fromkeys(mates, "REPLY")
    assert pool.counters["lost_workers"] == 3


def client_done(client, count):
    return len(client.answers) >= count


def test_the_last_attempt_goes_alone_even_if_it_is_not_the_oldest_request():
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


# -- Results that do not fit


def two_running(**options):
    pool = Pool(queue_size=1, **options)
    clients = [pool.client("a"), pool.client("b")]
    workers = [pool.worker("w0"), pool.worker("w1")]
    for client in clients:
        client.ask()
    pool.turn()
    return pool, clients, workers


def served_in_the_end(pool, clients, workers):
    """Lets the workers answer what they are given; asserts that each client got its reply, once."""
    for _ in range(4):
        pool.turn()
        for worker in workers:
            while len(worker.batches) > getattr(worker, "answered", 0):
                worker.answered = len(worker.batches)
                worker.answer()
    pool.turn()
    for client in clients:
        assert client.answers == [("REPLY", 1)]
        assert client.inbox[0].tree["who"] == [client.name, 1]
    assert pool.holds_nothing()


def test_a_result_for_a_slot_of_another_worker_reaches_nobody():
    pool, clients, (thief, victim) = two_running()
    thief.send(victim.batch.result(number=thief.batch.number))
    pool.turn()
    assert [client.answers for client in clients] == [[], []]
    assert pool.counters["late_results"] == 1
    thief.answered = 1  # its batch came back to it
    served_in_the_end(pool, clients, [thief, victim])


@pytest.mark.parametrize("field", ["epoch", "number"])
def test_a_result_of_another_epoch_or_batch_is_counted_and_dropped(field):
    pool, clients, (wrong, other) = two_running()
    wrong.answer(**{field: 999})
    pool.turn()
    assert [client.answers for client in clients] == [[], []]
    assert pool.counters["late_results"] == 1
    wrong.answered = 1
    served_in_the_end(pool, clients, [wrong, other])


def test_a_result_that_names_another_request_id_reaches_nobody():
    pool = Pool(queue_size=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask(1)
    pool.turn()
    entries, (reply,) = worker.batch.replies()
    head = Header(Op.REPLY, request_id=2).pack()
    worker.send(join_batch(worker.batch.table, Op.RESULT, [[head + reply[0][len(head) :]]]))
    pool.turn()
    assert client.answers == []
    assert pool.counters["malformed"] == 1
    worker.answered = 1
    served_in_the_end(pool, [client], [worker])


def test_a_result_that_leaves_a_request_out_answers_the_others():
    pool = Pool(queue_size=3)
    clients = [pool.client(name) for name in "abc"]
    worker = pool.worker("w")
    for client in clients:
        client.ask()
    pool.turn()
    worker.answer(only=[2, 0])
    assert pool.counters["requeued"] == 1
    pool.turn()
    assert worker.who == [["a1", "b1", "c1"], ["b1"]]
    worker.answered = 1
    served_in_the_end(pool, clients, [worker])


def test_a_result_that_names_a_slot_twice_answers_it_once():
    pool = Pool(queue_size=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    entries, replies = worker.batch.replies()
    worker.send(
        join_batch(worker.batch.table._replace(entries=entries * 2), Op.RESULT, replies * 2)
    )
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert pool.counters["late_results"] == 1


def test_a_second_copy_of_a_result_reaches_nobody():
    pool = Pool(queue_size=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    worker.answer()
    worker.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert pool.counters["late_results"] == 1


@pytest.mark.xfail(
    strict=True, reason="an older batch's RESULT takes back the batch that the worker holds now"
)
def test_the_result_of_an_older_batch_leaves_the_current_one_with_its_worker():
    pool = Pool(queue_size=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    older = worker.batch
    # The batch is held up on the way for so long that the worker says twice that it has none.
    worker.ready(0)
    pool.wait(1.0)
    worker.ready(0)
    pool.turn()
    assert worker.batch is not older
    worker.answer(older)
    pool.turn()
    assert len(worker.batches) == 2
    worker.answer(worker.batches[1])
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert pool.counters["requeued"] == 1


@pytest.mark.xfail(
    strict=True, reason="each RESULT counts as late for ever once a batch was held up on the way"
)
def test_a_worker_whose_batch_came_late_catches_up():
    pool = Pool(queue_size=1)
    clients = [pool.client(name) for name in "abcde"]
    worker = pool.worker("w")
    clients[0].ask()
    pool.turn()
    worker.ready(0)
    pool.wait(1.0)
    worker.ready(0)
    for client in clients[1:]:
        client.ask()
    pool.turn()
    served = 0
    while served < len(worker.batches) < 50:  # it works off what it got, in order
        worker.answer(worker.batches[served])
        served += 1
        pool.turn()
    for client in clients:
        assert client.answers == [("REPLY", 1)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"junk",
        pytest.param(Header(Op.REPLY).pack()[:20], id="cut short"),
        pytest.param(b"ZMQR\x63" + bytes(80), id="another version"),
    ],
)
@pytest.mark.xfail(strict=True, reason="the request leaves its batch before its reply is checked")
def test_a_request_whose_reply_is_not_a_message_goes_back_to_the_queue(body):
    pool = Pool(queue_size=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    (entry, _) = worker.batch.shards[0]
    table = worker.batch.table._replace(entries=[entry._replace(length=len(body), frames=0)])
    worker.send(join_batch(table, Op.RESULT, [[body]]))
    pool.turn()
    assert pool.counters["malformed"] == 1
    worker.answered = 1
    served_in_the_end(pool, [client], [worker])


@pytest.mark.parametrize("op", [Op.INFER, Op.UNKNOWN, Op.WELCOME, Op.KNOWN, 99])
@pytest.mark.xfail(strict=True, reason="whatever is not a REPLY is passed on as if it were an ERROR")
def test_an_answer_that_is_neither_a_reply_nor_an_error_is_not_passed_on(op):
    pool = Pool(queue_size=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    head = Header(op, request_id=1).pack()
    entry = worker.batch.shards[0][0]._replace(length=len(head), frames=0)
    worker.send(join_batch(worker.batch.table._replace(entries=[entry]), Op.RESULT, [[head]]))
    broker = pool.broker
    assert [peer for peer, _ in broker.to_clients] == []
    pool.turn()
    worker.answered = 1
    served_in_the_end(pool, [client], [worker])


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
@pytest.mark.xfail(strict=True, reason="dispatch sends requests that expired since the last tick")
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
