"""What a trajectory of chunks of actions may be."""

from typing import Any

import numpy as np
import pytest

from zmqrl.errors import DecodeError
from zmqrl.recording.builder import TrajectoryBuilder
from zmqrl.trajectory import Trajectory


def tree(**changes: Any) -> dict[str, Any]:
    """Two steps of one row in chunks of three, of which the second ends early; with changes."""
    made = {
        "observation": np.zeros((2, 1, 4)),
        "policy": {"actions": np.zeros((2, 1, 3, 1))},
        "reward": np.ones((2, 1, 3), np.float32),
        "terminated": np.array([[False], [True]]),
        "truncated": np.zeros((2, 1), bool),
        "valid": np.array([[[True, True, True]], [[True, True, False]]]),
        "versions": np.zeros(2, np.int64),
        "bootstrap": np.zeros((1, 4)),
        "final_index": np.array([[1, 0]]),
        "final_observation": np.zeros((1, 4)),
    }
    return {**made, **changes}


def test_its_env_steps_are_the_sub_steps_that_were_made() -> None:
    made = Trajectory.of_tree(tree())
    assert made.sub_steps.tolist() == [[3], [2]]
    assert made.env_steps == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"valid": np.ones((2, 1), bool)}, "valid is no bool array of 3"),
        ({"valid": np.ones((2, 1, 2), bool)}, r"valid is not \[2, 1, 3\]"),
        ({"valid": np.array([[[True] * 3], [[True, False, True]]])}, "goes on after"),
        ({"valid": np.array([[[True, True, False]], [[True] * 3]])}, "no episode with it"),
        ({"valid": np.array([[[True] * 3], [[False] * 3]])}, "final_index"),
        ({"reward": np.ones((2, 1, 0), np.float32)}, "no steps"),
        ({"reward": np.ones((2, 1, 3, 1), np.float32)}, "reward"),
        ({"terminated": np.zeros((2, 1, 3), bool)}, "terminated"),
    ],
)
def test_one_that_is_no_such_thing_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        Trajectory.of_tree(tree(**changes))


def builder() -> TrajectoryBuilder:
    made = TrajectoryBuilder(1, sub_steps=2)
    made.observe(np.zeros((3, 4)))
    made.act({"actions": np.zeros((3, 2, 1))}, version=1)
    return made


def test_a_builder_refuses_rewards_without_sub_steps() -> None:
    with pytest.raises(ValueError, match=r"reward of shape \(3, 2\), got \(3,\)"):
        builder().outcome(np.zeros(3), np.zeros(3, bool), np.zeros(3, bool))


def test_rewards_of_chunks_may_come_late() -> None:
    made = builder()
    handle = made.outcome(None, np.zeros(3, bool), np.zeros(3, bool), None, np.ones((3, 2), bool))
    made.observe(np.zeros((3, 4)))
    assert made.take() == []
    made.late_reward(handle, np.arange(6).reshape(3, 2))
    (trajectory,) = made.take()
    assert trajectory.reward.tolist() == [[[0, 1], [2, 3], [4, 5]]]


def test_a_reward_that_is_no_number_is_dropped_with_its_row_named() -> None:
    made = builder()
    made.outcome([[0, 0], [0, np.nan], [0, 0]], np.zeros(3, bool), np.zeros(3, bool))
    made.observe(np.zeros((3, 4)))
    assert made.take() == []
    assert made.problem == "reward is nan in row 1"
