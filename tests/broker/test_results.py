import pytest
from driver import Pool

from zmqrl.transport.header import HEADER_SIZE, Header, Op, join_batch, unpack


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


def test_a_reply_does_not_wait_for_the_end_of_the_turn_unless_its_client_is_gone():
    pool, (present, gone), workers = two_running()
    pool.gone.add(gone.peer)
    for worker in workers:
        worker.answer()
    assert present.answers == [("REPLY", 1)]
    pool.turn()
    assert pool.counters["lost_clients"] == 1
    assert gone.answers == []
    assert pool.holds_nothing()


@pytest.mark.parametrize("field", ["epoch", "number"])
def test_a_result_of_another_epoch_or_batch_is_counted_and_dropped(field):
    pool, clients, (wrong, other) = two_running()
    wrong.answer(**{field: 999})
    pool.turn()
    assert [client.answers for client in clients] == [[], []]
    assert pool.counters["late_results"] == 1
    wrong.answered = 1
    served_in_the_end(pool, clients, [wrong, other])


@pytest.mark.parametrize("field", ["request_id", "frames"])
def test_a_result_whose_reply_is_not_that_of_its_request_reaches_nobody(field):
    pool = Pool(queue_size=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask(1)
    pool.turn()
    entries, (reply,) = worker.batch.replies()
    header = unpack(reply[0])
    header = header._replace(**{field: getattr(header, field) + 1})
    table = worker.batch.table._replace(entries=entries, origins=b"")
    worker.send(join_batch(table, Op.RESULT, [[header.pack() + reply[0][HEADER_SIZE:]]]))
    assert pool.counters["malformed"] == 1
    pool.turn()
    assert client.answers == []
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
    pool = Pool(queue_size=2)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    client.ask()
    pool.turn()
    entries, replies = worker.batch.replies()
    table = worker.batch.table._replace(entries=[entries[0]] * 2, origins=b"")
    worker.send(join_batch(table, Op.RESULT, [replies[0]] * 2))
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert pool.counters["late_results"] == 1
    assert worker.who == [["a1", "a2"], ["a2"]]  # the one that was left out runs again


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
def test_an_answer_that_is_neither_a_reply_nor_an_error_is_not_passed_on(op):
    pool = Pool(queue_size=1)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    head = Header(op, request_id=1).pack()
    entry = worker.batch.shards[0][0]._replace(length=len(head), frames=0, origin_length=0)
    table = worker.batch.table._replace(entries=[entry], origins=b"")
    worker.send(join_batch(table, Op.RESULT, [[head]]))
    assert pool.broker.take_outbox() == ([], [])
    pool.turn()
    worker.answered = 1
    served_in_the_end(pool, [client], [worker])
