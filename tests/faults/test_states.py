"""Policies with memory in real pools: each env has a state of its own, whatever becomes of the parts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import TESTS, Pool, no_more_files, wait_for

from zmqrl import PolicyClient
from zmqrl.client.aio import AsyncPolicyClient
from zmqrl.errors import EncodeError, PolicyError, RequestRefused, StateLost

STICKY = "rollout.affinity=sticky"
NONE = "rollout.affinity=none"
ENVS = 4
STEPS = 13


@pytest.fixture
def counting(folder: Path) -> Iterator[Pool]:
    pool = Pool(folder, TESTS / "policies.py", "Counting")
    yield pool
    pool.close()


def start(
    pool: Pool, affinity: str, workers: int = 1, *broker: str, decoupled: bool = True, **kwargs: Any
) -> Pool:
    pool.start_broker(affinity, *broker, decoupled=decoupled)
    for rank in range(workers):
        pool.start_worker(rank, overrides=(affinity, *broker), **kwargs)
    pool.wait_for_workers(workers)
    return pool


def seen(env: int, step: int) -> float:
    """What an env shows in a step; each differs."""
    return 100 * env + step


def begins(env: int, step: int) -> bool:
    """Whether an episode of that env begins in that step: at another time in each."""
    return step == 0 or step % (env + 5) == 4


def expected(env: int, chunk: int = 3) -> list[tuple[int, int]]:
    """The actions and counts that an env with a counting policy of its own gets."""
    stream = []
    count, x = 0, 0.0
    for step in range(STEPS):
        if begins(env, step):
            count = 0
        if count % chunk == 0:
            x = seen(env, step)
        stream.append((int(x) * (count % chunk + 1), count + 1))
        count += 1
    return stream


def play(client: PolicyClient, env: int, streams: dict[int, list[Any]]) -> None:
    for step in range(STEPS):
        x = np.full((1, 1), seen(env, step))
        reply = client.infer({"x": x}, reset=[begins(env, step)])
        streams[env].append((int(reply["actions"][0, 0]), int(reply["counts"][0])))
    client.rest()  # in normal mode the others need not wait for this one


@pytest.mark.parametrize("affinity", [STICKY, NONE])
@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "normal"])
def test_envs_in_parallel_get_the_same_chunks_of_actions_as_in_series(
    counting: Pool, affinity: str, decoupled: bool
) -> None:
    start(counting, affinity, 2, decoupled=decoupled)
    parallel: dict[int, list[Any]] = {env: [] for env in range(ENVS)}
    series: dict[int, list[Any]] = {env: [] for env in range(ENVS)}
    threads = [
        threading.Thread(
            target=play,
            args=(counting.client(rank=env, world_size=ENVS), env, parallel),
        )
        for env in range(ENVS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for client in counting.clients:
        client.close()
    for env in range(ENVS):
        with counting.client(rank=env, world_size=ENVS) as client:
            play(client, env, series)
    assert parallel == series == {env: expected(env) for env in range(ENVS)}
    served = [totals["shards"] for totals in counting.status()["totals"].values()]
    assert len(served) == 2
    assert min(served) > 0


@pytest.mark.slow
@pytest.mark.parametrize("affinity", [STICKY, NONE])
def test_a_network_gives_envs_in_parallel_nearly_the_chunks_that_it_gives_in_series(
    counting: Pool, affinity: str
) -> None:
    """Not to the last bit: a matrix product of other rows may be summed in another order."""
    start(counting, affinity, 2, policy="planning_network")

    def play_on(env: int, client: PolicyClient, actions: dict[int, list[Any]]) -> None:
        random = np.random.default_rng(env)
        for step in range(STEPS):
            x = random.normal(size=(2, 5)).astype(np.float32)
            actions[env].append(client.infer({"x": x}, reset=begins(env, step))["actions"])

    parallel: dict[int, list[Any]] = {env: [] for env in range(ENVS)}
    series: dict[int, list[Any]] = {env: [] for env in range(ENVS)}
    threads = [
        threading.Thread(target=play_on, args=(env, counting.client(), parallel)) for env in range(ENVS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for env in range(ENVS):
        play_on(env, counting.client(), series)
    for env in range(ENVS):
        assert np.stack(parallel[env]) == pytest.approx(np.stack(series[env]), abs=1e-5)
        changes = np.abs(np.diff(np.stack(series[env]), axis=0)).max(axis=(1, 2))
        assert changes.min() > 1e-3  # each step has an action of its own


@pytest.mark.parametrize("affinity", [STICKY, NONE])
def test_rows_of_one_request_have_states_of_their_own(counting: Pool, affinity: str) -> None:
    start(counting, affinity)
    client = counting.client()
    streams: dict[int, list[Any]] = {env: [] for env in range(ENVS)}
    order = np.random.default_rng(3)
    for step in range(STEPS):
        ids = order.permutation(ENVS)
        for part in (ids[:1], ids[1:]) if step % 3 == 2 else (ids,):
            x = np.array([[seen(env, step)] for env in part])
            reply = client.infer({"x": x}, reset=[begins(env, step) for env in part], ids=part)
            for row, env in enumerate(part):
                streams[env].append((int(reply["actions"][row, 0]), int(reply["counts"][row])))
    assert streams == {env: expected(env) for env in range(ENVS)}


@pytest.mark.parametrize("affinity", [STICKY, NONE])
def test_stages_and_single_observations_have_states_of_their_own(counting: Pool, affinity: str) -> None:
    start(counting, affinity)
    client = counting.client()
    x = {"x": np.ones((2, 1))}
    for step in range(3):
        both = [client.submit(x, stage=stage, reset=step == 0) for stage in (0, 1)]
        assert [p.result()["counts"].tolist() for p in both] == [[step + 1] * 2] * 2
    one = client.infer_one({"x": np.ones(1)}, reset=True, ids=7)
    assert one["counts"] == 1
    assert client.infer_one({"x": np.ones(1)}, reset=False, ids=7)["counts"] == 2
    assert client.infer(x, reset=[False, True])["counts"].tolist() == [4, 1]


@pytest.mark.parametrize("affinity", [STICKY, NONE])
def test_padding_and_both_modes_touch_no_state(counting: Pool, affinity: str) -> None:
    start(counting, affinity, 1, "rollout.static_batch_sizes=[4]")
    clients = [counting.client(mode=mode) for mode in ("train", "eval", "train")]
    for step in range(4):
        pending = [
            client.submit({"x": np.full((3, 1), seen(env, step))}, reset=step == 0)
            for env, client in enumerate(clients)
        ]
        for env, request in enumerate(pending):
            reply = request.result()
            assert reply["counts"].tolist() == [step + 1] * 3
            assert reply["actions"].tolist() == [[seen(env, step - step % 3) * (step % 3 + 1)]] * 3
            assert reply["eval"].all() == (env == 1)
            assert reply["valid"].all()


@pytest.mark.parametrize("affinity", [STICKY, NONE])
def test_only_the_guilty_request_of_a_batch_fails_and_its_state_stays(
    counting: Pool, affinity: str
) -> None:
    start(counting, affinity, seconds=0.1)
    good, guilty, blocker = counting.client(), counting.client(), counting.client()
    x = np.ones((1, 1))
    for step, command in enumerate(["go", "raise", "raise", "go"]):
        block = blocker.submit({"x": x, "command": ["go"]}, reset=True)
        pending = [
            good.submit({"x": x, "command": ["go"]}, reset=step == 0),
            guilty.submit({"x": x, "command": [command]}, reset=step == 0),
        ]
        block.result()
        assert pending[0].result()["counts"] == step + 1
        if command == "raise":
            with pytest.raises(PolicyError, match="marked"):
                pending[1].result()
        else:
            assert pending[1].result()["counts"] == (1 if step == 0 else 2)


@pytest.mark.parametrize("affinity", [STICKY, NONE])
def test_large_states_and_observations_go_through_shared_memory(counting: Pool, affinity: str) -> None:
    start(counting, affinity, width=20_000)
    client = counting.client()
    for step in range(5):
        x = np.full((2, 30_000), seen(1, step))
        reply = client.infer({"x": x}, reset=step == 0)
        assert reply["counts"].tolist() == [step + 1] * 2
        assert (reply["actions"] == seen(1, step - step % 3) * (step % 3 + 1)).all()
    assert counting.counters()["lane_replies"] >= 4


def test_two_batches_in_hand_are_run_in_order(counting: Pool) -> None:
    start(counting, STICKY, 1, "rollout.prefetch=true", "rollout.rollout_queue_size=2", seconds=0.002)
    streams: dict[int, list[Any]] = {env: [] for env in range(ENVS)}
    threads = [
        threading.Thread(target=play, args=(counting.client(), env, streams)) for env in range(ENVS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert streams == {env: expected(env) for env in range(ENVS)}


@pytest.mark.parametrize("affinity", [STICKY, NONE])
def test_tasks_on_one_client_have_an_env_each(counting: Pool, affinity: str) -> None:
    start(counting, affinity, 2)
    streams: dict[int, list[Any]] = {env: [] for env in range(ENVS)}

    async def play_alone(client: AsyncPolicyClient, env: int) -> None:
        for step in range(STEPS):
            x = np.full(1, seen(env, step))
            reply = await client.infer_one({"x": x}, reset=begins(env, step), ids=env)
            streams[env].append((int(reply["actions"][0]), int(reply["counts"])))

    async def play_all() -> None:
        async with AsyncPolicyClient(counting.frontend, timeout=20) as client:
            await asyncio.gather(*(play_alone(client, env) for env in range(ENVS)))

    asyncio.run(play_all())
    assert streams == {env: expected(env) for env in range(ENVS)}


def test_a_request_without_memory_is_refused_and_says_what_to_do(counting: Pool) -> None:
    start(counting, STICKY)
    with pytest.raises(RequestRefused, match="reset="):
        counting.client().infer({"x": np.ones((1, 1))})


def test_memory_for_a_policy_that_keeps_none_is_ignored(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    for step in range(3):
        reply = client.infer({"x": np.full((2, 3), step)}, reset=step == 0)
        assert (reply["actions"] == step).all()


def test_a_policy_with_memory_that_takes_the_place_of_one_without_is_told_of_resets(
    counting: Pool,
) -> None:
    start(counting, STICKY, policy="Echo")
    client, careless = counting.client(), counting.client()
    x = {"x": np.ones((2, 1))}
    for step in range(3):
        client.infer(x, reset=step == 0)
    careless.infer(x)
    counting.kill("rollout-0")
    counting.start_worker(0, overrides=(STICKY,))
    with pytest.raises(StateLost, match="reset="):
        client.infer(x, reset=False)
    assert client.infer(x, reset=True)["counts"].tolist() == [1, 1]
    with pytest.raises(RequestRefused, match="reset="):
        careless.infer(x)


def test_a_repeated_step_after_a_time_limit_is_answered_with_what_was_kept(counting: Pool) -> None:
    """A frozen worker wakes up, has run the step, and gets it a second time."""
    start(counting, STICKY, 1, "rollout.attempt_timeout_s=1", seconds=0.3)
    client = counting.client()
    x = {"x": np.ones((2, 1))}
    first = [client.infer(x, reset=step == 0)["counts"].tolist() for step in range(2)]
    pending = client.submit(x, reset=False)
    wait_for(lambda: counting.worker("rollout-0")["state"] == "busy", "the worker to begin")
    counting.freeze("rollout-0")
    wait_for(lambda: counting.counters()["requeued"] > 0, "the request to be taken back", 30)
    counting.thaw("rollout-0")
    assert [*first, pending.result()["counts"].tolist()] == [[1, 1], [2, 2], [3, 3]]
    assert client.infer(x, reset=False)["counts"].tolist() == [4, 4]


@pytest.mark.parametrize("affinity", [STICKY, NONE])
def test_a_step_that_is_sent_again_to_a_new_broker_advances_once(
    counting: Pool, affinity: str, tmp_path: Path
) -> None:
    touched = tmp_path / "touched"
    start(counting, affinity, seconds=0.5, touch=str(touched))
    client = counting.client()
    x = {"x": np.ones((2, 1))}
    assert client.infer(x, reset=True)["counts"].tolist() == [1, 1]
    touched.unlink()
    pending = client.submit(x, reset=False)
    wait_for(touched.exists, "the policy to run")
    counting.kill("broker")
    counting.start_broker(affinity)
    assert pending.result()["counts"].tolist() == [2, 2]
    assert client.infer(x, reset=False)["counts"].tolist() == [3, 3]


def test_a_request_that_is_given_up_and_asked_again_advances_once(counting: Pool) -> None:
    start(counting, STICKY, seconds=0.4)
    client = counting.client()
    x = {"x": np.ones((2, 1))}
    client.infer(x, reset=True)
    client.submit(x, reset=False).cancel()
    assert client.infer(x, reset=False)["counts"].tolist() == [2, 2]
    client.submit(x, reset=False).cancel()
    assert client.infer(x, reset=[True, False])["counts"].tolist() == [1, 3]


def test_a_worker_that_is_started_again_gets_its_share_of_the_envs_as_they_begin(counting: Pool) -> None:
    start(counting, STICKY, 2)
    clients = [counting.client() for _ in range(4)]
    x = {"x": np.ones((2, 1))}
    for client in clients:
        client.infer(x, reset=True)
    counting.kill("rollout-1")
    for client in clients:
        with contextlib.suppress(StateLost):
            client.infer(x, reset=False)
    counting.start_worker(1, overrides=(STICKY,))
    counting.wait_for_workers(2)
    assert counting.worker("rollout-0")["homes"] == 4
    wait_for(lambda: counting.worker("rollout-1")["state"] == "idle", "the worker to be idle")
    for client in clients:
        assert client.infer(x, reset=True)["counts"].tolist() == [1, 1]
    assert [counting.worker(name)["homes"] for name in ("rollout-0", "rollout-1")] == [2, 2]
    for client in clients:
        assert client.infer(x, reset=False)["counts"].tolist() == [2, 2]


def test_states_that_are_too_large_to_be_carried_are_what_the_error_names(counting: Pool) -> None:
    start(counting, NONE, 1, "broker.max_message_mb=4", width=50_000)
    client = counting.client(max_message_mb=4)
    x = {"x": np.ones((3, 40_000))}
    client.infer(x, reset=True)
    with pytest.raises(EncodeError, match=r"states of its envs \(see rollout.affinity\), has 4\.\d MiB"):
        client.infer(x, reset=False)


def test_a_request_that_could_not_be_sent_keeps_no_env_busy(counting: Pool) -> None:
    start(counting, STICKY)
    client = counting.client()
    x = {"x": np.ones((2, 1))}
    client.infer(x, reset=True)
    client._connection._link._socket.close()
    with no_more_files(), pytest.raises(zmq.ZMQError):
        client.infer(x, reset=False)
    assert client.infer(x, reset=False)["counts"].tolist() == [2, 2]


def test_a_killed_worker_takes_its_states_with_it_and_the_client_is_told(counting: Pool) -> None:
    start(counting, STICKY)
    client = counting.client()
    x = {"x": np.ones((3, 1))}
    client.infer(x, reset=True)
    counting.kill("rollout-0")
    counting.start_worker(0, overrides=(STICKY,))
    with pytest.raises(StateLost, match="rollout-0 does not have the state of row 0, 2") as lost:
        client.infer(x, reset=[False, True, False])
    assert lost.value.rows == [0, 2]
    with pytest.raises(ValueError, match=r"row 0 \(env 0 of stage 0\) has no episode"):
        client.infer(x, reset=False)
    assert client.infer(x, reset=[True, True, True])["counts"].tolist() == [1, 1, 1]
    assert client.infer(x, reset=False)["counts"].tolist() == [2, 2, 2]


def test_so_many_lost_states_that_no_message_can_name_them_are_told_at_once(counting: Pool) -> None:
    start(counting, STICKY)
    client = counting.client(timeout=30)
    x = {"x": np.ones((140_000, 1))}
    client.infer(x, reset=True)
    counting.kill("rollout-0")
    counting.start_worker(0, overrides=(STICKY,))
    with pytest.raises(StateLost, match="does not have the state of row 0, 1, 2") as lost:
        client.infer(x, reset=False)
    assert lost.value.rows == list(range(140_000))
    assert (client.infer(x, reset=True)["counts"] == 1).all()


def test_states_that_clients_carry_outlive_the_worker(counting: Pool) -> None:
    start(counting, NONE)
    client = counting.client()
    x = {"x": np.ones((2, 1))}
    for step in range(6):
        assert client.infer(x, reset=step == 0)["counts"].tolist() == [step + 1] * 2
        if step in (2, 4):
            counting.kill("rollout-0")
            counting.start_worker(0, overrides=(NONE,))
