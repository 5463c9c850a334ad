"""Chunks of actions in a shard: the simulators see what they would have seen one action at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from batched_sims import Partial
from conftest import TESTS
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from test_videos import frames_of, red

from zmqrl.config import EnvConfig, EnvModeConfig, load
from zmqrl.env.adapters import ShardEnv, Step
from zmqrl.env.batched import BatchedEnv
from zmqrl.env.chunks import Chunks, Park
from zmqrl.env.making import make_shard
from zmqrl.errors import ConfigError, EnvironmentFailure
from zmqrl.spaces import ActionSpace
from zmqrl.transport.tree import leaves

ROWS = 3
SIZES = [(4, 1), (4, 3), (4, 4), (7, 7)]


class Noted(gymnasium.Env):
    """Ends after as many steps as the seed says; notes the actions that it got."""

    observation_space = spaces.Box(-1e9, 1e9, (1,), np.float32)
    action_space: spaces.Space = spaces.Box(-9, 9, (2,), np.float32)

    def __init__(self) -> None:
        self.episodes: list[list[Any]] = []
        self.length = 0
        self.array = np.zeros(1, np.float32)  # one that is used again

    def reset(self, *, seed=None, options=None):
        self.length = 1 + (seed or 0) % 5
        self.episodes.append([])
        self.array[:] = 100 * len(self.episodes)
        return self.array, {"success": False}

    def step(self, action):
        played = self.episodes[-1]
        assert len(played) < self.length, "stepped past its end"
        played.append(action)
        self.array += 1
        over = len(played) == self.length
        # Succeeds in its first step only.
        return self.array, float(len(played)), over, False, {"success": len(played) == 1}


def open_loop(space: spaces.Space[Any], row: int, episode: int, step: int) -> Any:
    """The action of a step, the same whatever is shown."""
    rng = np.random.default_rng([row, episode, step])
    if isinstance(space, spaces.Box):
        return rng.uniform(-1, 1, space.shape or ()).astype(np.float32)
    if isinstance(space, spaces.Dict):
        return {key: open_loop(child, row, episode, step) for key, child in space.items()}
    assert isinstance(space, spaces.Discrete)
    return int(rng.integers(space.n))


def stacked(items: list[Any]) -> Any:
    """Trees to one tree, along a new first axis."""
    if isinstance(items[0], dict):
        return {key: stacked([item[key] for item in items]) for key in items[0]}
    return np.stack(items)


def row_of(tree: Any, row: int) -> bytes:
    """All bits of a row of a tree."""
    return b"".join(np.ascontiguousarray(leaf[row]).tobytes() for _, leaf in leaves(tree))


def play(shard: ShardEnv, chunks: Chunks | None, steps: int) -> list[list[dict[str, Any]]]:
    """The episodes of each row: the observations by step, the rewards, and how they ended."""
    size, sub_steps = (chunks.size, chunks.sub_steps) if chunks else (1, 1)
    space = shard.single_action_space
    observation = shard.reset()
    episodes: list[list[dict[str, Any]]] = [[] for _ in range(shard.num_envs)]

    def begin(row: int) -> None:
        episodes[row].append({"seen": {0: row_of(observation, row)}, "rewards": [], "end": None})

    for row in range(shard.num_envs):
        begin(row)
    for _ in range(0, steps, sub_steps):
        planned = []
        for row in range(shard.num_envs):
            number, at = len(episodes[row]) - 1, len(episodes[row][-1]["rewards"])
            planned.append([open_loop(space, row, number, at + j) for j in range(size)])
        actions = stacked([stacked(chunk) if chunks else chunk[0] for chunk in planned])
        step = shard.step(actions)
        observation = step.observation
        reward, valid = (np.reshape(each, (shard.num_envs, -1)) for each in (step.reward, step.valid))
        for row in range(shard.num_envs):
            episode = episodes[row][-1]
            episode["rewards"] += reward[row, valid[row]].tolist()
            assert not reward[row, ~valid[row]].any()
            if step.terminated[row] or step.truncated[row]:
                success = None if step.success is None else bool(step.success[row])
                end = bool(step.terminated[row]), bool(step.truncated[row]), success
                episode["end"] = (*end, row_of(step.final_observation, row))
                begin(row)
            else:
                episode["seen"][len(episode["rewards"])] = row_of(observation, row)
    shard.close()
    return episodes


def configured(*overrides: str) -> EnvConfig:
    return load(None, list(overrides)).env


def shard_of(config: EnvConfig, seeds: bool = True) -> ShardEnv:
    begun = [0] * ROWS

    def seed_of(row: int) -> int:
        begun[row] += 1
        return 10 * row + begun[row]

    return make_shard(config, "eval", ROWS, seed_of if seeds else lambda row: None)


def assert_the_same(chunked: Any, plain: Any) -> None:
    """Of what both have played, everything is the same to the bit."""
    compared = 0
    for one, other in zip(chunked, plain, strict=True):
        for a, b in zip(one, other, strict=False):
            assert all(b["seen"][at] == seen for at, seen in a["seen"].items() if at in b["seen"])
            shorter = min(len(a["rewards"]), len(b["rewards"]))
            assert a["rewards"][:shorter] == b["rewards"][:shorter]
            if a["end"] is not None and b["end"] is not None:
                assert a["rewards"] == b["rewards"]
                assert a["end"] == b["end"]
                compared += 1
    assert compared >= ROWS


@pytest.mark.parametrize(
    "simulator",
    [
        ["env.id=CartPole-v1"],
        ["env.id=gymnasium_robotics:FetchReachDense-v4", "env.eval.max_episode_steps=10"],
        [f"env.factory={TESTS / 'sims.py'}:make", "env.kwargs.length=5"],
        pytest.param(["env.id=CartPole-v1", "env.vectorization=async"], marks=pytest.mark.slow),
    ],
    ids=["cartpole", "fetch", "counter", "async"],
)
@pytest.mark.parametrize(("size", "sub_steps"), SIZES)
def test_chunks_give_the_transitions_of_single_actions_to_the_bit(
    simulator: list[str], size: int, sub_steps: int
) -> None:
    if "Fetch" in simulator[0]:
        pytest.importorskip("gymnasium_robotics")
    chunks = [f"env.num_action_chunks={size}", f"env.replan_every={sub_steps}"]
    plain = play(shard_of(configured(*simulator)), None, 60)
    chunked = play(shard_of(configured(*simulator, *chunks)), Chunks(size, sub_steps), 80)
    assert_the_same(chunked, plain)


def noted_shard(chunks: Chunks | None, lengths: list[int]) -> tuple[ShardEnv, list[Noted]]:
    """One in which the next episode of a row has its length; without limits of any kind."""
    envs = [Noted() for _ in lengths]
    made = [(lambda env=env: Park(env) if chunks else env) for env in envs]
    vector_env = SyncVectorEnv(made, autoreset_mode=AutoresetMode.DISABLED)
    return ShardEnv(vector_env, lambda row: lengths[row] - 1, action_chunks=chunks), envs


def chunk(rows: int, size: int) -> Any:
    return np.arange(rows * size * 2, dtype=np.float32).reshape(rows, size, 2) / 10


def test_a_row_that_ends_within_a_chunk_is_parked_and_the_others_go_on() -> None:
    shard, envs = noted_shard(Chunks(4, 4), [2, 5, 4])
    shard.reset()
    actions = chunk(3, 4)
    step = shard.step(actions)
    assert step.reward.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert step.valid.tolist() == [[True, True, False, False], [True] * 4, [True] * 4]
    assert step.terminated.tolist() == [True, False, True]
    assert not step.truncated.any()
    assert step.final_observation[:, 0].tolist() == [102, 104, 104]
    assert step.observation[:, 0].tolist() == [200, 104, 200], "the others are shown their episode"
    assert np.array_equal(envs[0].episodes[0], actions[0, :2])
    assert np.array_equal(envs[1].episodes[0], actions[1])
    assert [len(env.episodes) for env in envs] == [2, 1, 2]


def test_an_end_in_the_middle_does_not_lose_a_success_before_it() -> None:
    shard, _ = noted_shard(Chunks(4, 4), [2, 5, 1])
    shard.reset()
    step = shard.step(chunk(3, 4))
    assert step.success is not None
    assert step.succeeded is not None
    assert step.success.tolist() == [False, False, True], "at the end of the chunk, or of the episode"
    assert step.succeeded.tolist() == [True, True, True]


def test_only_the_first_actions_of_a_chunk_are_carried_out() -> None:
    shard, envs = noted_shard(Chunks(5, 2), [5, 5])
    shard.reset()
    actions = chunk(2, 5)
    step = shard.step(actions)
    assert step.reward.tolist() == [[1, 2], [1, 2]]
    assert np.array_equal(envs[1].episodes[0], actions[1, :2])


def test_when_every_row_has_ended_the_rest_of_the_chunk_is_left_out() -> None:
    shard, _ = noted_shard(Chunks(9, 9), [2, 1])
    pauses = []
    shard.goes_on = lambda: not pauses.append(1)
    shard.reset()
    step = shard.step(chunk(2, 9))
    assert step.reward.shape == (2, 9)
    assert step.valid.sum() == 3
    assert len(pauses) == 1


class Batched(VectorEnv):
    """Steps all rows in one array, past their ends too; a row ends after as many steps as its number."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED}
    single_observation_space = spaces.Dict({"n": spaces.Box(-1e9, 1e9, (1,), np.float64)})
    single_action_space = spaces.Dict({"push": spaces.Box(-1, 1, (), np.float32)})

    def __init__(self, num_envs: int = 3) -> None:
        self.num_envs = num_envs
        self.counts = np.zeros(num_envs)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.counts[mask] = 0
        return {"n": self.counts[:, None]}, {}

    def step(self, actions):
        self.counts += 1
        terminated = self.counts >= 1 + np.arange(self.num_envs)
        return {"n": self.counts[:, None]}, self.counts * 10, terminated, terminated & False, {}


def test_a_batched_simulator_is_stepped_on_and_what_comes_after_an_end_does_not_count() -> None:
    shard = ShardEnv(Batched(), action_chunks=Chunks(4, 4))
    shard.reset()
    step = shard.step({"push": np.zeros((3, 4), np.float32)})
    assert step.reward.tolist() == [[10, 0, 0, 0], [10, 20, 0, 0], [10, 20, 30, 0]]
    assert step.valid.sum(1).tolist() == [1, 2, 3]
    assert step.final_observation["n"][:, 0].tolist() == [1, 2, 3]
    assert step.observation["n"][:, 0].tolist() == [0, 0, 0]


class DictActions(Noted):
    action_space = spaces.Dict(
        {"arm": spaces.Box(-1, 1, (2,), np.float32), "grip": spaces.Discrete(3), "say": spaces.Text(9)}
    )


def test_each_part_of_an_action_comes_in_chunks() -> None:
    env = DictActions()
    shard = ShardEnv(
        SyncVectorEnv([lambda: env], autoreset_mode="Disabled"),
        lambda row: 4,
        action_chunks=Chunks(3, 2),
    )
    space = shard.policy_action_space
    assert isinstance(space, spaces.Dict)
    assert space["arm"].shape == (3, 2)
    shard.reset()
    arm = np.linspace(-1, 1, 6, dtype=np.float32).reshape(1, 3, 2)
    shard.step({"arm": arm, "grip": np.array([[2, 0, 1]]), "say": [["on"], ["off"], ["stop"]]})
    first, second = env.episodes[0]
    assert (first["grip"], second["grip"]) == (2, 0)
    assert (first["say"], second["say"]) == ("on", "off")
    assert np.array_equal(second["arm"], arm[0, 1])


def test_chunks_are_mapped_from_minus_one_to_one_as_single_actions_are() -> None:
    shard = shard_of(
        configured("env.id=Pendulum-v1", "env.rescale_actions=true", "env.num_action_chunks=3")
    )
    assert shard.policy_action_space == spaces.Box(-1.0, 1.0, (3, 1), np.float32)
    shard.close()


def test_a_chunk_of_the_wrong_length_is_an_error_that_names_both() -> None:
    shard, _ = noted_shard(Chunks(4, 2), [5, 5])
    shard.reset()
    with pytest.raises(EnvironmentFailure, match=r"num_action_chunks: 4.*\(2, 4, 2\).*\(2, 3, 2\)"):
        shard.step(chunk(2, 3))


def test_a_chunk_of_the_wrong_length_in_a_part_of_the_actions_names_its_key() -> None:
    shard = ShardEnv(
        SyncVectorEnv([DictActions], autoreset_mode=AutoresetMode.DISABLED), action_chunks=Chunks(3, 2)
    )
    shard.reset()
    actions = {
        "arm": np.zeros((1, 3, 2), np.float32),
        "say": [["on"]] * 3,
        "grip": np.zeros((1, 2), int),
    }
    with pytest.raises(EnvironmentFailure, match=r"\(1, 3\).* for 'grip', got shape \(1, 2\)"):
        shard.step(actions)
    actions["grip"] = np.array([[0, 1, 3]])
    with pytest.raises(EnvironmentFailure, match=r"'grip'\[2\] is 3 in row 0"):
        shard.step(actions)


class Choices(Noted):
    action_space = spaces.Dict(
        {"gear": spaces.MultiDiscrete([3, 4], start=[1, 0]), "lamps": spaces.MultiBinary(2)}
    )


def test_choices_stay_choices_in_chunks() -> None:
    env = Choices()
    vector_env = SyncVectorEnv([lambda: env], autoreset_mode=AutoresetMode.DISABLED)
    shard = ShardEnv(vector_env, lambda row: 4, action_chunks=Chunks(2, 2))
    space = shard.policy_action_space
    assert isinstance(space, spaces.Dict)
    assert [ActionSpace.of(child).kind for child in space.values()] == ["other", "other"]
    shard.reset()
    gear, lamps = np.array([[[1, 3], [3, 0]]]), np.array([[[0, 1], [1, 1]]])
    shard.step({"gear": gear, "lamps": lamps})
    assert [each["gear"].tolist() for each in env.episodes[0]] == gear[0].tolist()
    assert [each["lamps"].tolist() for each in env.episodes[0]] == lamps[0].tolist()
    with pytest.raises(EnvironmentFailure, match=r"'gear'\[0, 1\] is 2.6 in row 0, which is not in"):
        shard.step({"gear": gear - 0.4 * (gear == 3), "lamps": lamps})
    with pytest.raises(EnvironmentFailure, match=r"'lamps'.* is 0.5 in row 0, which is not in"):
        shard.step({"gear": gear, "lamps": lamps / 2})


def test_a_chunk_where_single_actions_are_asked_for_is_told_as_such() -> None:
    shard, _ = noted_shard(None, [5, 5])
    shard.reset()
    with pytest.raises(EnvironmentFailure, match=r"chunks of 3\? set env.num_action_chunks"):
        shard.step(chunk(2, 3))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("four values", "step returned no .observation, reward, terminated, truncated, info."),
        ("raises", "ArithmeticError: it exploded"),
    ],
)
def test_what_an_env_does_wrong_within_a_chunk_is_named_with_stage_and_row(
    what: str, words: str
) -> None:
    odd = f"env.factory={TESTS / 'odd_sims.py'}:odd", f"env.kwargs.what={what}"
    shard = make_shard(configured(*odd, "env.num_action_chunks=2"), "eval", 2, lambda row: None, stage=1)
    shard.reset()
    moves = {"move": np.array([[0, 0], [0, 2]]), "grip": np.zeros((2, 2, 2))}
    with pytest.raises(EnvironmentFailure, match=rf"odd \(stage 1\) failed in step: row 1: {words}"):
        shard.step(moves)


class Tolerant(Partial):
    """A batched simulator of tensors that goes on after an end, and does not say it again."""

    def step(self, actions: torch.Tensor) -> Any:
        ended, cut = self.advance(actions)
        return self.state, torch.ones(self.num_envs), ended, cut, {"success": ended}


def test_a_batched_simulator_of_tensors_takes_chunks_and_resets_the_rows_that_ended() -> None:
    env = Tolerant(3, length=2)
    shard = ShardEnv(BatchedEnv(env, 3, False), action_chunks=Chunks(4, 3))
    shard.reset()
    step = shard.step(np.zeros((3, 4), np.int64))
    assert step.valid.sum(1).tolist() == [2, 3, 3]
    assert step.terminated.tolist() == [True, True, False]
    assert step.success is not None
    assert step.success.tolist() == [True, True, False]
    assert step.final_observation[:, 0].tolist() == [2, 3, 3]
    assert step.observation.tolist() == [[0, 2], [0, 2], [3, 1]]
    assert [len(actions) for actions in env.actions] == [3, 3, 3]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_each_sub_step_is_a_picture_of_the_film(vectorization: str, folder: Path) -> None:
    section = EnvConfig(
        factory=f"{TESTS / 'odd_sims.py'}:Painter",
        kwargs={"render_mode": "rgb_array"},
        vectorization=vectorization,  # type: ignore[arg-type]
        num_action_chunks=4,
        eval=EnvModeConfig(save_video=True),
    )
    shard = make_shard(section, "eval", 2, lambda row: None, filmed=True)
    assert shard.film is not None
    shard.film.next = folder / "one.mp4"
    shard.reset()
    for _ in range(5):
        shard.step(np.zeros((2, 4), np.int64))
    shard.close()
    frames = frames_of(folder / "one.mp4", 64, 96)
    assert np.allclose([red(frame) for frame in frames], 9.6 * np.arange(11), atol=4)


def test_without_chunks_a_step_has_one_reward_a_row() -> None:
    shard, _ = noted_shard(None, [2, 2])
    shard.reset()
    step: Step = shard.step(chunk(2, 1)[:, 0])
    assert step.reward.shape == step.valid.shape == (2,)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.replan_every=3", "env.num_action_chunks=2"], "replan_every is 3.*a chunk has 2"),
        (["env.num_action_chunks=2", "env.autoreset_mode=next_step"], "autoreset_mode disabled"),
    ],
)
def test_the_configuration_refuses_chunks_that_cannot_be_carried_out(
    overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        configured("env.id=CartPole-v1", *overrides)


def test_a_ready_vector_env_that_resets_by_itself_takes_no_chunks(tmp_path: Any) -> None:
    (tmp_path / "ready.py").write_text(
        "import gymnasium\n"
        "def make(num_envs): return gymnasium.make_vec('CartPole-v1', num_envs, 'vector_entry_point')\n"
        "def disabled(num_envs):\n"
        "    return gymnasium.make_vec('CartPole-v1', num_envs, 'sync',\n"
        "        vector_kwargs={'autoreset_mode': gymnasium.vector.AutoresetMode.DISABLED})\n"
        "def wrapped(num_envs):\n"
        "    return gymnasium.wrappers.vector.RecordEpisodeStatistics(disabled(num_envs))\n"
    )
    names = ("make", "has NextStep"), ("disabled", "needs single"), ("wrapped", "needs single")
    for name, words in names:
        with pytest.raises(ConfigError, match=words):
            shard_of(configured(f"env.factory={tmp_path}/ready.py:{name}", "env.num_action_chunks=2"))
