"""Workers that keep state for their clients: whose requests go where."""

import pytest
from driver import STEP, Pool

from zmqrl.transport.header import FLAG_BEGINS, Op


def sticky_worker(pool, name, **hello):
    return pool.worker(name, sticky=True, **hello)


def at_home(clients="ab", workers=2, **options):
    """A pool in which each client has asked once, and been answered."""
    pool = Pool(**options)
    clients = [pool.client(name) for name in clients]
    workers = [sticky_worker(pool, f"w{number}") for number in range(workers)]
    for client in clients:
        client.ask()
        pool.turn()
        pool.turn(options.get("max_wait", 0.0))
        for worker in workers:
            if worker.batches:
                worker.answer()
                worker.batches.clear()
    pool.turn()
    for client in clients:
        client.take()
    return pool, clients, workers


def homes(pool):
    return {worker["name"]: worker["homes"] for worker in pool.status["workers"]}


@pytest.mark.parametrize(
    ("clients", "workers", "places"),
    [(1, 1, [1]), (4, 2, [2, 2]), (7, 3, [3, 2, 2]), (2, 5, [1, 1, 0, 0, 0]), (8, 4, [2, 2, 2, 2])],
)
@pytest.mark.parametrize("together", [True, False])
def test_each_worker_has_its_share_of_the_homes(clients, workers, places, together):
    pool = Pool()
    clients = [pool.client(f"c{number}") for number in range(clients)]
    workers = [sticky_worker(pool, f"w{number}") for number in range(workers)]
    for client in clients:
        client.ask()
        if not together:
            pool.turn()
    for _ in clients:
        pool.turn()
        for worker in workers:
            if worker.batches:
                worker.answer()
                worker.batches.clear()
    pool.turn()
    assert sorted(homes(pool).values(), reverse=True) == places
    assert [[code for code, _ in client.answers] for client in clients] == [["REPLY"]] * len(clients)


def test_a_client_waits_for_its_home_while_another_worker_is_idle():
    pool, (a, b), (first, second) = at_home()
    for client in (a, b):
        client.ask()
    pool.turn()
    assert (first.who, second.who) == ([["a2"]], [["b2"]])
    second.answer()
    a.ask()
    pool.wait(2.0)
    assert len(second.batches) == 1
    first.answer()
    pool.turn()
    assert first.who == [["a2"], ["a3"]]


def test_clients_that_never_ask_take_nobodys_place():
    pool, _, _ = at_home("a", workers=2)
    pool.client("looks on"), pool.client("so does this")
    b = pool.client("b")
    b.ask()
    pool.turn()
    assert homes(pool) == {"w0": 1, "w1": 1}


def test_a_worker_that_has_never_been_idle_is_not_waited_for():
    pool = Pool()
    clients = [pool.client(name) for name in "abc"]
    worker = sticky_worker(pool, "w")
    sticky_worker(pool, "still begins", ready=False)
    for client in clients:
        client.ask()
    for _ in clients:
        pool.turn()
        worker.answer()
    assert homes(pool) == {"w": 3, "still begins": 0}


@pytest.mark.parametrize("newer", [0, 1], ids=["new socket", "new process"])
def test_a_client_that_comes_under_its_name_again_has_its_old_home(newer):
    pool, (_, b), (first, second) = at_home()
    again = pool.client("b", incarnation=newer)
    assert homes(pool) == {"w0": 1, "w1": 0}
    first.ready()  # so that the other has been idle for longer
    b = again
    b.ask()
    pool.turn()
    assert (first.who, second.who) == ([], [["b1"]])
    assert homes(pool) == {"w0": 1, "w1": 1}


def test_a_client_that_was_lost_has_its_home_when_it_is_back():
    pool, (_, b), (_, second) = at_home()
    b.lose()
    pool.turn()
    assert homes(pool) == {"w0": 1, "w1": 0}
    other = pool.client("c")
    other.ask()
    pool.turn()
    second.answer()
    back = pool.client("b")
    back.ask()
    pool.turn()
    assert second.who == [["c1"], ["b1"]]
    assert homes(pool) == {"w0": 1, "w1": 2}


def test_a_goodbye_frees_the_place():
    pool, (_, b), (first, second) = at_home()
    b.bye()
    assert homes(pool) == {"w0": 1, "w1": 0}
    second.ready()
    pool.client("c").ask()
    pool.turn()
    assert second.who == [["c1"]]
    pool.client("b").ask()  # a stranger now: both have their share
    first.answer() if first.batches else None
    pool.turn()
    assert first.who == [["b1"]]


def test_what_a_lost_worker_had_in_hand_goes_to_any_other_which_is_home_then():
    pool, (a, b), (first, second) = at_home()
    for client in (a, b):
        client.ask()
    pool.turn()
    second.answer()
    first.lose()
    pool.turn()
    assert second.who == [["b2"], ["a2"]]
    assert homes(pool) == {"w1": 2}
    second.answer()
    again = sticky_worker(pool, "w0")
    a.ask()
    pool.turn()
    assert (again.who, second.who[2:]) == ([], [["a3"]])


def test_what_killed_a_worker_does_not_wait_for_its_name_although_all_others_are_full():
    pool, (a, b), (first, second) = at_home()
    for client in (a, b):
        client.ask()
    pool.turn()
    first.lose()
    again = sticky_worker(pool, "w0")
    second.answer()
    pool.turn()
    assert (again.who, second.who) == ([], [["b2"], ["a2"]])


@pytest.mark.parametrize("way", ["lost", "stuck"])
def test_who_waits_for_a_worker_that_is_lost_or_stuck_moves(way):
    pool, (a, _), (first, second) = at_home(attempt_timeout=2.0, queue_size=1)
    a.ask()
    a.ask()
    pool.turn()
    assert first.who == [["a2"]]
    if way == "lost":
        first.lose()
    else:
        pool.wait(2.25)
    for _ in range(2):
        pool.turn()
        second.answer()
    assert second.who == [["a2"], ["a3"]]
    assert homes(pool)["w1"] == 2


def test_a_worker_that_is_started_again_gets_clients_that_need_no_state():
    pool, clients, (first, second) = at_home("abcdef")
    second.lose()
    again = sticky_worker(pool, "w1")
    workers = [first, again]

    def ask(clients, **request):
        for client in clients:
            client.ask(**request)
        for _ in clients:
            pool.turn()
            for worker in workers:
                if worker.batches:
                    worker.answer()
        return {name: count for name, count in homes(pool).items() if name in ("w0", "w1")}

    stayed = [client for client in clients if client.name in "ace"]
    moved = [client for client in clients if client.name in "bdf"]
    assert ask(stayed) == {"w0": 3, "w1": 0}
    assert ask(stayed[:2]) == {"w0": 3, "w1": 0}
    assert ask(stayed, flags=FLAG_BEGINS) == {"w0": 2, "w1": 1}
    assert ask(stayed, flags=FLAG_BEGINS) == {"w0": 2, "w1": 1}
    assert ask(moved) == {"w0": 3, "w1": 3}


def test_a_client_that_has_another_request_under_way_stays():
    pool, (a, b), (first,) = at_home(workers=1)
    again = sticky_worker(pool, "w1")
    a.ask()
    a.ask(flags=FLAG_BEGINS)
    pool.turn()
    assert (first.who, again.who) == ([["a2"]], [])
    b.ask(flags=FLAG_BEGINS)
    pool.turn()
    assert again.who == [["b2"]]


def test_a_worker_that_was_lost_and_comes_back_on_its_socket_gets_what_waited_for_it():
    pool = Pool(queue_size=1)
    a = pool.client("a")
    worker = sticky_worker(pool, "w")
    a.ask()
    a.ask()
    pool.turn()
    pool.broker.worker_unreachable(worker.peer)  # its connection broke, and is made anew
    worker.hello(sticky=True)
    a.ask()
    worker.ready()
    for _ in range(3):
        pool.turn()
        worker.answer()
    assert worker.who == [["a1"], ["a1"], ["a2"], ["a3"]]
    assert pool.holds_nothing()
    assert homes(pool) == {"w": 1}


def test_a_worker_that_was_stuck_is_home_again_to_those_who_have_not_asked_since():
    pool, (a, _, c), (first, second) = at_home("abc", attempt_timeout=2.0)
    assert homes(pool) == {"w0": 2, "w1": 1}
    a.ask()
    pool.turn()
    pool.wait(2.25)
    second.answer()  # what was a's
    first.answer()  # it is back
    for client in (a, c):
        client.ask()
    pool.turn()
    assert first.who == [["a2"], ["c2"]]
    assert second.who == [["a2"], ["a3"]]


def test_a_request_whose_result_was_lost_goes_home_again():
    """There the state is; a worker elsewhere would only say that it has none."""
    pool, (a, _), (first, second) = at_home()
    a.ask()
    pool.turn()
    first.ready()
    pool.turn()
    assert (first.who, second.who) == ([["a2"], ["a2"]], [])
    assert [entry.attempt for entry, _ in first.batch.shards] == [1]


def test_all_that_a_client_has_under_way_goes_to_one_worker():
    pool = Pool(queue_size=1)
    a = pool.client("a")
    workers = [sticky_worker(pool, f"w{number}") for number in range(2)]
    for stage in range(3):
        a.ask(stage=stage)
    for _ in range(3):
        pool.turn()
        for worker in workers:
            if worker.batches:
                worker.answer()
    assert [worker.who for worker in workers] == [[["a1"], ["a2"], ["a3"]], []]


def test_a_partial_batch_is_held_open_for_those_at_home_and_for_nobody_else():
    pool, (a, b, c), (first, second) = at_home("abc", max_wait=1.0)
    assert homes(pool) == {"w0": 2, "w1": 1}
    b.ask()
    pool.turn()
    assert second.who == [["b2"]]  # it has the batch to itself
    a.ask()
    pool.turn()
    assert first.who == []
    assert pool.broker.timeout() == pytest.approx(STEP)
    pool.turn(0.9)
    assert pool.broker.timeout() == pytest.approx(0.1)
    c.ask()
    pool.turn()
    assert first.who == [["a2", "c2"]]


def test_a_batch_that_is_held_open_leaves_in_time_while_others_wait_for_a_busy_home():
    pool, (a, b, _), (first, _) = at_home("abc", max_wait=0.4)
    b.ask()
    pool.turn()
    b.ask()
    pool.turn(0.1)
    a.ask()
    pool.turn(0.35)  # b's wait is over; its home is busy
    assert pool.broker.timeout() == pytest.approx(0.05)
    pool.turn(0.05)
    assert first.who == [["a2"]]


def test_a_batch_ahead_is_a_full_one_of_those_at_home():
    pool, (a, b), (first, second) = at_home(queue_size=2)
    a.ask()
    pool.turn()
    first.ahead()
    a.ask()
    for _ in range(4):
        b.ask()
    pool.turn()
    assert (first.who, second.who) == ([["a2"]], [["b2", "b3"]])
    second.ahead()
    pool.turn()
    assert second.who[1:] == [["b4", "b5"]]
    a.ask()
    pool.turn()
    assert first.who[1:] == [["a3", "a4"]]


def test_one_sticky_worker_makes_its_policy_so_and_the_odd_one_is_warned():
    pool = Pool()
    client = pool.client("a")
    client.ask()
    odd = pool.strange_worker("odd")
    odd.hello()
    pool.send()
    assert odd.inbox[-1].op is Op.WELCOME
    assert "warning" not in odd.inbox[-1].fields
    sticky = pool.strange_worker("sticky")
    sticky.hello(sticky=True)
    pool.send()
    assert "rollout.affinity" in sticky.inbox[-1].fields["warning"]
    for worker in (odd, sticky):
        worker.ready()
    for _ in range(3):
        pool.turn()
        odd.answer()
        client.ask()
    assert (len(odd.batches), sticky.batches) == (3, [])


def test_a_policy_whose_workers_keep_no_state_any_more_shares_its_queue_again():
    pool, (a, b), workers = at_home()
    for worker in workers:
        worker.bye()
    for client in (a, b, a, b):
        client.ask()
    plain = pool.worker("plain")
    pool.turn()
    plain.answer()
    pool.turn()
    assert plain.who == [["a2", "b2"], ["a3", "b3"]]
    assert homes(pool) == {"plain": 0}


def test_each_policy_has_homes_of_its_own():
    pool = Pool(queue_size=1)
    clients = [pool.client(name) for name in "ab"]
    base = sticky_worker(pool, "base")
    rewards = [sticky_worker(pool, f"r{number}", policy="reward") for number in range(2)]
    shared = pool.worker("shared", policy="other")
    for client in clients:
        for policy in ("", "reward", "other"):
            client.ask(policy=policy)
    for _ in range(4):
        pool.turn()
        for worker in (base, *rewards, shared):
            if worker.batches:
                worker.answer()
    assert homes(pool) == {"base": 2, "r0": 1, "r1": 1, "shared": 0}


def test_in_normal_mode_ranks_say_who_is_where():
    pool = Pool(decoupled=False)
    clients = [pool.client(name, rank=rank, world_size=2) for rank, name in enumerate("ab")]
    workers = [sticky_worker(pool, f"w{rank}", rank=rank, world_size=2) for rank in (1, 0)]
    for client in clients:
        client.ask()
    pool.turn()
    assert [worker.who for worker in workers] == [[["b1"]], [["a1"]]]


def test_sticky_must_be_true_or_false():
    pool = Pool()
    worker = pool.strange_worker()
    worker.hello(sticky=1)
    pool.send()
    assert "sticky must be true or false" in worker.inbox[-1].fields["message"]
    assert pool.status["workers"] == []


def test_homes_of_clients_that_do_not_come_back_are_not_kept_for_ever():
    pool = Pool()
    worker = sticky_worker(pool, "w")
    for number in range(1200):
        client = pool.client(f"c{number}")
        client.ask()
        pool.turn()
        worker.answer()
        client.lose()
    (policy,) = {worker.policy for worker in pool.broker._pool.workers.values()}
    assert len(policy.schedule._homes) == len(policy.schedule._absent) == 1000
    assert homes(pool) == {"w": 0}
