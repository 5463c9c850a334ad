"""Drills that cut the network: a relay falls silent, so that nobody gets to know of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from faults.drills import Trial, drill
from faults.relay import Relay

_HEARTBEAT = 0.6
_FAST_HEARTBEAT = f"broker.heartbeat_timeout_s={_HEARTBEAT}"


@contextmanager
def _relay(endpoint: str) -> Iterator[Relay]:
    relay = Relay(endpoint)
    try:
        yield relay
    finally:
        relay.close()


@drill("worker-cut-off")
def worker_cut_off(trial: Trial) -> None:
    """The link of a rollout worker falls silent without a word, and heals.

    The broker notices by its heartbeats (0.6 s here); others answer what the worker held, within that
    time and 1 s more. When the link is back the worker joins again; what it was late with is dropped.
    """
    pool = trial.pool.start(1, "", _FAST_HEARTBEAT, seconds=0.02)
    with _relay(pool.backend) as relay:
        pool.start_worker(1, overrides=(f"broker.backend={relay.endpoint}",), seconds=0.02)
        pool.wait_for_workers(2)
        load = trial.load(clients=16)
        for _ in range(trial.size(5, quick=1)):
            load.wait_for(100)
            relay.freeze()
            moment = time.monotonic()
            pool.wait_for_workers(1)
            trial.recovers(moment, within=_HEARTBEAT + 1.0)
            load.wait_for(50)
            relay.thaw()
            pool.wait_for_workers(2)
        trial.finish(load)
    trial.expect(pool.counters()["lost_workers"] >= 1, "the loss was not counted")


@drill("clients-cut-off")
def clients_cut_off(trial: Trial) -> None:
    """The link of some clients falls silent without a word, and heals; their calls are answered.

    The others go on meanwhile. After the link is back, no call takes longer than 3 s.
    """
    pool = trial.pool.start(2, "", _FAST_HEARTBEAT, seconds=0.01)
    with _relay(pool.frontend) as relay:
        others = trial.load(clients=8)
        far = trial.load(clients=8, endpoint=relay.endpoint)
        # Short of what a client waits for before it asks, before it makes its socket anew, and beyond.
        for seconds in (0.8, 2.0, 5.0)[: trial.size(3, quick=1)]:
            far.wait_for(100)
            relay.freeze()
            moment = time.monotonic()
            others.wait_for(100)
            time.sleep(max(0.0, moment + seconds - time.monotonic()))
            moment = time.monotonic()
            relay.thaw()
            far.wait_for(200)
            trial.recovered(far.longest_s(moment), within=3.0)
        trial.finish(far)
