import numpy as np
import pytest

from zmqrl.errors import EncodeError
from zmqrl.transport.tree import MAX_DEPTH, is_row_list, leaves, rows_of


def test_rows_are_the_first_axis_that_all_arrays_share():
    assert rows_of({"image": np.zeros((4, 8, 8)), "camera": {"pose": np.zeros((4, 6))}}) == 4
    assert rows_of(np.zeros((0, 3))) == 0


def test_a_row_list_counts_by_its_length():
    assert rows_of({"task_descriptions": ["push", "pull", None]}) == 3
    with pytest.raises(EncodeError, match=r"'task' has 2 rows, but 'state' has 3"):
        rows_of({"state": np.zeros(3), "task": ["a", "b"]})


def test_constants_do_not_count():
    assert (
        rows_of({"fps": 30, "gain": np.array(0.5), "name": "x", "scale": np.float32(1), "x": np.ones(5)})
        == 5
    )


def test_a_list_of_arrays_counts_by_its_arrays():
    assert rows_of({"views": [np.zeros((5, 2)), np.zeros((5, 3))]}) == 5


def test_arrays_that_differ_in_rows_are_both_named():
    tree = {"images": {"left": np.zeros((4, 2))}, "views": [np.zeros((4, 1)), np.zeros((6, 1))]}
    with pytest.raises(EncodeError, match=r"'views\[1\]' has 6 rows, but 'images\.left' has 4"):
        rows_of(tree)


@pytest.mark.parametrize("tree", [{}, 3, np.array(1.0), {"a": 1, "b": {"c": "x"}}, None], ids=str)
def test_a_tree_without_rows_is_refused_with_what_to_do(tree):
    with pytest.raises(EncodeError, match=r"infer_one\(\) for a single observation"):
        rows_of(tree)


def test_leaves_come_with_their_paths():
    tree = {"a": {"b": 1}, "c": [{"d": 2}, np.zeros(1)], "e": ["x", "y"], "f": ()}
    assert [path for path, _ in leaves(tree)] == ["a.b", "c[0].d", "c[1]", "e", "f"]


def test_a_leaf_that_is_the_whole_tree_has_an_empty_path():
    assert list(leaves(3)) == [("", 3)]


def test_a_tree_that_is_too_deep_is_refused():
    tree = np.zeros(1)
    for _ in range(MAX_DEPTH):
        tree = {"a": tree}
    assert len(list(leaves(tree))) == 1
    with pytest.raises(EncodeError, match=f"deeper than {MAX_DEPTH} at 'a.a.a"):
        list(leaves({"a": tree}))


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (["a", "b"], True),
        (("a", None), True),
        ([1, 2.5, True, b"x", np.float32(1)], True),
        ([], True),
        ([np.zeros(2)], False),
        ([["a"]], False),
        (["a", {}], False),
        ("ab", False),
        (np.zeros(2), False),
        ({"a": 1}, False),
    ],
    ids=repr,
)
def test_a_row_list_is_a_list_of_scalars(node, expected):
    assert is_row_list(node) is expected
