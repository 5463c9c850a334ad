import numpy as np
import pytest

from zmqrl.transport.codec import encode


def signature(tree):
    return encode(tree).signature


def observation(**changes):
    tree = {
        "image": np.zeros((4, 8, 8, 3), np.uint8),
        "state": np.zeros((4, 7), np.float32),
        "task_descriptions": ["push"] * 4,
        "camera": {"left": np.zeros((4, 2)), "right": np.zeros((4, 2))},
        "fps": 30,
        "gain": np.array(0.5),
    }
    return {key: value for key, value in {**tree, **changes}.items() if value is not None}


def test_the_number_of_rows_does_not_change_the_signature():
    more = observation(
        image=np.ones((9, 8, 8, 3), np.uint8),
        state=np.ones((9, 7), np.float32),
        task_descriptions=["pull", "a much longer task"] * 9,
        camera={"left": np.ones((9, 2)), "right": np.ones((9, 2))},
    )
    assert signature(more) == signature(observation())


def test_the_order_of_keys_does_not_change_the_signature():
    def backwards(tree):
        if not isinstance(tree, dict):
            return tree
        return {key: backwards(tree[key]) for key in reversed(tree)}

    assert signature(backwards(observation())) == signature(observation())


def test_layout_and_byte_order_do_not_change_the_signature():
    state = np.zeros((4, 7), ">f4", order="F")
    assert signature(observation(state=state)) == signature(observation())


def test_whether_an_array_is_large_does_not_change_the_signature():
    few, many = np.zeros((1, 100)), np.zeros((1000, 100))
    assert signature(few) == signature(many)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": np.zeros((4, 7), np.float64)},
        {"state": np.zeros((4, 8), np.float32)},
        {"state": np.zeros((4, 7, 1), np.float32)},
        {"state": np.zeros(4, np.float32)},
        {"state": None},
        {"extra": np.zeros(4)},
        {"camera": {"left": np.zeros((4, 2)), "top": np.zeros((4, 2))}},
        {"camera": [np.zeros((4, 2)), np.zeros((4, 2))]},
        {"camera": None, "left": np.zeros((4, 2)), "right": np.zeros((4, 2))},
        {"task_descriptions": np.array(["push"] * 4)},
        {"task_descriptions": "push"},
        {"fps": 31},
        {"fps": 30.0},
        {"fps": np.int64(30)},
        {"fps": "30"},
        {"gain": np.array(0.25)},
        {"gain": np.array(0.5, np.float32)},
        {"gain": 0.5},
    ],
    ids=lambda changes: ",".join(f"{k}={type(v).__name__}" for k, v in changes.items()),
)
def test_another_structure_or_constant_changes_the_signature(changes):
    assert signature(observation(**changes)) != signature(observation())


def test_names_that_read_alike_when_joined_are_told_apart():
    trees = [
        {"a": {"b": 1}},
        {"a.b": 1},
        {"a": 1, "b": 1},
        {"a'": {"b": 1}},
        {"ab": 1},
        [[1], [np.zeros(2)]],
        [[np.zeros(2)], [1]],
        [[[np.zeros(2)]], 1],
    ]
    assert len({signature(tree) for tree in trees}) == len(trees)


def test_a_constant_of_megabytes_has_a_signature_like_any_other():
    one, other = {"map": b"a" * 1_000_000}, {"map": b"a" * 999_999 + b"b"}
    assert signature(one) == signature(dict(one))
    assert signature(one) != signature(other)
