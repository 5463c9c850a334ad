"""Drills on policies with memory, whose states the workers keep or the clients carry.

What is counted as *crossed* here is an answer of another state than that which all steps of the row's
episode, and nothing else, have made.
"""

from __future__ import annotations

import re
import time

from faults.broker import restart
from faults.drills import Trial, drill
from faults.envs import Told
from faults.load import Load
from faults.pool import Pool, wait_for
from zmqrl.errors import StateLost

_KEPT, _CARRIED = "sticky", "none"
_ENVS = 4
_WORKERS = 3
_ATTEMPT = 1.0


@drill("states-kept-workers-killed")
def states_kept_workers_killed(trial: Trial) -> None:
    """Rollout workers that keep states are SIGKILLed under load; just the rows of the dead are told
    `StateLost`, within 1 s, and begin anew.
    """
    _workers_killed(trial, _KEPT)


@drill("states-carried-workers-killed")
def states_carried_workers_killed(trial: Trial) -> None:
    """The same where clients carry the states: nothing is lost."""
    _workers_killed(trial, _CARRIED)


def _workers_killed(trial: Trial, affinity: str) -> None:
    pool = _start(trial, affinity, _WORKERS)
    load = _load(trial, affinity)
    load.wait_for(100)
    rank = _WORKERS  # a name of its own for each, for errors say by name whose state is not there
    while load.ledger.answered < trial.size(10_000, quick=600) or rank < _WORKERS + 2:
        workers = wait_for(lambda: len(w := pool.status()["workers"]) > 1 and w, "another worker")
        moment = pool.kill(workers[0]["name"])
        _start_worker(pool, affinity, rank)
        rank += 1
        trial.recovers(moment, within=1.0)
        time.sleep(max(0.0, moment + 0.5 - time.monotonic()))
    load.wait_for(100)
    _finish(trial, load, affinity)


@drill("states-kept-broker-restarted")
def states_kept_broker_restarted(trial: Trial) -> None:
    """The broker is SIGKILLed or SIGTERMed over workers that keep states, and started again; just the
    rows that come to another worker than before are told `StateLost`.

    A step that a worker has run, but whose answer was lost with the broker, advances the state once.
    """
    _broker_restarted(trial, _KEPT)


@drill("states-carried-broker-restarted", in_suite=False)
def states_carried_broker_restarted(trial: Trial) -> None:
    """The same where clients carry the states: nothing is lost."""
    _broker_restarted(trial, _CARRIED)


def _broker_restarted(trial: Trial, affinity: str) -> None:
    _start(trial, affinity, 2)
    load = _load(trial, affinity)
    for number in range(trial.size(6, quick=2)):
        load.wait_for(trial.size(500, quick=100))
        restart(trial, number)
    load.wait_for(100)
    _finish(trial, load, affinity, needs_told=False)


@drill("states-kept-worker-frozen")
def states_kept_worker_frozen(trial: Trial) -> None:
    """Two workers that keep states are SIGSTOPped beyond `rollout.attempt_timeout_s` (1 s here) in turn,
    and SIGCONTed, so that rows come back to where an old state of theirs is.

    Rows that come to the other worker are told `StateLost`; no state that a late run has advanced, or
    that is older than the row's last answer, goes into an answer.
    """
    _worker_frozen(trial, _KEPT)


@drill("states-carried-worker-frozen", in_suite=False)
def states_carried_worker_frozen(trial: Trial) -> None:
    """The same where clients carry the states: nothing is lost."""
    _worker_frozen(trial, _CARRIED)


def _worker_frozen(trial: Trial, affinity: str) -> None:
    pool = _start(trial, affinity, 2, f"rollout.attempt_timeout_s={_ATTEMPT:g}")
    load = _load(trial, affinity)
    for number in range(trial.size(6, quick=2)):
        name = f"rollout-{number % 2}"
        load.wait_for(100)
        wait_for(lambda name=name: pool.worker(name).get("state") == "busy", "work to be frozen")
        moment = pool.freeze(name)
        trial.recovers(moment, within=_ATTEMPT + 1.0)
        wait_for(lambda name=name: pool.worker(name)["state"] == "stuck", "the quarantine")
        load.wait_for(100)
        pool.thaw(name)
        wait_for(lambda name=name: pool.worker(name)["state"] != "stuck", "the worker to be back")
    load.wait_for(100)
    counters = pool.counters()
    late = counters["late_results"]
    trial.expect(late >= 1, f"no late result was dropped: {counters}")
    trial.expect(counters["lost_workers"] == 0, f"it was taken for dead: {counters}")
    _finish(trial, load, affinity)


def _start(trial: Trial, affinity: str, workers: int, *broker: str) -> Pool:
    pool = trial.pool
    pool.start_broker(*broker)
    for rank in range(workers):
        _start_worker(pool, affinity, rank)
    pool.wait_for_workers(workers)
    return pool


def _start_worker(pool: Pool, affinity: str, rank: int) -> None:
    overrides = (f"rollout.affinity={affinity}",)
    pool.start_worker(rank, "Remembering", overrides=overrides, seconds=0.005)


def _load(trial: Trial, affinity: str) -> Load:
    is_kept = affinity == _KEPT
    expects = (StateLost,) if is_kept else ()
    return trial.load(clients=16, envs=_ENVS, stay=is_kept, expects=expects)


def _finish(trial: Trial, load: Load, affinity: str, needs_told: bool = True) -> None:
    """Finish a load, and check that whose states are lost, and nobody else, was told so.

    Args:
        trial: The drill.
        load: Its clients.
        affinity: Where the states are.
        needs_told: Whether anybody must have been told.
    """
    trial.finish(load)
    if affinity == _CARRIED:
        return  # any error is one that the load did not expect
    trial.expect(load.told or not needs_told, "nobody was told that states are lost")

    def lost(told: Told) -> list[int]:
        teller = trial.pool.pid(re.findall(r"rollout-\d+", told.text)[0])
        return [row for row, holder in told.holders.items() if holder != teller]

    wrong = [told for told in load.told if told.rows != lost(told)]
    trial.expect(not wrong, f"{len(wrong)} of {len(load.told)} were told of other rows: {wrong[:1]}")
