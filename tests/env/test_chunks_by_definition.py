"""Chunks of actions in a pool, held against the same episodes played by the definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TESTS, Pool
from dice_sims import Chunk, episode
from test_chunks_in_a_pool import collected, evaluated

from zmqrl.trajectory import Trajectory

SIM = [
    f"env.factory={TESTS / 'dice_sims.py'}:make",
    "env.info_keys=[told, say]",
    "env.task_description=throw",
    "env.delay_sampler={type: uniform, low: 0, high: 0.001}",
]


@pytest.fixture
def planners(folder: Path) -> Iterator[Pool]:
    pool = Pool(folder, TESTS / "dice_sims.py", "Planner")
    yield pool
    pool.close()


def chunks_of(env: int, envs: int, size: int, sub_steps: int, count: int) -> list[Chunk]:
    """The first `count` chunks of an env, over all of its episodes."""
    made: list[Chunk] = []
    number = 0
    while len(made) < count:
        made += episode(env + number * envs, size, sub_steps)
        number += 1
    return made[:count]


CASES = pytest.mark.parametrize(
    ("size", "sub_steps", "vectorization", "stages"),
    [
        (4, 1, "sync", 1),
        pytest.param(4, 3, "async", 2, marks=pytest.mark.slow),
        pytest.param(6, 6, "sync", 2, marks=pytest.mark.slow),
    ],
)


def options(size: int, sub_steps: int, vectorization: str, stages: int) -> list[str]:
    return [
        f"env.num_action_chunks={size}",
        f"env.replan_every={sub_steps}",
        f"env.vectorization={vectorization}",
        f"env.pipeline_stages={stages}",
    ]


@CASES
def test_the_episodes_of_an_evaluation_are_those_of_the_definition(
    planners: Pool, size: int, sub_steps: int, vectorization: str, stages: int
) -> None:
    planners.start(chunk=size)
    found, _ = evaluated(
        planners,
        *SIM,
        *options(size, sub_steps, vectorization, stages),
        "env.eval={total_num_envs: 5, rollout_epoch: 4, use_fixed_reset_state_ids: true}",
    )
    assert [(e.env, e.number) for e in found] == [(i, k) for i in range(5) for k in range(4)]
    for each in found:
        chunks = episode(each.env + 5 * each.number, size, sub_steps)
        assert each.length == sum(len(chunk.rewards) for chunk in chunks)
        assert each.total_return == sum(sum(chunk.rewards) for chunk in chunks)
        assert each.success_at_end == chunks[-1].success
        assert each.success_once == any(chunk.succeeded for chunk in chunks)
    assert len({(e.success_once, e.success_at_end) for e in found}) == 3


@CASES
def test_the_trajectories_of_a_training_are_those_of_the_definition(
    planners: Pool, size: int, sub_steps: int, vectorization: str, stages: int
) -> None:
    planners.start(chunk=size)
    made, _ = collected(
        planners,
        6,
        *SIM,
        *options(size, sub_steps, vectorization, stages),
        "env.train={total_num_envs: 5, max_steps_per_rollout_epoch: 20}",
        "env.train.use_fixed_reset_state_ids=true",
    )
    by_first_env: dict[int, list[Trajectory]] = {}
    for each in made:
        by_first_env.setdefault(int(each.observation["seed"][0, 0]) % 5, []).append(each)
    assert len(by_first_env) == stages
    for first, trajectories in by_first_env.items():
        steps, rows, _ = trajectories[0].reward.shape
        assert steps == -(-20 // sub_steps)
        for row in range(rows):
            expected = chunks_of(first + row, 5, size, sub_steps, steps * len(trajectories))
            for number, each in enumerate(trajectories):
                compare(each, row, expected[number * steps :][:steps], sub_steps)


def compare(made: Trajectory, row: int, expected: list[Chunk], sub_steps: int) -> None:
    following = made.next_observation()
    for step, chunk in enumerate(expected):
        same(made.observation, step, row, chunk.acted_on)
        same(following, step, row, chunk.led_to)
        assert np.array_equal(made.actions[step, row], chunk.actions)
        count = len(chunk.rewards)
        rest = sub_steps - count
        assert made.valid[step, row].tolist() == [True] * count + [False] * rest
        assert made.reward[step, row].tolist() == chunk.rewards + [0.0] * rest
        assert made.terminated[step, row] == chunk.terminated
        assert made.truncated[step, row] == chunk.truncated
        assert made.sub_steps[step, row] == count


def same(tree: Any, step: int, row: int, expected: dict[str, Any]) -> None:
    assert tree["seed"][step, row] == expected["seed"]
    assert np.array_equal(tree["now"][step, row], expected["now"])
    assert tree["told"][step, row] == expected["told"]
    assert tree["say"][step][row] == expected["say"]
    assert tree["task_descriptions"][step][row] == "throw"
