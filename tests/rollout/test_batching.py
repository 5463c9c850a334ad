import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqrl.errors import PolicyOutputError
from zmqrl.rollout.batching import check_output, merge, select, split
from zmqrl.transport.codec import encode


def shard(rows, seed=0):
    random = np.random.default_rng(seed)
    return {
        "images": {"wrist": random.integers(0, 255, (rows, 4, 4, 3), dtype=np.uint8)},
        "state": random.normal(size=(rows, 7)).astype(np.float32),
        "views": [random.normal(size=(rows, 2)), random.normal(size=rows)],
        "task_descriptions": [f"task {seed}.{row}" for row in range(rows)],
        "fps": 30,
        "gain": np.array(0.5),
    }


def assert_equal(got, expected):
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_equal(got[key], expected[key])
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
    else:
        np.testing.assert_array_equal(got, expected)
        assert getattr(got, "dtype", None) == getattr(expected, "dtype", None)


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_splitting_undoes_merging_whatever_the_rows_of_the_shards(rows):
    shards = [shard(count, seed) for seed, count in enumerate(rows)]
    parts = split(merge(shards), rows)
    assert len(parts) == len(shards)
    for part, original in zip(parts, shards, strict=True):
        assert_equal(part, original)


def test_shards_of_four_and_six_rows_make_a_batch_of_ten():
    merged = merge([shard(4, 1), shard(6, 2)])
    assert merged["state"].shape == (10, 7)
    assert merged["images"]["wrist"].shape == (10, 4, 4, 3)
    assert [view.shape for view in merged["views"]] == [(10, 2), (10,)]
    assert merged["task_descriptions"][3:5] == ["task 1.3", "task 2.0"]


def test_constants_stand_once_in_a_batch_and_go_to_every_part():
    merged = merge([shard(2), shard(3)])
    assert merged["fps"] == 30
    assert merged["gain"].shape == ()
    assert [part["fps"] for part in split(merged, [2, 3])] == [30, 30]
    assert [part["gain"].shape for part in split(merged, [2, 3])] == [(), ()]


@pytest.mark.parametrize(
    "constants", [(30, 60), (30, 30.0), (30, True), (np.array(1.0), np.array(2.0)), ("a", "b")], ids=repr
)
def test_trees_of_different_constants_are_not_merged(constants):
    with pytest.raises((ValueError, TypeError)):
        merge([{"x": np.zeros((2, 3)), "fps": constant} for constant in constants])


def test_arrays_of_a_single_shard_are_copied_only_if_they_cannot_be_written_to():
    only = shard(3)
    only["state"].flags.writeable = only["gain"].flags.writeable = False
    merged = merge([only])
    assert_equal(merged, only)
    assert merged["images"]["wrist"] is only["images"]["wrist"]
    for key in ("state", "gain"):
        assert merged[key].flags.writeable
        assert not np.shares_memory(merged[key], only[key])


@pytest.mark.parametrize("rows", [[3], [2, 1], [0, 4]], ids=str)
def test_padding_repeats_the_last_row(rows):
    shards = [shard(count, seed) for seed, count in enumerate(rows)]
    merged = merge(shards, padding=2)
    total = sum(rows)
    assert_equal(select(merged, slice(0, total)), merge(shards))
    assert_equal(select(merged, slice(total, None)), select(merge(shards), np.array([total - 1] * 2)))


def test_bare_arrays_merge_and_split():
    merged = merge([np.zeros((1, 2)), np.ones((2, 2))])
    assert merged.tolist() == [[0, 0], [1, 1], [1, 1]]
    assert [part.tolist() for part in split(merged, [1, 2])] == [[[0, 0]], [[1, 1], [1, 1]]]


def test_trees_that_share_a_signature_merge():
    trees = [shard(2), dict(reversed(shard(5).items()))]
    assert encode(trees[0]).signature == encode(trees[1]).signature
    assert merge(trees)["state"].shape == (7, 7)


@pytest.mark.parametrize(
    "other",
    [
        {"state": np.zeros((2, 3)), "more": 1},
        {},
        [np.zeros((2, 3))],
        np.zeros((2, 3)),
        "state",
        {"state": np.zeros((2, 4))},
        {"state": np.zeros((2, 3, 1))},
        {"state": np.zeros((2, 3), np.float32)},
        {"state": np.array(1.0)},
        {"state": ["a", "b"]},
        {"state": {"x": np.zeros((2, 3))}},
        {"state": None},
        {"other": np.zeros((2, 3))},
    ],
    ids=repr,
)
def test_trees_of_different_structure_are_not_merged(other):
    tree = {"state": np.zeros((2, 3))}
    for trees in ([tree, other], [other, tree], [tree, tree, other]):
        with pytest.raises((ValueError, KeyError, TypeError)):
            merge(trees)


@pytest.mark.parametrize(
    "other", ["bc", [np.zeros(2), np.zeros(2)], ("b", "c"), 2, [["b"], ["c"]]], ids=repr
)
def test_a_row_list_is_not_merged_with_something_else(other):
    for trees in ([["a", "b"], other], [other, ["a", "b"]]):
        with pytest.raises((ValueError, TypeError)):
            merge(trees)


def test_lists_of_different_lengths_are_not_merged():
    with pytest.raises(ValueError, match="zip"):
        merge([[np.zeros(2)], [np.zeros(2), np.zeros(2)]])


def test_rows_are_selected_in_the_order_asked_for():
    tree = {"x": np.arange(4), "task": ["a", "b", "c", "d"], "views": [np.arange(4) * 10], "fps": 30}
    selected = select(tree, np.array([3, 1]))
    assert_equal(
        selected, {"x": np.array([3, 1]), "task": ["d", "b"], "views": [np.array([30, 10])], "fps": 30}
    )


def test_rows_of_tensors_are_selected():
    torch = pytest.importorskip("torch")
    selected = select({"x": torch.arange(4), "gain": torch.tensor(2.0)}, np.array([2, 0]))
    assert selected["x"].tolist() == [2, 0]
    assert selected["gain"].item() == 2.0


# -- What a policy returned


def test_a_dict_of_arrays_with_a_row_for_each_observation_is_a_reply():
    output = {
        "actions": np.zeros((3, 2)),
        "info": {"value": np.zeros(3), "text": ["a", "b", "c"]},
        "layers": [np.zeros((3, 1)), np.zeros((3, 5))],
    }
    assert check_output(output, 3) is output


def test_a_bare_array_stands_under_actions():
    actions = np.zeros((3, 2))
    assert check_output(actions, 3)["actions"] is actions


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (np.zeros((2, 7)), r"'actions' of shape \[2, 7\] for 3 observations"),
        (np.zeros((7, 3)), r"'actions' of shape \[7, 3\] for 3"),
        (np.array(1.0), r"'actions' of shape \[\] for 3"),
        ({"actions": np.zeros(3), "value": np.zeros(4)}, r"'value' of shape \[4\]"),
        ({"info": {"value": np.zeros((1, 3))}}, r"'info\.value' of shape \[1, 3\]"),
        ({"layers": [np.zeros(3), np.zeros(2)]}, r"'layers\[1\]' of shape \[2\]"),
        ({"text": ["a", "b"]}, r"'text' of shape \[2\]"),
        ({"actions": np.zeros(3), "value": 1.5}, "a float under 'value', not an array"),
        ({"actions": None}, "a NoneType under 'actions', not an array"),
        ({"actions": {"arm": "up"}}, r"a str under 'actions\.arm'"),
        ({"layers": [np.zeros(3), object()]}, r"an? object under 'layers\[1\]'"),
        ({"actions": np.float32(1)}, "a float32 under 'actions'"),
        ({}, "no 'actions'; its dict has nothing"),
        (None, "a NoneType; it must return an array of actions, or a dict"),
        (1.5, "a float; it must"),
        ("actions", "a str; it must"),
        ([np.zeros(3)], "a list; it must"),
    ],
    ids=str,
)
def test_what_is_no_reply_is_refused_by_its_key(output, message):
    with pytest.raises(PolicyOutputError, match=message):
        check_output(output, 3)
