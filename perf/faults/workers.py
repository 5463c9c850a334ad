"""Drills that hurt rollout workers."""

from __future__ import annotations

import time
from typing import Any

from faults.drills import Trial, drill
from faults.policies import Command, set_stuck
from faults.pool import wait_for
from zmqrl.errors import AttemptsExhausted, PolicyError, PolicyTimeout

_HEARTBEAT = 0.6
_FAST_HEARTBEAT = f"broker.heartbeat_timeout_s={_HEARTBEAT}"


@drill("workers-killed")
def workers_killed(trial: Trial) -> None:
    """A rollout worker is SIGKILLed every 0.5 s under load; what it held is answered within 1 s.

    A replacement is started each time. The longest connected one is killed next, once there is another:
    a busy machine may need more than the 0.5 s to start one.
    """
    pool = trial.pool.start(4, seconds=0.005)
    load = trial.load(clients=24)
    load.wait_for(100)
    kills = 0
    while load.ledger.answered < trial.size(10_000, quick=600) or kills < 2:
        workers = wait_for(lambda: len(w := pool.status()["workers"]) > 1 and w, "another worker")
        victim = workers[0]["name"]
        moment = pool.kill(victim)
        pool.start_worker(int(victim.partition("-")[2]), seconds=0.005)
        kills += 1
        trial.recovers(moment, within=1.0)
        time.sleep(max(0.0, moment + 0.5 - time.monotonic()))
    # One that held nothing is noticed at the next look at idle workers.
    wait_for(lambda: pool.counters()["lost_workers"] == kills, f"the loss of {kills} workers", 10.0)


@drill("worker-frozen")
def worker_frozen(trial: Trial) -> None:
    """A rollout worker is SIGSTOPped beyond the heartbeat time-out of 0.6 s, then SIGCONTed.

    Others answer what it held, within the time-out and 1 s more. When it thaws, its late results are
    dropped and counted, and it is given work again.
    """
    pool = trial.pool.start(2, "", _FAST_HEARTBEAT, seconds=0.02)
    load = trial.load(clients=16)
    for _ in range(trial.size(5, quick=1)):
        load.wait_for(100)
        wait_for(lambda: pool.worker("rollout-0").get("state") == "busy", "work to be frozen")
        moment = pool.freeze("rollout-0")
        trial.recovers(moment, within=_HEARTBEAT + 1.0)
        pool.wait_for_workers(1)
        load.wait_for(50)
        pool.thaw("rollout-0")
        pool.wait_for_workers(2)
    shards = pool.status()["totals"]["rollout-0"]["shards"]
    wait_for(lambda: pool.status()["totals"]["rollout-0"]["shards"] > shards, "work for the thawed")
    counters = pool.counters()
    late = counters["late_results"] + counters["unknown"]
    trial.expect(late >= 1, f"no late result was dropped: {counters}")


@drill("policy-stuck")
def policy_stuck(trial: Trial) -> None:
    """A policy hangs in a call; after `rollout.attempt_timeout_s` (1 s here) others take over.

    The worker is alive and its heartbeats go on, so only that time limit shows it. It gets no more work
    until it speaks again, and then it does.
    """
    pool = trial.pool.start(2, "", "rollout.attempt_timeout_s=1", seconds=0.01)
    load = trial.load(clients=16)
    load.wait_for(100)
    set_stuck(trial.folder, pool.pid("rollout-0"), True)
    wait_for(lambda: _is_busy_for(0.1, pool.worker("rollout-0")), "a call that hangs")
    moment = time.monotonic()
    wait_for(lambda: pool.worker("rollout-0")["state"] == "stuck", "the quarantine")
    trial.recovers(moment, within=1.0 + 1.0)
    load.wait_for(trial.size(1000, quick=100))
    trial.expect(pool.worker("rollout-0")["state"] == "stuck", "a stuck worker was given work")
    set_stuck(trial.folder, pool.pid("rollout-0"), False)
    wait_for(lambda: pool.worker("rollout-0")["state"] != "stuck", "the worker to be back")
    load.wait_for(100)
    counters = pool.counters()
    trial.expect(counters["late_results"] >= 1, f"no late result was dropped: {counters}")
    trial.expect(counters["lost_workers"] == 0, f"it was taken for dead: {counters}")


def _is_busy_for(seconds: float, worker: dict[str, Any]) -> bool:
    return worker["state"] == "busy" and worker["state_s"] > seconds


@drill("policy-stuck-everywhere")
def policy_stuck_everywhere(trial: Trial) -> None:
    """The policy hangs in every worker; each call ends in an explicit error that says so.

    Requests that were tried end when `rollout.max_attempts` (1 here) is reached, those that no worker is
    left for at their deadline (3 s). Once the policy goes on, so does the pool.
    """
    pool = trial.pool.start(2, "", "rollout.attempt_timeout_s=1", "rollout.max_attempts=1")
    names = ("rollout-0", "rollout-1")
    for name in names:
        set_stuck(trial.folder, pool.pid(name), True)
    kinds = (AttemptsExhausted, PolicyTimeout)
    begin = time.monotonic()
    load = trial.load(clients=12, requests=24, timeout=3.0, expects=kinds)
    ledger = trial.finish(load)
    trial.expect(time.monotonic() - begin < 3.0 * 2 + 2.0, "the errors came late")
    trial.expect(ledger.errors.keys() == {k.__name__ for k in kinds}, f"{ledger.errors}")
    texts = [str(failure.error) for failure in load.failures]
    vague = [text for text in texts if "held it" not in text and "queued for" not in text]
    trial.expect(not vague, f"an error does not say what happened: {vague[:1]}")
    for name in names:
        set_stuck(trial.folder, pool.pid(name), False)
    trial.finish(trial.load(clients=8, requests=100))


@drill("policy-holds-the-gil")
def policy_holds_the_gil(trial: Trial) -> None:
    """A policy holds the interpreter lock for 3 s, five time-outs long; it is not taken for dead."""
    pool = trial.pool.start(2, "", _FAST_HEARTBEAT, seconds=0.01)

    def mark(client: int, sequence: int) -> int:
        return Command.HOLD_GIL if (client, sequence) == (0, 10) else Command.NONE

    load = trial.load(clients=12, mark=mark)
    wait_for(lambda: (0, 10) in trial.runs(), "the call that holds the lock")
    moment = time.monotonic()
    wait_for(lambda: not load.is_open_since(moment), "its end")
    trial.expect(time.monotonic() - moment > 2.0, "the lock was not held")
    trial.finish(load)
    counters, reruns = pool.counters(), trial.reruns()
    trial.expect(counters["lost_workers"] == 0, f"it was taken for dead: {counters}")
    trial.expect(counters["requeued"] == reruns == 0, f"its requests ran again: {counters}")


@drill("policy-raises")
def policy_raises(trial: Trial) -> None:
    """A policy raises on marked rows; only their calls end in `PolicyError`, not their batch mates'."""
    trial.pool.start(2, seconds=0.005)
    marked = set()

    def mark(client: int, sequence: int) -> int:
        if (client * 31 + sequence) % 25:
            return Command.NONE
        marked.add((client, sequence))
        return Command.RAISE

    requests = trial.size(3000, quick=400)
    load = trial.load(clients=16, requests=requests, mark=mark, expects=(PolicyError,))
    trial.finish(load)
    failed = {(failure.client, failure.sequence) for failure in load.failures}
    trial.expect(marked and failed == marked, f"{len(marked)} were marked, {len(failed)} failed")
    quoted = all("this row is marked" in str(failure.error) for failure in load.failures)
    trial.expect(quoted, "an error does not quote the policy")


@drill("poison-request")
def poison_request(trial: Trial) -> None:
    """A request kills every worker that touches it; three die, then it ends in its history.

    Its last attempt is alone, so that its batch mates are answered. Each dead worker is replaced.
    """
    pool = trial.pool.start(2, seconds=0.02)
    mates = trial.load(clients=12)
    mates.wait_for(50)
    poison = trial.load(
        clients=1, requests=1, mark=lambda client, sequence: Command.DIE, expects=(AttemptsExhausted,)
    )
    deaths, rank = 0, 2
    until = time.monotonic() + 20.0
    while poison.is_running() and time.monotonic() < until:
        for _ in pool.launcher.exits():
            deaths += 1
            pool.start_worker(rank, seconds=0.02)
            rank += 1
        time.sleep(0.02)
    trial.finish(poison)
    mates.wait_for(50)
    deaths += len(pool.launcher.exits())
    trial.expect(deaths == 3, f"{deaths} workers died")
    history = str(poison.failures[0].error) if poison.failures else "no error"
    trial.expect(history.count("was lost") == 3, f"the history is: {history}")


@drill("workers-all-gone")
def workers_all_gone(trial: Trial) -> None:
    """All rollout workers are SIGKILLed; what is asked waits, and one that comes back answers it."""
    pool = trial.pool.start(2, seconds=0.005)
    load = trial.load(clients=16)
    load.wait_for(100)
    for name in ("rollout-0", "rollout-1"):
        pool.kill(name)
    pool.wait_for_workers(0)
    wait_for(lambda: pool.status()["open_requests"] == 16, "all clients to wait")
    pool.start_worker(0, seconds=0.005)
    pool.wait_for_workers(1)
    trial.recovers(time.monotonic(), within=1.0)
    load.wait_for(trial.size(1000, quick=100))


@drill("workers-retire")
def workers_retire(trial: Trial) -> None:
    """Rollout workers are SIGTERMed in turn under load, and new ones join; nothing runs twice.

    A worker that is told to stop finishes its batch, takes no more, and ends with status 0.
    """
    pool = trial.pool.start(2, seconds=0.01)
    load = trial.load(clients=16)
    for rank in range(2, trial.size(10, quick=4)):
        load.wait_for(50)
        pool.start_worker(rank, seconds=0.01)
        pool.wait_for_workers(3)
        pool.terminate(f"rollout-{rank - 2}")
        status = pool.wait_for_exit(f"rollout-{rank - 2}")
        trial.expect(status == 0, f"a worker ended with status {status}")
        pool.wait_for_workers(2)
    load.wait_for(50)
    trial.finish(load)
    counters, reruns = pool.counters(), trial.reruns()
    trial.expect(counters["requeued"] == reruns == 0, f"{reruns} reruns: {counters}")
    trial.expect(counters["lost_workers"] == 0, f"one did not say goodbye: {counters}")
