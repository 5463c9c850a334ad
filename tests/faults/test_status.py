"""`bin/status`, of real pools."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import TESTS, Pool, wait_for

from zmqrl.broker.status import StatusClient
from zmqrl.errors import AuthenticationFailed
from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import Header, Op


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zmqrl", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def status(pool: Pool) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(run("--json", "--broker", pool.frontend).stdout)
    return tree


def test_a_pool_without_rollout_workers_is_red_and_one_with_a_worker_is_not(pool: Pool) -> None:
    pool.start_broker()
    pool.wait_for_workers(0)
    alone = run("--broker", pool.frontend)
    assert alone.returncode == 1
    assert "no rollout worker is connected" in alone.stdout
    pool.start_worker(0)
    pool.wait_for_workers(1)
    served = run(*pool.overrides)  # the address as the configuration has it
    assert served.returncode == 0, served.stderr
    assert "rollout-0" in served.stdout


def test_a_broker_that_is_not_there_is_named() -> None:
    done = run("--broker", "tcp://127.0.0.1:9")
    assert done.returncode == 1
    assert "no broker answers at tcp://127.0.0.1:9" in done.stderr
    assert json.loads(run("--json", "--broker", "tcp://127.0.0.1:9").stdout)["problems"]


def test_an_error_that_is_not_about_keys_is_not_taken_for_a_refusal(folder: Path) -> None:
    client = StatusClient(f"ipc://{folder}/x")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.bind(f"ipc://{folder}/x")
        assert client.ask(0.01) is None
        peer = stranger.recv_multipart()[0]
        for code in ("other", "revoked"):
            stranger.send_multipart([peer, Header(Op.ERROR).pack() + encode_meta({"code": code})])
        with pytest.raises(AuthenticationFailed):
            client.ask(5)
        stranger.send_multipart([peer, Header(Op.ERROR).pack() + encode_meta({"code": "other"})])
        assert client.ask(0.2) is None
    client.close()


def test_an_address_that_is_none_is_a_bad_command_line() -> None:
    done = run("--broker", "localhost:5757")
    assert done.returncode == 2
    assert "localhost:5757" in done.stderr


def test_an_env_worker_stuck_in_reset_is_named_and_so_is_one_stuck_in_step(pool: Pool) -> None:
    pool.start(workers=1, policy="Balance")
    for rank, where in enumerate(("reset", "step")):
        pool.launcher.start(
            f"env-{rank}",
            [
                "start-env-worker",
                *pool.overrides,
                f"--rank={rank}",
                "--mode=train",
                f"env.factory={TESTS / 'sims.py'}:make",
                f"env.kwargs.hang_in_{where}_at=3",
                "env.kwargs.length=5",
            ],
        )
    wanted = {"env-0": "reset", "env-1": "step"}

    def stuck() -> bool:
        clients = {c["name"]: c for c in pool.status()["clients"]}
        return all(
            name in clients and clients[name]["state"] == state and clients[name]["state_s"] > 1
            for name, state in wanted.items()
        )

    wait_for(stuck, f"both to be stuck; the output so far: {pool.lines}")
    assert {c["name"]: c["state"] for c in status(pool)["clients"]} == wanted


def test_a_rollout_worker_stuck_in_a_policy_call_is_named_with_the_time(pool: Pool) -> None:
    pool.start_broker("rollout.attempt_timeout_s=0.5")
    pool.start_worker(0)
    pool.wait_for_workers(1)
    pending = pool.client().submit({"x": np.ones((1, 3)), "command": ["sleep 30"]})
    wait_for(lambda: pool.status()["workers"][0]["state"] == "stuck", "the quarantine")
    assert run("--broker", pool.frontend).returncode == 1
    (problem,) = status(pool)["problems"]
    assert problem.startswith("rollout-0 is stuck in a policy call for")
    pending.cancel()


def test_the_status_page_names_clients_by_what_they_say_that_they_do(pool: Pool) -> None:
    pool.start(workers=1)
    client = pool.client(name="my-loop")
    client.infer({"x": np.ones((1, 3))})
    client.phase("rendering")
    wait_for(lambda: pool.status()["clients"][0]["state"] == "rendering", "the phase")
    assert "rendering" in run("--broker", pool.frontend).stdout
