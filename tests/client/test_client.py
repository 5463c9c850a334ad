"""The client against a real pool: answers, time limits, threads, forks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import zmq
from conftest import Pool, no_more_files, wait_for

from zmqrl import Pending, PolicyClient
from zmqrl.client.asking import Request
from zmqrl.errors import (
    BrokerUnreachable,
    ClientClosed,
    ClientError,
    ClientInUse,
    EncodeError,
    EndpointError,
    Overloaded,
    PolicyError,
    PolicyTimeout,
    Replaced,
    RequestRefused,
)
from zmqrl.transport.codec import encode
from zmqrl.transport.header import Header, Op, unpack


def x(value: float, rows: int = 2) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 3), value)}


def test_the_result_is_the_policys_output_for_the_observation(echo: Pool) -> None:
    client = echo.client()
    result = client.infer({"x": np.arange(6.0).reshape(2, 3), "task": ["open", "close"]})
    np.testing.assert_array_equal(result["actions"], np.arange(6.0).reshape(2, 3))


def test_a_single_observation_comes_back_without_its_axis(echo: Pool) -> None:
    client = echo.client()
    result = client.infer_one({"x": np.arange(3.0), "task": "open"})
    assert result["actions"].tolist() == [0.0, 1.0, 2.0]


def test_the_reply_tells_the_policy_version_and_where_the_time_went(pool: Pool) -> None:
    client = pool.start(version=42, seconds=0.02).client()
    pending = client.submit(x(1))
    pending.result()
    assert pending.policy_version == 42
    assert pending.predict_seconds is not None
    assert 0.02 <= pending.predict_seconds < 10
    assert pending.queue_seconds is not None
    assert 0 <= pending.queue_seconds < 10


def test_eval_rows_are_deterministic_and_train_rows_are_sampled_in_one_batch(pool: Pool) -> None:
    first, second, busy = pool.start(seconds=0.5).client(), pool.client(), pool.client()
    blocker = busy.submit(x(0))  # while it is computed, the two others gather in the queue
    wait_for(lambda: pool.status()["workers"][0]["state"] == "busy", "the worker to compute")
    train, evaluation = first.submit(x(1, rows=3), "train"), second.submit(x(2, rows=2), "eval")
    blocker.result()
    assert train.result()["eval"].tolist() == [False] * 3
    assert evaluation.result()["eval"].tolist() == [True] * 2
    assert train.result()["rows"].tolist() == [5] * 3, "they were not in one batch"


def test_several_requests_can_be_in_flight(echo: Pool) -> None:
    client = echo.client()
    pending = [client.submit(x(value)) for value in range(20)]
    assert [p.result()["actions"][0, 0] for p in reversed(pending)] == list(range(19, -1, -1))


def test_after_a_timeout_the_next_call_gets_the_next_answer(pool: Pool) -> None:
    client = pool.start(seconds=0.2).client()
    for value in range(3):
        with pytest.raises(PolicyTimeout):
            client.infer(x(-1), timeout=0.05)
        assert client.infer(x(value))["actions"][0, 0] == value


def test_a_client_survives_a_hundred_timeouts(pool: Pool) -> None:
    client = pool.start(workers=0).client()
    wait_for(lambda: pool.status_client.ask(), "the broker")
    for _ in range(100):
        with pytest.raises((PolicyTimeout, BrokerUnreachable)):
            client.infer(x(0), timeout=0.005)
    pool.start_worker(0)
    assert client.infer(x(5))["actions"][0, 0] == 5


def test_without_a_worker_the_timeout_says_that_none_is_connected(pool: Pool) -> None:
    client = pool.start(workers=0).client()
    with pytest.raises(PolicyTimeout, match="0 rollout workers connected"):
        client.infer(x(0), timeout=1.5)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "ipc:///tmp/zmqrl-nobody-listens-here"])
def test_without_a_broker_the_error_names_the_address_within_the_timeout(endpoint: str) -> None:
    with PolicyClient(endpoint) as client:
        begin = time.monotonic()
        with pytest.raises(BrokerUnreachable, match=endpoint):
            client.infer(x(0), timeout=0.5)
        assert 0.5 <= time.monotonic() - begin < 3.0


def test_the_clients_own_timeout_holds_where_a_call_names_none() -> None:
    with PolicyClient("tcp://127.0.0.1:1", timeout=0.3) as client:
        begin = time.monotonic()
        with pytest.raises(BrokerUnreachable):
            client.infer(x(0))
        assert 0.3 <= time.monotonic() - begin < 3.0


def test_waiting_with_a_time_limit_leaves_the_request_in_flight(pool: Pool) -> None:
    pending = pool.start(seconds=1.0).client().submit(x(1))
    begin = time.monotonic()
    assert not pending.wait(0.05)
    assert 0.05 <= time.monotonic() - begin < 0.95
    assert pending.result()["actions"][0, 0] == 1


@pytest.mark.parametrize("timeout", [0, -1, "5", float("nan"), True])
def test_an_impossible_timeout_is_refused(timeout: object) -> None:
    with pytest.raises(ValueError, match="timeout"):
        PolicyClient("tcp://127.0.0.1:1", timeout=timeout)  # type: ignore[arg-type]


@pytest.mark.parametrize("endpoint", ["127.0.0.1:5757", "tcp://localhost", "ipc://" + "x" * 200])
def test_a_malformed_endpoint_is_refused_at_once(endpoint: str) -> None:
    with pytest.raises(EndpointError):
        PolicyClient(endpoint)


def test_observations_that_cannot_be_sent_are_refused_by_path(echo: Pool) -> None:
    client = echo.client()
    with pytest.raises(EncodeError, match=r"camera\.front"):
        client.infer({"x": np.ones((2, 3)), "camera": {"front": np.array([None, object()])}})
    with pytest.raises(EncodeError, match=r"3 rows.*2"):
        client.infer({"x": np.ones((2, 3)), "y": np.ones((3, 1))})
    assert client.infer(x(4))["actions"][0, 0] == 4


def test_an_observation_above_the_limit_is_refused_before_it_is_sent(echo: Pool) -> None:
    client = echo.client(max_message_mb=1)
    with pytest.raises(EncodeError, match="MiB"):
        client.infer({"x": np.zeros((2, 1 << 20))})
    assert client.infer(x(4))["actions"][0, 0] == 4


def test_a_failing_policy_is_an_error_with_the_remote_traceback(echo: Pool) -> None:
    client = echo.client()
    with pytest.raises(PolicyError, match=r"this row is marked(.|\n)*policies\.py"):
        client.infer({"x": np.ones((1, 3)), "command": ["raise"]})
    with pytest.raises(PolicyError, match=r"shape.*for 1 observations"):
        client.infer({"x": np.ones((1, 3)), "command": ["wrong rows"]})
    assert client.infer(x(4))["actions"][0, 0] == 4


def test_an_output_that_cannot_be_sent_is_an_error_for_its_client_and_reaches_no_other(
    pool: Pool,
) -> None:
    pool.start(seconds=0.1)
    blocker, odd, good = pool.client(), pool.client(), pool.client()
    pending = blocker.submit(x(0))
    refused = odd.submit({**x(1), "command": ["object array", "ok"]})
    answered = good.submit({**x(2), "command": ["ok", "ok"]})
    pending.result()
    with pytest.raises(PolicyError, match="dtype object"):
        refused.result()
    assert (answered.result()["actions"] == 2).all()


def test_a_reply_that_is_not_contiguous_arrives_whole_and_its_batch_mates_too(pool: Pool) -> None:
    pool.start(seconds=0.1)
    blocker, odd, good = pool.client(), pool.client(), pool.client()
    pending = blocker.submit(x(0))
    strided = odd.submit({"x": np.array([[1.0, 2.0], [3.0, 4.0]]), "command": ["strided", "ok"]})
    answered = good.submit({**x(5), "command": ["ok", "ok"]})
    pending.result()
    expected = np.repeat([[3.0, 4.0], [1.0, 2.0]], 2000, axis=1)
    np.testing.assert_array_equal(strided.result()["actions"], expected)
    assert (answered.result()["actions"] == 5).all()


def test_the_remote_policy_acts_as_the_same_policy_in_this_process(pool: Pool) -> None:
    torch = pytest.importorskip("torch")
    from zmqrl.demo import ReachPolicy

    pool.start_broker()
    pool.launcher.start(
        "rollout-0", ["start-rollout-worker", *pool.overrides, "--policy=zmqrl.demo:ReachPolicy"]
    )
    dice = np.random.default_rng(0)
    observation = {key: dice.normal(size=(5, 3)) for key in ("achieved_goal", "desired_goal")}
    remote = pool.client(mode="eval").infer({**observation, "task": ["reach"] * 5})["actions"]
    tensors = {key: torch.from_numpy(value) for key, value in observation.items()}
    local = ReachPolicy()(tensors, eval_mask=torch.ones(5, dtype=torch.bool))["actions"].numpy()
    np.testing.assert_array_equal(remote, local)
    assert remote.dtype == local.dtype


def test_a_failing_request_does_not_fail_its_batch_mates(pool: Pool) -> None:
    pool.start(seconds=0.1)
    blocker = pool.client().submit(x(0))
    good = [pool.client().submit({**x(i, rows=4 + i), "command": ["ok"] * (4 + i)}) for i in range(2)]
    bad = pool.client().submit({**x(9, rows=3), "command": ["ok", "raise", "ok"]})
    blocker.result()
    assert [g.result()["actions"].shape for g in good] == [(4, 3), (5, 3)]
    with pytest.raises(PolicyError):
        bad.result()


def test_requests_of_different_structure_share_a_pool(pool: Pool) -> None:
    pool.start(seconds=0.05)
    blocker = pool.client().submit(x(0))
    wide = pool.client().submit({"x": np.ones((2, 8), np.float32)})
    named = pool.client().submit({"x": np.ones((2, 3)), "image": np.zeros((2, 64, 64, 3), np.uint8)})
    blocker.result()
    assert wide.result()["actions"].shape == (2, 8)
    assert named.result()["actions"].shape == (2, 3)


def test_a_simulator_may_reuse_its_observation_buffer(pool: Pool) -> None:
    client = pool.start(seconds=0.005).client()
    frame = np.empty((1, 500_000), np.float32)
    pending = []
    for value in range(12):
        frame[:] = value
        pending.append(client.submit({"x": frame}))
    for value, request in enumerate(pending):
        assert (request.result()["actions"] == value).all()


def test_a_policy_may_reuse_its_output_buffer(pool: Pool) -> None:
    client = pool.start(policy="Static").client()
    kept = [client.infer(x(value))["actions"] for value in range(30)]
    for value, actions in enumerate(kept):
        assert (actions == value).all()


def test_messages_that_are_not_of_zmqrl_are_passed_over(folder: Path) -> None:
    endpoint = f"ipc://{folder}/odd.ipc"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as broker:
        broker.setsockopt(zmq.LINGER, 0)
        broker.bind(endpoint)
        broker.setsockopt(zmq.RCVTIMEO, 10_000)
        with PolicyClient(endpoint) as policy:
            pending = policy.submit(x(1.0))
            peer, first = broker.recv_multipart()
            while unpack(first).op != Op.INFER:
                peer, first = broker.recv_multipart()
            reply = Header(Op.REPLY, request_id=unpack(first).request_id, frames=2, rows=2)
            encoded = encode({"actions": np.ones((2, 5000)), "logits": np.ones((2, 5000))})
            broker.send_multipart([peer, b"not a message of zmqrl", b"in two frames"])
            broker.send_multipart([peer, reply.pack() + encoded.meta, *encoded.buffers])
            assert pending.result()["logits"].sum() == 10_000


def test_a_send_that_is_interrupted_leaves_no_half_message_behind(pool: Pool) -> None:
    client = pool.start().client()
    assert client.infer(x(1))["actions"][0, 0] == 1
    header = Header(Op.INFER, request_id=99, frames=2, rows=1)
    broken = Request(header, b"meta", [memoryview(bytes(5000)), ["no buffer"]], time.monotonic() + 5)
    with pytest.raises(TypeError):
        client._connection.start(broken)
    assert client.infer(x(2))["actions"][0, 0] == 2
    assert pool.counters()["malformed"] == 0


def test_after_an_interrupted_send_nothing_was_heard_on_the_new_socket(echo: Pool) -> None:
    client = echo.client()
    client.infer(x(1))
    link = client._connection._link
    link.asked = time.monotonic()
    with pytest.raises(TypeError):
        link.send([b"half of a message", ["no buffer"]])
    assert link.asked is None
    assert not link.reached
    assert link.suspicion.due < float("inf"), "the broker may have other keys by now"


def test_a_send_that_is_interrupted_gives_its_shared_memory_back(echo: Pool) -> None:
    client = echo.client()
    client.infer(x(1))
    assert client._connection.shares_memory
    header = Header(Op.INFER, request_id=99, frames=1, rows=1)
    broken = Request(header, "no bytes", [memoryview(bytes(200_000))], time.monotonic() + 5)
    with pytest.raises(TypeError):
        client._connection.start(broken)
    assert broken.slot is not None
    assert not client._connection._lane.slots._lent


@pytest.mark.parametrize("asks", [True, False])
def test_a_client_that_got_no_file_for_a_new_socket_goes_on_when_there_is_one(
    echo: Pool, asks: bool
) -> None:
    client = echo.client()
    client.infer(x(1))
    connection = client._connection
    if asks:
        connection._link.asked = time.monotonic()
    with no_more_files(), pytest.raises(zmq.ZMQError):
        connection._rebuild()
    assert client.infer(x(2))["actions"][0, 0] == 2
    with no_more_files(), pytest.raises(zmq.ZMQError):
        connection._rebuild()
    client.catch_up()
    assert client.infer(x(3))["actions"][0, 0] == 3


def test_results_are_writable_and_stay_as_they_are(echo: Pool) -> None:
    client = echo.client()
    kept = [client.infer({"x": np.full((1, 2000), float(value))})["actions"] for value in range(50)]
    for _ in range(100):
        client.infer({"x": np.full((1, 2000), -1.0)})
    for value, actions in enumerate(kept):
        assert (actions == value).all()
        actions += 1


def test_a_slow_call_after_a_slow_step_is_asked_about_and_runs_once(pool: Pool) -> None:
    client = pool.start().client()
    client.infer(x(1))
    time.sleep(2.4)  # a slow simulator: nothing is said on this connection meanwhile
    assert client.infer({**x(2), "command": ["sleep 1.6", "ok"]})["actions"][0, 0] == 2
    counters = pool.counters()
    assert (counters["requests"], counters["cancelled"], counters["duplicates"]) == (2, 0, 0)


def test_an_observation_with_too_many_large_arrays_is_refused_at_once(echo: Pool) -> None:
    client = echo.client()
    with pytest.raises(EncodeError, match="4097 large arrays"):
        client.infer({str(i): np.zeros((1, 1024), np.float32) for i in range(4100)})  # a few are small
    assert client.infer(x(4))["actions"][0, 0] == 4


@pytest.mark.parametrize("stage", [-1, 256])
def test_an_impossible_stage_is_refused_and_leaves_nothing_behind(echo: Pool, stage: int) -> None:
    client = echo.client()
    with pytest.raises(ValueError, match="stage"):
        client.submit(x(1), stage=stage)
    assert client.infer({**x(2), "command": ["sleep 1.2", "ok"]})["actions"][0, 0] == 2


@pytest.mark.parametrize("name", ["", "n" * 201, "two\nlines", "\x1b[2J"])
def test_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="200 printable characters"):
        PolicyClient("tcp://127.0.0.1:1", name=name)


def test_a_reply_above_the_limit_is_an_error_that_says_so(pool: Pool, folder: Path) -> None:
    (folder / "wide.py").write_text(
        "import numpy as np\n"
        "class Wide:\n"
        "    def infer(self, observation, eval_mask):\n"
        "        return np.zeros((len(observation['x']), 1 << 19))\n"
    )
    pool.overrides.append("broker.max_message_mb=1")
    pool.start_broker()
    pool.launcher.start(
        "rollout-0", ["start-rollout-worker", *pool.overrides, f"--policy={folder}/wide.py:Wide"]
    )
    with pytest.raises(PolicyError, match=r"4\.0 MiB.*1 MiB can be sent"):
        pool.client().infer(x(1, rows=1))


def test_replies_that_are_too_much_for_one_message_become_errors_and_cut_no_worker(
    pool: Pool, folder: Path
) -> None:
    (folder / "wordy.py").write_text(
        "import time\n"
        "class Wordy:\n"
        "    def infer(self, observation, eval_mask):\n"
        "        time.sleep(0.3)\n"
        "        return {'actions': observation['x'], 'text': ['x' * 200_000] * len(observation['x'])}\n"
    )
    pool.overrides.append("broker.max_message_mb=1")
    pool.start_broker()
    pool.launcher.start(
        "rollout-0", ["start-rollout-worker", *pool.overrides, f"--policy={folder}/wordy.py:Wordy"]
    )
    pool.wait_for_workers(1)
    pending = [pool.client().submit(x(i, rows=1)) for i in range(12)]
    for request in pending:
        request.wait()
    errors = [p for p in pending if p._request.error is not None]
    for request in errors:
        with pytest.raises(PolicyError, match="replies of one batch are larger than 1 MiB"):
            request.result()
    assert 0 < len(errors) < 12
    assert pool.counters()["requeued"] == 0


def test_a_request_that_can_never_fit_is_refused(pool: Pool) -> None:
    pool.start_broker("broker.max_client_mb=1")
    with pytest.raises(RequestRefused, match=r"2\.0 MiB.*max_client_mb"):
        pool.client().infer({"x": np.zeros((1, 1 << 18))})


def test_a_lock_that_an_interrupt_left_behind_does_not_shut_its_own_thread_out(echo: Pool) -> None:
    client = echo.client()
    client._turn.lock.acquire()
    client._turn.owner = threading.get_ident()
    assert client.infer(x(4))["actions"][0, 0] == 4
    assert client.infer(x(5))["actions"][0, 0] == 5


def test_of_many_requests_at_once_those_over_the_bound_end_in_overloaded(pool: Pool) -> None:
    pool.start(0, "", "broker.max_client_messages=2")
    client = pool.client()
    pending = [client.submit(x(1.0), timeout=5.0) for _ in range(400)]
    kinds = Counter()
    for request in pending:
        with pytest.raises((Overloaded, PolicyTimeout)) as error:
            request.result()
        kinds[error.type] += 1
    assert kinds == {PolicyTimeout: 2, Overloaded: 398}


def test_requests_that_are_too_much_for_one_batch_are_served_in_several(pool: Pool) -> None:
    pool.overrides.append("broker.max_message_mb=1")
    pool.start(seconds=0.2)
    blocker = pool.client().submit(x(0))
    text = "x" * 3000
    pending = [
        pool.client().submit({**x(i), "text": [text] * 200, "x": np.full((200, 3), i)}) for i in range(4)
    ]
    blocker.result()
    assert [p.result()["actions"][0, 0] for p in pending] == [0, 1, 2, 3]
    assert pool.counters()["requeued"] == 0


def test_single_observations_lose_their_axis_inside_lists_too(pool: Pool, folder: Path) -> None:
    (folder / "lists.py").write_text(
        "class Lists:\n"
        "    def infer(self, observation, eval_mask):\n"
        "        x = observation['x']\n"
        "        return {'actions': [x, x[:, :1]], 'words': ['go'] * len(x)}\n"
    )
    pool.start_broker()
    pool.launcher.start(
        "rollout-0", ["start-rollout-worker", *pool.overrides, f"--policy={folder}/lists.py:Lists"]
    )
    result = pool.client().infer_one({"x": np.arange(3.0)})
    assert [part.shape for part in result["actions"]] == [(3,), (1,)]
    assert result["words"] == "go"


def test_two_threads_on_one_client_raise_instead_of_mixing_replies(pool: Pool) -> None:
    client = pool.start(seconds=0.3).client()
    started = threading.Event()
    results: list[object] = []

    def call() -> None:
        pending = client.submit(x(3))
        started.set()
        results.append(pending.result()["actions"][0, 0])

    thread = threading.Thread(target=call)
    thread.start()
    started.wait()

    def refused() -> bool:
        try:
            client.submit(x(4)).cancel()
        except ClientInUse:
            return True
        return False

    wait_for(refused, "the second thread to be refused")
    thread.join()
    assert results == [3]


def test_eight_threads_on_one_client_get_their_own_answers_or_a_named_error(pool: Pool) -> None:
    client = pool.start(workers=2).client()
    outcomes: list[str] = []

    def loop(number: int) -> None:
        for step in range(200):
            value = number * 1000 + step
            try:
                result = client.infer(x(value))["actions"]
                outcomes.append("right" if (result == value).all() else f"{result} for {value}")
            except ClientInUse:
                outcomes.append("in use")

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1600
    assert set(outcomes) <= {"right", "in use"}
    assert client.infer(x(7))["actions"][0, 0] == 7


def test_eight_threads_with_a_client_each_get_their_own_answers(pool: Pool) -> None:
    pool.start(workers=2)
    wrong: list[object] = []

    def loop(number: int) -> None:
        with PolicyClient(pool.frontend) as client:
            for step in range(100):
                value = number * 1000 + step
                result = client.infer(x(value))["actions"]
                if not (result == value).all():
                    wrong.append(result)

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _infer_in_child(client: PolicyClient, value: float, answers: multiprocessing.Queue) -> None:
    answers.put((value, float(client.infer(x(value))["actions"][0, 0])))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_after_a_fork_parent_and_children_each_get_their_own_answers(echo: Pool) -> None:
    client = echo.client()
    assert client.infer(x(0))["actions"][0, 0] == 0
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    children = [
        fork.Process(target=_infer_in_child, args=(client, float(value), answers)) for value in (1, 2, 3)
    ]
    for child in children:
        child.start()
    for value in range(10, 20):
        assert client.infer(x(value))["actions"][0, 0] == value
    assert sorted(answers.get(timeout=20) for _ in children) == [(v, v) for v in (1.0, 2.0, 3.0)]
    for child in children:
        child.join(10)
        assert child.exitcode == 0


def _infer_in_child_once_there_are_files(client: PolicyClient, answers: multiprocessing.Queue) -> None:
    with no_more_files(), pytest.raises(zmq.ZMQError):
        client.infer(x(1))
    answers.put((client.infer(x(2), timeout=8)["actions"][0, 0], client.name.count("-")))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_that_gets_no_file_for_a_socket_of_its_own_leaves_the_parents_alone(echo: Pool) -> None:
    client = echo.client(name="parent")
    client.infer(x(0))
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=_infer_in_child_once_there_are_files, args=(client, answers))
    child.start()
    assert answers.get(timeout=20) == (2, 1)
    child.join(10)
    assert client.infer(x(3))["actions"][0, 0] == 3


class _Slow(gymnasium.Env):  # type: ignore[misc]
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Box(-1, 1, (3,))

    def reset(self, **options: Any) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        return action, 1.0, False, False, {}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_simulators_that_are_forked_after_the_client_was_used_are_no_harm(echo: Pool) -> None:
    client = echo.client()
    assert client.infer(x(1))["actions"][0, 0] == 1
    envs = gymnasium.vector.AsyncVectorEnv([_Slow, _Slow], context="fork")
    observation, _ = envs.reset()
    for value in range(1, 20):
        actions = client.infer({"x": observation + np.float32(value / 20)})["actions"]
        observation, *_ = envs.step(np.clip(actions - observation, -1, 1))
        np.testing.assert_allclose(observation, value / 20, atol=1e-6)
    envs.close()
    assert client.infer(x(2))["actions"][0, 0] == 2


def _use_the_parents_request(pending: Pending, answers: multiprocessing.Queue) -> None:
    try:
        pending.result()
    except ClientError as error:
        answers.put(str(error))
    pending.cancel()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_request_made_before_a_fork_is_the_parents(pool: Pool) -> None:
    pending = pool.start(seconds=0.5).client().submit(x(7))
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=_use_the_parents_request, args=(pending, answers))
    child.start()
    assert "parent process" in answers.get(timeout=20)
    child.join(10)
    assert child.exitcode == 0
    assert pending.result()["actions"][0, 0] == 7


def test_a_client_is_not_closed_under_a_call_of_another_thread(pool: Pool) -> None:
    client = pool.start(seconds=0.5).client()
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(client.infer(x(3))["actions"][0, 0]))
    thread.start()
    wait_for(lambda: pool.counters()["requests"] == 1, "the call")
    with pytest.raises(ClientInUse):
        client.close()
    thread.join()
    assert results == [3]


def test_a_restart_under_the_same_name_replaces_the_old_client_loudly(pool: Pool) -> None:
    pool.start(seconds=0.3)
    old = pool.client(name="env-3")
    waiting = old.submit(x(1))
    assert not waiting.wait(0.05)
    new = pool.client(name="env-3")
    assert new.infer(x(2))["actions"][0, 0] == 2
    with pytest.raises(Replaced, match="env-3"):
        waiting.result()
    with pytest.raises(Replaced, match="env-3"):
        old.infer(x(3))


def test_a_cancelled_request_is_not_run(pool: Pool) -> None:
    client = pool.start(seconds=0.2).client()
    first, second = client.submit(x(1)), client.submit(x(2))
    second.cancel()
    first.result()
    wait_for(lambda: pool.counters()["cancelled"] == 1, "the cancellation")
    assert pool.status()["totals"]["rollout-0"]["shards"] == 1


def test_a_closed_client_says_so(pool: Pool) -> None:
    client = pool.start(seconds=0.2).client()
    pending = client.submit(x(1))
    client.close()
    client.close()
    with pytest.raises(ClientClosed):
        pending.result()
    with pytest.raises(ClientClosed):
        client.infer(x(1))


def test_a_script_that_ends_in_an_exception_with_requests_unsent_exits_at_once() -> None:
    script = """
import numpy as np
from zmqrl import PolicyClient
client = PolicyClient("tcp://127.0.0.1:1")
for _ in range(1000):
    client.submit({"x": np.zeros((1, 1000))})
raise KeyError("the user's own mistake")
"""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "the user's own mistake" in done.stderr
    assert time.monotonic() - begin < 5.0


def test_ctrl_c_interrupts_a_waiting_call(pool: Pool) -> None:
    script = f"""
import signal
import numpy as np
from zmqrl import PolicyClient
# A shell that runs the tests in the background lets them, and this, ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
client = PolicyClient({pool.frontend!r})
print("waiting", flush=True)
client.infer({{"x": np.zeros((1, 1))}})
"""
    pool.start(workers=0)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    wait_for(lambda: pool.counters()["requests"] == 1, "the request")
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors


def test_the_client_needs_neither_torch_nor_gymnasium_nor_pydantic() -> None:
    script = """
import sys
import zmqrl
heavy = {"torch", "gymnasium", "pydantic", "yaml", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30, cwd=Path("/"))
