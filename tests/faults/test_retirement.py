"""A rollout worker that is told to leave finishes what it has, and nobody is the worse for it."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from conftest import TESTS, Load, Pool, wait_for


def retire(pool: Pool, name: str) -> None:
    """Tell a worker to leave, and wait until it has."""
    process = pool.launcher.children[name].process
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


@pytest.mark.parametrize("decoupled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_workers_come_and_go_under_load_and_no_request_notices(pool: Pool, decoupled: bool) -> None:
    pool.start_broker(decoupled=decoupled)
    for rank in range(2):
        pool.start_worker(rank, seconds=0.005, world_size=8)
    pool.wait_for_workers(2)
    places = [{"rank": rank, "world_size": 8} for rank in range(8)]
    loads = [Load(pool, clients=1, **place) for place in places]  # type: ignore[arg-type]
    for load in loads:
        load.wait_for(20)
    for rank in range(2, 5):
        pool.start_worker(rank, seconds=0.005, world_size=8)
        pool.wait_for_workers(3)  # it has joined
        retire(pool, f"rollout-{rank - 2}")
        pool.wait_for_workers(2)
        loads[0].wait_for(20)
    for load in loads:
        load.finish()
    counters = pool.counters()
    answered = sum(load.answered.total() for load in loads)
    assert counters["requests"] == counters["answered"] == answered
    for name in ("errors", "requeued", "lost_workers", "late_results", "duplicates", "dropped"):
        assert counters[name] == 0, (name, counters)


def test_a_worker_that_is_told_to_leave_in_a_batch_finishes_it_and_takes_no_other(
    pool: Pool, folder: Path
) -> None:
    begun = folder / "begun"
    pool.start_broker("rollout.rollout_queue_size=1")
    pool.start_worker(0, "Touching", path=begun, seconds=0.5)
    pool.wait_for_workers(1)
    client = pool.client()
    first, second = (client.submit({"x": np.full((1, 3), float(value))}) for value in range(2))
    wait_for(begun.exists, "the policy call")
    retire(pool, "rollout-0")
    assert first.result()["actions"][0, 0] == 0
    assert pool.counters()["batches"] == 1
    assert not second.done(), "it waits for whoever joins next"
    pool.start_worker(1)
    assert second.result()["actions"][0, 0] == 1
    counters = pool.counters()
    assert counters["requests"] == counters["answered"] == 2
    assert counters["requeued"] == counters["lost_workers"] == 0


def test_a_worker_that_is_told_to_leave_while_it_loads_never_takes_a_request(
    pool: Pool, folder: Path
) -> None:
    (folder / "slow.py").write_text(
        "import pathlib, sys, time\n"
        f"sys.path.append({str(TESTS)!r})\n"
        "from policies import Echo\n"
        "def policy():\n"
        f"    pathlib.Path({str(folder)!r}, 'loads').touch()\n"
        "    time.sleep(2)\n"
        "    return Echo()\n"
    )
    pool.start(workers=1, seconds=0.005)
    load = Load(pool, clients=4)
    policy = f"--policy={folder}/slow.py:policy"
    pool.launcher.start("rollout-1", ["start-rollout-worker", *pool.overrides, policy, "--rank=1"])
    wait_for((folder / "loads").exists, "the policy to load")
    retire(pool, "rollout-1")
    load.wait_for(50)
    load.finish()
    status = pool.status()
    assert status["counters"]["requests"] == status["counters"]["answered"]
    assert status["counters"]["requeued"] == status["counters"]["errors"] == 0
    assert status["totals"].get("rollout-1", {}).get("batches", 0) == 0
