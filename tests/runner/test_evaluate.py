"""Whole evaluations by the command line: real processes from start to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import TESTS, wait_for
from runner.evaluation import BOTH_MODES, POLICY, SIM, SLOW, Run


@BOTH_MODES
def test_an_evaluation_counts_exactly_the_episodes_asked_for(folder: Path, decoupled: bool) -> None:
    run = Run(
        folder,
        "env.id=CartPole-v1",
        "env.eval={total_num_envs: 5, rollout_epoch: 3, max_episode_steps: 40, seed: 1}",
        "cluster.component_placement={env: 0-2, rollout: 0-1}",
        decoupled=decoupled,
    )
    assert run.wait() == 0, run.text()
    result = run.result()
    assert result["eval/num_trajectories"] == 15
    assert result["eval/missing_trajectories"] == 0
    assert result["eval/return"] == result["eval/episode_len"] == 40
    assert "eval/success_once" not in result, "CartPole reports no success"
    assert result["broker/requests"] == result["broker/answered"] > 0
    assert result["broker/dropped"] == result["broker/requeued"] == result["broker/errors"] == 0
    assert result["time/broker/queue"] >= 0
    for key in ("time/env/step", "time/env/wait", "time/rollout/predict", "env_steps_per_s", "wall_s"):
        assert result[key] > 0
    assert result["rollout/mean_rows_per_batch"] >= result["rollout/mean_shards_per_batch"] >= 1
    assert result["bottleneck"] in ("env", "queue", "rollout")


def test_more_rollout_workers_than_env_workers_are_fine_in_normal_mode(folder: Path) -> None:
    run = Run(
        folder,
        f"{SIM}:make",
        "env.eval.total_num_envs=2",
        "cluster.component_placement={env: 0-1, rollout: 0-2}",
        decoupled=False,
    )
    assert run.wait() == 0, run.text()
    assert run.result()["eval/success_at_end"] == 1.0


def test_pipeline_stages_play_the_same_episodes(folder: Path) -> None:
    run = Run(
        folder,
        f"{SIM}:make",
        "env.eval={total_num_envs: 5, rollout_epoch: 2}",
        "env.pipeline_stages=2",
        "cluster.component_placement={env: 0-1, rollout: '0'}",
    )
    assert run.wait() == 0, run.text()
    assert run.result()["eval/num_trajectories"] == 10
    assert run.result()["eval/episode_len"] == 10


@pytest.mark.slow
def test_fixed_reset_states_give_the_same_returns_in_both_modes(folder: Path) -> None:
    returns = []
    for decoupled in (True, False):
        place = folder / str(decoupled)
        place.mkdir()
        run = Run(
            place,
            "env.id=CartPole-v1",
            "env.eval={total_num_envs: 4, rollout_epoch: 2, use_fixed_reset_state_ids: true, seed: 5}",
            "env.eval.max_episode_steps=500",
            "cluster.component_placement={env: 0-1, rollout: '0'}",
            "rollout.policy_kwargs.damping=0",
            decoupled=decoupled,
        )
        assert run.wait() == 0, run.text()
        returns.append(run.result()["eval/return"])
    assert returns[0] == returns[1]
    assert 5 < returns[0] < 400


@pytest.mark.slow
@BOTH_MODES
def test_every_episode_is_counted_although_a_rollout_worker_is_killed(
    folder: Path, decoupled: bool
) -> None:
    run = Run(
        folder,
        f"{SIM}:make",
        *SLOW,
        "env.eval={total_num_envs: 8, rollout_epoch: 2}",
        "cluster.component_placement={env: 0-3, rollout: 0-1}",
        decoupled=decoupled,
    )
    run.wait_until_it_steps()
    run.rollout(0).send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert run.result()["eval/num_trajectories"] == 16
    assert run.result()["eval/episode_len"] == 150
    assert "rollout-0 was killed by SIGKILL" in run.text()


@pytest.mark.slow
@BOTH_MODES
def test_the_others_go_on_although_half_of_the_env_workers_are_killed(
    folder: Path, decoupled: bool
) -> None:
    run = Run(
        folder,
        f"{SIM}:make",
        *SLOW,
        "cluster.restart=never",
        "env.eval={total_num_envs: 4, rollout_epoch: 2}",
        "cluster.component_placement={env: 0-3, rollout: 0-1}",
        decoupled=decoupled,
    )
    run.wait_until_it_steps()
    for rank in (1, 2):
        run.env(rank).send_signal(signal.SIGKILL)
    assert run.wait() == 1, run.text()
    result = run.result()
    assert result["missing"] == "eval-1, eval-2"
    assert result["eval/num_trajectories"] + result["eval/missing_trajectories"] == 8
    assert result["eval/num_trajectories"] >= 4
    assert "eval-1 was killed by SIGKILL" in run.text()


@pytest.mark.parametrize(
    "part", ["start-rollout-worker", pytest.param("start-broker", marks=pytest.mark.slow)]
)
def test_a_run_that_breaks_off_still_writes_what_there_is(folder: Path, part: str) -> None:
    run = Run(
        folder,
        f"{SIM}:make",
        "cluster.restart=never",
        "env.eval={total_num_envs: 2, rollout_epoch: 1000}",
        "env.delay_sampler={type: constant, delay: 0.01}",
        "cluster.component_placement={env: 0-1, rollout: '0'}",
    )
    run.wait_until_it_steps()
    run.part(part).send_signal(signal.SIGKILL)
    assert run.wait() == 1
    assert "was killed by SIGKILL" in run.text().splitlines()[-1]
    assert run.result()["eval/num_trajectories"] > 0
    assert run.result()["eval/missing_trajectories"] > 0


@BOTH_MODES
def test_pipeline_stages_of_different_length_end_without_waiting_for_each_other(
    folder: Path, decoupled: bool
) -> None:
    run = Run(
        folder,
        "env.id=CartPole-v1",
        "rollout.policy_kwargs.damping=0",  # falls sooner or later
        "env.eval={total_num_envs: 6, rollout_epoch: 5, use_fixed_reset_state_ids: true}",
        "env.pipeline_stages=2",
        "env.request_timeout_s=20",
        "cluster.component_placement={env: 0-2, rollout: '0'}",
        decoupled=decoupled,
    )
    assert run.wait() == 0, run.text()
    result = run.result()
    assert result["eval/num_trajectories"] == 30
    assert result["broker/requests"] == result["broker/answered"]


@pytest.mark.parametrize(
    "where", ["second_hangs", pytest.param("second_hangs_in_reset", marks=pytest.mark.slow)]
)
def test_an_env_worker_that_is_stuck_is_named_and_the_rest_is_counted(folder: Path, where: str) -> None:
    run = Run(
        folder,
        f"{SIM}:{where}",
        "env.eval={total_num_envs: 3, rollout_epoch: 2}",  # the worker with two envs hangs
        "runner.stall_timeout_s=3",
        "cluster.component_placement={env: 0-1, rollout: '0'}",
    )
    assert run.wait() == 1
    assert run.result()["missing"] == "eval-0"
    assert run.result()["eval/num_trajectories"] >= 2
    assert "eval-0 was silent for 3 s" in run.text().splitlines()[-1]
    assert "restart" not in run.text(), "what hangs would hang again"


def test_an_env_that_raises_ends_its_worker_and_the_text_names_it(folder: Path) -> None:
    run = Run(
        folder,
        f"{SIM}:make",
        "env.kwargs={length: 50, raise_at: 37}",
        "cluster.max_restarts=1",
        "env.eval.total_num_envs=1",
        "cluster.component_placement={env: '0', rollout: '0'}",
    )
    assert run.wait() == 1
    last = run.text().splitlines()[-1]
    assert "eval-0" in last
    assert "exploded at step 37" in last
    assert "it was restarted 1 time in" in last


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        pytest.param(["env.id=NoSuchEnv-v0"], "NoSuchEnv", marks=pytest.mark.slow),
        pytest.param(["env.id=no_such_module:Env-v0"], "no_such_module", marks=pytest.mark.slow),
        ([f"{SIM}:fails_to_start"], "the renderer has no display"),
        pytest.param([f"{SIM}:no_such_name"], "no_such_name", marks=pytest.mark.slow),
        pytest.param([f"{SIM}:asks"], "EOF when reading a line", marks=pytest.mark.slow),
        (["env.id=CartPole-v1", "rollout.policy=no_such_module:policy"], "no_such_module"),
        (
            ["env.id=CartPole-v1", f"rollout.policy={TESTS / 'policies.py'}:Echo"],
            "the policy failed|IndexError|only integers",
        ),
        pytest.param(
            ["env.id=CartPole-v1", "broker.frontend=ipc:///no/such/folder/f"],
            "/no/such/folder",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_start_ends_the_run_with_its_cause(
    folder: Path, overrides: list[str], words: str
) -> None:
    run = Run(folder, "cluster.component_placement={env: 0-1, rollout: 0-1}", *overrides)
    assert run.wait() in (1, 2)
    last = run.text().splitlines()[-1]
    assert last.startswith("error: "), run.text()
    assert any(word in run.text() for word in words.split("|")), run.text()
    assert "restart" not in run.text(), run.text()


def test_what_the_users_code_raises_at_start_up_is_shown_and_all_parts_end(folder: Path) -> None:
    run = Run(folder, "env.id=CartPole-v1", f"rollout.policy={TESTS / 'policies.py'}:raises_at_once")
    wait_for(lambda: "Traceback" in run.text() or run.process.poll() is not None, "the traceback")
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(run.process.pid).children(recursive=True)
    assert run.wait() == 1
    assert "Traceback" in run.text()
    assert "no weights at model.pt" in run.text().splitlines()[-1]
    wait_for(lambda: not any(child.is_running() for child in children), "the end of all parts", 3)


@pytest.mark.slow
def test_what_takes_for_ever_to_start_ends_the_run_within_its_time_limit(folder: Path) -> None:
    run = Run(folder, f"{SIM}:starts_for_ever", "runner.startup_timeout_s=4")
    assert run.wait(30) == 1
    assert "runner.startup_timeout_s" in run.text().splitlines()[-1]


@pytest.mark.parametrize(
    "overrides",
    [
        ["env.id=CartPole-v1", "rolout.policy=x:y"],
        [POLICY],
        [],
        ["env.id=CartPole-v1", POLICY, "--json=/tmp"],
        ["env.id=CartPole-v1", POLICY, "runner.logger.log_path=/proc/nowhere"],
        ["env.id=CartPole-v1", POLICY, "broker.frontend=ipc:///tmp/a", "broker.backend=ipc:///tmp/a"],
    ],
)
def test_a_bad_configuration_exits_with_2_and_starts_nothing(folder: Path, overrides: list[str]) -> None:
    run = Run(folder, *overrides, policy="rollout.rollout_queue_size=0")
    assert run.wait() == 2
    assert run.text().startswith("error: ")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_run_within_ten_seconds_with_no_process_left(
    folder: Path, number: signal.Signals
) -> None:
    run = Run(
        folder,
        f"{SIM}:second_hangs",
        "env.eval={total_num_envs: 3, rollout_epoch: 1000}",
        "cluster.component_placement={env: 0-1, rollout: '0'}",
    )
    run.wait_until_it_steps()
    children = psutil.Process(run.process.pid).children(recursive=True)
    assert len(children) == 4
    begin = time.monotonic()
    os.kill(run.process.pid, number)
    assert run.wait(20) == 1
    assert time.monotonic() - begin < 10
    assert not any(child.is_running() for child in children)
    assert f"stopped by {number.name}" in run.text()


def test_a_run_can_use_tcp_endpoints(folder: Path, free_ports: list[int]) -> None:
    first, second = free_ports
    run = Run(
        folder,
        f"{SIM}:make",
        f"broker.frontend=tcp://127.0.0.1:{first}",
        f"broker.backend=tcp://127.0.0.1:{second}",
        "cluster.component_placement={env: 0-1, rollout: '0'}",
    )
    assert run.wait() == 0, run.text()


@pytest.mark.slow
def test_the_status_of_a_run_is_found_by_its_configuration(folder: Path) -> None:
    simulator = [f"{SIM}:make", "env.kwargs.hang_in_step_at=3", "cluster.component_placement.env=0-1"]
    run = Run(folder, *simulator)
    status = [sys.executable, "-m", "zmqrl", "status", "--json", f"runner.logger.log_path={folder}"]

    def stepping() -> dict[str, Any]:
        done = subprocess.run(status, capture_output=True, text=True, timeout=30)
        clients = json.loads(done.stdout)["clients"] if done.returncode == 0 else []
        return {c["name"]: c["state"] for c in clients}

    wait_for(lambda: stepping() == {"eval-0": "step", "eval-1": "step"}, "both to hang", 40)
    run.process.terminate()
    run.wait()
    assert stepping() == {}
