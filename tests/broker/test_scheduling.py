import pytest
from driver import STEP, Pool


def test_the_oldest_requests_go_first_whoever_sent_them():
    pool = Pool(queue_size=3)
    a, b = pool.client("a"), pool.client("b")
    for client in (b, a, a, b, a):
        client.ask()
        pool.turn(STEP)
    worker = pool.worker("w")
    pool.turn()
    worker.answer()
    pool.turn()
    assert worker.who == [["b1", "a1", "a2"], ["b2", "a3"]]


@pytest.mark.parametrize(
    ("queue_size", "clients", "workers", "sizes"),
    [
        (1, 4, 1, [1]),
        (3, 4, 2, [3, 1]),
        (9, 4, 2, [4]),
        (0, 8, 2, [4, 4]),
        (0, 7, 2, [4, 3]),
        (0, 7, 3, [3, 3, 1]),
        (0, 4, 4, [1, 1, 1, 1]),
        (0, 2, 5, [1, 1]),
        (0, 1, 1, [1]),
    ],
)
def test_a_batch_holds_at_most_the_queue_size_or_the_clients_per_worker(
    queue_size, clients, workers, sizes
):
    pool = Pool(queue_size=queue_size)
    for number in range(clients):
        pool.client(f"c{number}").ask()
    workers = [pool.worker(f"w{number}") for number in range(workers)]
    pool.turn()
    assert [len(batch) for worker in workers for batch in worker.batches] == sizes


def test_the_automatic_cap_counts_those_who_are_connected_now():
    pool = Pool(queue_size=0)
    clients = [pool.client(f"c{number}") for number in range(8)]
    workers = [pool.worker(f"w{number}") for number in range(4)]

    def sizes():
        pool.turn()
        sizes = [len(batch) for worker in workers for batch in worker.batches]
        for worker in workers:
            if worker.batches:
                worker.answer()
                worker.batches.clear()
        return sizes

    def ask():
        for client in clients:
            client.ask()

    ask()
    assert sizes() == [2, 2, 2, 2]
    for worker in workers[2:]:
        worker.lose()
    ask()
    assert sizes() == [4, 4]
    for client in clients[:4]:
        client.bye()
    del clients[:4]
    ask()
    assert sizes() == [2, 2]


def test_a_stuck_worker_does_not_count_for_the_automatic_cap():
    pool = Pool(queue_size=0, attempt_timeout=1.0)
    clients = [pool.client(f"c{number}") for number in range(4)]
    clients[0].ask()
    stuck, good = pool.worker("stuck"), pool.worker("good")
    pool.turn()
    pool.wait(1.25)
    good.answer()
    for client in clients:
        client.ask()
    pool.turn()
    assert len(stuck.batches) == 1
    assert [len(batch) for batch in good.batches] == [1, 4]


@pytest.mark.parametrize(
    ("max_rows", "rows", "batches"),
    [
        (8, [4, 4, 4], [["c0", "c1"], ["c2"]]),
        (7, [4, 4, 4], [["c0"], ["c1"], ["c2"]]),
        (8, [4, 5, 3], [["c0"], ["c1", "c2"]]),
        (8, [100, 1, 1], [["c0"], ["c1", "c2"]]),
        (8, [1, 100, 1], [["c0"], ["c1"], ["c2"]]),
        (0, [1000, 1000, 1000], [["c0", "c1", "c2"]]),
    ],
)
@pytest.mark.parametrize("decoupled", [True, False], ids=["shared", "ranks"])
def test_a_batch_holds_at_most_max_rows_unless_it_is_one_request(decoupled, max_rows, rows, batches):
    pool = Pool(queue_size=9, max_rows=max_rows, decoupled=decoupled)
    for number, count in enumerate(rows):
        pool.client(f"c{number}", rank=number, world_size=3).ask(rows=count)
    worker = pool.worker("w", rank=0, world_size=1)
    for _ in range(len(batches) + 1):
        pool.turn()
        worker.answer()
    assert worker.who == [[f"{name}1" for name in batch] for batch in batches]


def test_the_worker_that_is_idle_the_longest_is_served_first():
    pool = Pool(queue_size=1)
    client = pool.client("a")
    workers = {name: pool.worker(name, ready=False) for name in ("w0", "w1", "w2")}
    for name in ("w1", "w2", "w0"):
        workers[name].ready()
        pool.turn(STEP)
    workers["w1"].ready()  # saying so again does not send it to the end
    order = []
    for _ in range(6):
        client.ask()
        pool.turn(STEP)
        order += [name for name, worker in workers.items() if len(worker.batches) > order.count(name)]
        workers[order[-1]].answer()
    assert order == ["w1", "w2", "w0"] * 2


def test_a_partial_batch_leaves_at_once_by_default():
    pool = Pool(queue_size=8)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    assert worker.who == [["a1"]]


def test_max_wait_holds_a_partial_batch_from_the_arrival_of_its_oldest_request():
    pool = Pool(queue_size=4, max_wait=1.0)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.wait(0.75)
    client.ask()
    assert pool.broker.timeout() == pytest.approx(0.25)
    pool.turn(0.125)
    assert worker.batches == []
    assert pool.broker.timeout() == pytest.approx(0.125)
    pool.turn(0.125)
    assert worker.who == [["a1", "a2"]]


def test_max_wait_counts_while_no_worker_is_idle():
    pool = Pool(queue_size=4, max_wait=1.0)
    client = pool.client("a")
    client.ask()
    pool.wait(1.0)
    worker = pool.worker("w")
    pool.turn()
    assert worker.who == [["a1"]]


def test_a_full_batch_does_not_wait():
    pool = Pool(queue_size=2, max_wait=1.0)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    client.ask()
    pool.turn()
    assert worker.who == [["a1", "a2"]]


def test_a_request_that_was_taken_back_does_not_wait_again():
    pool = Pool(queue_size=2, max_wait=10.0)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    client.ask()
    pool.turn()
    client.cancel(2)
    worker.lose()
    other = pool.worker("other")
    pool.turn()
    assert other.who == [["a1"]]


def test_a_cancelled_request_does_not_fill_a_batch_that_is_held_open():
    pool = Pool(queue_size=3, max_wait=1.0)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    client.cancel(client.ask())
    client.ask()
    pool.turn()
    assert worker.batches == []
    client.ask()
    pool.turn()
    assert worker.who == [["a1", "a3", "a4"]]


def test_a_batch_that_is_full_by_rows_does_not_wait():
    pool = Pool(queue_size=8, max_rows=8, max_wait=1.0)
    client, worker = pool.client("a"), pool.worker("w")
    client.ask(rows=4)
    client.ask(rows=4)
    pool.turn()
    assert worker.who == [["a1", "a2"]]


def test_a_batch_holds_no_more_bytes_than_one_frame_may_have():
    pool = Pool(queue_size=10, max_joined=3000)
    client, worker = pool.client("a"), pool.worker("w")
    for _ in range(3):
        client.ask(size=300)
    pool.turn()
    assert worker.who == [["a1", "a2"]]
    worker.answer()
    pool.turn()
    assert worker.who[-1] == ["a3"]


def test_an_automatic_max_wait_is_a_tenth_of_what_batches_take():
    pool = Pool(queue_size=4, max_wait=None)
    client, worker = pool.client("a"), pool.worker("w")
    pool.client("b"), pool.client("c")
    client.ask()
    pool.turn()
    assert worker.who == [["a1"]]  # nothing is known of this pool yet
    for number in range(2, 60):
        pool.turn(0.5)  # each batch takes half a second
        worker.answer()
        client.ask()
        pool.turn()
        if len(worker.who) < number:  # it is held open
            pool.turn(0.06)
        assert len(worker.who) == number
    worker.answer()
    client.ask()
    pool.turn()
    assert len(worker.who) == 59
    pool.turn(0.04)
    client.ask()
    pool.turn()
    assert len(worker.who) == 59
    pool.turn(0.02)
    assert worker.who[59:] == [["a60", "a61"]]


@pytest.mark.parametrize("batch_s", [0.0005, 0.5])
def test_an_automatic_max_wait_delays_nobody_where_it_would_be_very_short_or_all_are_here(batch_s):
    pool = Pool(queue_size=4, max_wait=None)
    a, b, worker = pool.client("a"), pool.client("b"), pool.worker("w")
    for number in range(1, 60):
        a.ask()
        if batch_s == 0.5:
            b.ask()
        pool.turn()
        assert len(worker.who) == number
        pool.turn(batch_s)
        worker.answer()


def test_a_batch_that_was_stuck_does_not_hold_up_those_after_it_for_long():
    pool = Pool(queue_size=4, max_wait=None)
    client, worker = pool.client("a"), pool.worker("w")
    pool.client("b")
    client.ask()
    pool.turn()
    pool.wait(50.0)
    worker.answer()
    client.ask()
    pool.turn()
    assert worker.who == [["a1"]]
    pool.turn(0.11)
    assert worker.who[1:] == [["a2"]]
