"""What simulators do wrong, or otherwise than most."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from odd_shards import BOTH, Make, odd_shards

from zmqrl.env.adapters import ShardEnv
from zmqrl.errors import EnvironmentFailure

make = pytest.fixture(odd_shards)


def moves(*ways: int) -> dict[str, Any]:
    return {"move": np.array(ways), "grip": np.zeros((len(ways), 2))}


@BOTH
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing key", r"observation\.sub has no 'y'"),
        ("wider", r"observation\.x is float32 \[4\], declared as Box.*\(3,\)"),
        ("would be stretched", r"observation\.x is float32 \[1\], declared as Box"),
        ("fraction", r"observation\.sub\.y is float64 \[\], declared as Discrete\(4\)"),
        ("two rewards", r"reward is \[1\.0, 2\.0\], not one number"),
        ("no info", "the info is a NoneType, not a dict"),
        ("four values", "step returned no .observation, reward, terminated, truncated, info."),
        ("raises", "ArithmeticError: it exploded"),
        ("exits", "SystemExit: 3"),
        ("says nothing", "Unspeakable"),
        ("no number", "terminated is NaN, neither true nor false"),
        ("ragged", r"observation\.x is no array: "),
    ],
)
def test_what_one_env_does_wrong_in_mid_run_is_named_with_its_row(
    make: Make, vectorization: str, what: str, words: str
) -> None:
    shard = make("odd", kwargs={"what": what}, vectorization=vectorization)
    shard.reset()
    shard.step(moves(0, 1))
    with pytest.raises(EnvironmentFailure, match=f"odd failed in step: row 1: {words}") as error:
        shard.step(moves(0, 2))
    assert "\n" not in str(error.value)


@BOTH
def test_an_incomplete_first_observation_is_named_with_its_row(make: Make, vectorization: str) -> None:
    shard = make("odd", kwargs={"what": "incomplete reset"}, vectorization=vectorization)
    with pytest.raises(EnvironmentFailure, match=r"failed in reset: row \d: observation has no 'sub'"):
        shard.reset()


@BOTH
@pytest.mark.parametrize("where", ["observation", "action"])
@pytest.mark.parametrize("kind", ["graph", "sequence", "one of"])
def test_a_space_that_cannot_be_batched_is_refused_with_its_key(
    make: Make, vectorization: str, where: str, kind: str
) -> None:
    words = rf"for its {where} 'a\[1\]': its rows differ in size"
    with pytest.raises(EnvironmentFailure, match=words):
        make("Scattered", kwargs={"where": where, "kind": kind}, vectorization=vectorization)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_observation_that_leaves_its_space_is_said_once(
    make: Make, vectorization: str, caplog: pytest.LogCaptureFixture
) -> None:
    shard = make("odd", kwargs={"what": "out of range"}, vectorization=vectorization)
    shard.reset()
    for _ in range(4):
        assert shard.step(moves(0, 2)).observation["x"][:, 1].tolist() == [0, 3]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1, said
    assert "odd: observation 'x'[1] is 3.0 in row 1, outside the declared [-1.0, 1.0]" in said[0]


@BOTH
def test_a_simulator_may_have_spaces_of_its_own(make: Make, vectorization: str) -> None:
    shard = make("OnAMission", vectorization=vectorization)
    assert shard.reset()["mission"] == ["step 0", "step 0"]
    steps = [shard.step(np.array([0, 1])) for _ in range(2)]
    assert steps[0].observation["mission"] == ["step 1", "step 1"]
    assert steps[1].final_observation["mission"] == ["step 2", "step 2"]
    assert steps[1].observation["image"].max() == 0


class Batched(VectorEnv[Any, Any, Any]):
    """A ready vector env of two rows, which shows what it is told to."""

    def __init__(self, space: spaces.Space[Any], *shown: Any, rewards: Any = (0.0, 0.0)) -> None:
        self.num_envs = 2
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = space
        self.single_action_space = spaces.Discrete(2)
        self.shown = list(shown)
        self.rewards = rewards

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.shown.pop(0), {}

    def step(self, actions: Any) -> Any:
        return self.shown.pop(0), self.rewards, torch.zeros(2, 1), [0, np.False_], {}


FLOATS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ROWS = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ({"a": ROWS}, {"a": ROWS[:1]}, r"2 rows .* in observation\.a, got shape \(1, 3\)"),
        ({"a": ROWS}, {"a": ROWS[:, :2]}, r"observation\.a is now float32 \[2, 2\] in place of float32"),
        ({"a": ROWS}, {"a": ROWS.astype(int)}, r"observation\.a is now int64 \[2, 3\] in place of fl"),
        ({"a": {"b": ROWS}}, {"a": {}}, r"observation\.a\.b is not there any more"),
        ({"a": ROWS}, {"a": ROWS, "b": ROWS}, r"observation\.b was not there before"),
        ({"a": ["x", "y"]}, {"a": ROWS}, r"observation\.a is now float32 \[2, 3\] in place of text"),
        ([ROWS, ROWS], [ROWS], "observation is now a list of 1 in place of a list of 2"),
        ((ROWS, ROWS), (ROWS, {"c": ROWS}), r"observation\[1\] is now a dict with 'c' in place of"),
    ],
)
def test_a_vector_env_that_changes_its_observation_is_an_error_that_names_the_key(
    first: Any, then: Any, words: str
) -> None:
    shard = ShardEnv(Batched(FLOATS, first, then), name="Batched")
    shard.reset()
    with pytest.raises(EnvironmentFailure, match=f"Batched failed in step: .*{words}"):
        shard.step(np.array([0, 1]))


def test_of_a_large_observation_every_part_is_looked_at_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    space = spaces.Box(0, 1, (100, 100, 3), np.float32)
    good = np.zeros((2, 100, 100, 3), np.float32)
    bad = good.copy()
    bad[1, 98, 97, 1] = 2
    shard = ShardEnv(Batched(space, good, *[bad] * 40), name="Batched")
    shard.reset()
    for _ in range(40):
        shard.step(np.array([0, 1]))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1, said
    assert "observation[98, 97, 1] is 2.0 in row 1, outside the declared [0.0, 1.0]" in said[0]


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Discrete(3, start=2), 1),
        (spaces.MultiDiscrete([2, 3]), [1, 3]),
        (spaces.MultiBinary(2), [0, 2]),
        (spaces.Box(np.array([-1, 0]), np.array([1, 5]), dtype=np.int16), [0, 6]),
    ],
)
def test_integers_that_leave_their_space_are_said(
    space: spaces.Space[Any], value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = np.stack([space.sample(), np.array(value)])
    ShardEnv(Batched(space, rows), name="Batched").reset()
    assert "in row 1, outside the declared" in caplog.text


@pytest.mark.parametrize(
    "rewards",
    [
        [True, False],
        [1, 0],
        np.array([[1], [0]], np.float16),
        np.array([1, 0], np.float32),
        torch.tensor([1.0, 0.0], dtype=torch.bfloat16),
        torch.tensor([[True], [False]]),
        [torch.tensor(1.0), torch.tensor(0.0)],
        np.array([1, np.bool_(False)], object),
    ],
)
def test_a_vector_env_may_give_rewards_and_flags_of_any_type(rewards: Any) -> None:
    shard = ShardEnv(Batched(FLOATS, ROWS, ROWS, rewards=rewards))
    shard.reset()
    step = shard.step(np.array([0, 1]))
    assert (step.reward.tolist(), step.reward.dtype) == ([1, 0], np.float64)
    for flags in (step.terminated, step.truncated):
        assert (flags.tolist(), flags.dtype) == ([False, False], np.bool_)


@BOTH
@pytest.mark.parametrize(
    "form",
    ["bool", "int", "float32", "numpy bool", "column", "list", "tensor", "tensor column"],
)
def test_an_env_may_give_its_reward_and_flags_in_any_type(
    make: Make, vectorization: str, form: str
) -> None:
    shard = make("Rewards", kwargs={"form": form}, vectorization=vectorization)
    shard.reset()
    steps = [shard.step(np.array([0, 1])) for _ in range(2)]
    assert [step.reward.tolist() for step in steps] == [[1, 1], [1, 1]]
    assert [step.terminated.tolist() for step in steps] == [[False] * 2, [True] * 2]
    assert not any(step.truncated.any() for step in steps)


def test_gymnasium_alone_would_stretch_or_cut_what_is_an_error_here() -> None:
    """Why each env is looked at: shared memory takes a short observation for all of its numbers."""
    envs = gymnasium.vector.AsyncVectorEnv([_stretched])
    envs.reset()
    shown, *_ = envs.step({"move": np.array([2]), "grip": np.zeros((1, 2), np.float32)})
    assert shown["x"].shape == (1, 3)
    envs.close()


def _stretched() -> Any:
    import odd_sims

    return odd_sims.Odd("would be stretched")
