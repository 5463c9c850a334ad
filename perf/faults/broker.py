"""Drills that hurt the broker, or fill it."""

from __future__ import annotations

import time

from faults.drills import Trial, drill
from faults.pool import Pool, wait_for


@drill("broker-restarted")
def broker_restarted(trial: Trial) -> None:
    """The broker is SIGKILLed or SIGTERMed under load, and started again; calls are answered in 3 s.

    Every call ends in its answer, and in one. What the broker held runs again if need be, which is why
    `reruns` may be above 0. Where the process alone takes more than a second to start, since others have
    the cores, it is 2 s from then.
    """
    trial.pool.start(2, seconds=0.005)
    load = trial.load(clients=16)
    for number in range(trial.size(6, quick=2)):
        load.wait_for(trial.size(500, quick=100))
        restart(trial, number)
    load.wait_for(100)


def restart(trial: Trial, number: int) -> None:
    """End the broker, by SIGKILL if `number` is even, else by SIGTERM, and start it again."""
    pool = trial.pool
    moment = (pool.terminate if number % 2 else pool.kill)("broker")
    pool.wait_for_exit("broker")
    pool.lines.clear()
    pool.start_broker()
    _wait_for_line(pool, "serving")
    serves = time.monotonic() - moment
    trial.recovers(moment, within=max(3.0, serves + 2.0))


def _wait_for_line(pool: Pool, words: str) -> None:
    wait_for(lambda: any(words in line for line in pool.lines), f"the words {words!r}")


@drill("queue-full-of-messages")
def queue_full_of_messages(trial: Trial) -> None:
    """More requests come than the queue takes (32); the rest is told `overloaded` and asks again.

    As soon as a rollout worker is there, everything is served: no call ends in an error.
    """
    trial.pool.start(0, "", "broker.max_queue_messages=32")
    _fill(trial, clients=trial.size(200, quick=80), width=16, bound=1 << 20)


@drill("queue-full-of-bytes")
def queue_full_of_bytes(trial: Trial) -> None:
    """More bytes come than the queue takes (16 MiB); the rest is told `overloaded` and asks again.

    The broker's memory is bounded by the queue and the one request that each client is sending; it does
    not grow with the number of refusals. As soon as a rollout worker is there, everything is served, and
    then the memory comes back.
    """
    trial.pool.start(0, "", "broker.max_queue_mb=16")
    _fill(trial, clients=trial.size(100, quick=40), width=250_000, bound=16 << 20)


def _fill(trial: Trial, clients: int, width: int, bound: int) -> None:
    """Ask without any rollout worker, until the queue is full; then serve all."""
    pool = trial.pool
    before = pool.rss("broker")
    load = trial.load(clients=clients, requests=2 * clients, width=width)
    sizes = []
    for refusals in (3 * clients, 9 * clients):
        wait_for(lambda n=refusals: pool.counters()["overloaded"] > n, f"{refusals} refusals")
        status = pool.status()
        trial.expect(status["open_requests"] <= 32, f"{status['open_requests']} requests are open")
        trial.expect(status["open_bytes"] <= bound, f"{status['open_bytes']} bytes are open")
        sizes.append(pool.rss("broker") - before)
    of_a_client = 3 * 4 * width  # rows of float32
    most = 2 * bound + clients * of_a_client + (32 << 20)
    trial.expect(max(sizes) < most, f"the broker grew by {sizes} bytes; {most} is the bound")
    trial.expect(sizes[1] < 1.5 * sizes[0] + (32 << 20), f"refusals make it grow: {sizes} bytes")
    pool.start_worker(0)
    trial.finish(load)
    wait_for(lambda: pool.rss("broker") - before < 72 << 20, "the broker's memory to come back")
