"""A loop of one's own that waits for several clients, and for other things too."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import socket
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import Pool, wait_for

from zmqrl import Pending, PolicyClient
from zmqrl.errors import AuthenticationFailed, BrokerUnreachable, PolicyTimeout
from zmqrl.transport.bundles import make_bundles


def x(value: float, rows: int = 2) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 3), value)}


def served(client: PolicyClient, pending: list[Pending], limit: float = 40.0) -> int:
    """Wait with a selector until all have ended; returns how often it waited in vain."""
    silent = 0
    until = time.monotonic() + limit
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ)
        while not all(request.done() for request in pending):
            assert time.monotonic() < until
            pause = client.catch_up()
            silent += not selector.select(pause) and pause > 0
    return silent


def test_one_thread_serves_several_clients_and_a_pipe_and_is_told_of_each_answer(pool: Pool) -> None:
    pool.start(workers=2)
    clients = [pool.client() for _ in range(3)]
    selector = selectors.DefaultSelector()
    ours, theirs = os.pipe()
    selector.register(ours, selectors.EVENT_READ)
    for client in clients:
        selector.register(client, selectors.EVENT_READ)
    answered: Counter[PolicyClient | str] = Counter()
    silent = 0
    open_ = {client: [(n, client.submit(x(n))) for n in range(4)] for client in clients}
    while min(answered[client] for client in clients) < 500:
        pause = min(client.catch_up() for client in clients)
        files = selector.select(pause)
        silent += not files and pause > 0
        if ours in [key.fileobj for key, _ in files]:
            answered["pipe"] += len(os.read(ours, 100))
        for client, requests in open_.items():
            client.catch_up()
            for n, pending in [entry for entry in requests if entry[1].done()]:
                assert (pending.result()["actions"] == n).all()
                answered[client] += 1
                requests.remove((n, pending))
                requests.append((n + 4, client.submit(x(n + 4))))
                os.write(theirs, b".")
    assert silent == 0, "an answer had come, and nothing told of it"
    assert answered["pipe"] > 1000
    selector.close()
    os.close(ours)
    os.close(theirs)


def test_a_request_that_stays_unanswered_ends_in_time_although_nothing_arrives() -> None:
    with PolicyClient("tcp://127.0.0.1:1") as client:
        pending = client.submit(x(0), timeout=0.7)
        begin = time.monotonic()
        served(client, [pending])
        assert 0.6 < time.monotonic() - begin < 5
        with pytest.raises(BrokerUnreachable):
            pending.result()
        assert client.catch_up() == 0, "a request has ended"
        assert client.catch_up() > 5, "nothing is awaited"


def test_its_file_stays_the_same_when_a_broker_that_hung_gets_a_new_socket(pool: Pool) -> None:
    client = pool.start().client(timeout=30.0)
    file = client.fileno()
    socket_before = client._connection._link._socket
    served(client, [client.submit(x(1))])
    pool.freeze("broker")
    pending = [client.submit(x(n)) for n in range(20)]
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        until = time.monotonic() + 20
        while client._connection._link._socket is socket_before:
            assert time.monotonic() < until
            selector.select(client.catch_up())
        pool.thaw("broker")
        while not all(request.done() for request in pending):
            assert time.monotonic() < until
            selector.select(client.catch_up())
    assert [request.result()["actions"][0, 0] for request in pending] == list(range(20))
    assert client.fileno() == file
    assert served(client, [client.submit(x(1))]) == 0


def test_a_restarted_broker_gets_what_is_open(pool: Pool) -> None:
    client = pool.start(seconds=0.3).client()
    pending = [client.submit(x(n)) for n in range(6)]
    client.catch_up()
    pool.kill("broker")
    pool.start_broker()
    served(client, pending)
    assert [request.result()["actions"][0, 0] for request in pending] == list(range(6))


def _serve_in_child(client: PolicyClient, answers: multiprocessing.Queue) -> None:
    pending = client.submit(x(7))
    silent = served(client, [pending])
    answers.put((silent, float(pending.result()["actions"][0, 0])))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_gets_a_file_of_its_own(echo: Pool) -> None:
    client = echo.client()
    open_ = client.submit(x(3))
    client.fileno()
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=_serve_in_child, args=(client, answers))
    child.start()
    assert answers.get(timeout=20) == (0, 7.0)
    child.join(10)
    served(client, [open_])
    assert open_.result()["actions"][0, 0] == 3


def test_to_look_why_nobody_answers_keeps_nobody_waiting() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with PolicyClient(f"tcp://127.0.0.1:{silent.getsockname()[1]}") as client:
            pending = client.submit(x(0), timeout=5.5)
            spent = 0.0
            with selectors.DefaultSelector() as selector:
                selector.register(client, selectors.EVENT_READ)
                while not pending.done():
                    begin = time.monotonic()
                    pause = client.catch_up()
                    spent += time.monotonic() - begin
                    selector.select(pause)
            with pytest.raises(BrokerUnreachable):
                pending.result()
            assert spent < 0.5, "three looks take 0.3 s each"


def test_a_client_without_a_key_is_told_so(pool: Pool, folder: Path) -> None:
    make_bundles(str(folder / "keys"))
    pool.overrides.append(f"security.keys={folder / 'keys'}")
    pool.start_broker()
    with PolicyClient(pool.frontend, timeout=10) as client:
        pending = client.submit(x(0))
        served(client, [pending])
        with pytest.raises(AuthenticationFailed, match=r"needs a key|without a key"):
            pending.result()


def test_what_the_broker_says_of_an_unanswered_request_is_in_its_error(pool: Pool) -> None:
    client = pool.start(workers=0).client()
    pending = client.submit(x(0), timeout=1.6)
    served(client, [pending])
    with pytest.raises(PolicyTimeout, match="0 rollout workers connected"):
        pending.result()
    assert wait_for(lambda: pool.counters()["cancelled"] == 1, "the cancellation")
