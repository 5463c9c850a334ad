import pytest
from driver import STEP, Pool

from zmqrl.transport.header import FLAG_EVAL, Header, Op


def ranks(envs, workers, **options):
    """A pool in normal mode, with its clients e0, e1, … and its workers w0, w1, …."""
    pool = Pool(decoupled=False, **options)
    return (
        pool,
        [pool.client(f"e{e}", rank=e, world_size=envs) for e in range(envs)],
        [pool.worker(f"w{r}", rank=r, world_size=workers) for r in range(workers)],
    )


def last(worker):
    """The env ranks of the last batch of a worker."""
    return sorted(int(name[1:]) for name, _ in worker.batch.who) if worker.batches else None


@pytest.mark.parametrize(
    ("envs", "workers", "bound"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (3, 2, [[0, 1], [2]]),
        (2, 3, [[0], [1], None]),
        (5, 1, [[0, 1, 2, 3, 4]]),
        (1, 2, [[0], None]),
    ],
)
def test_env_rank_e_belongs_to_rollout_rank_e_times_r_over_e(envs, workers, bound):
    pool, clients, workers = ranks(envs, workers)
    for client in reversed(clients):
        client.ask()
    pool.turn()
    assert [last(worker) for worker in workers] == bound
    assert max(len(worker.batches) for worker in workers) == 1


def test_workers_without_ranks_share_the_envs_in_the_order_in_which_they_came():
    pool = Pool(decoupled=False)
    clients = [pool.client(f"e{e}", rank=e, world_size=4) for e in range(4)]
    first = pool.worker("first")
    pool.turn(STEP)
    second = pool.worker("second")
    for client in clients:
        client.ask()
    pool.turn()
    assert (last(first), last(second)) == ([0, 1], [2, 3])


def test_a_worker_waits_for_all_its_envs_and_for_no_others():
    pool, clients, (w0, w1) = ranks(4, 2)
    for client in clients:
        client.ask()
    pool.turn()
    w0.answer()
    w1.answer()
    for rank in (0, 2, 3):
        clients[rank].ask()
    pool.wait(30.0)
    assert len(w0.batches) == 1
    assert last(w1) == [2, 3]
    clients[1].ask()
    pool.turn()
    assert last(w0) == [0, 1]
    assert (len(w0.batches), len(w1.batches)) == (2, 2)


def test_the_queue_size_and_the_wait_of_decoupled_mode_do_not_bound_a_barrier():
    pool, clients, (worker,) = ranks(4, 1, queue_size=1, max_wait=10.0)
    for client in clients:
        client.ask()
    pool.turn()
    assert last(worker) == [0, 1, 2, 3]


def test_an_env_that_has_not_asked_yet_is_waited_for():
    pool, (e0, e1), (worker,) = ranks(2, 1)
    e0.ask()
    pool.wait(5.0)
    assert worker.batches == []
    e1.ask()
    pool.turn()
    assert last(worker) == [0, 1]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_env_that_has_not_asked_yet_is_waited_for_only_in_the_mode_that_it_announced(mode):
    pool = Pool(decoupled=False)
    asks = pool.client("e0", rank=0, world_size=2, mode=mode)
    pool.client("e1", rank=1, world_size=2, mode="eval" if mode == "train" else "train")
    worker = pool.worker("w")
    asks.ask(eval=mode == "eval")
    pool.turn()
    assert last(worker) == [0]


def test_train_and_eval_have_barriers_of_their_own():
    pool, (e0, e1, e2, e3), (worker,) = ranks(4, 1)
    for client in (e0, e1):
        client.ask()
    for client in (e2, e3):
        client.ask(eval=True)
    pool.turn()
    assert last(worker) == [0, 1]
    worker.answer()
    pool.turn()
    assert last(worker) == [2, 3]
    worker.answer()
    e0.ask()
    e2.ask(eval=True)
    e3.ask(eval=True)
    pool.turn()
    assert last(worker) == [2, 3]  # e1 is still missing in its own group
    worker.answer()
    e1.ask()
    pool.turn()
    assert last(worker) == [0, 1]


@pytest.mark.parametrize("is_eval", [False, True], ids=["train", "eval"])
def test_pipeline_stages_have_barriers_of_their_own(is_eval):
    pool, (e0, e1), (worker,) = ranks(2, 1)
    for stage in (0, 1):
        for client in (e0, e1):
            client.ask(stage=stage, eval=is_eval)
        pool.turn()
        worker.answer()
    e0.ask(stage=0, eval=is_eval)
    e0.ask(stage=1, eval=is_eval)
    e1.ask(stage=1, eval=is_eval)
    pool.turn()
    assert worker.who[2:] == [["e04", "e13"]]
    worker.answer()
    e1.ask(stage=0, eval=is_eval)
    pool.turn()
    assert worker.who[3:] == [["e03", "e14"]]


def test_an_env_that_joins_later_is_bound_and_waited_for():
    pool = Pool(decoupled=False)
    first, worker = pool.client("e0", rank=0, world_size=2), pool.worker("w")
    first.ask()
    pool.turn()
    worker.answer()
    second = pool.client("e1", rank=1, world_size=2)
    first.ask()
    pool.turn()
    assert len(worker.batches) == 1
    second.ask()
    pool.turn()
    assert last(worker) == [0, 1]


def test_an_env_that_changes_its_mode_is_no_longer_waited_for_in_the_old_one():
    pool, (e0, e1), (worker,) = ranks(2, 1)
    e0.ask()
    e1.ask()
    pool.turn()
    worker.answer()
    e0.ask()
    pool.turn()
    assert len(worker.batches) == 1
    e1.ask(eval=True)
    pool.turn()
    assert last(worker) == [0]
    worker.answer()
    pool.turn()
    assert last(worker) == [1]


def test_two_pipeline_stages_of_the_same_envs_take_turns():
    pool, clients, (worker,) = ranks(2, 1)
    for _ in range(3):
        for stage in (0, 1):
            for client in clients:
                client.ask(stage=stage)
        for stage in (0, 1):
            pool.turn()
            assert [header.stage for header in worker.batch.headers] == [stage, stage]
            worker.answer()
    assert len(worker.batches) == 6


@pytest.mark.parametrize("way", ["bye", "lose", "vanish"])
def test_a_barrier_opens_when_the_env_it_waits_for_is_gone(way):
    pool, clients, (worker,) = ranks(3, 1)
    for client in clients:
        client.ask()
    pool.turn()
    worker.answer()
    clients[0].ask()
    clients[2].ask()
    pool.wait(1.0)
    assert len(worker.batches) == 1
    getattr(clients[1], way)()
    pool.wait(0.5)
    assert last(worker) == [0, 2]
    worker.answer()
    pool.turn()
    assert pool.holds_nothing()


def test_an_env_that_is_lost_within_a_barrier_does_not_close_it():
    pool, clients, (worker,) = ranks(3, 1, max_rows=1)
    for client in clients:
        client.ask()
    pool.turn()
    clients[1].lose()
    worker.answer()
    pool.turn()
    worker.answer()
    pool.turn()
    assert worker.who == [["e01"], ["e21"]]
    assert pool.holds_nothing()


def test_max_rows_splits_an_open_barrier_and_starves_nobody():
    pool, clients, (worker,) = ranks(4, 1, max_rows=2)
    for _ in range(5):
        for client in clients:
            client.ask()
        pool.turn()
        worker.answer()
        # Those who got their answers are faster than the second half of the batch.
        for client in clients[:2]:
            client.ask()
        pool.turn()
        assert last(worker) == [2, 3]
        worker.answer()
        for client in clients[2:]:
            client.ask()
        pool.turn()
        worker.answer()
        pool.turn()
        worker.answer()
        pool.turn()
    assert pool.holds_nothing()
    assert [len(client.answers) for client in clients] == [10, 10, 10, 10]


def test_an_open_barrier_does_not_wait_again_for_the_env_that_it_waited_for():
    pool, clients, (worker,) = ranks(4, 1, max_rows=2)
    clients[0].ask()
    pool.turn()
    for client in clients[1:]:
        client.ask()
    pool.turn()
    assert last(worker) == [0, 1]  # the barrier had been found waiting for 1
    worker.answer()
    pool.turn()
    assert last(worker) == [2, 3]


def test_an_env_with_several_requests_open_has_one_in_each_batch():
    pool, (e0, e1), (worker,) = ranks(2, 1)
    for client in (e0, e0, e1, e1):
        client.ask()
    for _ in range(2):
        pool.turn()
        worker.answer()
    assert worker.who == [["e01", "e11"], ["e02", "e12"]]


@pytest.mark.parametrize("way", ["lose", "bye", "vanish", "stuck"])
def test_a_lost_rollout_workers_envs_move_to_the_live_ones_and_back(way):
    pool, clients, (w0, w1) = ranks(4, 2, attempt_timeout=2.0)
    for client in clients:
        client.ask()
    pool.turn()
    w0.answer()
    if way == "stuck":
        pool.wait(2.25)
    else:
        getattr(w1, way)()
        pool.wait(1.0)
    assert last(w0) == [2, 3]
    w0.answer()
    for client in clients:
        client.ask()
    pool.turn()
    assert last(w0) == [0, 1, 2, 3]
    w0.answer()
    pool.turn()
    assert [len(client.answers) for client in clients] == [2, 2, 2, 2]
    if way == "stuck":
        w1.answer()  # too late, but it is back
        back = w1
    else:
        back = pool.worker("w1", rank=1, world_size=2)
    for client in clients:
        client.ask()
    pool.turn()
    assert (last(w0), last(back)) == ([0, 1], [2, 3])


def test_a_restarted_rollout_worker_takes_over_before_its_old_self_is_missed():
    pool, clients, (w0, w1) = ranks(2, 2)
    pool.turn(STEP)
    new = pool.worker("w1", rank=1, world_size=2)
    clients[1].ask()
    pool.turn()
    assert (last(w0), last(w1), last(new)) == (None, None, [1])


def test_requests_wait_while_no_rollout_worker_is_connected():
    pool, clients, _ = ranks(2, 0)
    for client in clients:
        client.ask()
    pool.wait(2.0)
    worker = pool.worker("w0", rank=0, world_size=1)
    pool.turn()
    assert last(worker) == [0, 1]


def test_a_client_without_a_rank_is_told_what_normal_mode_needs():
    pool, (e0,), (worker,) = ranks(1, 1)
    stray = pool.client("stray")
    stray.ask(4)
    e0.ask()
    pool.turn()
    assert stray.answers == [("refused", 4)]
    message = stray.inbox[0].fields["message"]
    assert "rank" in message
    assert "enable_decoupled_mode" in message
    assert last(worker) == [0]


def test_a_request_that_kills_its_workers_takes_no_rank_mates_with_it():
    pool, clients, (worker,) = ranks(3, 1, max_attempts=2)
    for client in clients:
        client.ask()
    for _ in range(6):
        pool.turn()
        if worker.batches and ["e1", 1] in worker.batch.who:
            worker.lose()
            worker = pool.worker("w0", rank=0, world_size=1)
        elif worker.batches:
            worker.answer()
    assert [client.answers for client in clients] == [[("REPLY", 1)], [("attempts", 1)], [("REPLY", 1)]]


def test_the_barrier_with_the_oldest_request_is_served_first():
    pool = Pool(decoupled=False)
    train = pool.client("train", rank=0, world_size=2)
    evaluation = pool.client("eval", rank=1, world_size=2, mode="eval")
    worker = pool.worker("w")
    train.ask()
    pool.turn()
    evaluation.ask(eval=True)
    pool.turn(STEP)
    train.ask()  # the group that was first to appear, but the last to be complete
    for _ in range(3):
        worker.answer()
        pool.turn(STEP)
    assert worker.who == [["train1"], ["eval1"], ["train2"]]


def test_evaluation_is_not_starved_by_two_pipeline_stages_of_training():
    pool = Pool(decoupled=False)
    train = pool.client("train", rank=0, world_size=2)
    evaluation = pool.client("eval", rank=1, world_size=2, mode="eval")
    worker = pool.worker("w")
    train.ask(stage=0)
    train.ask(stage=1)
    evaluation.ask(eval=True)
    for _ in range(20):  # a worker that is slower than its simulators
        pool.turn(STEP)
        (header,) = worker.batch.headers
        worker.answer()
        if not header.flags & FLAG_EVAL:
            train.ask(stage=header.stage)
    pool.turn()
    assert evaluation.answers == [("REPLY", 1)]


def test_an_env_has_one_request_in_a_batch_after_two_rollout_workers_were_lost_with_it():
    pool, (e0,), (old,) = ranks(1, 1)
    e0.ask()
    e0.ask()
    pool.turn()
    new = pool.worker("w0", rank=0, world_size=1)  # it has restarted; its old self is not missed yet
    pool.turn()
    assert (old.who, new.who) == ([["e01"]], [["e02"]])
    new.lose()
    old.lose()
    newest = pool.worker("w0", rank=0, world_size=1)
    for _ in range(2):
        pool.turn()
        newest.answer()
    assert newest.who == [["e01"], ["e02"]]


def test_a_barrier_does_not_wait_for_a_stage_that_rests_until_it_asks_again():
    pool = Pool(decoupled=False)
    first, second = (pool.client(name, rank=rank, world_size=2) for rank, name in enumerate("ab"))
    worker = pool.worker("w", rank=0, world_size=1)
    for client in (first, second):
        client.ask(stage=1)
    pool.turn()
    worker.answer()
    first.send([Header(Op.REST, stage=1).pack()])
    second.ask(stage=1)
    pool.turn()
    assert worker.who[-1] == ["b2"]
    worker.answer()
    first.ask(stage=1)
    pool.turn()
    assert len(worker.who) == 2, "the barrier did not wait for the one that had asked again"
    second.ask(stage=1)
    pool.turn()
    assert sorted(worker.who[-1]) == ["a2", "b3"]
