"""All ways to begin the next episode give the same transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import TESTS
from gymnasium import spaces
from odd_sims import same

from zmqrl.config import EnvConfig, EnvModeConfig
from zmqrl.env.adapters import ShardEnv
from zmqrl.env.making import make_shard

SIMS = TESTS / "odd_sims.py"
MODES = ("disabled", "next_step", "same_step")


def row_of(tree: Any, row: int) -> Any:
    return {k: row_of(v, row) for k, v in tree.items()} if isinstance(tree, dict) else tree[row]


def transitions(shard: ShardEnv, steps: int) -> list[list[Any]]:
    """Of each row the valid ones, with the seed that the actions of a row are drawn by."""
    rows = shard.num_envs
    seen: list[list[Any]] = [[] for _ in range(rows)]
    randoms = [np.random.default_rng(row) for row in range(rows)]

    def one(row: int) -> Any:
        space = shard.single_action_space
        if isinstance(space, spaces.Discrete):
            return randoms[row].integers(space.n)
        return randoms[row].uniform(space.low, space.high).astype(np.float32)

    actions = [one(row) for row in range(rows)]
    observation = shard.reset()
    while min(map(len, seen)) < steps:
        step = shard.step(np.array(actions))
        for row in np.flatnonzero(step.valid):
            done = bool(step.terminated[row] or step.truncated[row])
            after = step.final_observation if done else step.observation
            seen[row].append(
                (
                    row_of(observation, row),
                    actions[row],
                    step.reward[row],
                    (bool(step.terminated[row]), bool(step.truncated[row])),
                    row_of(after, row),
                )
            )
            # A reset row takes no action: the next one is drawn only after a transition.
            actions[row] = one(int(row))
        observation = step.observation
    return [of_row[:steps] for of_row in seen]


@pytest.mark.parametrize(
    ("simulator", "limit", "steps"),
    [
        ({"id": "CartPole-v1"}, 17, 90),
        pytest.param({"id": "gymnasium_robotics:FetchReach-v4"}, 6, 20, marks=pytest.mark.slow),
        pytest.param({"factory": f"{SIMS}:LongTail"}, None, 120, marks=pytest.mark.slow),
    ],
    ids=["CartPole", "FetchReach", "LongTail"],
)
def test_all_autoreset_modes_give_the_same_transitions_bit_for_bit(
    simulator: dict[str, str], limit: int | None, steps: int
) -> None:
    limits = EnvModeConfig(max_episode_steps=limit)
    reference: list[list[Any]] | None = None
    for vectorization in ("sync", "async"):
        for mode in MODES:
            section = EnvConfig(
                **simulator, vectorization=vectorization, autoreset_mode=mode, train=limits
            )
            first = set(range(3))

            def seed_of(row: int, first: set[int] = first) -> int | None:
                if row in first:
                    first.remove(row)
                    return 100 + row
                return None

            shard = make_shard(section, "train", 3, seed_of)
            found = transitions(shard, steps)
            shard.close()
            reference = reference or found
            for mine, theirs in zip(found, reference, strict=True):
                assert same(mine, theirs), f"{vectorization} {mode}"
    assert reference is not None
    assert any(any(transition[3]) for row in reference for transition in row), "no episode ended"
