"""The policy that draws actions at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Pool
from env.test_worker import env_worker
from gymnasium import spaces

from zmqrl.random_policy import RandomPolicy

ROWS = np.ones(50, np.bool_)


def row(tree: Any, number: int) -> Any:
    if isinstance(tree, dict):
        return {key: row(part, number) for key, part in tree.items()}
    return tuple(row(part, number) for part in tree) if isinstance(tree, list) else tree[number]


@pytest.mark.parametrize(
    ("actions", "space"),
    [
        ({"n": 3}, spaces.Discrete(3)),
        ({"shape": [2], "low": [-1, 0], "high": 1}, spaces.Box(np.array([-1, 0]), 1, (2,), np.float32)),
        (
            {"shape": [2], "low": 0, "high": [1, 4], "dtype": "int64"},
            spaces.MultiDiscrete([2, 5]),
        ),
        (
            {"arm": {"shape": [6], "low": -2, "high": -1}, "hands": [{"n": 2}, {"n": 4}]},
            spaces.Dict(
                arm=spaces.Box(-2, -1, (6,)),
                hands=spaces.Tuple([spaces.Discrete(2), spaces.Discrete(4)]),
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*precision lowered")
def test_each_row_is_an_action_of_the_space(actions: Any, space: spaces.Space[Any]) -> None:
    drawn = RandomPolicy(actions).infer(None, ROWS)["actions"]
    assert all(space.contains(row(drawn, number)) for number in range(len(ROWS)))
    assert not all(str(row(drawn, 0)) == str(row(drawn, number)) for number in range(len(ROWS)))


def test_the_seed_decides_unless_there_is_none() -> None:
    def draw(seed: int | None) -> list[float]:
        actions = {"shape": [1], "low": 0, "high": 1}
        return list(RandomPolicy(actions, seed).infer(None, ROWS)["actions"][:, 0])

    assert draw(3) == draw(3) != draw(4)
    assert draw(None) != draw(None)


@pytest.mark.parametrize("actions", [None, "Discrete(2)", {"shape": [2]}, {"arm": 3}])
def test_what_cannot_be_drawn_is_refused_at_once(actions: Any) -> None:
    with pytest.raises((TypeError, KeyError)):
        RandomPolicy(actions)


def test_a_run_of_one_env_worker_repeats(pool: Pool) -> None:
    pool.start_broker()
    returns = []
    for number in range(2):
        kwargs = "rollout.policy_kwargs={actions: {shape: [1], low: -2, high: 2}}"
        policy = ["--policy=zmqrl.random_policy:RandomPolicy", kwargs]
        pool.launcher.start(f"rollout-{number}", ["start-rollout-worker", *pool.overrides, *policy])
        pool.wait_for_workers(1)
        worker = env_worker(
            pool,
            "env.id=Pendulum-v1",
            "env.eval={total_num_envs: 3, max_episode_steps: 20, use_fixed_reset_state_ids: true}",
        )
        assert worker.run()
        returns.append([episode.total_return for episode in worker.reporter.episodes])
        pool.terminate(f"rollout-{number}")
        pool.wait_for_exit(f"rollout-{number}")
    assert returns[0] == returns[1]
