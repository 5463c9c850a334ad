import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from zmqrl.env.actions import actions_for
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


def test_actions_are_cast_to_the_box_and_clipped_if_that_is_asked_for():
    first, second = taken(shard_of(BOX, clip_actions=True), [[9.0, -9.0], [0.5, 0.5]])
    assert first.dtype == np.float32
    assert first.tolist() == [4, 0]
    assert second.tolist() == [0.5, 0.5]


def test_rescaled_actions_fill_the_box():
    shard = shard_of(BOX, rescale_actions=True, clip_actions=True)
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


@pytest.mark.parametrize(
    ("space", "actions", "words"),
    [
        (BOX, [[0, 0], [0, 1.5]], r"action\[1\] is 1.5 in row 1, outside Box.*set env.clip_actions"),
        (spaces.Box(-1, 1, ()), [0, -np.inf], "action is -inf in row 1, outside Box"),
        (spaces.Discrete(3, start=-1), [1, 2], r"action is 2 in row 1, which is not in Discrete\(3, s"),
        (spaces.Discrete(3), [1.0, 0.5], "action is 0.5 in row 1, which is not in"),
        (spaces.MultiDiscrete([2, 3]), [[1, 2], [2, 1]], r"action\[0\] is 2 in row 1"),
        (spaces.MultiBinary(2), [[2, 0], [0, 0]], r"action\[0\] is 2 in row 0"),
    ],
)
def test_an_action_outside_its_space_is_an_error_that_names_it(space, actions, words):
    shard = shard_of(space)
    shard.reset()
    with pytest.raises(EnvironmentFailure, match=f"Numbers cannot take the actions: the {words}"):
        shard.step(np.array(actions))


def test_a_rescaled_action_outside_minus_one_to_one_is_an_error():
    shard = shard_of(BOX, rescale_actions=True)
    shard.reset()
    with pytest.raises(EnvironmentFailure, match=r"action\[0\] is 1.2 in row 0, outside \[-1, 1\]"):
        shard.step(np.array([[1.2, 0], [0, 0]]))


def test_an_action_a_rounding_error_beyond_its_bound_is_on_it():
    box = spaces.Box(0, np.float32(0.1), (1,))
    first, second = taken(shard_of(box), np.array([[0.1 * (1 + 1e-7)], [-1e-9]]))
    assert box.contains(first)
    assert box.contains(second)


MOVE_AND_GRIP = spaces.Dict(
    {
        "move": spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,))]),
        "grip": spaces.Box(0, 1, (1,)),
    }
)


def move_and_grip(way=(3, 1), grip=0.5):
    return {
        "move": [np.array(way, np.int32), np.zeros((2, 2))],
        "grip": np.array([[0.0], [grip]]),
    }


def test_each_leaf_of_a_tree_of_actions_is_brought_into_its_space():
    first, second = taken(shard_of(MOVE_AND_GRIP, clip_actions=True), move_and_grip(grip=7))
    assert (first["move"][0], second["move"][0]) == (3, 1)
    assert second["grip"].tolist() == [1]
    assert MOVE_AND_GRIP.contains(first)
    assert MOVE_AND_GRIP.contains(second)


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (move_and_grip(grip=7), r"the action 'grip'\[0\] is 7.0 in row 1, outside Box"),
        (move_and_grip(way=(0, 1)), r"the action 'move\[0\]' is 0 in row 0, which is not in"),
        (move_and_grip(way=(3,)), r"shape \(2,\) and dtype int64 for 'move\[0\]', got shape \(1,\)"),
        ({"move": []}, "the policy gave no 'grip' .in any row.; its dict has 'move'"),
        ({**move_and_grip(), "move": [np.zeros(2)]}, "a list of 2 parts for 'move', got a list of 1"),
        (np.zeros((2, 1)), "expected a dict with 'grip', 'move', got an array"),
        ({**move_and_grip(), "grip": {"x": 1}}, "expected an array for 'grip', got a dict with 'x'"),
    ],
)
def test_what_is_wrong_in_a_tree_of_actions_is_named_with_its_key(actions, words):
    shard = shard_of(MOVE_AND_GRIP)
    shard.reset()
    with pytest.raises(EnvironmentFailure, match=words):
        shard.step(actions)


def test_actions_of_text_are_checked_and_passed_on():
    space = spaces.Text(5)
    assert taken(shard_of(space), ["left", "right"]) == ["left", "right"]
    shard = shard_of(space)
    shard.reset()
    with pytest.raises(EnvironmentFailure, match="action is 'too long' in row 1, outside Text"):
        shard.step(["left", "too long"])


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


def test_rows_are_called_by_their_numbers_where_a_batch_has_some_of_them():
    """A simulator that answers in parts asks for the actions of the rows that are ready."""
    rows = np.array([7, 3])
    with pytest.raises(ValueError, match=r"action\[1\] is 1.5 in row 3, outside"):
        actions_for(BOX, rows, np.array([[0, 0], [0, 1.5]]))
    with pytest.raises(ValueError, match=r"NaN in rows \[7\]"):
        actions_for(BOX, rows, np.array([[np.nan, 0], [0, 0]]))
    with pytest.raises(ValueError, match="is 2 in row 7, which is not in"):
        actions_for(spaces.Discrete(2), rows, np.array([2, 0]))
    with pytest.raises(ValueError, match="'too long' in row 3, outside Text"):
        actions_for(spaces.Text(5), rows, ["left", "too long"])
