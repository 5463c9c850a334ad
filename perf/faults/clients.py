"""Drills that hurt clients, or that clients do."""

from __future__ import annotations

from faults.drills import Trial, drill
from faults.pool import wait_for

CROWD = 10_000
"""The number of the first client of a crowd."""


@drill("clients-killed")
def clients_killed(trial: Trial) -> None:
    """Client processes are killed by hundreds with requests queued; broker and queue recover.

    Nobody waits for the answers of the dead, so nothing of theirs stays: no request, no byte, no memory.
    What was still queued 4 s after their death (they are probed every 3 s) is not inferred.
    """
    pool = trial.pool.start(1, "", "rollout.rollout_queue_size=1", seconds=0.15)
    load = trial.load(clients=2)
    load.wait_for(4)
    before = pool.rss("broker")
    count = trial.size(200, quick=40)
    trial.crowd("crowd", count, first=CROWD, width=100_000, timeout=60.0)
    wait_for(lambda: pool.status()["open_requests"] > count * 0.9, "the crowd's requests", 30.0)
    full = pool.rss("broker")
    moment = trial.kill_crowd("crowd")
    wait_for(lambda: len(pool.status()["clients"]) <= 2, "the broker to forget the dead", 30.0)
    trial.recovers(moment, within=5.0)
    trial.finish(load)
    status = pool.wait_for_quiet()
    print("MB", before >> 20, full >> 20, pool.rss("broker") >> 20, status["counters"])
    trial.expect(status["open_bytes"] == 0, f"{status['open_bytes']} bytes are still held")
    wasted = sum(client >= CROWD for client, _ in trial.runs())
    trial.expect(wasted <= 40, f"{wasted} requests of {count} killed clients were inferred")
