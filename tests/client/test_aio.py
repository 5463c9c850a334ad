"""The asyncio client against a real pool: many calls at once, cancellation, faults, forks."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Pool, wait_for

from zmqrl import AsyncPolicyClient, PolicyClient
from zmqrl.errors import (
    AuthenticationFailed,
    BrokerUnreachable,
    ClientClosed,
    ClientInUse,
    EncodeError,
    EndpointError,
    PolicyError,
    PolicyTimeout,
    Replaced,
)
from zmqrl.transport.bundles import make_bundles


def x(value: float, rows: int = 2) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 3), value)}


def run(pool: Pool, program: Callable[[AsyncPolicyClient], Awaitable[Any]], **options: Any) -> Any:
    """Run an asyncio program with a client of the pool."""

    async def main() -> Any:
        async with AsyncPolicyClient(pool.frontend, **{"timeout": 20.0, **options}) as client:
            return await program(client)

    return asyncio.run(main())


def test_the_result_is_the_policys_output_for_the_observation(echo: Pool) -> None:
    async def program(client: AsyncPolicyClient) -> None:
        result = await client.infer({"x": np.arange(6.0).reshape(2, 3), "task": ["open", "close"]})
        np.testing.assert_array_equal(result["actions"], np.arange(6.0).reshape(2, 3))
        assert result["eval"].tolist() == [False, False]
        assert (await client.infer(x(1), mode="eval"))["eval"].tolist() == [True, True]
        one = await client.infer_one({"x": np.arange(3.0), "task": "open"})
        assert one["actions"].tolist() == [0.0, 1.0, 2.0]

    run(echo, program)


def test_two_hundred_calls_at_once_get_their_own_answers_ten_times_over(pool: Pool) -> None:
    async def simulator(client: AsyncPolicyClient, number: int) -> int:
        for step in range(10):
            value = number * 1000 + step
            result = await client.infer(x(value, rows=1 + number % 3))
            assert result["actions"].shape == (1 + number % 3, 3)
            assert (result["actions"] == value).all()
        return number

    async def program(client: AsyncPolicyClient) -> list[int]:
        return await asyncio.gather(*(simulator(client, number) for number in range(200)))

    assert run(pool.start(workers=2), program) == list(range(200))
    assert pool.counters()["requests"] == 2000


def test_large_arrays_of_many_calls_at_once_are_not_mixed_up(echo: Pool) -> None:
    frame = np.empty((1, 500_000), np.float32)

    async def ask(client: AsyncPolicyClient, value: int) -> None:
        frame[:] = value  # a simulator that reuses its buffer
        assert ((await client.infer({"x": frame}))["actions"] == value).all()

    async def program(client: AsyncPolicyClient) -> None:
        await asyncio.gather(*(ask(client, value) for value in range(12)))

    run(echo, program)


def test_a_cancelled_task_gives_its_request_up_and_the_broker_is_told(pool: Pool) -> None:
    async def program(client: AsyncPolicyClient) -> None:
        first = asyncio.create_task(client.infer(x(1)))
        second = asyncio.create_task(client.infer(x(2)))
        await asyncio.sleep(0)  # both have sent
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert ((await first)["actions"] == 1).all()
        await asyncio.to_thread(wait_for, lambda: pool.counters()["cancelled"] == 1, "the cancellation")

    run(pool.start(seconds=0.3), program)
    assert pool.status()["totals"]["rollout-0"]["shards"] == 1


def test_calls_that_are_given_up_after_a_moment_lose_no_answer_of_others(pool: Pool) -> None:
    given_up = 0

    async def impatient(client: AsyncPolicyClient, number: int) -> None:
        nonlocal given_up
        for step in range(100):
            value = number * 1000 + step
            try:
                result = await asyncio.wait_for(client.infer(x(value)), 0.001 * (step % 5))
                assert (result["actions"] == value).all()
            except asyncio.TimeoutError:
                given_up += 1
            assert (await client.infer(x(-value)))["actions"][0, 0] == -value

    async def program(client: AsyncPolicyClient) -> None:
        await asyncio.gather(*(impatient(client, number) for number in range(10)))

    run(pool.start(workers=2), program)
    assert given_up >= 200, "those that wait 0 s at least"


def test_answers_that_came_while_the_loop_was_blocked_count_although_their_time_is_up(
    pool: Pool,
) -> None:
    async def program(client: AsyncPolicyClient) -> None:
        calls = [asyncio.create_task(client.infer(x(n), timeout=0.8)) for n in range(5)]
        await asyncio.sleep(0)
        wait_for(lambda: pool.status()["totals"]["rollout-0"]["shards"] == 5, "the policy")
        time.sleep(1.0)  # a simulator that should not do this
        assert [(await call)["actions"][0, 0] for call in calls] == list(range(5))

    run(pool.start(), program)
    assert pool.counters()["cancelled"] == 0


def test_a_broker_that_is_killed_and_restarted_answers_all_that_wait(pool: Pool) -> None:
    async def simulator(client: AsyncPolicyClient, number: int, steps: int) -> None:
        for step in range(steps):
            value = number * 1000 + step
            assert ((await client.infer(x(value)))["actions"] == value).all()

    def restart() -> None:
        wait_for(lambda: pool.counters()["requests"] > 100, "requests")
        pool.kill("broker")
        pool.start_broker()

    async def program(client: AsyncPolicyClient) -> None:
        fault = asyncio.create_task(asyncio.to_thread(restart))
        while not fault.done():
            await asyncio.gather(*(simulator(client, number, 5) for number in range(50)))
        await fault
        await asyncio.gather(*(simulator(client, number, 5) for number in range(50)))

    run(pool.start(workers=2, seconds=0.01), program, timeout=40.0)


def test_each_end_of_a_call_has_its_name(echo: Pool) -> None:
    async def program(client: AsyncPolicyClient) -> None:
        with pytest.raises(EncodeError, match="camera"):
            await client.infer({"x": np.ones((2, 3)), "camera": np.array([None, object()])})
        with pytest.raises(ValueError, match="mode"):
            await client.infer(x(1), mode="test")
        with pytest.raises(PolicyError, match="this row is marked"):
            await client.infer({**x(1), "command": ["raise", "ok"]})
        with pytest.raises(PolicyTimeout):
            await client.infer({**x(1), "command": ["sleep 1", "ok"]}, timeout=0.3)
        assert ((await client.infer(x(4)))["actions"] == 4).all()

    run(echo, program)


def test_without_a_broker_or_a_key_the_error_says_so(pool: Pool, folder: Path) -> None:
    make_bundles(str(folder / "keys"))
    pool.overrides.append(f"security.keys={folder / 'keys'}")
    pool.start_broker()

    async def program(client: AsyncPolicyClient) -> None:
        async with AsyncPolicyClient(f"ipc://{folder}/nobody", timeout=1.0) as nobody:
            calls = (client.infer(x(1)), nobody.infer(x(1)))
            refused, unanswered = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, AuthenticationFailed)
        assert "key" in str(refused)
        assert isinstance(unanswered, BrokerUnreachable)
        assert "nobody" in str(unanswered)

    run(pool, program)
    with pytest.raises(EndpointError):
        AsyncPolicyClient("127.0.0.1:5757")


def test_all_clients_of_a_loop_that_have_no_key_are_told_even_beside_one_that_gave_up(
    pool: Pool, folder: Path
) -> None:
    make_bundles(str(folder / "keys"))
    pool.overrides.append(f"security.keys={folder / 'keys'}")
    pool.start_broker()

    async def ask(endpoint: str, timeout: float) -> None:
        # On a busy machine a look may not tell why, and the request goes on until its time is up.
        async with AsyncPolicyClient(endpoint, timeout=15.0) as client:
            await asyncio.wait_for(client.infer(x(1)), timeout)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            mute = AsyncPolicyClient(f"tcp://127.0.0.1:{silent.getsockname()[1]}", timeout=60.0)
            with pytest.raises(asyncio.TimeoutError):  # while it looks why nobody answers
                await asyncio.wait_for(mute.infer(x(1)), 0.45)
            calls = [ask(pool.frontend, 30.0) for _ in range(20)]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(end) for end in ends} == {AuthenticationFailed}, ends
            await mute.close()

    asyncio.run(main())


def test_it_is_made_as_a_policy_client_is_but_for_what_records() -> None:
    both = [inspect.signature(kind).parameters for kind in (AsyncPolicyClient, PolicyClient)]
    mine, theirs = (dict(parameters) for parameters in both)
    for name in ("learner", "envs", "action_space", "trajectory_steps"):
        del theirs[name]
    assert mine == theirs


def test_a_client_of_the_same_name_ends_all_calls_of_the_first(pool: Pool) -> None:
    async def program(client: AsyncPolicyClient) -> None:
        calls = [asyncio.create_task(client.infer(x(n))) for n in range(3)]
        await asyncio.sleep(0.1)
        async with AsyncPolicyClient(pool.frontend, name="env-3") as other:
            assert ((await other.infer(x(5)))["actions"] == 5).all()
        for call in calls:
            with pytest.raises(Replaced, match="env-3"):
                await call

    run(pool.start(seconds=0.5), program, name="env-3")


def test_close_ends_the_calls_that_wait(pool: Pool) -> None:
    async def program(client: AsyncPolicyClient) -> None:
        calls = [asyncio.create_task(client.infer(x(n))) for n in range(3)]
        await asyncio.sleep(0)
        await client.close()
        await client.close()
        for call in calls:
            with pytest.raises(ClientClosed):
                await call
        with pytest.raises(ClientClosed):
            await client.infer(x(1))

    run(pool.start(seconds=0.3), program)


def test_a_second_event_loop_is_refused(pool: Pool) -> None:
    refusals: list[str] = []

    async def from_elsewhere(client: AsyncPolicyClient) -> None:
        for use in (client.infer(x(1)), client.close()):
            with pytest.raises(ClientInUse) as error:
                await use
            refusals.append(str(error.value))

    async def program(client: AsyncPolicyClient) -> None:
        call = asyncio.create_task(client.infer(x(2)))
        await asyncio.to_thread(lambda: asyncio.run(from_elsewhere(client)))
        assert ((await call)["actions"] == 2).all()

    run(pool.start(seconds=0.2), program)
    assert len(refusals) == 2
    assert all("another event loop" in refusal for refusal in refusals)


def test_eight_loops_in_threads_with_a_client_each_get_their_own_answers(pool: Pool) -> None:
    pool.start(workers=2)
    done: list[int] = []

    def loop(number: int) -> None:
        async def program(client: AsyncPolicyClient) -> None:
            for step in range(50):
                value = number * 1000 + step
                assert ((await client.infer(x(value)))["actions"] == value).all()
            done.append(number)

        run(pool, program)

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(8))


def _in_child(client: AsyncPolicyClient, endpoint: str, answers: multiprocessing.Queue) -> None:
    async def main() -> None:
        try:
            await client.infer(x(1))
        except ClientInUse as error:
            answers.put(str(error))
        await client.close()
        async with AsyncPolicyClient(endpoint) as own:
            answers.put(float((await own.infer(x(3)))["actions"][0, 0]))

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_refused_by_name_and_its_parent_goes_on(echo: Pool) -> None:
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()

    async def program(client: AsyncPolicyClient) -> None:
        call = asyncio.create_task(client.infer(x(2)))
        await asyncio.sleep(0)
        child = fork.Process(target=_in_child, args=(client, echo.frontend, answers))
        child.start()
        assert "parent process" in answers.get(timeout=20)
        assert answers.get(timeout=20) == 3
        child.join(10)
        assert child.exitcode == 0
        assert ((await call)["actions"] == 2).all()
        for value in range(20):
            assert ((await client.infer(x(value), timeout=5))["actions"] == value).all()

    run(echo, program)


def test_a_client_that_waits_spends_no_time(echo: Pool) -> None:
    async def program(client: AsyncPolicyClient) -> None:
        await client.infer(x(1))
        begin = time.process_time()
        await asyncio.sleep(2.0)
        idle = time.process_time() - begin
        begin = time.process_time()
        await client.infer({**x(2), "command": ["sleep 2", "ok"]})
        asked = time.process_time() - begin
        assert idle < 0.2, "a loop that never rests spends 2 s"
        assert asked < 0.2

    run(echo, program)


def test_a_closed_client_leaves_no_file_open(echo: Pool) -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for value in range(30):
            async with AsyncPolicyClient(echo.frontend) as client:
                assert ((await client.infer(x(value)))["actions"] == value).all()
        # The reaper of libzmq closes sockets in its own time.
        wait_for(lambda: len(os.listdir("/proc/self/fd")) < before + 10, "the files to be closed")

    asyncio.run(main())


def test_a_client_whose_loop_is_over_can_be_closed_in_another(echo: Pool) -> None:
    client = AsyncPolicyClient(echo.frontend, timeout=20.0)
    asyncio.run(client.infer(x(1)))
    asyncio.run(client.close())
    with pytest.raises(ClientClosed):
        asyncio.run(client.infer(x(1)))


def test_a_client_whose_loop_ended_in_a_call_can_be_closed_in_another(folder: Path) -> None:
    async def call() -> AsyncPolicyClient:
        client = AsyncPolicyClient(f"ipc://{folder}/nobody")
        calls.append(asyncio.get_running_loop().create_task(client.infer(x(1))))
        await asyncio.sleep(0.05)
        return client

    calls: list[asyncio.Task[Any]] = []
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(call())
    loop.close()
    asyncio.run(client.close())
    assert client._client._connection._link._socket.closed
    calls[0]._log_destroy_pending = False  # type: ignore[attr-defined]


def test_asyncio_is_imported_by_those_who_use_it_only() -> None:
    script = """
import sys
import zmqrl
assert "asyncio" not in sys.modules
zmqrl.AsyncPolicyClient
assert "asyncio" in sys.modules
try:
    zmqrl.Nothing
except AttributeError as error:
    assert "Nothing" in str(error)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
