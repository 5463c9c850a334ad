"""Peers that share an identity, freeze, come by hundreds, speak another version, or send too much."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from by_hand import RawWorker, hello, introduced
from conftest import Load, Pool, wait_for

from zmqrl import PolicyClient
from zmqrl.broker.core import Broker
from zmqrl.broker.pool import Options
from zmqrl.broker.server import BrokerServer
from zmqrl.broker.status import StatusClient
from zmqrl.env.orders import Orders
from zmqrl.errors import LearnerRefused, PolicyError, RequestRefused, StartupFailed
from zmqrl.rollout.worker import RolloutWorker
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode, encode, encode_meta
from zmqrl.transport.header import (
    HEADER_SIZE,
    Header,
    Op,
    unpack,
)


def request(number: int, value: float) -> bytes:
    encoded = encode({"x": np.full((1, 3), value)})
    header = Header(Op.INFER, request_id=number, rows=1, budget_ms=30_000, signature=encoded.signature)
    return header.pack() + encoded.meta


def test_of_two_sockets_with_one_identity_the_later_one_is_answered(pool: Pool) -> None:
    pool.start()
    context = zmq.Context()
    twins = [context.socket(zmq.DEALER) for _ in range(3)]
    for value, socket in enumerate(twins):
        socket.setsockopt(zmq.IDENTITY, b"the same")
        socket.connect(pool.frontend)
        socket.send(hello("twin"))
        assert unpack(socket.recv()).op == Op.WELCOME
        socket.send(request(1, value))
        first = socket.recv()
        assert decode(first[HEADER_SIZE:])["actions"][0, 0] == value
    assert [client["name"] for client in pool.status()["clients"]] == ["twin"]
    context.destroy(0)


def test_the_replies_to_two_clients_with_the_same_request_ids_never_cross(pool: Pool) -> None:
    pool.start(workers=2)
    twins = [introduced(pool.frontend, f"twin-{number}") for number in range(2)]
    window, count = 50, 5000
    for begin in range(1, count + 1, window):
        for number in range(begin, begin + window):
            for twin, socket in enumerate(twins):
                socket.send(request(number, number + twin / 2))
        for twin, socket in enumerate(twins):
            for _ in range(window):
                assert socket.poll(30_000)
                first = socket.recv()
                header = unpack(first)
                assert header.op == Op.REPLY
                value = decode(first[HEADER_SIZE:])["actions"][0, 0]
                assert value == header.request_id + twin / 2
    for socket in twins:
        socket.close(0)


_LOOP = """
import sys
import numpy as np
from zmqrl import PolicyClient
ranks = {"rank": int(sys.argv[3]), "world_size": int(sys.argv[4])} if sys.argv[3:] else {}
client = PolicyClient(sys.argv[1], name=sys.argv[2], timeout=30, **ranks)
for step in range(1 << 40):
    assert (client.infer({"x": np.full((1, 3), step)})["actions"] == step).all()
    print(step, flush=True)
"""


@contextmanager
def loop(pool: Pool, name: str, *ranks: int) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own, which prints a line for each answer; of a rank, of so many."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LOOP, pool.frontend, name, *map(str, ranks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_client_that_was_frozen_until_it_was_forgotten_registers_again(pool: Pool) -> None:
    pool.start_broker("broker.heartbeat_timeout_s=0.6")
    pool.start_worker(0, seconds=0.01)
    pool.wait_for_workers(1)
    with loop(pool, "sleepy") as client:
        os.kill(client.pid, signal.SIGSTOP)
        wait_for(lambda: pool.status()["clients"] == [], "the client to be forgotten")
        os.kill(client.pid, signal.SIGCONT)
        wait_for(lambda: [c["name"] for c in pool.status()["clients"]] == ["sleepy"], "its return")
        answered = pool.counters()["answered"]
        wait_for(lambda: pool.counters()["answered"] > answered + 20, "more answers")
        assert client.poll() is None


def test_clients_of_the_shared_queue_have_one_heartbeat_in_a_time_limit(tmp_path: Path) -> None:
    every_ms = {}
    for decoupled in (True, False):
        endpoints = [f"ipc://{tmp_path}/{name}-{decoupled}" for name in ("frontend", "backend")]
        server = BrokerServer(*endpoints, Options(decoupled=decoupled), heartbeat_s=10.0)
        legs = (server._frontend, server._backend)
        every_ms[decoupled] = [leg.getsockopt(zmq.HEARTBEAT_IVL) for leg in legs]
        server.close()
    assert every_ms == {True: [10_000, 2000], False: [2000, 2000]}
    with PolicyClient(f"ipc://{tmp_path}/nobody") as client:
        leg = client._connection._link._socket
        assert leg.getsockopt(zmq.HEARTBEAT_IVL) == sockets.HEARTBEAT_S * 1000


@pytest.mark.alone
def test_the_barrier_of_normal_mode_waits_no_longer_for_a_frozen_client_than_for_a_frozen_worker(
    pool: Pool,
) -> None:
    pool.start_broker("broker.heartbeat_timeout_s=2", decoupled=False)
    pool.start_worker(0, world_size=1)
    pool.wait_for_workers(1)
    observation = {"x": np.ones((1, 3), int)}  # as those of the other
    with loop(pool, "env-0", 0, 2) as other:
        client = pool.client(rank=1, world_size=2)
        for _ in range(3):
            assert client.infer(observation)["rows"] == 2
        os.kill(other.pid, signal.SIGSTOP)
        begin = time.monotonic()
        while time.monotonic() < begin + 8.0:  # what the other had asked for opens one barrier more
            if client.infer(observation)["rows"] == 1:
                break
        assert 2.0 < time.monotonic() - begin < 3.8  # docs/reliability.md: a second more at most


def test_a_replacement_of_a_frozen_client_is_served_and_the_frozen_one_refused_loudly(
    pool: Pool,
) -> None:
    pool.start(seconds=0.01)
    with loop(pool, "env-3") as old:
        os.kill(old.pid, signal.SIGSTOP)
        new = pool.client(name="env-3")
        assert new.infer({"x": np.full((1, 3), 5.0)})["actions"][0, 0] == 5
        os.kill(old.pid, signal.SIGCONT)
        assert old.wait(20) == 1
        assert old.stderr is not None
        assert "Replaced" in old.stderr.read()
        assert new.infer({"x": np.full((1, 3), 6.0)})["actions"][0, 0] == 6


def test_two_hundred_peers_that_come_and_go_are_forgotten_and_disturb_nobody(pool: Pool) -> None:
    pool.start(workers=2, seconds=0.002)
    load = Load(pool, clients=2)
    load.wait_for(20)
    for generation in range(2):
        context = zmq.Context()
        peers = [sockets.dealer(context, pool.backend if n % 2 else pool.frontend) for n in range(200)]
        for number, socket in enumerate(peers):
            client = number % 2 == 0
            name = f"{generation}-{number}"
            socket.send(hello(name) if client else hello(name, policy="nobody asks"))
            socket.send(request(1, 0.0) if client else Header(Op.READY).pack())
        load.wait_for(20)
        context.destroy()
    wait_for(lambda: len(pool.status()["workers"]) == 2, "the workers to be forgotten", 40)
    wait_for(lambda: len(pool.status()["clients"]) == 2, "the clients to be forgotten", 40)
    load.wait_for(50)
    load.finish()


def start_broker_with_few_files(pool: Pool, files: int, most: int, *overrides: str) -> None:
    """Start the broker with such limits of open files, soft and hard."""
    limits = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {most}))"
    code = f"import resource, runpy; {limits}; runpy.run_module('zmqrl', run_name='__main__')"
    decoupled = "runner.enable_decoupled_mode=true"
    pool.launcher.start("broker", ["start-broker", *pool.overrides, decoupled, *overrides], ["-c", code])


def test_a_broker_takes_more_connections_than_the_soft_limit_of_open_files(pool: Pool) -> None:
    start_broker_with_few_files(pool, 64, 512)
    clients = [pool.client() for _ in range(100)]
    pool.start_worker(0)
    assert all(client.infer({"x": np.ones((1, 3))})["rows"] == 1 for client in clients)


def test_a_broker_that_can_open_no_more_files_serves_those_that_it_has(
    pool: Pool, free_ports: list[int]
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports[0]}"
    start_broker_with_few_files(pool, 64, 64, f"broker.frontend={endpoint}")
    pool.start_worker(0)
    with PolicyClient(endpoint, timeout=20.0) as client:
        assert client.infer({"x": np.ones((1, 3))})["rows"] == 1
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        strangers = [sockets.dealer(context, endpoint) for _ in range(100)]
        until = time.monotonic() + 7.0  # the broker has looked at its memory
        while time.monotonic() < until:
            assert client.infer({"x": np.ones((1, 3))})["rows"] == 1
        for stranger in strangers:
            stranger.close(0)
        context.term()
    with PolicyClient(endpoint, timeout=20.0) as late:
        assert late.infer({"x": np.ones((1, 3))})["rows"] == 1


def test_fifty_brokers_that_start_at_once_get_ports_of_their_own_and_serve() -> None:
    servers: list[BrokerServer] = []
    errors: list[Exception] = []
    stopping = threading.Event()

    def serve() -> None:
        try:
            server = BrokerServer("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", Options())
            servers.append(server)
            server.run(stopping.is_set)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=serve) for _ in range(50)]
    for thread in threads:
        thread.start()
    wait_for(lambda: errors or len(servers) == 50, "the brokers", 40)
    assert errors == []
    assert len({end for server in servers for end in (server.frontend, server.backend)}) == 100
    for server in servers:
        client = StatusClient(server.frontend)
        assert (client.ask(20) or {})["epoch"] == server.core.status()["epoch"]
        client.close()
    stopping.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_broker_that_is_stopped_still_tells_what_has_happened(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    server = BrokerServer(f"ipc://{tmp_path}/front", f"ipc://{tmp_path}/back", Options())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.backend)
    socket.send(hello("w7"))
    deadline = time.monotonic() + 20
    server.run(lambda: bool(server.core.status()["workers"]) or time.monotonic() > deadline)
    context.destroy(0)
    assert "w7 joined" in caplog.text


@pytest.mark.parametrize("leg", ["frontend", "backend"])
def test_a_peer_that_sends_more_than_the_limit_is_cut_and_the_others_do_not_notice(
    pool: Pool, leg: str
) -> None:
    pool.overrides.append("broker.max_message_mb=1")
    pool.start()
    load = Load(pool, clients=2)
    load.wait_for(20)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.connect(getattr(pool, leg))
    socket.send(hello("large"))
    assert unpack(socket.recv()).op == Op.WELCOME
    socket.send(bytes((1 << 20) + 1))
    assert monitor.poll(20_000), "it was not cut"
    load.wait_for(100)
    load.finish()
    pool.wait_for_workers(1)
    context.destroy(0)


class Strange:
    """A broker or a learner that gives the same answer to everything."""

    def __init__(self, endpoint: str, answer: Any) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = sockets.router(self._context, endpoint)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)  # those that asked may be gone
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=(answer,))
        self._thread.start()

    def _run(self, answer: Any) -> None:
        while not self._stopping:
            if self._socket.poll(50):
                peer, first, *_ = self._socket.recv_multipart()
                self._socket.send_multipart([peer, answer(first)])

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._context.destroy(0)


def of_another_version(first: bytes) -> bytes:
    return first[:4] + b"\x63" + first[5:]


@pytest.fixture
def elsewhere(folder: Path) -> Iterator[str]:
    """The endpoint of a broker or learner that speaks another version of the protocol."""
    endpoint = f"ipc://{folder}/elsewhere"
    strange = Strange(endpoint, of_another_version)
    yield endpoint
    strange.close()


def test_a_client_of_a_broker_of_another_version_is_told_so(elsewhere: str) -> None:
    with (
        PolicyClient(elsewhere) as client,
        pytest.raises(RequestRefused, match="version 99, this is"),
    ):
        client.infer({"x": np.ones((1, 3))})


def test_a_rollout_worker_of_a_broker_of_another_version_ends_and_says_so(elsewhere: str) -> None:
    worker = RolloutWorker(object(), elsewhere, name="rollout-0")  # type: ignore[arg-type]
    with pytest.raises(StartupFailed, match="version 99, this is"):
        worker.run(lambda: False)


def test_an_eval_worker_of_a_learner_of_another_version_is_told_so(elsewhere: str) -> None:
    orders = Orders(elsewhere, "eval-0")
    with pytest.raises(LearnerRefused, match="version 99, this is"):
        orders.next(10.0)
    orders.close()


def test_a_broker_of_another_version_is_told_in_place_of_a_status(elsewhere: str) -> None:
    client = StatusClient(elsewhere)
    with pytest.raises(RequestRefused, match="version 99, this is"):
        client.ask(10.0)
    client.close()


def test_the_status_of_a_thousand_peers_with_the_longest_names_can_be_read(folder: Path) -> None:
    broker = Broker(Options(), 1, 0.0)
    for number in range(1000):
        face = chr(0x1F600)  # four bytes
        who = {"name": f"{number:{face}>200}", "host": 300 * face}
        broker.from_client(b"c%d" % number, [hello(**who)])
        broker.from_worker(b"w%d" % number, [hello(**who)])
    endpoint = f"ipc://{folder}/long"
    words = encode_meta(broker.status())
    strange = Strange(
        endpoint, lambda first: Header(Op.STATUS, request_id=unpack(first).request_id).pack() + words
    )
    client = StatusClient(endpoint)
    status = client.ask(10.0)
    assert status is not None
    assert len(status["clients"]) == len(status["workers"]) == 1000
    client.close()
    strange.close()


STATUS = {
    "counters": {"requests": 1},
    "workers": [],
    "clients": [],
    "totals": {"rollout-0": {"rows": 2}},
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"counters": None},
        {"counters": {"requests": "many"}},
        {"workers": {}},
        {"workers": [1]},
        {"clients": "all"},
        {"totals": []},
        {"totals": {"rollout-0": 3}},
        {"totals": {"rollout-0": {"rows": None}}},
    ],
    ids=repr,
)
def test_a_status_that_nobody_could_count_with_is_no_answer(folder: Path, wrong: dict[str, Any]) -> None:
    endpoint = f"ipc://{folder}/odd"
    told = [STATUS, {**STATUS, **wrong}]
    strange = Strange(
        endpoint,
        lambda first: (
            Header(Op.STATUS, request_id=unpack(first).request_id).pack() + encode_meta(told.pop(0))
        ),
    )
    client = StatusClient(endpoint)
    assert client.ask(10.0) == STATUS
    assert client.ask(1.0) is None
    client.close()
    strange.close()


@pytest.mark.parametrize(
    "tree", [[np.ones((1, 3))], np.ones((1, 3)), "text", None], ids=["list", "array", "text", "nothing"]
)
def test_a_reply_that_is_no_dict_is_an_error_for_its_client_alone(pool: Pool, tree: Any) -> None:
    pool.start(workers=0)
    worker = RawWorker(pool.backend)
    pending = pool.client().submit({"x": np.ones((1, 3))})
    worker.answer(Header(Op.REPLY), encode(tree).meta)
    with pytest.raises(PolicyError, match="not a dict"):
        pending.result()
    worker.close()


def test_a_long_introduction_is_refused_before_it_is_read(pool: Pool) -> None:
    pool.start(workers=0)
    for endpoint in (pool.frontend, pool.backend):
        socket = sockets.dealer(zmq.Context.instance(), endpoint)
        begin = time.monotonic()
        for _ in range(200):
            socket.send(hello("long", more=[{}] * 100_000))
        for _ in range(200):
            assert socket.poll(20_000)
            assert b"is the most" in socket.recv()
        assert time.monotonic() - begin < 20
        socket.close(0)
