"""Reward workers in a real pool: the numbers in the trajectories are those that the model gave."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TESTS, Pool, wait_for
from policies import judged

from zmqrl import config
from zmqrl.env.worker import EnvWorker
from zmqrl.errors import PolicyError
from zmqrl.learner.port import Learner
from zmqrl.process import StopSignal
from zmqrl.trajectory import Trajectory

STEPS = 8
"""In a trajectory."""


@pytest.fixture
def learner(folder: Path) -> Iterator[Learner]:
    with Learner(f"ipc://{folder}/learner") as port:
        port.receive(0)  # lets env workers in
        yield port


def env_overrides(pool: Pool, learner: Learner, *more: str, length: int = 5) -> list[str]:
    return [
        *pool.overrides,
        f"actor.endpoint={learner.endpoint}",
        f"env.factory={TESTS / 'sims.py'}:make",
        f"env.kwargs.length={length}",
        f"env.train.max_steps_per_rollout_epoch={STEPS}",
        "cluster.component_placement.env=0-0",
        "env.train.total_num_envs=3",
        "reward.use_reward_model=true",
        f"reward.model={TESTS / 'policies.py'}:Judge",
        *more,
    ]


def start(pool: Pool, decoupled: bool = True, rewards: int = 1, **judge: Any) -> None:
    pool.start_broker(decoupled=decoupled)
    pool.start_worker(0, "Balance", world_size=1)
    for number in range(rewards):
        start_reward_worker(pool, f"reward-{number}", **judge)
    pool.wait_for_workers(1 + rewards)


def start_reward_worker(pool: Pool, name: str, **judge: Any) -> None:
    kwargs = [f"reward.model_kwargs.{key}={value}" for key, value in judge.items()]
    model = f"--model={TESTS / 'policies.py'}:Judge"
    pool.launcher.start(name, ["start-reward-worker", *pool.overrides, model, *kwargs])


def start_env_worker(pool: Pool, learner: Learner, rank: int, *more: str) -> None:
    overrides = env_overrides(pool, learner, *more)
    arguments = ["start-env-worker", *overrides, "--mode=train", f"--rank={rank}"]
    pool.launcher.start(f"env-{rank}", arguments)


@contextmanager
def env_worker_here(
    pool: Pool, learner: Learner, rank: int, *more: str, **options: Any
) -> Iterator[Any]:
    """An env worker in a thread of the test, which can so see how far it is."""
    stop = StopSignal()
    overrides = [*env_overrides(pool, learner, **options), "cluster.component_placement.env=0-1", *more]
    loaded = config.load(None, overrides)
    worker = EnvWorker(loaded, "train", rank, stop)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        stop.reason = "SIGTERM"
        thread.join()


def trajectories(learner: Learner, count: int, senders: int = 1) -> list[Trajectory]:
    """The first ones, at least `count` and so many that all `senders` are among those who sent them."""
    found: list[Trajectory] = []

    def are_here() -> bool:
        found.extend(learner.receive(0.1))
        return len(found) >= count and len({one.origin for one in found}) >= senders

    wait_for(are_here, "trajectories", 30)
    return found


def expected(trajectory: Trajectory) -> np.ndarray:
    """What the model says of each transition `[T, N]`, from what the trajectory holds of it."""
    return judged(
        trajectory.observation,
        trajectory.actions,
        trajectory.next_observation(),
        trajectory.terminated,
        trajectory.truncated,
    )


@pytest.mark.parametrize(
    ("decoupled", "when", "autoreset"),
    [
        (True, "step", "disabled"),
        pytest.param(True, "terminal", "next_step", marks=pytest.mark.slow),
        pytest.param(False, "step", "next_step", marks=pytest.mark.slow),
        pytest.param(False, "terminal", "disabled", marks=pytest.mark.slow),
    ],
)
def test_the_rewards_of_trajectories_are_the_models(
    pool: Pool, learner: Learner, decoupled: bool, when: str, autoreset: str
) -> None:
    start(pool, decoupled)
    for rank in range(2):
        start_env_worker(
            pool,
            learner,
            rank,
            f"reward.when={when}",
            f"env.autoreset_mode={autoreset}",
            "cluster.component_placement.env=0-1",
            "env.train.total_num_envs=5",
            "env.pipeline_stages=2",
        )
    found = trajectories(learner, 24, senders=2)
    assert {trajectory.origin for trajectory in found} == {"env-0", "env-1"}
    for trajectory in found:
        counted = trajectory.valid if when == "step" else trajectory.terminated
        np.testing.assert_array_equal(trajectory.reward, np.where(counted, expected(trajectory), 0))
    ends = sum(trajectory.terminated.sum() for trajectory in found)
    assert ends > 0
    final = np.concatenate([t.next_observation()[t.terminated] for t in found])
    assert (final == 5).all(), "the model was not shown the observations in which episodes ended"


def test_an_episode_that_is_cut_off_has_its_reward_too(pool: Pool, learner: Learner) -> None:
    start(pool)
    start_env_worker(pool, learner, 0, "reward.when=terminal", "env.train.max_episode_steps=3")
    for trajectory in trajectories(learner, 4):
        assert trajectory.truncated.any()
        assert not trajectory.terminated.any()
        rewards = np.where(trajectory.truncated, expected(trajectory), 0)
        np.testing.assert_array_equal(trajectory.reward, rewards)


@pytest.mark.alone
@pytest.mark.slow
def test_a_slow_reward_model_does_not_slow_the_actions_down(pool: Pool, learner: Learner) -> None:
    start(pool, seconds=0.5)
    # An episode takes 0.6 s, so the model can keep pace; but nobody waits for it.
    delays = "env.delay_sampler={type: constant, delay: 0.03}"
    with (
        env_worker_here(pool, learner, 0, delays, "reward.use_reward_model=false", length=20) as without,
        env_worker_here(pool, learner, 1, delays, "reward.when=terminal", length=20) as judges,
    ):
        for worker in (without, judges):
            wait_for(lambda w=worker: w.report.totals.shard_steps > 5, "the first steps")
        before = [worker.report.totals.shard_steps for worker in (without, judges)]
        wait_for(lambda: without.report.totals.shard_steps >= before[0] + 100, "100 steps")
        assert judges.report.totals.shard_steps >= before[1] + 80
        judged_ones = [t for t in trajectories(learner, 12) if t.origin == "env-1"]
    assert any(t.terminated.any() for t in judged_ones)
    for trajectory in judged_ones:
        rewards = np.where(trajectory.terminated, expected(trajectory), 0)
        np.testing.assert_array_equal(trajectory.reward, rewards)


def test_a_reward_model_that_cannot_keep_pace_sets_the_pace(pool: Pool, learner: Learner) -> None:
    start(pool, seconds=0.01)
    with env_worker_here(pool, learner, 0) as worker:
        wait_for(lambda: worker.report.totals.env_steps > 300, "300 steps")
        found = trajectories(learner, 20)
        assert pool.counters()["overloaded"] == 0
    for trajectory in found:
        np.testing.assert_array_equal(trajectory.reward, expected(trajectory))


def test_when_a_reward_worker_is_killed_another_takes_over(
    pool: Pool, learner: Learner, folder: Path
) -> None:
    start(pool, seconds=0.05, touch=folder / "asked")
    start_env_worker(pool, learner, 0, "reward.when=terminal")
    trajectories(learner, 3)
    (folder / "asked").unlink()
    wait_for((folder / "asked").exists, "a call of the model")
    os.kill(pool.pid("reward-0"), signal.SIGKILL)
    start_reward_worker(pool, "reward-1")
    for trajectory in trajectories(learner, 12):
        rewards = np.where(trajectory.terminated, expected(trajectory), 0)
        np.testing.assert_array_equal(trajectory.reward, rewards)
    assert pool.launcher.children["env-0"].process.poll() is None


def test_a_reward_model_that_returns_the_wrong_shape_ends_the_run_and_says_so(
    pool: Pool, learner: Learner
) -> None:
    start(pool, wrong_shape="true")
    start_env_worker(pool, learner, 0)
    child = pool.launcher.children["env-0"]
    assert child.process.wait(20) == 1
    child.reader.join()
    words = "\n".join(child.last_lines)
    assert "the reward model returned rewards of shape [3, 2] for 3 transitions; expected [3]" in words


def test_rewards_that_fail_do_not_keep_an_env_worker_from_closing_what_it_has_open(
    pool: Pool, learner: Learner
) -> None:
    start(pool, wrong_shape="true")
    overrides = [*env_overrides(pool, learner), "env.pipeline_stages=2"]
    worker = EnvWorker(config.load(None, overrides), "train", 0, StopSignal())
    with pytest.raises(PolicyError, match=r"^env-0: .*the reward model returned rewards of shape"):
        worker.run()
    wait_for(lambda: pool.status()["clients"] == [], "the goodbye")


def test_rewards_that_nobody_gives_end_the_run_within_their_time_limit(
    pool: Pool, learner: Learner
) -> None:
    start(pool, rewards=0)
    start_env_worker(pool, learner, 0, "reward.timeout_s=2")
    child = pool.launcher.children["env-0"]
    assert child.process.wait(20) == 1
    child.reader.join()
    assert "no rollout worker serves" in "\n".join(child.last_lines)
