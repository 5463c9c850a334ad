"""EnvPool: rows that are stepped in threads, and answers with whatever is ready."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from conftest import Pool
from env.test_worker import env_worker

from zmqrl.config import EnvConfig, EnvModeConfig
from zmqrl.env.adapters import ShardEnv
from zmqrl.env.making import make_shard
from zmqrl.errors import ConfigError, EnvironmentFailure

pytest.importorskip("envpool", reason="EnvPool is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CARTPOLE = (
    "env.factory=envpool:make_gymnasium",
    "env.vectorization=batched",
    "env.kwargs={task_id: CartPole-v1, batch_size: 2, num_threads: 2}",
)


def shard_of(
    seed_of: Any = lambda row: None,
    eval_section: dict[str, Any] | None = None,
    num_envs: int = 6,
    **kwargs: Any,
) -> ShardEnv:
    config = EnvConfig(
        factory="envpool:make_gymnasium",
        vectorization="batched",
        kwargs={"task_id": "CartPole-v1", "num_threads": 2, **kwargs},
        eval=EnvModeConfig(**(eval_section or {})),
    )
    return make_shard(config, "eval", num_envs, seed_of)


def play(shard: ShardEnv, transitions: int) -> dict[int, list[list[float]]]:
    """The first transitions of each row: observation, reward and the end; every action is 1."""
    observation = shard.reset()
    last = dict(zip(shard.rows.tolist(), observation, strict=True))
    seen: dict[int, list[list[float]]] = {row: [] for row in range(shard.num_envs)}
    while min(map(len, seen.values())) < transitions:
        step = shard.step(np.ones(len(shard.rows), np.int64))
        for place, row in enumerate(step.rows.tolist()):
            if step.valid[place]:
                final = step.terminated[place] or step.truncated[place]
                seen[row].append([*last[row], step.reward[place], final])
            last[row] = step.observation[place]
    shard.close()
    return {row: list(map(list, rows[:transitions])) for row, rows in seen.items()}


def test_an_answer_is_about_the_rows_that_are_ready() -> None:
    shard = shard_of(batch_size=2)
    assert shard.answers_in_parts
    assert shard.reset().shape == (2, 4)
    seen = set()
    for _ in range(40):
        step = shard.step(np.zeros(2, np.int64))
        assert step.rows.shape == step.reward.shape == (2,)
        assert (shard.rows == step.rows).all()
        seen.update(step.rows.tolist())
    assert seen == set(range(6))
    shard.close()


def test_parts_and_whole_answers_are_the_same_transitions() -> None:
    parts, whole = (play(shard_of(seed_of=lambda row: 5, batch_size=size), 40) for size in (2, 6))
    assert parts == whole
    # Every action is 1, so that an episode is short, and there are some in each row.
    assert all(sum(transition[-1] for transition in rows) > 2 for rows in whole.values())


def test_whole_answers_have_the_rows_in_order_as_trajectories_need_them() -> None:
    shard = shard_of()
    assert not shard.answers_in_parts
    shard.reset()
    for _ in range(300):
        assert shard.step(np.ones(6, np.int64)).rows.tolist() == [0, 1, 2, 3, 4, 5]
    shard.close()


def test_the_step_that_resets_a_row_is_no_transition() -> None:
    for rows in play(shard_of(), 60).values():
        for before, after in itertools.pairwise(rows):
            if before[-1]:
                assert abs(after[0]) < 0.05  # where CartPole begins
            else:
                assert abs(after[0] - before[0]) < 0.1


def test_without_a_seed_two_pools_are_not_alike() -> None:
    assert play(shard_of(), 5) != play(shard_of(), 5)


def test_envs_play_their_episodes_whichever_are_ready(pool: Pool) -> None:
    pool.start(policy="Balance", damping=0)
    common = ["env.eval={total_num_envs: 6, rollout_epoch: 3, use_fixed_reset_state_ids: true, seed: 4}"]
    alone = env_worker(pool, *CARTPOLE, *common)
    assert alone.run()
    episodes = {(e.env, e.number): e.length for e in alone.reporter.episodes}
    assert sorted(episodes) == [(env, number) for env in range(6) for number in range(3)]
    shared = {}
    for rank in range(2):
        worker = env_worker(pool, *CARTPOLE, *common, "cluster.component_placement.env=0-1", rank=rank)
        assert worker.run()
        shared.update({(e.env, e.number): e.length for e in worker.reporter.episodes})
    assert shared == episodes
    assert len(set(episodes.values())) > 3


def test_pixels_of_pong_reach_the_policy(pool: Pool) -> None:
    pool.start(policy="Noop")
    worker = env_worker(
        pool,
        "env.factory=envpool:make_gymnasium",
        "env.vectorization=batched",
        "env.kwargs={task_id: Pong-v5, batch_size: 2, num_threads: 2, max_episode_steps: 60}",
        "env.eval={total_num_envs: 4, rollout_epoch: 2}",
    )
    assert worker.run()
    assert sorted((e.env, e.number) for e in worker.reporter.episodes) == [
        (env, number) for env in range(4) for number in range(2)
    ]


def test_training_needs_whole_answers(pool: Pool) -> None:
    pool.start(policy="Balance")
    learning = ("algorithm.name=sac", "env.train.total_num_envs=4")
    with pytest.raises(ConfigError, match=r"let its batch_size be its num_envs"):
        env_worker(pool, *CARTPOLE, *learning, mode="train")


def test_an_own_factory_hands_the_seed_on(tmp_path: Any) -> None:
    (tmp_path / "pools.py").write_text(
        "import envpool\n"
        "def seeded(num_envs, seed):\n"
        "    return envpool.make_gymnasium('CartPole-v1', num_envs=num_envs, seed=seed)\n"
        "def unseeded(num_envs):\n"
        "    return envpool.make_gymnasium('CartPole-v1', num_envs=num_envs)\n"
    )
    first = []
    for _ in range(2):
        config = EnvConfig(factory=f"{tmp_path}/pools.py:seeded")
        shard = make_shard(config, "eval", 3, lambda row: 9)
        first.append(shard.reset())
        shard.close()
    assert (first[0] == first[1]).all()
    shard = make_shard(EnvConfig(factory=f"{tmp_path}/pools.py:unseeded"), "eval", 3, lambda row: 9)
    with pytest.raises(ConfigError, match=r"give the factory an argument seed"):
        shard.reset()
    shard.close()


def test_a_policy_keeps_the_memories_of_the_rows_apart(pool: Pool) -> None:
    pool.start(policy="Continues")
    worker = env_worker(pool, *CARTPOLE, "env.eval={total_num_envs: 6, rollout_epoch: 5}")
    assert worker.run()
    assert len(worker.reporter.episodes) == 30


def test_an_action_that_is_refused_is_named_with_its_row_of_the_pool() -> None:
    shard = shard_of(batch_size=2)
    shard.reset()
    while shard.rows[1] < 2:
        shard.step(np.zeros(2, np.int64))
    words = rf"the action is 9 in row {shard.rows[1]}, which is not in Discrete"
    with pytest.raises(EnvironmentFailure, match=words):
        shard.step(np.array([0, 9]))
    shard.close()


def test_lost_states_begin_all_rows_of_a_pool_again(pool: Pool) -> None:
    """The policy raises if a row goes on from a state that is not its own."""
    pool.start_broker("rollout.affinity=sticky")
    pool.start_worker(0, "Continues", overrides=("rollout.affinity=sticky",))
    worker = env_worker(pool, *CARTPOLE, "env.eval={total_num_envs: 6, rollout_epoch: 40}")
    step, replaced = worker._stages[0].shard.step, []

    def and_lose_the_states(actions: Any) -> Any:
        if not replaced and len(worker.reporter.episodes) > 20:
            replaced.append(len(worker.reporter.episodes))
            pool.kill("rollout-0")
            pool.start_worker(1, "Continues", overrides=("rollout.affinity=sticky",))
        return step(actions)

    worker._stages[0].shard.step = and_lose_the_states  # type: ignore[method-assign]
    assert worker.run()
    assert replaced
    assert 0 < worker.report.totals.state_lost <= 6
    played = sorted((e.env, e.number) for e in worker.reporter.episodes)
    assert played == [(env, number) for env in range(6) for number in range(40)]
    assert all(e.length == e.total_return for e in worker.reporter.episodes)
    assert pool.counters()["errors"] <= 1  # that of the states
