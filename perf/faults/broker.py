"""Drills that hurt the broker, or fill it."""

from __future__ import annotations

import itertools

from faults.drills import Trial, drill
from faults.pool import wait_for


@drill("broker-restarted")
def broker_restarted(trial: Trial) -> None:
    """The broker is SIGKILLed under load and started again; every call ends in its answer within 3 s.

    Requests that it held run again if need be, which is why `reruns` may be above 0; none is answered
    twice.
    """
    pool = trial.pool.start(2, seconds=0.005)
    load = trial.load(clients=16)
    for _ in range(trial.size(5, quick=1)):
        load.wait_for(trial.size(500, quick=100))
        moment = pool.kill("broker")
        pool.start_broker()
        trial.recovers(moment, within=3.0)
    load.wait_for(100)


@drill("queue-full-of-messages")
def queue_full_of_messages(trial: Trial) -> None:
    """More requests come than the queue takes (32); the rest is told `overloaded` and asks again.

    As soon as a rollout worker is there, everything is served: no call ends in an error.
    """
    pool = trial.pool.start(0, "", "broker.max_queue_messages=32")
    _fill(trial, clients=trial.size(200, quick=80), width=16, most_bytes=1 << 20)
    trial.expect(pool.counters()["overloaded"] > 0, "nothing was refused")


@drill("queue-full-of-bytes")
def queue_full_of_bytes(trial: Trial) -> None:
    """More bytes come than the queue takes (16 MiB); the rest is refused, and memory is bounded.

    As soon as a rollout worker is there, everything is served: no call ends in an error.
    """
    pool = trial.pool.start(0, "", "broker.max_queue_mb=16")
    _fill(trial, clients=trial.size(100, quick=40), width=250_000, most_bytes=16 << 20)
    trial.expect(pool.counters()["overloaded"] > 0, "nothing was refused")


def _fill(trial: Trial, clients: int, width: int, most_bytes: int) -> None:
    """Ask without any rollout worker, until the queue is full; then serve all."""
    pool = trial.pool
    before = pool.rss("broker")
    load = trial.load(clients=clients, requests=2 * clients, width=width)
    wait_for(lambda: pool.counters()["overloaded"] > 2 * clients, "refusals, again and again")
    status, grown = pool.status(), pool.rss("broker") - before
    trial.expect(status["open_requests"] <= 32, f"{status['open_requests']} requests are open")
    trial.expect(status["open_bytes"] <= most_bytes, f"{status['open_bytes']} bytes are open")
    trial.expect(grown < 4 * most_bytes + (32 << 20), f"the broker grew by {grown >> 20} MiB")
    pool.start_worker(0)
    trial.finish(load)


@drill("start-orders")
def start_orders(trial: Trial) -> None:
    """Broker, client and rollout worker start in each of the six orders; every call is answered."""
    pool = trial.pool
    for number, order in enumerate(itertools.permutations(("broker", "worker", "client"))):
        pool.lines.clear()
        for part in order:
            if part == "broker":
                pool.start_broker()
                wait_for(lambda: any("serving" in line for line in pool.lines), "the broker")
            elif part == "worker":
                pool.start_worker(0)
                wait_for(lambda: any("is loaded" in line for line in pool.lines), "the worker")
            else:
                load = trial.load(clients=4, requests=trial.size(200, quick=20), first=10 * number)
        trial.finish(load)
        for name in ("broker", "rollout-0"):
            pool.kill(name)
