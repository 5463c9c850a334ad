import msgpack
import pytest
from driver import EPOCH, Pool

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
    if op is Op.INFER:
        client.ask(5)
    else:
        client.known(5)
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
    client.send([Header(op, request_id=1).pack()])
    pool.turn()
    assert client.inbox == []


def test_the_status_is_made_once_a_turn_however_often_it_is_asked_for():
    pool = Pool()
    stranger = pool.stranger()
    for request_id in (1, 2):
        stranger.send([Header(Op.STATUS, request_id=request_id).pack()])
        pool.client(f"client-{request_id}")
    pool.turn()
    stranger.send([Header(Op.STATUS, request_id=3).pack()])
    pool.turn()
    assert [(m.request_id, m.fields["clients_connected"]) for m in stranger.inbox] == [
        (1, 0),
        (2, 0),
        (3, 2),
    ]


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
