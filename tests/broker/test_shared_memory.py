"""What the broker does about requests whose arrays are in shared memory."""

import struct

import pytest
from driver import Pool

from zmqrl.broker.lane import BrokerLane
from zmqrl.transport import sharedmem
from zmqrl.transport.header import FLAG_LANE, FLAG_READS_LANE, Header, Op, join_batch

NOWHERE = struct.pack("<II16sQI", 0, 0, bytes(16), 1, 0)
"""Where no memory is."""


@pytest.fixture
def pool():
    return Pool(lane=BrokerLane(sharedmem.proof()), max_attempts=1)


def reader(pool, name):
    """A worker that can read shared memory."""
    worker = pool.worker(name, ready=False)
    worker.ready(flags=FLAG_READS_LANE)
    return worker


def test_a_broker_without_shared_memory_answers_that_the_arrays_must_be_sent():
    pool = Pool()
    client = pool.client("a")
    client.ask(flags=FLAG_LANE, place=NOWHERE)
    pool.turn()
    assert client.answers == [("lane", 1)]
    assert pool.counters["requests"] == 0


def test_everybody_is_welcomed_with_memory_that_can_be_read(pool):
    for peer in (pool.stranger(), pool.strange_worker()):
        peer.hello()
        pool.turn()
        assert sharedmem.Reader().can_read(peer.inbox[0].fields["lane"])


def test_a_reply_says_whether_another_worker_may_still_be_reading_the_request(pool):
    client, first = pool.client("a"), reader(pool, "first")
    client.ask(flags=FLAG_LANE, place=NOWHERE)
    pool.turn()
    first.answer()
    pool.turn()
    client.ask(flags=FLAG_LANE, place=NOWHERE)
    pool.broker.dispatch()
    first.bye()  # the batch crosses it: no attempt has failed
    second = reader(pool, "second")
    pool.turn()
    second.answer()
    pool.turn()
    assert [message.header.attempt for message in client.take()] == [0, 1]
    assert pool.counters["lane_requests"] == 2


def test_a_request_that_cannot_be_read_for_a_worker_leaves_the_worker_to_others(pool):
    client, remote = pool.client("a"), pool.worker("remote")
    client.ask(flags=FLAG_LANE, place=NOWHERE)
    pool.turn()
    client.ask()
    pool.turn()
    assert client.answers == [("lane", 1)]
    assert remote.who == [["a2"]]
    remote.answer()
    pool.turn()
    assert client.answers == [("lane", 1), ("REPLY", 2)]


def test_what_is_named_in_shared_memory_counts_for_the_bounds_but_is_not_held_here():
    pool = Pool(lane=BrokerLane(sharedmem.proof()), max_client_bytes=1 << 20, max_open_bytes=5 << 18)
    clients = [pool.client("a"), pool.client("b")]
    place = NOWHERE[:32] + struct.pack("<I2Q", 2, 1 << 18, 3 << 17)
    for client in clients:
        client.ask(flags=FLAG_LANE, place=place)
        client.ask(flags=FLAG_LANE, place=place)
        client.ask(flags=FLAG_LANE, place=NOWHERE[:32] + struct.pack("<IQ", 1, 1 << 20))
        client.ask(flags=FLAG_LANE, place=NOWHERE[:-1])
    pool.turn()
    assert clients[0].answers == [("overloaded", 2), ("refused", 3), ("lane", 4)]
    assert clients[1].answers == [("overloaded", 1), ("overloaded", 2), ("refused", 3), ("lane", 4)]
    assert pool.broker.status()["open_bytes"] > 5 << 17
    assert 0 < pool.broker.held_bytes < 1000
    clients[0].cancel(1)
    assert pool.broker.status()["open_bytes"] == pool.broker.held_bytes == 0


@pytest.mark.parametrize("why", ["cancelled", "gone", "taken back", "another broker's"])
def test_the_memory_of_a_reply_that_nobody_gets_is_free_at_once(pool, why):
    client, worker, slots = pool.client("a"), reader(pool, "first"), sharedmem.Slots()
    client.ask()
    pool.turn()
    slot = slots.lend([bytes(100_000)])
    table, entry = worker.batch.table, worker.batch.table.entries[0]
    reply = [Header(Op.REPLY, FLAG_LANE, request_id=1, rows=1).pack() + slot.descriptor]
    entry = entry._replace(length=len(reply[0]), frames=0, origin_length=0)
    table = table._replace(entries=[entry], origins=b"")
    if why == "cancelled":
        client.cancel(1)
    elif why == "gone":
        client.lose()
    elif why == "taken back":
        pool.wait(61)
    else:
        table = table._replace(epoch=1)
    worker.send(join_batch(table, Op.RESULT, [reply]))
    assert slots.collect(0.0) == 0
    pool.turn()
    assert ("REPLY", 1) not in client.answers
