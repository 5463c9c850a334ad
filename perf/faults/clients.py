"""Drills that hurt clients, or that clients do."""

from __future__ import annotations

import time

import zmq

from faults.drills import Trial, drill
from faults.load import Load
from faults.policies import observation
from faults.pool import Pool, wait_for
from zmqrl.errors import Overloaded, PolicyTimeout
from zmqrl.transport.codec import encode, encode_meta
from zmqrl.transport.header import Header, Op

CROWD = 10_000
"""The number of the first client of a crowd."""


@drill("clients-killed")
def clients_killed(trial: Trial) -> None:
    """Client processes are SIGKILLed by hundreds with requests queued; broker and queue recover.

    Nobody waits for the answers of the dead, so nothing of theirs stays: no request, no byte, no memory.
    The broker notices within 5 s, for it probes silent clients every 3 s; what is queued then is not
    inferred.
    """
    pool = trial.pool.start(1, "", "rollout.rollout_queue_size=1", seconds=0.15)
    load = trial.load(clients=2)
    load.wait_for(4)
    before = pool.rss("broker")
    count, width = trial.size(200, quick=40), trial.size(75_000, quick=300_000)
    trial.crowd("crowd", count, first=CROWD, width=width, timeout=60.0)
    wait_for(lambda: pool.status()["open_requests"] > count * 0.9, "the crowd's requests", 120.0)
    full = pool.rss("broker")
    begun = trial.runs().total()
    moment = pool.kill("crowd")
    wait_for(lambda: pool.status()["clients_connected"] <= 2, "the broker to forget the dead", 30.0)
    trial.recovers(moment, within=5.0)
    trial.finish(load)
    status = pool.wait_for_quiet()
    trial.expect(status["open_bytes"] == 0, f"{status['open_bytes']} bytes are still held")
    inferred = trial.runs().total() - begun
    trial.expect(inferred < count * 0.9, f"{inferred} requests were inferred after the kill")
    wait_for(
        lambda: pool.rss("broker") - before < (full - before) / 2,
        f"the broker's memory, {before >> 20} MiB at first and {full >> 20} at most, to come back",
    )


@drill("client-restarted")
def client_restarted(trial: Trial) -> None:
    """An env worker is restarted under its name while its request is in inference.

    First the old one is dead: its answer reaches nobody, the new one's requests are answered. Then the
    old one is frozen and only seems dead: when it thaws it is told `Replaced`, and is not answered.
    """
    pool = trial.pool.start(1, seconds=0.1)
    generations = trial.size(7, quick=3)
    for number in range(generations):
        trial.crowd(
            f"env-{number}", 1, first=CROWD + number, name="env", timeout=20.0, expects=["Replaced"]
        )
        wait_for(lambda name=f"env-{number}": trial.crowd_ledger(name).answered >= 2, "the newest")
        if number and number % 2 == 0:
            old = f"env-{number - 1}"
            pool.thaw(old)
            pool.wait_for_exit(old)
            pool.launcher.children[old].reader.join(5.0)
            told = trial.crowd_ledger(old).errors
            trial.expect(told == {"Replaced": 1}, f"the replaced one was told {dict(told)}")
        wait_for(lambda: pool.worker("rollout-0")["shards"] == 1, "its request to be in inference")
        if number % 2:
            pool.freeze(f"env-{number}")
        else:
            pool.kill(f"env-{number}")
    connected = pool.status()["clients_connected"]
    trial.expect(connected <= 1, f"the broker knows {connected} of them")


@drill("half-the-clients-killed")
def half_the_clients_killed(trial: Trial) -> None:
    """Half of the env workers are SIGKILLed; the others go on, within 1 s."""
    _half_killed(trial, decoupled=True)


@drill("half-the-clients-killed-normal-mode")
def half_the_clients_killed_normal_mode(trial: Trial) -> None:
    """The same in normal mode, where a rollout worker waits for all its live env workers."""
    _half_killed(trial, decoupled=False)


def _half_killed(trial: Trial, decoupled: bool) -> None:
    pool = trial.pool
    pool.start_broker(decoupled=decoupled)
    for rank in range(2):
        pool.start_worker(rank, seconds=0.01)
    pool.wait_for_workers(2)
    half = trial.size(16, quick=4)
    load = trial.load(clients=half, rank=lambda number: number, world_size=2 * half)
    # The numbers are chosen such that the upper half of the ranks is theirs.
    first = CROWD // (2 * half) * (2 * half) + half
    trial.crowd("half", half, first=first, world_size=2 * half)
    wait_for(lambda: trial.crowd_ledger("half").answered >= 2 * half, "both halves to be served")
    load.wait_for(100)
    moment = pool.kill("half")
    load.wait_for(trial.size(1000, quick=100))
    trial.recovered(load.longest_s(moment), within=1.0)


@drill("client-never-reads")
def client_never_reads(trial: Trial) -> None:
    """A client asks and never reads; its replies are dropped and counted, the others go on.

    The broker holds no more of its replies than the requests that it may have open (8 here), whether the
    client has asked 50 times or 500; the others keep at least a fifth of their pace beside it.
    """
    pool = trial.pool.start(1, "", "broker.max_client_messages=8", seconds=0.002)
    load = trial.load(clients=8)
    load.wait_for(100)
    before, pace = pool.rss("broker"), _pace(load)
    deaf = _hello(pool, "deaf")
    beside = []
    for sequence in range(trial.size(500, quick=100)):
        encoded = encode(observation(CROWD, sequence, 1, 100_000))
        header = Header(Op.INFER, request_id=sequence + 1, frames=1, rows=1, budget_ms=20_000)
        header = header._replace(signature=encoded.signature)
        wait_for(lambda: deaf.poll(0, zmq.POLLOUT), "the broker to read")
        deaf.send_multipart([header.pack() + encoded.meta, *encoded.buffers])
        if sequence % 50 == 49:
            beside.append(_pace(load))
    trial.expect(max(beside) > pace / 5, f"{max(beside):.0f} answers/s beside it, {pace:.0f} before")
    trial.finish(load)
    counters = pool.wait_for_quiet()["counters"]
    trial.expect(counters["dropped"] >= 10, f"its replies were not dropped: {counters}")
    wait_for(lambda: pool.rss("broker") - before < 32 << 20, "the broker's memory to be that of before")
    deaf.close(0)


@drill("client-floods")
def client_floods(trial: Trial) -> None:
    """A client opens hundreds of requests at once; what is over its bound (16) is refused for now.

    What is never let in ends in `Overloaded`; what is let in too late to be answered in its time, in
    `PolicyTimeout`, which says where it was.
    Others are served beside it at a tenth of their pace or more.
    """
    pool = trial.pool.start(2, "", "broker.max_client_messages=16", seconds=0.02)
    load = trial.load(clients=8)
    load.wait_for(100)
    pace = _pace(load)
    kinds = (Overloaded, PolicyTimeout)
    flood = trial.load(clients=1, depth=300, requests=600, timeout=4.0, expects=kinds)
    beside = _pace(load)
    trial.expect(beside > pace / 10, f"{beside:.0f} answers/s beside it, {pace:.0f} before")
    most = max(client["open_requests"] for client in pool.status()["clients"])
    trial.expect(most <= 16, f"a client has {most} requests open")
    ledger = trial.finish(flood)
    vague = [f for f in flood.failures if "said nothing" in str(f.error)]
    trial.expect(not vague, f"{len(vague)} errors do not say what happened")
    trial.expect(ledger.answered > 0, "nothing of it was answered")
    trial.expect(pool.counters()["overloaded"] > 0, "the broker counted no refusal")


def _pace(load: Load) -> float:
    """Answers per second, over some hundred of them."""
    begin, answered = time.monotonic(), load.ledger.answered
    load.wait_for(200)
    return (load.ledger.answered - answered) / (time.monotonic() - begin)


def _hello(pool: Pool, name: str) -> zmq.Socket[bytes]:
    """A registered client with a socket that takes next to nothing until it is read."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.connect(pool.frontend)
    socket.send(Header(Op.HELLO).pack() + encode_meta({"name": name, "incarnation": 1}))
    return socket
