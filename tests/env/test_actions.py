import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from zmqrl.env.adapters import ShardEnv
from zmqrl.errors import ConfigError, EnvironmentFailure


class Numbers(gymnasium.Env):
    """Keeps the last action that it was given."""

    def __init__(self, action_space):
        self.action_space = action_space
        self.observation_space = spaces.Box(-1e9, 1e9, (), np.float64)

    def reset(self, *, seed=None, options=None):
        return np.float64(0), {}

    def step(self, action):
        self.last_action = action
        return np.float64(0), 0.0, False, False, {}


def shard_of(space, **options):
    return ShardEnv(
        SyncVectorEnv([lambda: Numbers(space)] * 2, autoreset_mode="Disabled"),
        name="Numbers",
        **options,
    )


def taken(shard, actions):
    shard.reset()
    shard.step(actions)
    return [env.last_action for env in shard._base.envs]


BOX = spaces.Box(np.float32([-2, 0]), np.float32([4, 1]))


def test_actions_are_clipped_and_cast_to_the_box():
    first, second = taken(shard_of(BOX), [[9.0, -9.0], [0.5, 0.5]])
    assert first.dtype == np.float32
    assert first.tolist() == [4, 0]
    assert second.tolist() == [0.5, 0.5]


def test_rescaled_actions_fill_the_box():
    shard = shard_of(BOX, rescale_actions=True)
    first, second = taken(shard, np.array([[-1, -1], [0, np.inf]], np.float64))
    assert first.tolist() == [-2, 0]
    assert second.tolist() == [1, 1]


def test_rescaled_actions_are_rounded_for_a_box_of_integers():
    shard = shard_of(spaces.Box(0, 255, (1,), np.uint8), rescale_actions=True)
    first, second = taken(shard, np.array([[1.0], [0.0]], np.float32))
    assert (first.item(), second.item(), first.dtype) == (255, 128, np.uint8)


@pytest.mark.parametrize("space", [spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)])
def test_actions_cannot_be_rescaled_without_bounds(space):
    with pytest.raises(ConfigError, match="rescale_actions needs a bounded Box, but Numbers takes"):
        shard_of(space, rescale_actions=True)


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (spaces.Discrete(5), np.array([1.0, 4.0])),
        (spaces.MultiDiscrete([5, 5]), np.array([[1, 2], [3, 4]], np.int32)),
        (spaces.MultiBinary(2), np.array([[True, False], [False, True]])),
    ],
)
def test_discrete_actions_are_cast_to_the_integers_of_the_space(space, actions):
    first, second = taken(shard_of(space), actions)
    assert first.dtype == second.dtype == space.dtype
    assert np.array_equal([first, second], actions)


def test_a_tree_of_actions_is_passed_on():
    space = spaces.Dict({"move": spaces.Discrete(3), "grip": spaces.Box(0, 1, (1,))})
    first, second = taken(shard_of(space), {"move": np.array([1, 2]), "grip": np.array([[0.0], [1.0]])})
    assert (first["move"], second["move"]) == (1, 2)
    assert second["grip"].tolist() == [1]


@pytest.mark.parametrize("actions", [np.zeros((2, 3)), np.zeros(2), np.zeros((3, 2)), [["a", "b"]] * 2])
def test_actions_of_the_wrong_shape_or_kind_are_refused(actions):
    shard = shard_of(BOX)
    shard.reset()
    with pytest.raises(EnvironmentFailure, match=r"Numbers .*expected shape \(2, 2\).*got shape"):
        shard.step(actions)


def test_actions_with_nan_are_refused_with_their_rows():
    shard = shard_of(BOX)
    shard.reset()
    with pytest.raises(EnvironmentFailure, match=r"Numbers cannot take .* hold NaN in rows \[1\]"):
        shard.step([[0, 0], [0, np.nan]])
