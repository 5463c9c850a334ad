"""Chunks of actions through a real pool: a policy, an env worker, and what a learner gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chunk_policies import step_action
from conftest import TESTS, Pool, wait_for

from zmqrl import config
from zmqrl.env.worker import EnvWorker
from zmqrl.errors import EnvironmentFailure
from zmqrl.learner.port import Learner
from zmqrl.process import StopSignal
from zmqrl.spaces import Spaces
from zmqrl.telemetry.report import Episode
from zmqrl.trajectory import Trajectory

LINE = f"env.factory={TESTS / 'training_sims.py'}:make"
"""The reward of a step is its action; an episode has 8 steps, which are counted in the observation."""


@pytest.fixture
def planners(folder: Path) -> Iterator[Pool]:
    pool = Pool(folder, TESTS / "chunk_policies.py", "Planned")
    yield pool
    pool.close()


def chunks_of(size: int, sub_steps: int) -> list[str]:
    return [f"env.num_action_chunks={size}", f"env.replan_every={sub_steps}"] if size else []


def evaluated(pool: Pool, *overrides: str) -> tuple[list[Episode], EnvWorker]:
    loaded = config.load(None, [*pool.overrides, "cluster.component_placement.env=0-0", *overrides])
    worker = EnvWorker(loaded, "eval", 0, StopSignal())
    assert worker.run()
    episodes = worker.reporter.episodes
    return sorted(episodes, key=lambda e: (e.env, e.number)), worker


def collected(pool: Pool, trajectories: int, *overrides: str) -> tuple[list[Trajectory], Spaces]:
    """What a learner gets from an env worker in this process."""
    endpoint = f"ipc://{pool.folder}/learner"
    with Learner(endpoint) as port:
        loaded = config.load(
            None,
            [
                *pool.overrides,
                "cluster.component_placement.env=0-0",
                f"actor.endpoint={endpoint}",
                *overrides,
            ],
        )
        stop = StopSignal()
        worker = EnvWorker(loaded, "train", 0, stop)
        failure: list[BaseException] = []

        def run() -> None:
            try:
                worker.run()
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        made: list[Trajectory] = []

        def enough() -> bool:
            made.extend(port.receive(0.1))
            return len(made) >= trajectories or bool(failure)

        try:
            port.publish({})
            wait_for(enough, "trajectories", 40)
            spaces = port.wait_for_spaces(1.0)
        finally:
            stop.reason = "SIGTERM"
            thread.join()
    assert failure == []
    assert spaces is not None
    return made[:trajectories], spaces


def flat(trajectories: list[Trajectory], row: int) -> list[float]:
    """The rewards of one row, one after another, of all that were steps."""
    found: list[float] = []
    for each in trajectories:
        rewards = each.reward[:, row].reshape(-1)
        found += rewards[each.valid[:, row].reshape(-1)].tolist()
    return found


@pytest.mark.parametrize(("size", "sub_steps"), [(4, 1), (4, 3), (5, 5)])
def test_an_evaluation_in_chunks_is_that_of_single_actions(
    planners: Pool, size: int, sub_steps: int
) -> None:
    planners.start(chunk=size)
    episodes, worker = evaluated(
        planners, LINE, *chunks_of(size, sub_steps), "env.eval={total_num_envs: 3, rollout_epoch: 2}"
    )
    rewards = step_action(np.arange(8)).astype(np.float64)
    assert [(e.env, e.number) for e in episodes] == [(i, k) for i in range(3) for k in range(2)]
    for episode in episodes:
        assert episode.length == 8
        assert episode.total_return == pytest.approx(rewards.sum(), abs=1e-12)
    totals = worker.report.totals
    assert totals.env_steps == 3 * 2 * 8
    assert totals.shard_steps == 2 * -(-8 // sub_steps)
    assert planners.counters()["answered"] == totals.shard_steps


def test_replanning_at_each_step_plays_cartpole_as_single_actions_do(planners: Pool) -> None:
    planners.start_broker()
    planners.start_worker(0, "First", world_size=1)
    seeds = "env.eval={total_num_envs: 3, rollout_epoch: 2, use_fixed_reset_state_ids: true}"
    plain, _ = evaluated(planners, "env.id=CartPole-v1", seeds)
    planners.kill("rollout-0")
    planners.start_worker(0, "First", world_size=1, chunk=4)
    chunked, _ = evaluated(planners, "env.id=CartPole-v1", seeds, *chunks_of(4, 1))
    assert chunked == plain
    assert len({episode.length for episode in plain}) > 1


def test_a_policy_with_memory_is_told_of_resets_at_the_end_of_a_chunk(planners: Pool) -> None:
    planners.start(policy="Remembers", chunk=3)
    episodes, _ = evaluated(
        planners,
        f"env.factory={TESTS / 'sims.py'}:make",
        "env.kwargs.length=7",
        "env.num_action_chunks=3",
        "env.eval={total_num_envs: 3, rollout_epoch: 3}",
    )
    assert [episode.length for episode in episodes] == [7] * 9
    assert all(episode.success_at_end for episode in episodes)


def test_fetch_reach_plays_its_fifty_steps_in_chunks_of_four(planners: Pool) -> None:
    pytest.importorskip("gymnasium_robotics")
    planners.start(policy="Hold", chunk=4, width=4)
    episodes, worker = evaluated(
        planners,
        "env.id=gymnasium_robotics:FetchReachDense-v4",
        "env.num_action_chunks=4",
        "env.eval={total_num_envs: 2, rollout_epoch: 1}",
    )
    assert [episode.length for episode in episodes] == [50, 50]
    assert worker.report.totals.env_steps == 100
    assert worker.report.totals.shard_steps == 13


@pytest.mark.parametrize(("size", "sub_steps"), [(3, 1), (4, 3), (5, 5)])
def test_a_learner_gets_a_reward_for_each_sub_step(planners: Pool, size: int, sub_steps: int) -> None:
    planners.start(chunk=size)
    made, spaces = collected(
        planners,
        3,
        LINE,
        *chunks_of(size, sub_steps),
        "env.train={total_num_envs: 2, max_steps_per_rollout_epoch: 12}",
    )
    assert (spaces.action.kind, spaces.action.shape) == ("box", (size, 1))
    steps = -(-12 // sub_steps)
    expected = step_action(np.arange(8)).tolist()
    for row in range(2):
        rewards = flat(made, row)
        assert rewards == [expected[at % 8] for at in range(len(rewards))]
    for each in made:
        assert each.reward.shape == each.valid.shape == (steps, 2, sub_steps)
        assert each.actions.shape == (steps, 2, size, 1)
        assert each.terminated.shape == (steps, 2)
        # What is acted on next, by the number of steps that have been made of the episode.
        acted_on, led_to = each.observation[..., 0], each.next_observation()[..., 0]
        assert np.array_equal(led_to - acted_on, each.sub_steps)
        assert np.array_equal(each.truncated, led_to == 8)
        assert each.env_steps == each.sub_steps.sum() == each.valid.sum()


def test_without_chunks_trajectories_are_what_they_were(planners: Pool) -> None:
    planners.start()
    made, _ = collected(planners, 1, LINE, "env.train={total_num_envs: 2}")
    assert made[0].reward.shape == made[0].valid.shape == (16, 2)
    assert (made[0].sub_steps == 1).all()


def test_a_reward_model_judges_a_chunk_as_a_whole(planners: Pool) -> None:
    planners.start(chunk=3)
    planners.launcher.start(
        "reward-0",
        [
            "start-reward-worker",
            *planners.overrides,
            f"--model={TESTS / 'chunk_policies.py'}:Judge",
        ],
    )
    made, _ = collected(
        planners,
        1,
        LINE,
        "env.num_action_chunks=3",
        f"reward={{use_reward_model: true, model: '{TESTS / 'chunk_policies.py'}:Judge'}}",
        "env.train={total_num_envs: 2, max_steps_per_rollout_epoch: 9}",
    )
    # An episode of 8 steps: two whole chunks, and one of two sub-steps.
    for row in range(2):
        assert made[0].reward[:, row].tolist() == [[0, 0, 33], [0, 0, 63], [0, 83, 0]]


def test_each_sub_step_is_delayed_as_one_step_is(planners: Pool) -> None:
    planners.start(chunk=5)
    _, worker = evaluated(
        planners,
        LINE,
        "env.num_action_chunks=5",
        "env.eval.total_num_envs=1",
        "env.delay_sampler={type: constant, delay: 0.1}",
    )
    # Of the reset, and of the eight steps of an episode that ends within the second chunk.
    assert 0.9 <= worker.report.totals.delay_s < 1.1


def test_a_worker_that_is_stopped_does_not_carry_its_chunk_out(planners: Pool) -> None:
    planners.start(chunk=500)
    slow = [LINE, "env.kwargs={length: 1000, seconds: 0.1}", "env.num_action_chunks=500"]
    overrides = [*planners.overrides, "cluster.component_placement.env=0-0", *slow]
    stop = StopSignal()
    worker = EnvWorker(config.load(None, overrides), "eval", 0, stop)
    env = worker._stages[0].shard.vector_env.envs[0].unwrapped  # type: ignore[attr-defined]
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(worker.run()))
    thread.start()
    wait_for(lambda: env.steps > 0, "the first step")
    stop.reason = "SIGTERM"
    thread.join()
    assert ended == [False]
    assert env.steps < 500


def test_an_error_names_the_stage_of_its_row(planners: Pool) -> None:
    planners.start(chunk=3)
    stages = "env.pipeline_stages=2", "env.eval.total_num_envs=2"
    with pytest.raises(EnvironmentFailure, match=r"^eval-0: .*make \(stage 0\) cannot take"):
        evaluated(planners, LINE, "env.num_action_chunks=4", *stages)


def test_a_policy_whose_chunk_is_too_short_ends_the_worker_with_both_lengths(planners: Pool) -> None:
    planners.start(chunk=3)
    with pytest.raises(EnvironmentFailure, match=r"^eval-0: .*chunks: 4.*\(1, 4, 1\).*\(1, 3, 1\)"):
        evaluated(planners, LINE, "env.num_action_chunks=4")


def test_a_reward_that_is_no_number_is_told_with_its_row(
    planners: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    planners.start(chunk=4)
    evaluated(planners, LINE, "env.num_action_chunks=4", "env.kwargs={nan_at: 3, what: reward}")
    assert "reward is nan in row 0" in caplog.text
