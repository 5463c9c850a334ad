"""The spaces of a simulator: read, sent, compared, and refused when malformed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from gymnasium import spaces

from zmqrl.errors import DecodeError
from zmqrl.spaces import ActionSpace, Spaces
from zmqrl.transport.codec import decode_meta, encode_meta

pytestmark = pytest.mark.timeout(10)

BOX = spaces.Box(np.array([-1.0, -np.inf]), np.array([1.0, np.inf]), dtype=np.float64)
ACTIONS = {
    "box": BOX,
    "image": spaces.Box(0, 255, (2, 2), np.uint8),
    "discrete": spaces.Discrete(4),
    "multi discrete": spaces.MultiDiscrete([2, 3]),
    "multi binary": spaces.MultiBinary(3),
    "dict": spaces.Dict({"a": BOX, "b": spaces.Discrete(2)}),
    "none": None,
}
OBSERVATION = {
    "state": np.zeros((2, 3), np.float32),
    "images": [{"wrist": np.zeros((2, 8, 8, 3), np.uint8)}, np.zeros(2, bool)],
    "task": ["open", "close"],
}


def test_a_box_has_its_shape_and_flat_bounds():
    action = ActionSpace.of(ACTIONS["image"])
    assert (action.kind, action.shape, action.low, action.high) == (
        "box",
        (2, 2),
        [0.0] * 4,
        [255.0] * 4,
    )


def test_an_unbounded_box_has_infinite_bounds():
    assert ActionSpace.of(BOX).high == [1.0, np.inf]


def test_a_discrete_space_has_its_number_of_actions():
    action = ActionSpace.of(ACTIONS["discrete"])
    assert (action.kind, action.shape, action.n) == ("discrete", (), 4)


@pytest.mark.parametrize("name", ["multi discrete", "multi binary", "dict", "none"])
def test_any_other_space_is_told_in_its_own_words(name):
    action = ActionSpace.of(ACTIONS[name])
    assert (action.kind, action.text) == ("other", str(ACTIONS[name]))


def test_a_discrete_space_that_does_not_begin_at_0_is_another_kind():
    assert ActionSpace.of(spaces.Discrete(4, start=1)).kind == "other"


def test_observations_are_told_by_path_without_their_first_axis():
    found = Spaces.of(OBSERVATION, None).observation
    assert found == {
        "state": ((3,), "float32"),
        "images[0].wrist": ((8, 8, 3), "uint8"),
        "images[1]": ((), "bool"),
        "task": ((), "text"),
    }


def test_a_bare_array_has_an_empty_path():
    assert Spaces.of(np.zeros((2, 4)), None).observation == {"": ((4,), "float64")}


@pytest.mark.parametrize(
    "text", [["open", "x"], ("open",), [None], "open", None, np.array(["open", "x"])], ids=repr
)
def test_text_has_no_width(text):
    shape, dtype = Spaces.of({"x": np.zeros((2, 1)), "task": text}, None).observation["task"]
    assert (shape, dtype) == ((), "text")


def test_a_list_of_numbers_is_an_array_of_them():
    assert Spaces.of({"x": [1.0, 2.0]}, None).observation == {"x": ((), "float64")}


@pytest.mark.parametrize("name", ACTIONS)
def test_spaces_survive_the_way_over_the_wire(name):
    made = Spaces.of(OBSERVATION, ACTIONS[name])
    read = Spaces.of_fields(decode_meta(encode_meta({"spaces": made.fields()}))["spaces"])
    assert read == made
    assert made.difference(read) == ""


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        ({"state": np.zeros((2, 4), np.float32)}, "'state' is float32 [4] in place of float32 [3]"),
        ({"state": np.zeros((2, 3))}, "'state' is float64 [3] in place of float32 [3]"),
        ({"more": np.zeros((2, 1))}, "'more' is float64 [1] in place of missing"),
        ({"task": np.zeros((2, 1))}, "'task' is float64 [1] in place of text []"),
    ],
)
def test_a_difference_of_observations_names_path_and_both(observation, words):
    mine, theirs = Spaces.of(OBSERVATION, BOX), Spaces.of(OBSERVATION | observation, BOX)
    assert words in mine.difference(theirs)


def test_a_missing_leaf_is_said_to_be_missing():
    theirs = Spaces.of({"state": OBSERVATION["state"], "images": OBSERVATION["images"]}, BOX)
    assert "'task' is missing in place of text" in Spaces.of(OBSERVATION, BOX).difference(theirs)


def test_a_difference_of_actions_names_both_spaces():
    mine, theirs = (Spaces.of(OBSERVATION, ACTIONS[name]) for name in ("discrete", "dict"))
    difference = mine.difference(theirs)
    assert "Discrete(4)" in difference
    assert "Dict(" in difference


def test_other_numbers_of_rows_and_other_words_make_no_difference():
    mine, theirs = Spaces.of({"x": np.zeros((2, 3))}, BOX), Spaces.of({"x": np.zeros((5, 3))}, BOX)
    assert mine.difference(theirs) == ""
    fields = theirs.fields()
    fields["action"]["text"] = "Box of another library"
    assert mine.difference(Spaces.of_fields(fields)) == ""


GOOD = Spaces.of(OBSERVATION, BOX).fields()
MALFORMED = {
    "nothing": lambda f: f.clear(),
    "no action": lambda f: f.pop("action"),
    "observation is a list": lambda f: f.update(observation=[]),
    "observation is text": lambda f: f.update(observation="x"),
    "a leaf is None": lambda f: f["observation"].update(state=None),
    "a leaf has three parts": lambda f: f["observation"].update(state=[[3], "f", 1]),
    "a path is a number": lambda f: f["observation"].update({1: [[3], "float32"]}),
    "a dtype is a number": lambda f: f["observation"].update(state=[[3], 1]),
    "a shape is text": lambda f: f["observation"].update(state=["33", "float32"]),
    "a shape is a number": lambda f: f["observation"].update(state=[3, "float32"]),
    "a length is negative": lambda f: f["observation"].update(state=[[-1], "float32"]),
    "a length is infinite": lambda f: f["observation"].update(state=[[float("inf")], "float32"]),
    "a length is a bool": lambda f: f["observation"].update(state=[[True], "float32"]),
    "a length is huge": lambda f: f["observation"].update(state=[[2**63], "float32"]),
    "too many lengths": lambda f: f["observation"].update(state=[[1] * 100, "float32"]),
    "action is text": lambda f: f.update(action="box"),
    "action lacks its shape": lambda f: f["action"].pop("shape"),
    "action has a field more": lambda f: f["action"].update(more=1),
    "action lacks its kind": lambda f: f["action"].pop("kind"),
    "an unknown kind": lambda f: f["action"].update(kind="round"),
    "a kind that is no text": lambda f: f["action"].update(kind=["box"]),
    "bounds are text": lambda f: f["action"].update(low="ab"),
    "bounds are short": lambda f: f["action"].update(low=[0.0]),
    "a bound is None": lambda f: f["action"].update(high=[None, 1.0]),
    "n is text": lambda f: f["action"].update(n="4"),
    "n is negative": lambda f: f["action"].update(n=-1),
    "discrete without actions": lambda f: f.update(
        action={"kind": "discrete", "shape": [], "low": [], "high": [], "n": 0, "text": ""}
    ),
    "text is a number": lambda f: f["action"].update(text=1),
}


@pytest.mark.parametrize("mutate", MALFORMED.values(), ids=MALFORMED)
def test_malformed_fields_are_refused(mutate):
    fields = copy.deepcopy(GOOD)
    Spaces.of_fields(copy.deepcopy(fields))
    mutate(fields)
    with pytest.raises(DecodeError):
        Spaces.of_fields(fields)


@pytest.mark.parametrize("fields", [None, 1, "x", [], [1, 2]], ids=repr)
def test_what_are_no_fields_at_all_is_refused(fields):
    with pytest.raises(DecodeError):
        Spaces.of_fields(fields)
