"""Normal mode binds envs and waits for them as if named policies did not exist."""

import pytest
from driver import STEP, Pool

from zmqrl.transport.header import Header, Op


def barrier(envs=2, workers=1, **options):
    """A pool in normal mode, with a reward worker of the lowest rank that was there first."""
    pool = Pool(decoupled=False, **options)
    reward = pool.worker("reward-0", policy="reward", rank=0, world_size=1)
    pool.turn(STEP)
    return (
        pool,
        [pool.client(f"e{e}", rank=e, world_size=envs) for e in range(envs)],
        [pool.worker(f"w{r}", rank=r, world_size=workers) for r in range(workers)],
        reward,
    )


@pytest.mark.parametrize("ranked", [True, False], ids=["ranks", "no ranks"])
def test_no_env_is_bound_to_a_reward_worker(ranked):
    pool = Pool(decoupled=False)
    place = {"rank": 0, "world_size": 1} if ranked else {}
    rewards = [pool.worker(f"r{number}", policy="reward", **place) for number in range(3)]
    pool.turn(STEP)
    clients = [pool.client(f"e{e}", rank=e, world_size=4) for e in range(4)]
    workers = [
        pool.worker(f"w{r}", **({"rank": r, "world_size": 2} if ranked else {})) for r in range(2)
    ]
    for client in clients:
        client.ask()
    pool.turn()
    assert [worker.who for worker in workers] == [[["e01", "e11"]], [["e21", "e31"]]]
    assert [worker.batches for worker in rewards] == [[], [], []]


def test_a_barrier_does_not_open_because_of_a_reward_request():
    pool, (e0, e1), (worker,), reward = barrier()
    for client in (e0, e1):
        client.ask()
    pool.turn()
    worker.answer()
    e0.ask()
    e1.ask(policy="reward")
    pool.turn()
    assert len(worker.batches) == 1
    assert reward.who == [["e12"]]
    e1.ask()
    pool.turn()
    assert worker.who[-1] == ["e02", "e13"]


@pytest.mark.parametrize("request_of", [{"eval": True}, {"stage": 1}, {"eval": True, "stage": 1}])
def test_a_reward_request_of_another_mode_or_stage_moves_no_barrier(request_of):
    pool, (e0, e1), (worker,), reward = barrier()
    for client in (e0, e1):
        client.ask()
    pool.turn()
    worker.answer()
    e0.ask()
    e1.ask(policy="reward", **request_of)  # as a default one, it would say that e1 does something else
    pool.turn()
    assert len(worker.batches) == 1, "the barrier opened"
    assert reward.who == [["e12"]]
    e1.ask()
    pool.turn()
    assert worker.who[-1] == ["e02", "e13"]
    worker.answer()
    for client in (e0, e1):
        client.ask(stage=1)
    e0.ask(eval=True)
    for _ in range(2):
        pool.turn()
        worker.answer()
    assert pool.counters["answered"] == 7  # no barrier waits for a mode or stage of a reward request


def test_a_barrier_does_not_wait_for_a_resting_stage_that_asks_for_rewards():
    pool, (e0, e1), (worker,), reward = barrier()
    for client in (e0, e1):
        client.ask()
    pool.turn()
    worker.answer()
    e1.send([Header(Op.REST).pack()])
    e1.ask(policy="reward")
    e0.ask()
    pool.turn()
    assert worker.who[-1] == ["e02"]
    assert reward.who == [["e12"]]


def test_a_barrier_does_not_wait_for_an_env_that_asks_a_named_policy_only():
    pool, (e0, e1), (worker,), reward = barrier()
    e0.ask()
    pool.turn()
    assert worker.batches == [], "who has not asked for anything may be about to"
    e1.ask(policy="reward")
    pool.turn()
    assert reward.who == [["e11"]]
    assert worker.who == [["e01"]]
    worker.answer()
    e1.ask()  # from now on it is waited for
    pool.turn()
    assert len(worker.batches) == 1
    e0.ask()
    pool.turn()
    assert worker.who[-1] == ["e12", "e02"]


def test_rewards_are_served_while_a_barrier_waits():
    pool, (e0, e1), (worker,), reward = barrier()
    e0.ask()
    for request_id in (2, 3):
        e0.ask(policy="reward")
        pool.turn()
        reward.answer()
        pool.turn()
        assert e0.answers[-1] == ("REPLY", request_id)
    assert worker.batches == []
    e1.ask()
    pool.turn()
    assert worker.who == [["e01", "e11"]]


def test_a_lost_env_that_a_barrier_waits_for_is_found_although_its_reward_request_is_open():
    pool, (e0, e1), (worker,), reward = barrier()
    e0.ask()
    e1.ask(policy="reward")
    pool.turn()
    e1.vanish()
    pool.wait(0.5)
    assert worker.who == [["e01"]]
    assert len(reward.batches) == 1


@pytest.mark.parametrize("way", ["lose", "bye", "stuck"])
def test_the_loss_of_a_reward_worker_moves_no_env(way):
    pool, clients, workers, reward = barrier(envs=2, workers=2, attempt_timeout=2.0)
    clients[0].ask(policy="reward")
    pool.turn()
    if way == "stuck":
        pool.wait(2.25)
    else:
        getattr(reward, way)()
    for client in clients:
        client.ask()
    pool.turn()
    assert [worker.who for worker in workers] == [[["e02"]], [["e11"]]]


def test_the_envs_of_a_lost_rollout_worker_never_move_to_a_reward_worker():
    pool, clients, (worker,), reward = barrier()
    for client in clients:
        client.ask()
    pool.turn()
    worker.lose()
    pool.wait(2.0)
    assert reward.batches == []
    new = pool.worker("w0", rank=0, world_size=1)
    pool.turn()
    assert new.who == [["e01", "e11"]]


def test_a_client_without_a_rank_may_ask_for_a_named_policy_only():
    pool, _, _, reward = barrier()
    stray = pool.client("stray")
    stray.ask(policy="reward")
    stray.ask()
    pool.turn()
    assert stray.answers == [("refused", 2)]
    reward.answer()
    pool.turn()
    assert stray.answers == [("refused", 2), ("REPLY", 1)]
