"""Parts of a run are killed, leave or hang: the run goes on, or ends with the cause."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import TESTS, wait_for
from runner.evaluation import BOTH_MODES, SIM, Run, frontend, status_client
from runner.training import COUNTING, COUNTS, LINE, SMALL, Training

from zmqrl import config
from zmqrl.broker.status import StatusClient
from zmqrl.runner import supervisor
from zmqrl.runner.supervisor import Kind, Supervisor

SLOW = "env.delay_sampler={type: constant, delay: 0.02}"
REWARDS = f"reward={{use_reward_model: true, model: '{TESTS / 'policies.py'}:judges_lines'}}"


broker = pytest.fixture(status_client)


def slow_run(folder: Path, *overrides: str, **options: Any) -> Run:
    """An evaluation of a slow simulator, whose broker is `broker`."""
    return Run(folder, f"{SIM}:make", frontend(folder), SLOW, *overrides, **options)


def part_of(run: Run | Training, *words: str, other_than: int = 0) -> psutil.Process:
    """The process of a part, as soon as there is one other than `other_than`."""

    def found() -> psutil.Process | None:
        assert run.process.poll() is None, run.text()
        with suppress(LookupError, psutil.NoSuchProcess):
            process = run.part(*words)
            return process if process.pid != other_than else None
        return None

    process: psutil.Process = wait_for(found, f"{words}", 40)
    return process


def kill_lives(run: Run | Training, count: int, *words: str) -> None:
    """Kill a part, and each that takes its place, so many times in all."""
    pid = 0
    for _ in range(count):
        process = part_of(run, *words, other_than=pid)
        pid = process.pid
        process.kill()


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("start-broker", "broker"),
        pytest.param("start-rollout-worker", "rollout-0", marks=pytest.mark.slow),
        pytest.param("start-env-worker", "eval-0", marks=pytest.mark.slow),
    ],
)
@BOTH_MODES
def test_an_evaluation_is_complete_although_a_part_is_killed(
    folder: Path, broker: StatusClient, part: str, name: str, decoupled: bool
) -> None:
    run = slow_run(
        folder,
        "env.kwargs.length=40",
        "env.eval={total_num_envs: 4, rollout_epoch: 3}",
        "cluster.component_placement={env: 0-1, rollout: 0-1}",
        decoupled=decoupled,
    )
    before = run.wait_for_answers(broker, 90)  # some episodes are over, and no worker is done
    run.part(part, *(["0"] if name != "broker" else [])).kill()
    assert run.wait() == 0, run.text()
    assert f"{name} was killed by SIGKILL; restart 1 of 3" in run.text()
    result = run.result()
    assert result["eval/num_trajectories"] == 12
    assert result["eval/missing_trajectories"] == 0
    assert result["eval/episode_len"] == 40
    assert result["env_steps"] >= 480
    assert result["broker/errors"] == result["broker/cancelled"] == 0 or part == "start-env-worker"
    ended = sum(result[f"broker/{how}"] for how in ("answered", "errors", "cancelled"))
    assert result["broker/requests"] == ended > before["answered"]
    assert result["rollout/mean_rows_per_batch"] >= result["rollout/mean_shards_per_batch"] >= 1


@pytest.mark.slow
def test_a_training_comes_to_its_end_although_each_part_is_killed_once(folder: Path) -> None:
    run = Training(
        folder,
        *COUNTING,
        REWARDS,
        "env.kwargs.seconds=0.005",
        "algorithm.updates_per_env_step=0.25",
        "runner={max_env_steps: 3000, val_check_interval: 100}",
    )
    parts = {
        "rollout-0": ["start-rollout-worker"],
        "reward-0": ["start-reward-worker"],
        "env-1": ["start-env-worker", "--mode=train", "--rank=1"],
        "eval-0": ["start-env-worker", "--mode=eval"],
        "broker": ["start-broker"],
    }
    run.wait_for_record("env_steps", 50)
    for name, words in parts.items():
        run.part(*words).kill()
        said = f"{name} was killed by SIGKILL; restart 1 of 3"
        wait_for(lambda said=said: said in run.text(), f"{said}: {run.text()}")
    assert run.wait() == 0, run.text()
    assert run.text().count("; restart ") == len(parts)
    result = run.result()
    assert result["env_steps"] >= 3000
    assert result["eval/num_trajectories"] == 2
    assert result["eval/policy_version"] == result["policy_version"]
    names = ("received", "dropped", "rolled_back")
    assert result["trajectories_sent"] == sum(result[f"trajectories_{name}"] for name in names)
    counts = ["broker/answered", "rollout/mean_rows_per_batch", "rollout/busy", "env_steps_per_s"]
    for record in run.records():
        for key in counts:
            assert record.get(key, 0) >= 0, (key, record)
    answered = [record["broker/answered"] for record in run.records() if "broker/answered" in record]
    assert answered == sorted(answered), "the counters of the broker's successor came on top"


def test_a_worker_that_is_done_is_not_started_again_although_the_runner_was_frozen_meanwhile(
    folder: Path, broker: StatusClient
) -> None:
    run = Run(
        folder,
        f"{SIM}:make",
        frontend(folder),
        "env.delay_sampler={type: constant, delay: 0.01}",
        "env.eval={total_num_envs: 2, rollout_epoch: 10}",
        "cluster.component_placement={env: 0-1, rollout: '0'}",
    )
    run.wait_for_answers(broker, 10)
    workers = [part_of(run, "start-env-worker", str(rank)) for rank in range(2)]
    runner = psutil.Process(run.process.pid)
    # A runner that stops before it has greeted them hears nothing of them.
    wait_for(lambda: str(runner.net_connections("unix")).count("/report'") >= 3, "their connections")
    run.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: all(w.status() == psutil.STATUS_ZOMBIE for w in workers), "their end", 40)
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 0, run.text()
    assert "; restart " not in run.text()
    assert run.result()["eval/num_trajectories"] == 20


def test_a_part_that_is_lost_again_and_again_ends_the_run_with_the_cause_and_the_count(
    folder: Path, broker: StatusClient
) -> None:
    run = slow_run(
        folder,
        "env.kwargs.length=100000",
        "cluster.max_restarts=2",
        "cluster.component_placement={env: '0', rollout: 0-1}",
    )
    run.wait_for_answers(broker, 10)
    kill_lives(run, 3, "start-rollout-worker", "1")
    assert run.wait() == 1
    cause = "rollout-1 was killed by SIGKILL"
    assert f"{cause}; restart 1 of 2\n" in run.text(), "the first restart is at once"
    assert f"{cause}; restart 2 of 2 after 1 s\n" in run.text()
    last = run.text().splitlines()[-1]
    assert last.startswith(f"error: {cause}; it was restarted 2 times in "), last
    assert last.endswith("s (cluster.max_restarts)"), last
    assert run.result()["env_steps"] > 0, "what there is was written"


@pytest.mark.slow
def test_a_training_whose_env_worker_always_hangs_ends_with_the_cause_and_the_count(
    folder: Path,
) -> None:
    run = Training(
        folder,
        *SMALL,
        COUNTS,
        LINE.replace(":make", ":rank_one_hangs"),
        "runner.stall_timeout_s=2",
        "cluster.max_restarts=1",
    )
    assert run.wait() == 1
    last = run.text().splitlines()[-1]
    assert "env-1 was silent for 2 s in a step or a reset (runner.stall_timeout_s)" in last
    assert "it was restarted 1 time in" in last
    assert run.result()["env_steps"] > 0


HANGING = ["rollout.attempt_timeout_s=1", "runner.stall_timeout_s=2"]
STUCK = "was stuck in a policy call for 2 s (runner.stall_timeout_s); restart 1 of 3"


@BOTH_MODES
def test_the_only_rollout_worker_is_started_again_when_its_policy_hangs(
    folder: Path, decoupled: bool
) -> None:
    run = Run(
        folder,
        f"{SIM}:make",
        *HANGING,
        "env.eval={total_num_envs: 2, rollout_epoch: 3}",
        "cluster.component_placement={env: 0-1, rollout: '0'}",
        f"rollout.policy_kwargs.once={folder}/once",
        policy=f"rollout.policy={TESTS / 'policies.py'}:HangsOnce",
        decoupled=decoupled,
    )
    assert run.wait() == 0, run.text()
    assert f"rollout-0 {STUCK}" in run.text()
    assert run.text().count("; restart ") == 1
    result = run.result()
    assert result["eval/num_trajectories"] == 6
    assert result["broker/errors"] == 0


@pytest.mark.slow
def test_env_workers_that_wait_for_a_slow_reward_model_are_not_taken_for_hanging(folder: Path) -> None:
    run = Training(
        folder,
        *COUNTING,
        REWARDS,
        f"reward.model_kwargs={{hang_once: {folder}/once, seconds: 6}}",
        "runner={stall_timeout_s: 3, max_env_steps: 200}",
    )
    assert run.wait() == 0, run.text()
    assert "; restart " not in run.text()


@pytest.mark.slow
def test_a_reward_worker_whose_model_hangs_is_started_again(folder: Path) -> None:
    run = Training(
        folder,
        *COUNTING,
        REWARDS,
        *HANGING,
        f"reward.model_kwargs.hang_once={folder}/once",
        "runner.max_env_steps=200",
    )
    assert run.wait() == 0, run.text()
    assert f"reward-0 {STUCK}" in run.text()
    assert run.text().count("; restart ") == 1


def test_a_worker_that_a_signal_kills_at_start_up_is_started_again(folder: Path) -> None:
    run = Run(
        folder,
        f"{SIM}:make",
        "env.eval.total_num_envs=1",
        "cluster.component_placement={env: '0', rollout: '0'}",
    )
    for words in (["start-env-worker"], ["start-rollout-worker"], ["start-broker"]):
        part_of(run, *words).kill()
    assert run.wait() == 0, run.text()
    assert run.text().count("was killed by SIGKILL; restart 1 of 3") == 3
    assert run.result()["eval/num_trajectories"] == 1


def test_what_became_a_bad_configuration_meanwhile_is_not_tried_again(
    folder: Path, broker: StatusClient
) -> None:
    shutil.copy(TESTS / "policies.py", folder / "policy.py")
    run = slow_run(
        folder,
        "env.kwargs.length=100000",
        "cluster.component_placement={env: '0', rollout: '0'}",
        policy=f"rollout.policy={folder}/policy.py:Balance",
    )
    run.wait_for_answers(broker, 10)
    (folder / "policy.py").unlink()
    run.part("start-rollout-worker").kill()
    assert run.wait() == 2
    assert "rollout-0 exited with code 2" in run.text().splitlines()[-1]
    assert "policy.py" in run.text().splitlines()[-1]
    assert run.text().count("; restart ") == 1


@pytest.mark.slow
def test_without_restarts_the_others_go_on_until_none_is_left(folder: Path) -> None:
    run = Training(
        folder,
        *COUNTING,
        "cluster={restart: never, component_placement: {env: 0-1, eval: 0, rollout: 0-1}}",
        "env.kwargs.seconds=0.005",
    )
    run.wait_for_record("env_steps", 50)
    for words in (["start-rollout-worker", "--rank=0"], ["start-env-worker", "--rank=1"]):
        run.part(*words).kill()
    for name in ("rollout-0", "env-1"):
        said = f"{name} was killed by SIGKILL; the others go on"
        wait_for(lambda said=said: said in run.text(), said)
    run.wait_for_record("env_steps", run.records()[-1]["env_steps"] + 100)
    run.part("start-rollout-worker", "--rank=1").kill()
    assert run.wait() == 1
    last = run.text().splitlines()[-1]
    causes = "rollout-0 was killed by SIGKILL; rollout-1 was killed by SIGKILL"
    assert f"no rollout worker is left: {causes}" in last
    assert "; restart " not in run.text()


@pytest.mark.slow
def test_a_rollout_worker_that_is_told_to_leave_has_retired_and_is_not_started_again(
    folder: Path, broker: StatusClient
) -> None:
    run = slow_run(
        folder,
        "env.kwargs.length=150",
        "env.eval={total_num_envs: 2, rollout_epoch: 1}",
        "cluster.component_placement={env: 0-1, rollout: 0-1}",
    )
    run.wait_for_answers(broker, 50)
    run.rollout(1).terminate()
    assert run.wait() == 0, run.text()
    assert "rollout-1 was told to leave (SIGTERM); the others go on" in run.text()
    assert "; restart " not in run.text()
    result = run.result()
    assert result["eval/num_trajectories"] == 2
    assert result["broker/requests"] == result["broker/answered"]
    assert result["broker/requeued"] == 0


@pytest.mark.parametrize(
    ("part", "number"),
    [("start-rollout-worker", signal.SIGINT), ("start-broker", signal.SIGTERM)],
)
@pytest.mark.slow
def test_a_run_can_be_stopped_while_a_part_waits_for_its_restart(
    folder: Path, part: str, number: signal.Signals
) -> None:
    run = Training(folder, *COUNTING, "cluster.max_restarts=10")
    run.wait_for_record("env_steps", 50)
    kill_lives(run, 4, part)
    wait_for(lambda: "restart 4 of 10 after 4 s" in run.text(), run.text())
    run.stop(number)
    begin = time.monotonic()
    assert run.wait() == 1
    assert time.monotonic() - begin < 10
    assert f"stopped by {number.name}" in run.text()
    wait_for(lambda: not run.left(), "the end of all children", 3)


@pytest.mark.slow
def test_a_training_whose_processes_are_all_told_to_end_was_stopped(folder: Path) -> None:
    run = Training(folder, *COUNTING)
    run.wait_for_record("env_steps", 50)
    run.note_children()
    runner = psutil.Process(run.process.pid)
    runner.suspend()  # the parts are quicker
    for child in run.children:
        child.terminate()
    wait_for(lambda: not run.left(), "the end of all parts")
    runner.terminate()
    runner.resume()
    assert run.wait() == 1
    assert run.text().splitlines()[-1].startswith("error: stopped by SIGTERM; go on with"), run.text()
    assert "; restart " not in run.text()


@pytest.mark.slow
def test_a_lost_learner_ends_the_training_and_says_how_to_go_on(folder: Path) -> None:
    run = Training(folder, *COUNTING, "runner.save_interval=20")
    run.wait_for_record("env_steps", 50)
    wait_for(lambda: list(run.folder.glob("checkpoints/global_step_*/manifest.json")), "a checkpoint")
    run.part("start-learner").kill()
    assert run.wait() == 1
    hint = f"go on with runner.resume_dir={run.folder}"
    assert run.text().splitlines()[-1].endswith(f"learner was killed by SIGKILL; {hint}")


@pytest.mark.parametrize("name", ["frontend", pytest.param("backend", marks=pytest.mark.slow)])
def test_a_port_that_the_broker_would_choose_itself_is_refused(folder: Path, name: str) -> None:
    run = Run(folder, f"{SIM}:make", f"broker.{name}=tcp://127.0.0.1:0")
    assert run.wait() == 2
    assert "give the port that the broker got" in run.text().splitlines()[-1]


def test_nothing_is_judged_right_after_the_runner_has_stood_still(folder: Path) -> None:
    loaded = config.load(None, ["runner.stall_timeout_s=4"])
    parts = Supervisor(
        loaded, folder / "none", lambda name, line: None, stepped=lambda: True, stopping=lambda: False
    )
    assert not parts.paused()
    time.sleep(2.1)  # as Ctrl-Z does
    assert parts.paused()
    assert not parts.paused()


def test_who_has_stayed_up_for_long_enough_may_be_lost_any_number_of_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_PROVEN_AFTER", 0.1)
    loaded = config.load(
        None, [frontend(folder), f"broker.backend=ipc://{folder}/b", "cluster.max_restarts=1"]
    )
    config.dump(loaded, folder / "config.yaml")
    lines: list[str] = []
    parts = Supervisor(
        loaded,
        folder / "config.yaml",
        lambda name, line: lines.append(line),
        stepped=lambda: True,
        stopping=lambda: False,
    )
    try:
        parts.start("broker", Kind.BROKER, "start-broker")
        for life in range(1, 4):
            wait_for(lambda life=life: len(lines) == life, "the broker")
            os.kill(parts._launcher.children["broker"].process.pid, signal.SIGKILL)
            (part,) = wait_for(parts.look, "its end")
            parts.lost(part)
            assert part.restarts == 1
            assert parts.look() == []
    finally:
        parts.close(first=[])
