"""Peers whose keys are let in no longer: forgotten like lost ones, and told so."""

import pytest
from driver import Pool, plain

from zmqrl.transport.header import Op


def client_of(pool, name, key):
    """A client whose connection has this key."""
    return joined(pool.stranger(name), key, pool.broker.from_client)


def worker_of(pool, name, key):
    """A rollout worker whose connection has this key."""
    return joined(pool.strange_worker(name), key, pool.broker.from_worker)


def joined(peer, key, take):
    take(peer.peer, plain(Op.HELLO, name=peer.name), key)
    peer.pool.send()
    peer.inbox.clear()
    return peer


def test_requests_of_a_revoked_client_are_cancelled_and_those_of_others_go_on():
    pool = Pool()
    good, bad = client_of(pool, "good", "G"), client_of(pool, "bad", "B")
    worker = pool.worker("w", ready=False)
    for client in (good, bad):
        client.ask()
    pool.broker.revoke_clients(lambda key: key != "B")
    worker.ready()
    pool.turn()
    worker.answer()
    pool.turn()
    assert worker.who == [["good1"]]
    assert good.answers == [("REPLY", 1)]
    assert [(m.code, m.request_id) for m in bad.inbox] == [("revoked", 0)]
    assert [client["name"] for client in pool.status["clients"]] == ["good"]
    assert (pool.counters["cancelled"], pool.counters["revoked"]) == (1, 1)


def test_what_a_revoked_worker_holds_runs_on_another():
    pool = Pool()
    good, bad = worker_of(pool, "good", "G"), worker_of(pool, "bad", "B")
    client = pool.client("a")
    bad.ready()
    client.ask()
    pool.turn()
    assert bad.who == [["a1"]]
    pool.broker.revoke_workers(lambda key: key != "B")
    good.ready()
    pool.turn()
    bad.answer()
    good.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert [m.code or m.op for m in bad.inbox] == ["revoked", Op.UNKNOWN]
    assert [worker["name"] for worker in pool.status["workers"]] == ["good"]
    assert pool.counters["answered"] == 1


@pytest.mark.parametrize("op", [Op.HELLO, Op.STATUS])
def test_a_revoked_client_that_asks_again_is_told_again_and_nothing_else(op):
    pool = Pool()
    client = pool.stranger("bad")
    pool.broker.from_client(client.peer, plain(op, name="bad"), None)
    pool.send()
    assert [m.code for m in client.inbox] == ["revoked"]
    assert pool.status["clients"] == []


def test_without_keys_nobody_is_turned_out_by_those_who_let_everybody_in():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    pool.broker.revoke_clients(lambda key: key == "")
    pool.broker.revoke_workers(lambda key: key == "")
    client.ask()
    pool.turn()
    worker.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1)]
