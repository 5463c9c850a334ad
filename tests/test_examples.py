"""The examples and the demo, as a reader would run them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TESTS, Pool, wait_for
from runner.training import Training

ROOT = TESTS.parent


def lengths(output: str) -> list[int]:
    """The episode lengths that an example tells."""
    return [int(number) for number in re.findall(r"episodes last (\d+) steps", output)]


@pytest.mark.timeout(180)
def test_a_loop_of_ones_own_trains(folder: Path) -> None:
    sockets = {name: f"ipc://{folder}/{name}" for name in ("frontend", "backend", "learner")}
    run = Training(
        folder,
        "--own-loop",
        f"broker.frontend={sockets['frontend']}",
        f"broker.backend={sockets['backend']}",
        f"actor.endpoint={sockets['learner']}",
        config="local_training.yaml",
    )
    example = [sys.executable, ROOT / "examples" / "train_own_loop.py"]
    done = subprocess.run(
        [*example, sockets["frontend"], sockets["learner"], "500"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr + run.text()
    first, *_, last = lengths(done.stdout)
    assert last > 3 * first, done.stdout
    run.wait_for_record("env_steps", 450 * 32)
    run.process.terminate()
    run.wait()
    result = run.result()
    # The last one may be on its way still, to a learner that is told to stop.
    assert 500 // 16 - 1 <= result["trajectories_received"] <= 500 // 16
    assert not [key for key in result if key.startswith("time/env/")], "nobody tells such times"


@pytest.mark.slow
def test_a_learner_of_ones_own_learns_from_the_pool(pool: Pool) -> None:
    learner = f"ipc://{pool.folder}/learner"
    overrides = [
        f"--config={ROOT / 'config' / 'own_learner.yaml'}",
        *pool.overrides,
        f"actor.endpoint={learner}",
        f"rollout.policy={ROOT / 'examples' / 'own_learner.py'}:Agent",
    ]
    pool.launcher.start("broker", ["start-broker", *overrides])
    pool.launcher.start("rollout-0", ["start-rollout-worker", *overrides])
    pool.launcher.start("env-0", ["start-env-worker", *overrides, "--mode=train"])
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "own_learner.py", learner, "60"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr + "\n".join(pool.lines)
    first, *_, last = lengths(done.stdout)
    assert last > 2 * first, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_the_demo_learns_to_reach_and_its_checkpoint_reaches_too(folder: Path) -> None:
    run = Training(folder, config="fetch_reach_sac_decoupled.yaml")
    assert run.wait(700) == 0, run.text()
    result = run.result()
    assert result["eval/num_trajectories"] == 100
    assert result["achieved_updates_per_env_step"] == pytest.approx(0.25, rel=0.15)
    for metric in ("eval/success_once", "eval/success_at_end"):
        assert result[metric] >= 0.95
    assert "2 times in a row" in run.text()

    evaluated = folder / "evaluated.json"
    command = [
        *(sys.executable, "-m", "zmqrl", "evaluate", f"--json={evaluated}"),
        f"--config={run.folder / 'config.yaml'}",
        f"runner.ckpt_path={run.folder}",
        "env.eval.rollout_epoch=1",
    ]
    records = run.records()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(evaluated.read_text())["eval/success_at_end"] >= 0.9
    assert run.records() == records, "the evaluation wrote into the files of the training"


@pytest.mark.slow
def test_the_checkpoint_of_another_architecture_is_refused_by_name(folder: Path) -> None:
    small = [
        "algorithm={name: sac, updates_per_env_step: 0.1}",
        "env.id=Pendulum-v1",
        "cluster.component_placement={env: 0, rollout: 0}",
    ]
    run = Training(folder, *small, "actor.model.hidden_sizes=[16]", "runner.max_env_steps=300")
    assert run.wait() == 0, run.text()
    for key in ("ckpt_path", "resume_dir"):
        command = "evaluate" if key == "ckpt_path" else "train"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "zmqrl", command, *small, "actor.model.hidden_sizes=[17]"),
                *(f"runner.{key}={run.folder}", f"runner.logger.log_path={folder}"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        text = done.stdout + done.stderr
        assert done.returncode == 1, text
        assert "has shape" in text or "[16" in text, text
        assert str(run.folder) in text


@pytest.mark.slow
def test_a_film_of_each_evaluation_is_left_in_the_run_folder(folder: Path) -> None:
    run = Training(
        folder,
        "algorithm={name: ppo, update_epoch: 1}",
        "env.id=CartPole-v1",
        "env.eval={total_num_envs: 2, save_video: true, max_episode_steps: 30}",
        "cluster.component_placement={env: 0, eval: 0, rollout: 0}",
        "runner={val_check_interval: 2, max_steps: 4}",
    )
    assert run.wait() == 0, run.text()
    films = wait_for(lambda: sorted((run.folder / "videos").glob("*.mp4")), "a film")
    assert all(film.stat().st_size > 1000 for film in films)
    assert not list((run.folder / "videos").glob(".*"))


def shown(example: str, pool: Pool, **environment: str) -> str:
    """What an example prints that asks the pool."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{example}.py", pool.frontend],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def serve(pool: Pool, policy: str) -> None:
    """Start a broker, and a worker with that policy."""
    pool.start_broker()
    pool.launcher.start("rollout-0", ["start-rollout-worker", *pool.overrides, f"--policy={policy}"])
    pool.wait_for_workers(1)


def test_a_gymnasium_script_asks_for_its_actions(pool: Pool) -> None:
    serve(pool, f"{ROOT / 'examples' / 'balance.py'}:Balance")
    lines = shown("own_gymnasium", pool).splitlines()
    assert lines == [f"episode {episode}: 500 steps" for episode in range(5)]


EVALUATION = '''
import numpy as np

def evaluate_policy(model, env, n_eval_episodes, warn):
    """As that of Stable-Baselines3: a batch of one, and the state as it was returned."""
    rewards, state = [], None
    for episode in range(n_eval_episodes):
        observation, _ = env.reset()
        total, over, start = 0.0, False, np.ones(1, bool)
        while not over:
            actions, state = model.predict(
                observation[None], state=state, episode_start=start, deterministic=True
            )
            observation, reward, terminated, truncated, _ = env.step(actions[0])
            total, over, start = total + reward, terminated or truncated, np.zeros(1, bool)
        rewards.append(total)
    return np.mean(rewards), np.std(rewards)
'''


@pytest.mark.slow
def test_a_pool_is_a_model_to_the_evaluation_of_stable_baselines3(pool: Pool, folder: Path) -> None:
    serve(pool, f"{ROOT / 'examples' / 'balance.py'}:Balance")
    environment = {}
    if importlib.util.find_spec("stable_baselines3") is None:
        stand_in = folder / "stable_baselines3" / "common"
        stand_in.mkdir(parents=True)
        (stand_in / "evaluation.py").write_text(EVALUATION)
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    said = shown("own_evaluation", pool, **environment)
    assert said == "reward of an episode: 500.0, give or take 0.0\n"


def test_an_asyncio_program_runs_several_simulators_on_one_client(pool: Pool) -> None:
    serve(pool, "zmqrl.demo:ReachPolicy")
    lines = shown("own_asyncio", pool).splitlines()
    assert sorted(lines) == [f"simulator {n}: distance to the goal 0.000" for n in range(8)]


def test_an_example_of_a_loop_is_short() -> None:
    for path in (ROOT / "examples").glob("own_*.py"):
        if path.stem != "own_learner":
            assert len(path.read_text().splitlines()) < 30, path
