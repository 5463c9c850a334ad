"""Simulators that step many rows of tensors in one call."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from batched_sims import Partial, WithFinal
from conftest import TESTS, Pool
from env.test_worker import env_worker

from zmqrl.config import EnvConfig
from zmqrl.env.batched import BatchedEnv
from zmqrl.env.making import make_shard
from zmqrl.errors import ConfigError, EnvironmentFailure

SIMS = f"{TESTS / 'batched_sims.py'}"


def shard_of(name, num_envs=3, seed_of=lambda row: None, **config):
    return make_shard(EnvConfig(factory=f"{SIMS}:{name}", **config), "eval", num_envs, seed_of)


def act(rows=3):
    return np.zeros(rows, np.int64)


def test_finished_rows_are_reset_and_the_others_go_on():
    shard = shard_of("Partial")
    assert shard.autoreset_mode is gymnasium.vector.AutoresetMode.DISABLED
    shard.reset()
    steps = [shard.step(act()) for _ in range(5)]
    assert [step.terminated.tolist() for step in steps[:4]] == [
        [False, False, False],
        [False, False, False],
        [True, False, False],
        [False, True, False],
    ]
    assert steps[2].final_observation[:, 0].tolist() == [3, 3, 3]
    assert steps[2].observation.tolist() == [[0, 2], [3, 1], [3, 1]]
    assert steps[3].observation.tolist() == [[1, 2], [0, 2], [4, 1]]
    assert steps[2].success.tolist() == [True, False, False]
    # It rewrites its one tensor; what it gave before stays.
    assert steps[0].observation[:, 0].tolist() == [1, 1, 1]


def test_rewards_and_dones_may_be_of_any_type_and_have_an_axis_too_many():
    shard = shard_of("Partial", kwargs={"limit": 2})
    shard.reset()
    shard.step(act())
    step = shard.step(act())
    assert step.reward.tolist() == [2, 2, 2]
    assert step.reward.dtype == np.float64
    assert step.truncated.tolist() == [True, True, True]
    assert not step.terminated.any()


def test_nested_observations_and_text_are_merged_row_by_row():
    shard = shard_of("Partial", kwargs={"nested": True})
    shard.reset()
    for _ in range(3):
        step = shard.step(act())
    assert step.observation["deep"]["half"].tolist() == [[0, 2], [3, 1], [3, 1]]
    assert step.observation["task"] == ["go"] * 3


def test_a_simulator_may_take_a_mask_and_return_the_rows_that_it_has_reset():
    shard = shard_of("ByMask")
    shard.reset()
    for _ in range(3):
        step = shard.step(act())
    assert step.observation.tolist() == [[0, 2], [3, 1], [3, 1]]


def test_seeded_rows_are_reset_one_by_one_so_that_each_depends_on_its_own_seed():
    shard = shard_of("Partial", seed_of=lambda row: 70 + row)
    assert shard.reset()[:, 1].tolist() == [70, 71, 72]
    for _ in range(3):
        step = shard.step(act())
    assert step.observation.tolist() == [[0, 70], [3, 71], [3, 72]]


def test_the_first_reset_is_seeded_because_some_begin_alike_in_every_process():
    env = BatchedEnv(sim := Partial(2), 2)
    env.reset()
    env.reset()
    assert isinstance(sim.seeds[0], int)
    assert sim.seeds[1] is None


def test_a_simulator_of_the_isaac_family_resets_by_itself(caplog):
    shard = shard_of("Rolling", kwargs={"limit": 4})
    assert shard.autoreset_mode is gymnasium.vector.AutoresetMode.SAME_STEP
    assert shard.single_action_space.shape == (2,)
    shard.reset()
    for _ in range(3):
        step = shard.step(np.zeros((3, 2), np.float32))
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([True, False, False], [False] * 3)
    assert step.observation.tolist() == [[0, 2], [3, 1], [3, 1]]
    # It does not say in what the episode ended.
    assert step.final_observation[0].tolist() == [2, 1]
    step = shard.step(np.zeros((3, 2), np.float32))
    assert step.truncated.tolist() == [False, False, True]
    assert [record.message for record in caplog.records] == [
        "Rolling resets by itself and gives no final_obs: the last observation before an episode's end "
        "stands in for it"
    ]


def test_a_simulator_that_resets_by_itself_may_hand_the_end_over():
    shard = shard_of("WithFinal")
    shard.reset()
    for _ in range(3):
        step = shard.step(act())
    assert step.final_observation[0].tolist() == [3, 1]
    assert step.observation.tolist() == [[0, 2], [3, 1], [3, 1]]
    assert step.success.tolist() == [True, False, False]


def test_actions_are_tensors_of_the_type_of_the_action_space():
    env = BatchedEnv(sim := WithFinal(3), 3)
    env.reset()
    env.step(act())
    assert str(sim.actions[0].dtype) == "torch.int64"


def test_a_factory_that_does_not_name_num_envs_is_told_to_make_all_rows():
    with pytest.raises(
        ConfigError, match=r"has many rows: give the factory an argument num_envs, or set"
    ):
        shard_of("partial_of_two", kwargs={"num_envs": 2})
    assert shard_of("partial_of_two", vectorization="batched").reset().shape == (3, 2)


def test_a_simulator_that_cannot_reset_single_rows_is_refused_unless_it_resets_by_itself():
    with pytest.raises(
        ConfigError, match=r"Unnamed cannot reset single rows: .*autoreset_mode to same_s"
    ):
        shard_of("Unnamed")
    shard = shard_of("Unnamed", autoreset_mode="same_step")
    shard.reset()
    assert not shard.step(np.zeros((3, 2), np.float32)).terminated.any()


def test_a_reset_that_does_not_heed_its_rows_is_warned_of(caplog):
    shard = shard_of("Careless")
    shard.reset()
    for _ in range(3):
        step = shard.step(act())
    assert step.observation[1:, 0].tolist() == [3, 3]
    assert "changed the observations of all others, too" in caplog.text


@pytest.mark.parametrize(("name", "warned"), [("Stays", True), ("Unnamed", False)])
def test_rows_that_stay_at_their_end_are_warned_of(name, warned, caplog):
    """Whether it resets by itself is believed: what can be seen is a row that ends time and again."""
    shard = shard_of(name, autoreset_mode="same_step")
    shard.reset()
    for _ in range(9):
        shard.step(np.zeros((3, 2), np.float32))
    said = [message for message in caplog.messages if "does it reset finished rows" in message]
    assert len(said) == warned
    if warned:
        assert "row 0 of Stays has ended an episode in 3 steps running, after a longer one" in said[0]


def test_episodes_of_one_step_are_nothing_to_warn_of(caplog):
    shard = shard_of("Stays", autoreset_mode="same_step", kwargs={"length": -9})
    shard.reset()
    for _ in range(9):
        assert shard.step(np.zeros((3, 2), np.float32)).terminated.all()
    assert "does it reset" not in caplog.text


ONE = {"state": [[0.0, 1.0]], "deep": {"half": [[0.0, 1.0]]}}


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        ({"reset": ONE}, r"single rows\.state is \[1, 2\], expected \[3, 2\], or just its 3 rows"),
        (
            {"reset": {"state": [[0.0] * 2] * 3}},
            "a reset of single rows has no 'deep'",
        ),
        ({"step": 3}, r"step returned no \(observation, reward, terminated, truncated, infos\)"),
    ],
)
def test_what_a_reset_or_step_gives_wrongly_is_named(gives, words):
    shard = shard_of("Gives", kwargs=gives)
    shard.reset()
    with pytest.raises(EnvironmentFailure, match=words):
        shard.step(act())


def test_another_number_of_rows_is_refused():
    with pytest.raises(ConfigError, match=r"Partial has num_envs=4, expected 3"):
        BatchedEnv(Partial(4), 3)


def test_time_limits_are_the_simulators_own_affair():
    with pytest.raises(ConfigError, match=r"env.eval.max_episode_steps needs single envs, but"):
        shard_of("Partial", eval={"max_episode_steps": 3})


@pytest.mark.parametrize("name", ["Partial", "WithFinal"])
def test_a_pool_evaluates_tensors_in_and_out(pool: Pool, name: str) -> None:
    pool.start(policy="Balance")
    worker = env_worker(
        pool, f"env.factory={SIMS}:{name}", "env.eval={total_num_envs: 3, rollout_epoch: 2}"
    )
    assert worker.run()
    lengths = sorted((e.env, e.number, e.length, e.success_at_end) for e in worker.reporter.episodes)
    assert lengths == [(env, number, 3 + env, True) for env in range(3) for number in range(2)]


def test_a_thunk_and_a_ready_vector_env_serve_too(pool: Pool) -> None:
    pool.start(policy="Balance")
    for name in ("thunk", "ready"):
        worker = env_worker(pool, f"env.factory={SIMS}:{name}", "env.eval.total_num_envs=2")
        assert worker.run()
        assert [episode.length for episode in worker.reporter.episodes] == [5, 5]


def test_a_ready_simulator_cannot_be_shared_by_two_pipeline_stages():
    with pytest.raises(ConfigError, match=r"ready is one simulator, which the 2 env.pipeline_stages"):
        shard_of("ready", num_envs=2, pipeline_stages=2)


def test_the_vector_env_that_an_id_is_registered_with_plays_whole_episodes(pool: Pool) -> None:
    pool.start(policy="Balance")
    worker = env_worker(
        pool,
        "env.id=CartPole-v1",
        "env.vectorization=vector_entry_point",
        "env.eval={total_num_envs: 4, rollout_epoch: 2, max_episode_steps: 30}",
    )
    assert worker.run()
    assert [episode.length for episode in worker.reporter.episodes] == [30] * 8


def test_infos_that_the_policy_wants_are_those_of_the_observation():
    shard = shard_of("Partial", info_keys=["half"])
    shard.reset()
    for _ in range(3):
        step = shard.step(act())
    assert step.observation["half"].tolist() == [0, 1.5, 1.5]
    assert step.final_observation["half"].tolist() == [1.5, 1.5, 1.5]


def test_what_it_declares_may_be_something_else_than_what_it_shows(caplog):
    shard = shard_of("Undeclared")
    observation = shard.reset()
    assert list(observation) == ["shown"]
    shard.step(act())
    assert not caplog.messages
    shard.vector_env._env.key = "other"
    with pytest.raises(EnvironmentFailure, match=r"observation\.shown is not there any more"):
        shard.step(act())
