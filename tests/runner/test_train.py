"""Whole trainings by the command line: real processes from start to end."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TESTS, wait_for
from runner.training import COUNTING, COUNTS, LINE, SMALL, Training

from zmqrl.config import Config
from zmqrl.runner.endpoints import local_endpoints

PPO = [
    "algorithm={name: ppo, update_epoch: 2, staleness_threshold: 1}",
    "actor={global_batch_size: 32, model: {hidden_sizes: [16]}}",
    "env.id=CartPole-v1",
]
PPO_IN_A_BOX = [*PPO[:2], "env.id=Pendulum-v1", "env.clip_actions=true"]
SAC = [
    "algorithm={name: sac, updates_per_env_step: 0.25, update_epoch: 4}",
    "actor={global_batch_size: 16, model: {hidden_sizes: [16]}}",
    "env.id=Pendulum-v1",
]


def balanced(result: dict[str, Any]) -> bool:
    """Whether every trajectory is accounted for."""
    names = ("received", "dropped", "rolled_back")
    return bool(result["trajectories_sent"] == sum(result[f"trajectories_{name}"] for name in names))


@pytest.mark.parametrize(
    "algorithm",
    [
        PPO,
        pytest.param(PPO_IN_A_BOX, marks=pytest.mark.slow),
        pytest.param(SAC, marks=pytest.mark.slow),
    ],
    ids=["ppo", "box", "sac"],
)
def test_a_training_runs_to_its_end_and_accounts_for_every_trajectory(
    folder: Path, algorithm: list[str]
) -> None:
    run = Training(folder, *algorithm, *SMALL, "runner={max_env_steps: 600, val_check_interval: 2}")
    assert run.wait() == 0, run.text()
    result = run.result()
    assert result["env_steps"] >= 600
    assert result["learner_updates"] > 0
    assert result["policy_version"] > 1
    assert result["trajectories_sent"] > 0
    assert balanced(result), result
    assert result["train/staleness/max"] >= 0
    if algorithm is SAC:
        assert 0 < result["train/replay_buffer/total_samples"] <= result["env_steps"]
    assert result["eval/num_trajectories"] == 2
    assert result["eval/policy_version"] == result["policy_version"], "the last weights are evaluated"
    assert result["achieved_updates_per_env_step"] == pytest.approx(
        result["learner_updates"] / result["env_steps"]
    )
    for name in ("config.yaml", "metrics.jsonl", "metrics.log", "learning_curve.png", "tensorboard"):
        assert (run.folder / name).exists(), name
    assert list((run.folder / "checkpoints").glob("global_step_*/manifest.json"))


@pytest.mark.slow
def test_training_ends_when_evaluations_in_a_row_reach_what_is_asked_for(folder: Path) -> None:
    run = Training(
        folder,
        *COUNTING,
        "runner={val_check_interval: 20, stop_at: {eval/return: 480}, stop_patience: 2}",
        "algorithm.updates_per_env_step=0.25",
    )
    assert run.wait() == 0, run.text()
    evaluations = [record["eval/return"] for record in run.records() if "eval/return" in record]
    assert evaluations[0] < 480 <= min(evaluations[-2:])
    assert sum(value >= 480 for value in evaluations) == 2
    assert "reached eval/return >= 480 2 times in a row" in run.text()


@pytest.fixture(scope="module")
def evaluated() -> Iterator[Training]:
    """A finished training whose evaluations took half a second a step."""
    with tempfile.TemporaryDirectory(prefix="zt-") as path:
        run = Training(
            Path(path),
            *SMALL,
            COUNTS,
            LINE.replace(":make", ":slow_in_evaluation"),
            "runner={val_check_interval: 500, max_env_steps: 3900}",
            "env.eval.total_num_envs=1",
            "env.kwargs.length=18",
            "algorithm.updates_per_env_step=0.25",
        )
        assert run.wait() == 0, run.text()
        yield run


@pytest.mark.alone
@pytest.mark.slow
def test_an_evaluation_keeps_to_one_version_while_others_are_published(evaluated: Training) -> None:
    evaluations = [record for record in evaluated.records() if "eval/return" in record]
    for record in evaluations:
        # Every action was the number of updates that the evaluated version had.
        number = record["eval/return"] / record["eval/episode_len"]
        assert number == record["eval/policy_version"] - 1
    first = evaluations[0]
    assert first["policy_version"] > first["eval/policy_version"] + 100, "weights went on"


@pytest.mark.alone
@pytest.mark.slow
def test_training_keeps_its_pace_during_an_evaluation(evaluated: Training) -> None:
    records = evaluated.records()
    evaluation = next(record for record in records if "eval/return" in record)
    end = evaluation["wall_s"]
    begin = end - evaluation["time/eval"]

    def pace(until: float) -> float:
        """Steps a second of an env worker, over the ten seconds before."""
        record = [r for r in records if "eval/return" not in r and r["wall_s"] <= until][-1]
        return 1 / sum(record[f"time/env/{part}"] for part in ("step", "wait", "gate_wait"))

    assert pace(end) >= 0.9 * pace(begin)


@pytest.mark.slow
def test_a_stopped_training_goes_on_where_it_was(folder: Path) -> None:
    arguments = [*SAC, *SMALL, "runner.val_check_interval=20"]
    run = Training(folder, *arguments, "runner.max_env_steps=100000")
    run.wait_for_record("env_steps", 500)
    run.stop(signal.SIGTERM)
    assert run.wait() == 1
    assert "runner.resume_dir=" in run.text()
    before = run.result()
    assert balanced(before), before

    steps = before["env_steps"] + 400
    resumed = Training(
        folder,
        f"runner.max_env_steps={steps}",
        f"runner.resume_dir={run.folder}",
        config=str(run.folder / "config.yaml"),
    )
    assert resumed.wait() == 0, resumed.text()
    after = resumed.result()
    assert balanced(after), after
    assert after["env_steps"] >= steps
    for key in ("learner_updates", "policy_version", "global_step", "trajectories_received"):
        assert after[key] > before[key], key
    assert after["wall_s"] > before["wall_s"]
    env_steps = [record["env_steps"] for record in resumed.records() if "eval/return" not in record]
    assert env_steps == sorted(env_steps), "the curve goes on and does not begin anew"
    assert env_steps[0] < 500 < before["env_steps"] < env_steps[-1]


@pytest.mark.parametrize(
    "moment",
    [
        "start",
        pytest.param("steps", marks=pytest.mark.slow),
        pytest.param("evaluation", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_a_training_within_ten_seconds_and_leaves_nobody(folder: Path, moment: str) -> None:
    run = Training(
        folder,
        *SMALL,
        COUNTS,
        LINE.replace(":make", ":slow_in_evaluation"),
        "runner={val_check_interval: 100}",
        "algorithm.updates_per_env_step=0.25",
    )
    if moment == "start":
        wait_for(lambda: "serving in" in run.text(), "the broker")
    elif moment == "steps":
        run.wait_for_record("env_steps", 50)
    else:
        run.wait_for_record("global_step", 120)
    run.stop(signal.SIGINT)
    begin = time.monotonic()
    assert run.wait() == 1
    assert time.monotonic() - begin < 10
    assert "stopped by SIGINT" in run.text()
    wait_for(lambda: not run.left(), "the end of all children", 3)
    assert run.records()


@pytest.mark.slow
def test_a_training_that_is_stopped_before_its_first_step_leaves_an_earlier_one_as_it_was(
    folder: Path,
) -> None:
    (folder / "run").mkdir()
    curve = folder / "run" / "learning_curve.png"
    curve.write_text("of an earlier run")
    run = Training(folder, *COUNTING, "env.kwargs.seconds=60")
    wait_for(lambda: "rollout-0 joined" in run.text() or run.process.poll() is not None, "its start")
    run.stop(signal.SIGINT)
    assert run.wait() == 1
    assert run.text().splitlines()[-1] == "error: stopped by SIGINT", (
        "there is no checkpoint to go on from"
    )
    assert curve.read_text() == "of an earlier run"


@pytest.mark.slow
def test_discrete_actions_are_refused_by_sac_with_its_reason(folder: Path) -> None:
    run = Training(folder, *SMALL, *SAC, "env.id=CartPole-v1")
    assert run.wait() == 2
    assert "sac" in run.text().lower()
    assert "discrete" in run.text().lower()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["observation", "reward"])
def test_a_number_that_is_none_costs_its_trajectory_and_training_goes_on(
    folder: Path, what: str
) -> None:
    run = Training(
        folder,
        *COUNTING,
        f"env.kwargs={{nan_at: 12, what: {what}}}",
        "runner.max_env_steps=600",
    )
    assert run.wait() == 0, run.text()
    result = run.result()
    assert 1 <= result["trajectories_dropped"] <= 4
    assert balanced(result), result
    assert f"{what} is nan in row" in run.text()
    assert "training_sims.py:make" in run.text()


@pytest.mark.slow
def test_nothing_but_such_numbers_ends_the_run_with_the_cause(folder: Path) -> None:
    run = Training(
        folder,
        *COUNTING,
        "env.kwargs.nan_at=-1",
        "cluster.max_restarts=0",
    )
    assert run.wait() == 1
    assert "5 trajectories had to be dropped" in run.text()


@pytest.mark.slow
def test_a_simulator_that_raises_is_started_again(folder: Path) -> None:
    run = Training(
        folder,
        *COUNTING,
        f"env.kwargs={{raise_at: 30, once: {folder / 'raised'}, seconds: 0.005}}",
        "runner.max_env_steps=2000",
    )
    assert run.wait() == 0, run.text()
    assert "exploded at step 30" in run.text()
    assert "restart 1 of 3" in run.text()
    assert balanced(run.result()), run.result()


@pytest.mark.slow
def test_a_simulator_that_always_raises_ends_the_run_with_the_cause(folder: Path) -> None:
    run = Training(folder, *COUNTING, "env.kwargs.raise_at=30", "cluster.max_restarts=1")
    assert run.wait() == 1
    assert "exploded at step 30" in run.text()
    assert "cluster.max_restarts" in run.text()


@pytest.mark.slow
def test_a_learner_that_hangs_ends_the_run_with_its_name(folder: Path) -> None:
    run = Training(folder, *COUNTING, "runner.stall_timeout_s=3")
    run.wait_for_record("env_steps", 50)
    run.part("start-learner").suspend()
    assert run.wait() == 1
    assert "the learner was silent for 3 s" in run.text()


@pytest.mark.slow
def test_trajectories_of_which_none_is_of_use_end_the_run_with_the_cause(folder: Path) -> None:
    policy = f"rollout.policy={TESTS / 'policies.py'}:Silent"
    run = Training(folder, *SMALL, *PPO, policy, "env.train.max_steps_per_rollout_epoch=2")
    assert run.wait() == 1
    assert "the last 50 trajectories had to be dropped" in run.text()
    assert "prev_logprobs" in run.text()


@pytest.mark.slow
def test_what_cannot_be_written_does_not_end_training_but_the_last_checkpoint_is_an_error(
    folder: Path,
) -> None:
    run = Training(folder, *COUNTING, "runner={max_env_steps: 600, save_interval: 20}", name="full")
    wait_for(lambda: run.folder.exists(), "the run folder")
    (run.folder / "checkpoints").write_text("in the way")
    (run.folder / "learning_curve.png").mkdir()
    assert run.wait() == 1, run.text()
    assert "cannot be written: " in run.text()
    assert "learning_curve.png cannot be written" in run.text()
    assert "what was learned since the one before it is lost" in run.text().splitlines()[-1]
    assert run.result()["env_steps"] >= 600


@pytest.mark.slow
def test_a_rollout_worker_that_is_killed_is_replaced_and_serves_the_newest_weights(folder: Path) -> None:
    run = Training(folder, *COUNTING, "algorithm.updates_per_env_step=0.25", "env.kwargs.seconds=0.005")
    run.wait_for_record("env_steps", 200)
    run.part("start-rollout-worker").kill()
    wait_for(lambda: "restart 1 of 3" in run.text(), "the restart")
    now = run.records()[-1]
    run.wait_for_record("env_steps", now["env_steps"] + 200)
    wait_for(
        lambda: run.records()[-1]["rollout/policy_version"] > now["policy_version"], "newer weights", 30
    )
    run.stop(signal.SIGTERM)
    run.wait()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.id=CartPole-v1"], ["algorithm.name"]),
        (["algorithm.name=sac"], ["env.id"]),
        (["algorithm.name=sac", "env.id=Pendulum-v1", "runner.stop_at={eval/return: 1}"], ["val_check"]),
        (["algorithm.name=sac", "env.id=X", "runner.resume_dir=nowhere"], ["resume_dir", "nowhere"]),
        (["algorithm.name=td3"], ["algorithm.name", "td3"]),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(
    folder: Path, overrides: list[str], words: list[str]
) -> None:
    run = Training(folder, *overrides)
    assert run.wait() == 2, run.text()
    assert all(word in run.text() for word in words), run.text()


def test_no_process_outlives_a_killed_runner_and_the_next_run_removes_its_sockets(folder: Path) -> None:
    run = Training(folder, *COUNTING)
    run.wait_for_record("env_steps", 50)
    run.note_children()
    arguments = run.part("start-broker").cmdline()
    sockets = Path(arguments[arguments.index("--config") + 1]).parent
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    wait_for(lambda: not run.left(), "the end of all children", 2)
    assert sockets.exists()
    with local_endpoints(Config()) as (_, first), local_endpoints(Config()) as (_, second):
        assert not sockets.exists()
        assert first.exists(), "that of a living run stays"
    assert not first.parent.exists()
    assert not second.parent.exists()
