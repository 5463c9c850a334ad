"""Each policy has workers and waiting requests of its own."""

import pytest
from driver import STEP, Pool

BOTH_MODES = pytest.mark.parametrize("decoupled", [True, False], ids=["shared", "ranks"])


def serve(pool, *workers):
    """Lets the workers answer what they hold."""
    for worker in workers:
        if len(worker.batches) > getattr(worker, "answered", 0):
            worker.answered = len(worker.batches)
            worker.answer()
    pool.turn()


# -- Who gets what


@BOTH_MODES
@pytest.mark.parametrize("asked", ["", "reward", "other"])
def test_a_request_goes_only_to_a_worker_of_its_policy(decoupled, asked):
    pool = Pool(decoupled=decoupled)
    client = pool.client("a", rank=0, world_size=1)
    workers = {name: pool.worker(f"w-{name}", policy=name) for name in ("other", "reward", "")}
    client.ask(policy=asked)
    pool.turn()
    assert {name: worker.who for name, worker in workers.items()} == {
        name: [["a1"]] if name == asked else [] for name in workers
    }
    workers[asked].answer()
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert pool.holds_nothing()


def test_a_worker_that_names_no_policy_serves_the_default_one():
    pool = Pool(queue_size=1)
    client = pool.client("a")
    silent, empty = pool.worker("silent"), pool.worker("empty", policy="")
    client.ask()
    client.ask()
    pool.turn()
    assert (silent.who, empty.who) == ([["a1"]], [["a2"]])


def test_a_worker_waits_idle_while_only_requests_for_others_are_there():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w", policy="reward")
    client.ask()
    client.ask(policy="other")
    pool.wait(5.0)
    assert worker.batches == []
    client.ask(policy="reward")
    pool.turn()
    assert worker.who == [["a3"]]


def test_the_policies_of_one_client_do_not_block_each_other():
    pool = Pool(queue_size=1)
    client, action, reward = pool.client("a"), pool.worker("action"), pool.worker("r", policy="reward")
    for _ in range(5):
        client.ask(policy="reward")
    pool.turn()
    for request_id in (6, 7):
        client.ask()
        pool.turn()
        serve(pool, action)
        assert client.answers[-1] == ("REPLY", request_id)
    assert reward.who == [["a1"]]  # which is still at it


@BOTH_MODES
def test_the_oldest_requests_of_a_named_policy_go_first_in_both_modes(decoupled):
    pool = Pool(decoupled=decoupled, queue_size=3)
    a, b = (pool.client(name, rank=rank, world_size=2) for rank, name in enumerate("ab"))
    for client in (b, a, a, b, a):
        client.ask(policy="reward")
        client.ask(policy="other")
        pool.turn(STEP)
    worker = pool.worker("w", policy="reward")
    pool.turn()
    serve(pool, worker)
    assert worker.who == [["b1", "a1", "a3"], ["b3", "a5"]]


def test_requests_that_wait_for_a_worker_get_the_one_that_comes_later():
    pool = Pool()
    client = pool.client("a")
    client.ask(policy="reward")
    pool.wait(3.0)
    worker = pool.worker("w", policy="reward")
    pool.turn()
    serve(pool, worker)
    assert client.answers == [("REPLY", 1)]


# -- The automatic cap


def test_the_automatic_cap_counts_the_workers_of_the_policy_and_the_clients_that_asked_for_it():
    pool = Pool(queue_size=0)
    clients = [pool.client(f"c{number}") for number in range(8)]
    rewards = [pool.worker(f"r{number}", policy="reward") for number in range(3)]
    actions = [pool.worker(f"w{number}") for number in range(2)]
    for client in clients:
        client.ask()
    for client in clients[:6]:
        client.ask(policy="reward")
    pool.turn()
    assert [len(worker.batch) for worker in actions] == [4, 4]
    assert [len(worker.batch) for worker in rewards] == [2, 2, 2]


def test_the_workers_of_a_named_policy_share_what_waits():
    """A client may have many rewards under way, where it has one request for actions."""
    pool = Pool(queue_size=0)
    client = pool.client("c")
    for _ in range(9):
        client.ask(policy="reward")
    workers = [pool.worker(f"r{number}", policy="reward") for number in range(2)]
    pool.turn()
    assert [len(worker.batch) for worker in workers] == [5, 2]
    workers[0].answer()
    pool.turn()
    assert len(workers[0].batch) == 1


def test_a_stuck_worker_does_not_count_for_the_cap_of_its_policy_and_no_other_policys_does():
    pool = Pool(queue_size=0, attempt_timeout=1.0)
    clients = [pool.client(f"c{number}") for number in range(4)]
    clients[0].ask(policy="reward")
    stuck, good = pool.worker("stuck", policy="reward"), pool.worker("good", policy="reward")
    actions = [pool.worker("w0"), pool.worker("w1")]
    pool.turn()
    pool.wait(1.25)
    serve(pool, good)
    for client in clients:
        client.ask(policy="reward")
        client.ask()
    pool.turn()
    assert len(stuck.batches) == 1
    assert [len(batch) for batch in good.batches] == [1, 4]
    assert [len(worker.batch) for worker in actions] == [2, 2]


# -- Lost and stuck workers


@BOTH_MODES
@pytest.mark.parametrize("way", ["lose", "vanish", "bye", "hello", "stuck", "never got it"])
def test_a_lost_reward_workers_requests_go_to_another_one_and_never_to_an_action_worker(decoupled, way):
    pool = Pool(decoupled=decoupled, queue_size=2, attempt_timeout=3.0)
    clients = [pool.client(name, rank=rank, world_size=2) for rank, name in enumerate("ab")]
    first = pool.worker("first", policy="reward")
    for client in clients:
        client.ask(policy="reward")
    pool.turn()
    clients[0].ask(policy="reward")  # waits behind them
    action, second = pool.worker("action"), pool.worker("second", policy="reward")
    pool.turn()
    assert second.who == [["a2"]]
    serve(pool, second)
    if way == "hello":
        first.hello(policy="reward")
    elif way == "never got it":
        first.ready(0)
        pool.wait(1.0)
        first.ready(0)
    elif way == "stuck":
        pool.wait(3.25)
    else:
        getattr(first, way)()
    pool.wait(1.0)
    assert second.who == [["a2"], ["a1", "b1"]]
    serve(pool, second)
    for client in clients:
        assert sorted(client.answers)[0] == ("REPLY", 1)
    assert action.batches == []
    assert pool.counters["requeued"] == 2
    assert pool.holds_nothing()


def test_what_a_lost_worker_held_goes_ahead_in_the_queue_of_its_policy():
    pool = Pool(queue_size=2)
    client, first = pool.client("a"), pool.worker("first", policy="reward")
    for _ in range(3):
        client.ask(policy="reward")
    for _ in range(3):
        client.ask()
    pool.turn()
    first.lose()
    second, action = pool.worker("second", policy="reward"), pool.worker("action")
    pool.turn()
    assert (second.who, action.who) == ([["a1", "a2"]], [["a4", "a5"]])


def test_a_request_returns_to_a_worker_that_was_stuck_with_it_if_only_other_policies_have_workers():
    pool = Pool(attempt_timeout=2.0)
    client, stuck = pool.client("a"), pool.worker("stuck", policy="reward")
    pool.worker("action")
    client.ask(policy="reward")
    pool.turn()
    pool.wait(2.25)
    stuck.ready()
    pool.turn()
    assert stuck.who == [["a1"], ["a1"]]


def test_a_request_avoids_the_worker_that_it_was_lost_with_if_its_policy_has_another():
    pool = Pool(attempt_timeout=2.0, queue_size=1)
    client, stuck = pool.client("a"), pool.worker("stuck", policy="reward")
    client.ask(policy="reward")
    pool.turn()
    other = pool.worker("other", policy="reward")
    client.ask(policy="reward")
    pool.turn()
    assert other.who == [["a2"]]
    pool.wait(1.75)
    serve(pool, other)
    other.batches.clear()
    client.ask(policy="reward")
    pool.turn()
    pool.wait(0.5)
    stuck.ready()
    pool.turn()
    assert stuck.who == [["a1"]]
    other.answer()
    pool.turn()
    assert other.who == [["a3"], ["a1"]]


def test_after_max_attempts_the_client_is_told_the_history_and_action_workers_are_not_in_it():
    pool = Pool(max_attempts=2)
    client, action = pool.client("a"), pool.worker("action")
    client.ask(policy="reward")
    for name in ("alice", "bob"):
        worker = pool.worker(name, policy="reward")
        pool.turn()
        worker.lose()
    pool.turn()
    assert client.answers == [("attempts", 1)]
    message = client.inbox[0].fields["message"]
    assert "alice was lost" in message
    assert "bob was lost" in message
    assert "action" not in message
    assert action.batches == []
    assert pool.status["queues"] == {"": 0}


def test_a_batch_that_could_not_be_delivered_waits_on_for_another_worker_of_its_policy():
    pool = Pool()
    client, gone = pool.client("a"), pool.worker("gone", policy="reward")
    action, other = pool.worker("action"), pool.worker("other", policy="reward", ready=False)
    gone.vanish()
    client.ask(policy="reward")
    pool.turn()
    other.ready()
    pool.turn()
    assert (action.who, other.who) == ([], [["a1"]])
    assert pool.counters["requeued"] == 0


# -- The end of a request


@pytest.mark.parametrize("running", [False, True], ids=["queued", "running"])
@pytest.mark.parametrize(
    ("way", "answer"),
    [("deadline", "deadline"), ("stop", "stopping"), ("cancel", None), ("bye", None), ("lose", None)],
)
def test_a_request_for_a_named_policy_ends_as_any_other_does(way, answer, running):
    pool = Pool()
    client = pool.client("a")
    if running:
        pool.worker("r", policy="reward")
    request_id = client.ask(policy="reward", budget=5.0)
    pool.turn()
    if way == "deadline":
        pool.wait(5.25)
    elif way == "stop":
        pool.broker.stop()
    elif way == "cancel":
        client.cancel(request_id)
    else:
        getattr(client, way)()
    pool.turn()
    assert [what for what, _ in client.answers] == ([answer] if answer else [])
    assert pool.holds_nothing()
    assert pool.status["queues"] == ({"": 0, "reward": 0} if running else {"": 0})


# -- A partial batch that is held open


def test_the_loop_wakes_for_the_first_partial_batch_of_a_policy_with_an_idle_worker():
    pool = Pool(queue_size=4, max_wait=1.0)
    client, action = pool.client("a"), pool.worker("action")
    client.ask(policy="nobody")
    pool.turn(0.125)
    client.ask(policy="reward")
    pool.turn(0.625)
    client.ask()
    assert pool.broker.timeout() == 0.25  # only the last one has a worker that waits for it
    reward = pool.worker("reward", policy="reward")
    pool.turn(0.25)
    assert pool.broker.timeout() == pytest.approx(0.125)
    pool.turn(0.125)
    assert (action.who, reward.who) == ([], [["a2"]])
    pool.turn(0.5)
    assert pool.broker.timeout() == pytest.approx(0.125)
    pool.turn(0.125)
    assert action.who == [["a3"]]


def test_a_batch_that_no_idle_worker_may_have_does_not_keep_the_loop_awake():
    pool = Pool(queue_size=1, max_wait=0.5, attempt_timeout=1.0)
    client, stuck = pool.client("a"), pool.worker("stuck", policy="reward")
    client.ask(policy="reward")
    pool.turn()
    pool.worker("busy", policy="reward")
    pool.wait(0.5)
    client.ask(policy="reward")
    pool.wait(0.5)
    stuck.ready()
    pool.turn()
    assert pool.status["queues"]["reward"] == 1  # of the two, the one that `stuck` was stuck with
    assert pool.broker.timeout() == 0.25
