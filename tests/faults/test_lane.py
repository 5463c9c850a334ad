"""Large arrays through shared memory in a real pool: they arrive, whoever dies, and nothing is left."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_hand import RawWorker, introduced
from conftest import TESTS, Pool, wait_for

from zmqrl import PolicyClient
from zmqrl.broker.status import StatusClient
from zmqrl.errors import ClientError, PolicyTimeout
from zmqrl.transport.bundles import make_bundles
from zmqrl.transport.codec import decode_meta, encode, encode_meta
from zmqrl.transport.header import (
    FLAG_LANE,
    FLAG_READS_LANE,
    HEADER_SIZE,
    Header,
    Op,
    unpack,
)
from zmqrl.transport.security import Keys
from zmqrl.transport.sharedmem import Slots

LARGE = (2, 50_000)
"""The shape of a float64 observation that goes through the lane."""


def slots_of(pid: int) -> int:
    """Slots of shared memory that a process has open or mapped, its own and those of others."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:zmqrl")


def shared_names() -> list[str]:
    """The names of shared memory on this host, without the semaphores, which others make as well."""
    return [name for name in os.listdir("/dev/shm") if not name.startswith("sem.")]


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def opened(pool: Pool, **options: Any) -> PolicyClient:
    """A client that knows by now that it shares memory."""
    client = pool.client(**options)
    client.infer({"x": np.zeros((1, 1))})
    assert client._connection.shares_memory
    return client


def test_every_kind_of_array_arrives_as_it_is_in_both_directions(pool: Pool) -> None:
    pool.start(policy="Mirror")
    client, generator = pool.client(), np.random.default_rng(1)
    image = generator.integers(0, 256, (3, 200, 200, 3), np.uint8)
    observation = {
        "image": image,
        "mirrored": image[:, :, ::-1],
        "fortran": np.asfortranarray(generator.random((3, 7000))),
        "half": generator.random((3, 9000)).astype(np.float16),
        "big_endian": generator.random((3, 9000)).astype(">f8"),
        "mask": generator.random((3, 9000)) > 0.5,
        "words": np.array([["word"] * 3000, ["ünïcode"] * 3000, [""] * 3000]),
        "times": np.arange(30_000).reshape(3, -1).astype("M8[us]"),
        "small": np.arange(3),
        "text": ["a", "b", "c"],
    }
    for _ in range(3):
        result = client.infer(observation)
        for key, value in observation.items():
            assert np.array_equal(result[key], value), key
            assert np.asarray(result[key]).dtype == np.asarray(value).dtype.newbyteorder("=")
        result["image"] += 1
    counters = pool.counters()
    assert (counters["lane_requests"], counters["lane_replies"], counters["inlined"]) == (2, 2, 0)


def test_an_observation_buffer_that_is_changed_after_each_request_arrives_as_it_was(pool: Pool) -> None:
    pool.start(workers=2, seconds=0.001)
    clients = [opened(pool) for _ in range(2)]
    frames = [np.empty(LARGE) for _ in clients]
    waiting: list[tuple[int, int, Any]] = []
    for step in range(200):
        for index, client in enumerate(clients):
            frames[index][:] = 1000 * index + step
            waiting.append((index, step, client.submit({"x": frames[index]})))
            frames[index][:] = -1
        while len(waiting) > 8:
            index, sent, pending = waiting.pop(0)
            assert (pending.result()["actions"] == 1000 * index + sent).all()
    for client in clients:
        slots = client._connection._lane.slots
        assert len(slots._free) + len(slots._lent) <= 5, "slots are not used again"
    assert pool.counters()["lane_requests"] == 400


def test_results_stay_as_they_are_while_slots_are_used_again(echo: Pool) -> None:
    client = opened(echo)
    kept = [client.infer({"x": np.full(LARGE, value)})["actions"] for value in range(30)]
    for _ in range(100):
        client.infer({"x": np.full(LARGE, -1.0)})
    assert all((actions == value).all() for value, actions in enumerate(kept))


def test_files_and_memory_do_not_grow_with_the_number_of_requests(pool: Pool) -> None:
    client = opened(pool.start())
    pids = [os.getpid(), pool.pid("rollout-0"), pool.pid("broker")]
    counts = []
    for _ in range(2):
        for _ in range(150):
            client.infer({"x": np.ones(LARGE)})
        counts.append([(files_of(pid), slots_of(pid)) for pid in pids])
    assert counts[0] == counts[1]


def test_a_policy_may_write_into_its_observation(pool: Pool) -> None:
    pool.start(policy="InPlace")
    clients = [opened(pool) for _ in range(3)]
    x = np.arange(100_000.0).reshape(LARGE)
    for _ in range(5):
        pending = [client.submit({"x": x}) for client in clients]
        assert all(np.array_equal(p.result()["actions"], x + 1) for p in pending)


def test_a_request_whose_worker_dies_is_read_from_the_same_memory_by_another(
    pool: Pool, folder: Path
) -> None:
    once = folder / "once"
    once.touch()
    pool.start(policy="InPlace", once=once)
    client = opened(pool)
    once.unlink()
    x = np.arange(100_000.0).reshape(LARGE)
    pending = client.submit({"x": x})
    wait_for(once.exists, "the death of the worker")
    pool.start_worker(1, "InPlace", once=once)
    assert np.array_equal(pending.result()["actions"], x + 1)
    counters = pool.counters()
    assert (counters["requeued"], counters["lane_requests"]) == (1, 1)
    # The first worker might only have been stuck, and still read it.
    assert client._connection._lane.slots._free == []


def test_memory_of_a_request_that_was_given_up_is_not_used_again(pool: Pool) -> None:
    client = opened(pool.start(seconds=0.3))
    pending = client.submit({"x": np.ones(LARGE)})
    pending.cancel()
    with pytest.raises(PolicyTimeout):
        client.infer({"x": np.ones(LARGE)}, timeout=0.1)
    slots = client._connection._lane.slots
    assert (slots._free, slots._lent) == ([], {})
    assert client.infer({"x": np.full(LARGE, 5.0)})["actions"][0, 0] == 5


def test_replies_to_requests_that_were_given_up_are_no_burden_to_their_worker(
    pool: Pool, folder: Path
) -> None:
    pool.start(policy="Touching", path=folder / "begun", seconds=0.1)
    client = opened(pool)
    counts = []
    for _ in range(2):
        for _ in range(10):
            (folder / "begun").unlink()
            pending = client.submit({"x": np.ones(LARGE)})
            wait_for((folder / "begun").exists, "the policy")
            pending.cancel()
            client.infer({"x": np.ones((1, 1))})
        counts.append(files_of(pool.pid("rollout-0")))
        assert client.infer({"x": np.full(LARGE, 5.0)})["actions"][0, 0] == 5
    assert pool.counters()["late_results"] == 20
    # Those of the client's own slots, which it has let go of, are kept for a while.
    assert counts[1] - counts[0] <= 10 + 2


def test_what_a_client_names_in_shared_memory_counts_as_what_it_has_open(pool: Pool) -> None:
    pool.start(1, "", "broker.max_client_mb=4", seconds=0.2)
    blocker = opened(pool)
    pending = blocker.submit({"x": np.zeros(LARGE)})
    wait_for(lambda: pool.status()["workers"][0]["state"] == "busy", "the worker")
    slots = Slots()
    encoded = encode({"x": np.ones((2, 60_000))})
    slot = slots.lend(encoded.buffers)
    assert slot is not None
    socket = introduced(pool.frontend)
    for number in range(1, 11):
        header = Header(Op.INFER, FLAG_LANE, number, rows=2, budget_ms=20_000)
        socket.send(header.pack() + slot.descriptor + encoded.meta)
    vast = header._replace(request_id=11).pack() + slot.descriptor[:36] + b"\xff" * 8
    socket.send(vast)
    codes = []
    while len(codes) < 11:
        assert socket.poll(10_000)
        reply = socket.recv_multipart()[0]
        is_error = unpack(reply).op == Op.ERROR
        codes.append(decode_meta(reply[HEADER_SIZE:])["code"] if is_error else "")
    assert sorted(codes) == [*[""] * 4, *["overloaded"] * 6, "refused"]
    pending.result()
    assert pool.status()["open_bytes"] == 0
    socket.close(0)


def test_a_worker_that_leaves_waits_until_its_last_reply_has_been_copied(pool: Pool) -> None:
    client = opened(pool.start())
    pending = client.submit({"x": np.full(LARGE, 3.0)})
    wait_for(lambda: pool.counters()["answered"] == 2, "the reply")
    pool.terminate("rollout-0")
    wait_for(lambda: not pool.status()["workers"], "the worker to say goodbye")
    assert (pending.result()["actions"] == 3).all()
    assert pool.wait_for_exit("rollout-0") == 0
    assert pool.counters()["requests"] == 2


def test_without_the_lane_in_the_configuration_nothing_is_shared(pool: Pool) -> None:
    pool.start(1, "", "broker.shared_memory=false")
    client = pool.client()
    for value in range(3):
        assert (client.infer({"x": np.full(LARGE, value)})["actions"] == value).all()
    assert not client._connection.shares_memory
    assert pool.counters()["lane_requests"] == 0


def test_a_restarted_broker_that_shares_no_memory_gets_what_is_open_over_the_socket(pool: Pool) -> None:
    pool.start_broker()
    wait_for(lambda: pool.status_client.ask(0.5), "the broker")
    client = pool.client()
    with pytest.raises(PolicyTimeout):
        client.infer({"x": np.ones((1, 1))}, timeout=1.5)
    assert client._connection.shares_memory
    pending = client.submit({"x": np.full(LARGE, 4.0)})
    wait_for(lambda: pool.counters()["lane_requests"] == 1, "the request")
    pool.kill("broker")
    pool.start_broker("broker.shared_memory=false")
    pool.start_worker(0)
    assert (pending.result()["actions"] == 4).all()
    assert not client._connection.shares_memory


@contextmanager
def remote_worker(pool: Pool) -> Iterator[None]:
    """A worker that does not say that it can read shared memory; it answers with the observation."""
    raw = [sys.executable, str(TESTS.parent / "perf" / "raw.py"), "worker", pool.backend]
    with subprocess.Popen(raw) as worker:
        try:
            pool.wait_for_workers(1)
            yield
        finally:
            worker.kill()


def test_a_worker_that_cannot_read_the_memory_gets_the_arrays_in_the_message(pool: Pool) -> None:
    pool.start_broker()
    with remote_worker(pool):
        client = opened(pool)
        for value in range(3):
            assert (client.infer({"x": np.full(LARGE, value)})["x"] == value).all()
        counters = pool.counters()
        assert (counters["lane_requests"], counters["inlined"]) == (3, 3)


@pytest.fixture
def raw_worker(pool: Pool) -> Iterator[RawWorker]:
    pool.start_broker()
    worker = RawWorker(pool.backend, FLAG_READS_LANE)
    yield worker
    worker.close()


def replied(value: float, place: bytes | None = None) -> tuple[Header, bytes]:
    """A reply, whose arrays are said to be in shared memory if there is a `place`."""
    meta = encode({"actions": np.full((2, 1), value)}).meta
    if place is None:
        return Header(Op.REPLY, rows=2), meta
    return Header(Op.REPLY, FLAG_LANE, rows=2), place + meta


def opened_by(worker: RawWorker, pool: Pool) -> PolicyClient:
    client = pool.client()
    pending = client.submit({"x": np.zeros((2, 1))})
    worker.answer(*replied(0))
    pending.result()
    assert client._connection.shares_memory
    return client


def test_a_client_whose_memory_a_worker_cannot_read_sends_again_over_the_socket(
    pool: Pool, raw_worker: RawWorker
) -> None:
    client = opened_by(raw_worker, pool)
    first, second = (client.submit({"x": np.ones(LARGE)}) for _ in range(2))
    error = Header(Op.ERROR), encode_meta({"code": "lane", "message": "cannot read it"})
    flags = [raw_worker.answer(*error).flags, raw_worker.answer(*error).flags]
    assert flags == [FLAG_LANE | FLAG_READS_LANE] * 2
    wait_for(lambda: not second.done() and pool.counters()["requests"] == 5, "the client to send again")
    assert [raw_worker.answer(*replied(value)).flags for value in (1, 2)] == [0, 0]
    assert (first.result()["actions"] == 1).all()
    assert (second.result()["actions"] == 2).all()
    third = client.submit({"x": np.ones(LARGE)})
    assert raw_worker.answer(*replied(3)).frames == 1
    assert (third.result()["actions"] == 3).all()
    assert pool.counters()["lane_requests"] == 2
    gc.collect()  # the brokers that earlier tests ran in this process
    assert slots_of(os.getpid()) <= 1, "slots are left open"  # the broker's proof


@pytest.mark.parametrize("descriptor", [b"", bytes(32), b"\xff" * 40])
def test_a_reply_whose_memory_the_client_cannot_read_is_asked_for_again(
    pool: Pool, raw_worker: RawWorker, descriptor: bytes
) -> None:
    client = opened_by(raw_worker, pool)
    pending = client.submit({"x": np.ones(LARGE)})
    raw_worker.answer(*replied(1, descriptor))
    assert not pending.wait(0.5)
    assert raw_worker.answer(*replied(2)).flags == 0
    assert (pending.result()["actions"] == 2).all()


def test_a_client_that_sends_nothing_large_lets_go_of_the_memory_of_replies(
    pool: Pool, raw_worker: RawWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, slots = opened_by(raw_worker, pool), Slots()
    encoded = encode({"actions": np.ones(LARGE)})
    slot = slots.lend(encoded.buffers)
    assert slot is not None
    pending = client.submit({"x": np.zeros((2, 1))})
    raw_worker.answer(Header(Op.REPLY, FLAG_LANE, rows=2), slot.descriptor + encoded.meta)
    assert (pending.result()["actions"] == 1).all()
    assert client._connection._lane.reader._mapped
    monkeypatch.setattr("zmqrl.transport.sharedmem.reader.KEPT_S", 0.0)
    client.submit({"x": np.zeros((2, 1))})
    assert not client._connection._lane.reader._mapped


def test_a_request_that_names_no_memory_is_refused_and_its_batch_mates_are_answered(pool: Pool) -> None:
    pool.start(seconds=0.1)
    _ask_among_hostile_ones(pool, "actions")
    assert len(pool.status()["workers"]) == 1


def test_a_broker_that_cannot_read_memory_for_a_worker_refuses_that_request_only(pool: Pool) -> None:
    pool.start_broker("rollout.rollout_queue_size=8")
    with remote_worker(pool):
        _ask_among_hostile_ones(pool, "x")


def _ask_among_hostile_ones(pool: Pool, key: str) -> None:
    blocker, mate = opened(pool), opened(pool)
    slots = Slots()
    slot = slots.lend([memoryview(np.ones(LARGE)).cast("B")])
    assert slot is not None
    socket = introduced(pool.frontend)
    good = slot.descriptor
    hostile = [
        b"",
        good[:-1],
        good[:8] + os.urandom(16) + good[24:],
        good[:36] + bytes([255] * 3 + [0] * 5),
        good[:32] + b"\xff" * 12,
    ]
    pending = [blocker.submit({"x": np.zeros(LARGE)})]
    for number, place in enumerate(hostile, 1):
        header = Header(Op.INFER, FLAG_LANE, number, rows=2, budget_ms=20_000)
        socket.send(header.pack() + place)
    pending.append(mate.submit({"x": np.ones(LARGE)}))
    assert [request.result()[key][0, 0] for request in pending] == [0, 1]
    codes = {}
    for _ in hostile:
        assert socket.poll(10_000)
        reply = socket.recv()
        codes[unpack(reply).request_id] = decode_meta(reply[HEADER_SIZE:])["code"]
    assert codes == dict.fromkeys(range(1, len(hostile) + 1), "lane")
    socket.close(0)


def test_the_child_of_a_fork_leaves_the_parents_memory_alone(pool: Pool) -> None:
    client = opened(pool.start(workers=2, seconds=0.01))
    pending = client.submit({"x": np.full(LARGE, 1.0)})

    def child() -> None:
        with pytest.raises(ClientError, match="parent process"):
            pending.result()
        for value in range(20):
            x = np.full(LARGE, 1000.0 + value)
            if not (client.infer({"x": x})["actions"] == x).all():
                os._exit(1)
        client.close()
        os._exit(0 if client._connection is not None else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    for value in range(20):
        assert (client.infer({"x": np.full(LARGE, value)})["actions"] == value).all()
    assert (pending.result()["actions"] == 1).all()
    process.join(20)
    assert process.exitcode == 0
    assert (client.infer({"x": np.full(LARGE, 9.0)})["actions"] == 9).all()


TRAFFIC = """
import itertools, sys
import numpy as np
from zmqrl import PolicyClient
with PolicyClient(sys.argv[1]) as client:
    for value in itertools.count():
        assert (client.infer({"x": np.full((2, 50_000), value)})["actions"] == value).all()
        print(value, flush=True)
"""


def test_whoever_is_killed_in_traffic_leaves_no_memory_behind_and_the_others_go_on(pool: Pool) -> None:
    names = shared_names()
    pool.start(workers=2)
    client = opened(pool)
    x = np.ones(LARGE)
    client.infer({"x": x})
    others = [
        subprocess.Popen([sys.executable, "-c", TRAFFIC, pool.frontend], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            for _ in range(20):
                assert other.stdout.readline()
        assert slots_of(pool.pid("rollout-0")) > 0
        for other in others:
            other.kill()
        pool.kill("rollout-1")
        for value in itertools.count():
            assert (client.infer({"x": x * value})["actions"] == value).all()
            # After a while there are only the broker's, one of this client, one of its own for it, and
            # the replies that those who were killed have not copied.
            if slots_of(pool.pid("rollout-0")) <= 3 + len(others):
                break
        pool.kill("broker")
        pool.start_broker()
        for value in range(10):
            assert (client.infer({"x": x * value})["actions"] == value).all()
        assert client._connection.shares_memory
        assert shared_names() == names
    finally:
        for other in others:
            other.kill()
            assert other.stdout is not None
            other.stdout.close()
            other.wait()
    gc.collect()  # the brokers that earlier tests ran in this process
    files = files_of(os.getpid())
    client.close()
    assert files_of(os.getpid()) < files
    assert slots_of(os.getpid()) == 0


def test_with_keys_the_lane_works_as_without(pool: Pool, folder: Path) -> None:
    make_bundles(f"{folder}/keys")
    pool.overrides.append(f"security.keys={folder}/keys")
    pool.status_client.close()
    pool.status_client = StatusClient(pool.frontend, keys=Keys.load(f"{folder}/keys", "client"))
    pool.start()
    client = opened(pool, keys=f"{folder}/keys")
    assert (client.infer({"x": np.full(LARGE, 2.0)})["actions"] == 2).all()
    counters = pool.counters()
    assert (counters["lane_requests"], counters["lane_replies"]) == (1, 1)
