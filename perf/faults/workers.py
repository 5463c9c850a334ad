"""Drills that hurt rollout workers."""

from __future__ import annotations

import time

from faults.drills import Trial, drill


@drill("workers-killed")
def workers_killed(trial: Trial) -> None:
    """A rollout worker is killed every 0.5 s under load; what it held is answered within 1 s."""
    workers = 3
    trial.pool.start(workers, seconds=0.005)
    load = trial.load(clients=24)
    load.wait_for(100)
    kills = 0
    while load.ledger.answered < trial.size(10_000, quick=600) or kills < 2:
        moment = trial.pool.kill(f"rollout-{kills % workers}")
        trial.pool.start_worker(kills % workers, seconds=0.005)
        kills += 1
        trial.recovers(moment, within=1.0)
        time.sleep(max(0.0, moment + 0.5 - time.monotonic()))
    counters = trial.pool.counters()
    trial.expect(counters["lost_workers"] == kills, f"{kills} were killed: {counters}")
