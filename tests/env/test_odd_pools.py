"""Unusual spaces, and what goes wrong, in whole pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TESTS, Pool
from odd_shards import BOTH
from odd_sims import same
from runner.evaluation import Run

from zmqrl import config
from zmqrl.config import EnvConfig
from zmqrl.env.making import make_shard
from zmqrl.env.worker import EnvWorker
from zmqrl.errors import EnvironmentFailure, PolicyError
from zmqrl.process import StopSignal

SIMS = TESTS / "odd_sims.py"


def env_worker(pool: Pool, simulator: str, *overrides: str) -> EnvWorker:
    loaded = config.load(
        None,
        [
            *pool.overrides,
            "cluster.component_placement.env=0-0",
            f"env.factory={SIMS}:{simulator}",
            *overrides,
        ],
    )
    return EnvWorker(loaded, "eval", 0, StopSignal())


def start(pool: Pool, policy: str, **kwargs: Any) -> None:
    pool.start_broker()
    words = [f"rollout.policy_kwargs.{key}={value}" for key, value in kwargs.items()]
    pool.launcher.start(
        "rollout-0",
        ["start-rollout-worker", *pool.overrides, f"--policy={SIMS}:{policy}", *words],
    )
    pool.wait_for_workers(1)


@BOTH
def test_every_kind_of_space_survives_the_way_to_the_policy_and_back(
    pool: Pool, vectorization: str
) -> None:
    start(pool, "gives_what_is_asked_for")
    worker = env_worker(
        pool,
        "Asks",
        f"env.vectorization={vectorization}",
        "env.eval={total_num_envs: 3, rollout_epoch: 2, use_fixed_reset_state_ids: true}",
    )
    assert worker.run()
    assert [episode.total_return for episode in worker.reporter.episodes] == [6.0] * 6


def test_an_observation_of_every_kind_of_space_comes_back_as_it_was(pool: Pool) -> None:
    pool.start(policy="Mirror")
    shard = make_shard(EnvConfig(factory=f"{SIMS}:Asks"), "eval", 3, lambda row: row)
    client = pool.client(mode="eval")
    observation = shard.reset()
    for _ in range(8):
        reply = client.infer(observation)
        del reply["actions"]
        assert same(reply, observation)
        step = shard.step(reply["wanted"])
        assert step.reward.tolist() == [1, 1, 1]
        observation = step.observation
    shard.close()


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        ({"forgets": "grip"}, EnvironmentFailure, r"eval-0: .*the policy gave no 'grip' .in any row."),
        ({"forgets": "actions"}, PolicyError, "eval-0: .*no 'actions'; its dict has 'action'"),
        ({"far": True}, EnvironmentFailure, r"eval-0: .*action 'grip'\[1\] is 2.0 in row 1, outside"),
    ],
)
def test_what_a_policy_does_wrong_is_named_with_worker_row_and_key(
    pool: Pool, policy: dict[str, Any], error: type[Exception], words: str
) -> None:
    start(pool, "moves", **policy)
    with pytest.raises(error, match=f"(?s){words}"):
        env_worker(pool, "odd", "env.eval.total_num_envs=2").run()


def test_clipped_actions_go_on(pool: Pool) -> None:
    start(pool, "moves", far=True)
    assert env_worker(pool, "odd", "env.eval.total_num_envs=2", "env.clip_actions=true").run()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["env.kwargs.what=wider"],
            r"eval-0: .*odd failed in step: row 0: observation.x is float32",
        ),
        (["env.vectorization=async", "env.kwargs.what=raises"], "row 0: ArithmeticError: it exploded"),
        (["env.kwargs.what=exits"], r"eval-0: .*odd failed in step: row 0: SystemExit: 3"),
        (["rollout.policy_kwargs.forgets=grip"], "eval-0: .*odd cannot take the actions: the policy"),
        (["rollout.policy_kwargs.forgets=actions"], "eval-0: .*no 'actions'; its dict has 'action'"),
    ],
)
def test_an_evaluation_ends_with_one_readable_line(
    folder: Path, overrides: list[str], words: str
) -> None:
    run = Run(
        folder,
        f"env.factory={SIMS}:odd",
        "cluster.component_placement={env: '0', rollout: '0'}",
        "cluster.max_restarts=0",
        "env.eval.total_num_envs=1",
        *overrides,
        policy=f"rollout.policy={SIMS}:moves",
    )
    assert run.wait() == 1, run.text()
    last = run.text().splitlines()[-1]
    assert last.startswith("error: "), run.text()
    for part in words.split(".*"):
        assert part in last, run.text()
