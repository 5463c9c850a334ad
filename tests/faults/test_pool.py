"""A pool whose parts are lost, or fed nonsense; what `bin/bench faults` drills is in test_drills.py."""

from __future__ import annotations

import os
import re
import signal

import msgpack
import numpy as np
import pytest
import zmq
from by_hand import introduced
from conftest import Pool, wait_for

from zmqrl.broker.status import StatusClient
from zmqrl.errors import AttemptsExhausted, BrokerStopping, RequestRefused
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode_meta, encode, encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op, unpack


def test_a_stuck_policy_loses_its_requests_to_another_worker(pool: Pool) -> None:
    pool.start_broker("rollout.attempt_timeout_s=0.5")
    pool.start_worker(0)
    pool.wait_for_workers(1)
    stuck = pool.client().submit({"x": np.ones((1, 3)), "command": ["sleep 3"]}, timeout=25)
    wait_for(lambda: pool.status()["workers"][0]["state"] == "stuck", "the quarantine")
    pool.start_worker(1)
    assert pool.client().infer({"x": np.ones((1, 3))})["actions"].shape == (1, 3)
    with pytest.raises(AttemptsExhausted, match=r"rollout-0 held it.*rollout-1 held it"):
        stuck.result()


def test_the_reply_to_a_client_that_vanished_is_counted_and_the_others_go_on(pool: Pool) -> None:
    pool.start(seconds=0.3)
    other = pool.client()
    socket = introduced(pool.frontend, "vanishes")
    header = Header(Op.INFER, request_id=1, rows=1, budget_ms=60_000)
    socket.send(header.pack() + encode({"x": np.ones((1, 3))}).meta)
    wait_for(lambda: pool.status()["workers"][0]["state"] == "busy", "the worker to compute")
    socket.close(0)
    wait_for(lambda: pool.counters()["answered"] == 1, "the reply")
    wait_for(lambda: pool.counters()["dropped"] == 1, "the reply to be dropped")
    for _ in range(5):
        assert other.infer({"x": np.ones((1, 3))})["actions"].shape == (1, 3)


def test_a_stopping_broker_says_so_to_waiting_clients_and_exits_cleanly(pool: Pool) -> None:
    pool.start(workers=0)
    request = pool.client().submit({"x": np.ones((1, 3))}, timeout=4)
    wait_for(lambda: pool.counters()["requests"] == 1, "the request")
    process = pool.launcher.children["broker"].process
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    with pytest.raises(BrokerStopping, match="shutting down"):
        request.result()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_second_broker_on_an_endpoint_refuses_and_leaves_the_first_alone(
    pool: Pool, transport: str
) -> None:
    if transport == "tcp":
        pool.start_broker("broker.frontend=tcp://127.0.0.1:0", "broker.backend=tcp://127.0.0.1:0")
        line = wait_for(lambda: next((li for li in pool.lines if "serving" in li), ""), "the broker")
        pool.frontend, pool.backend = re.findall(r"tcp://[\d.:]+", line)
        pool.overrides = [f"broker.frontend={pool.frontend}", f"broker.backend={pool.backend}"]
        pool.status_client.close()
        pool.status_client = StatusClient(pool.frontend)
        pool.start_worker(0)
        pool.wait_for_workers(1)
    else:
        pool.start()
    pool.launcher.start("second", ["start-broker", *pool.overrides])
    second = pool.launcher.children["second"]
    assert second.process.wait(20) == 2
    second.reader.join()
    assert any(pool.frontend in li and "in use" in li.lower() for li in second.last_lines)
    assert pool.client().infer({"x": np.ones((1, 3))})["actions"].shape == (1, 3)


def test_a_request_that_cannot_be_decoded_is_refused_and_its_batch_mates_are_answered(
    pool: Pool,
) -> None:
    pool.start(seconds=0.1)
    blocker, mate = pool.client(), pool.client()
    socket = introduced(pool.frontend)
    pending = [blocker.submit({"x": np.zeros((1, 3))})]
    socket.send(Header(Op.INFER, request_id=9, rows=2, budget_ms=20_000).pack() + b"\xc1 not msgpack")
    pending.append(mate.submit({"x": np.ones((1, 3))}))
    for request in pending:
        assert request.result()["actions"].shape == (1, 3)
    assert socket.poll(10_000)
    reply = socket.recv()
    assert (unpack(reply).op, unpack(reply).request_id) == (Op.ERROR, 9)
    assert decode_meta(reply[HEADER_SIZE:])["code"] == "refused"
    socket.close(0)


def test_a_request_nested_without_end_is_refused_and_kills_no_worker(pool: Pool) -> None:
    pool.start(workers=2)
    nest: object = 1
    for _ in range(900):
        nest = [nest]
    hostile = {"x": {b"nd": True, b"type": nest, b"kind": b"", b"shape": [1], b"data": b""}}
    socket = introduced(pool.frontend)
    header = Header(Op.INFER, request_id=9, rows=1, budget_ms=20_000)
    socket.send(header.pack() + msgpack.packb(hostile))
    assert socket.poll(10_000)
    assert decode_meta(socket.recv()[HEADER_SIZE:])["code"] == "refused"
    assert len(pool.status()["workers"]) == 2
    socket.close(0)


def test_a_refused_introduction_is_answered(pool: Pool) -> None:
    pool.start(workers=0)
    for endpoint in (pool.frontend, pool.backend):
        socket = sockets.dealer(zmq.Context.instance(), endpoint)
        socket.send(Header(Op.HELLO).pack() + encode_meta({"name": "n" * 201}))
        assert socket.poll(10_000)
        assert "200 printable characters" in decode_meta(socket.recv()[HEADER_SIZE:])["message"]
        socket.close(0)


def test_in_normal_mode_a_client_without_a_rank_gets_a_named_error(pool: Pool) -> None:
    pool.start_broker(decoupled=False)
    pool.start_worker(0, world_size=1)
    pool.wait_for_workers(1)
    with pytest.raises(RequestRefused, match="rank and world_size"):
        pool.client().infer({"x": np.ones((1, 3))})
    ranked = pool.client(rank=0, world_size=1)
    assert ranked.infer({"x": np.ones((1, 3))})["actions"].shape == (1, 3)


def test_in_normal_mode_the_others_go_on_when_an_env_is_killed_or_says_goodbye(pool: Pool) -> None:
    pool.start_broker(decoupled=False)
    pool.start_worker(0, world_size=1)
    pool.wait_for_workers(1)
    clients = [pool.client(rank=rank, world_size=3) for rank in range(3)]
    wait_for(lambda: len(pool.status()["clients"]) == 3, "the clients to register")
    for _ in range(3):
        pending = [c.submit({"x": np.ones((2, 3))}) for c in clients]
        for p in pending:
            p.result()
    assert pending[0].result()["rows"].tolist() == [6, 6], "the worker did not wait for all its envs"
    clients[2].close()
    pending = [c.submit({"x": np.ones((2, 3))}) for c in clients[:2]]
    assert [p.result()["rows"][0] for p in pending] == [4, 4]
    clients[1]._connection._link._socket.close(0)  # as if the process had been killed: no goodbye
    assert clients[0].infer({"x": np.ones((2, 3))})["rows"].tolist() == [2, 2]
    clients[1]._connection._link._connect()


def test_in_normal_mode_a_lost_rollout_workers_envs_move_to_the_live_one(pool: Pool) -> None:
    pool.start_broker(decoupled=False)
    for rank in range(2):
        pool.start_worker(rank, seconds=0.01)
    pool.wait_for_workers(2)
    clients = [pool.client(rank=rank, world_size=4) for rank in range(4)]
    wait_for(lambda: len(pool.status()["clients"]) == 4, "the clients to register")
    for killed in (False, True):
        for _ in range(10):
            pending = [c.submit({"x": np.full((1, 3), float(i))}) for i, c in enumerate(clients)]
            if killed and "rollout-0" in {w["name"] for w in pool.status()["workers"]}:
                os.kill(pool.pid("rollout-0"), signal.SIGKILL)
                pool.wait_for_workers(1)
            assert [p.result()["actions"][0, 0] for p in pending] == [0, 1, 2, 3]
    assert pending[0].result()["rows"].tolist() == [4]


@pytest.mark.alone
def test_sixty_four_clients_fill_batches_and_share_two_workers(pool: Pool) -> None:
    pool.start(workers=2, seconds=0.005)
    clients = [pool.client() for _ in range(64)]
    observation = {"x": np.ones((1, 3))}
    pending = {client: client.submit(observation) for client in clients}
    answered = 0
    while answered < 64 * 60:  # each asks again as soon as it has its answer
        for client, request in pending.items():
            if request.done():
                answered += 1
                request.result()
                pending[client] = client.submit(observation)
    status = pool.status()
    counters, totals = status["counters"], status["totals"]
    assert counters["shards"] / counters["batches"] >= 12
    assert 0.4 <= totals["rollout-0"]["shards"] / counters["shards"] <= 0.6
