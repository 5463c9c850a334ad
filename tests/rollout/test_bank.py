"""The bank of states against a dict: what is kept, what goes, and what a repeated step gets."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqrl.rollout.bank import StateBank

ROW_BYTES = 8 + 4 * 3 + 8  # of `state` and `output`


def key(number: int) -> bytes:
    return np.array([7, number], np.int64).tobytes()


def state(values: np.ndarray) -> dict:
    return {"n": values.copy(), "nested": (np.repeat(values[:, None], 3, 1).astype(np.float32),)}


def keep(
    bank: StateBank, numbers: list[int], steps: list[int], values: list[int], version: int = 1
) -> None:
    values = np.array(values, np.int64)
    bank.keep(
        [key(n) for n in numbers], np.array(steps), version, {"actions": 10 * values}, state(values)
    )


def find(bank: StateBank, numbers: list[int], steps: list[int], reset: object = False):
    mask = np.broadcast_to(np.asarray(reset), len(numbers))
    return bank.find([key(n) for n in numbers], np.array(steps, np.int64), mask)


class Model:
    """What a bank does: of each row the last step, value and version, the one used last at the end."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.rows: OrderedDict[int, tuple[int, int, int]] = OrderedDict()

    def keep(self, numbers: list[int], steps: list[int], values: list[int], version: int) -> None:
        most = max(self.most, len(numbers))
        new = [number for number in numbers if number not in self.rows]
        for number in numbers:
            if number in self.rows:
                self.rows.move_to_end(number)
        for row in zip(numbers, steps, values, strict=True):
            self.rows[row[0]] = (row[1], row[2], version)
        while new and len(self.rows) > most:
            # New rows stand at the end, so those of this call are the last to go.
            self.rows.popitem(last=False)


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True),
        st.integers(0, 3),  # how far the steps are from those that follow
        st.booleans(),  # whether it fails, so that nothing is kept
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(1, 40))
def test_a_bank_knows_of_each_row_what_a_dict_does(script: list, most: int) -> None:
    bank, model = StateBank(most * ROW_BYTES), Model(most)
    for count, (numbers, offset, fails) in enumerate(script):
        steps = []
        for row, number in enumerate(numbers):
            last = model.rows.get(number, (-1, 0, 0))[0]
            steps.append(max(0, last + 1 - (offset if row % 2 else 0)))
        reset = np.array([row % 3 == 0 for row in range(len(numbers))])
        found = find(bank, numbers, steps, reset)
        for row, number in enumerate(numbers):
            known = model.rows.get(number)
            last = None if known is None else known[0]
            assert found.repeated[row] == (last == steps[row])
            goes_on = last is not None and last in (steps[row], steps[row] - 1)
            assert found.lost[row] == (not goes_on and not reset[row])
            assert (found.slots[row] >= 0) == (known is not None)
        here = np.flatnonzero(found.slots >= 0)
        slots = found.slots[here]
        if len(here):
            expected = np.array([model.rows[numbers[row]][1] for row in here])
            kept = bank.states(slots)
            assert kept["n"].tolist() == expected.tolist()
            assert (kept["nested"][0] == expected[:, None]).all()
            blank = {"actions": np.full(len(numbers), -1)}
            outputs = bank.with_outputs(blank, here, slots)["actions"]
            assert outputs[here].tolist() == (10 * expected).tolist()
            assert (np.delete(outputs, here) == -1).all()
            versions = [model.rows[numbers[row]][2] for row in here]
            assert bank.versions(slots).tolist() == versions
        if not fails:
            values = [100 * count + number for number in numbers]
            keep(bank, numbers, steps, values, count)
            model.keep(numbers, steps, values, count)
        assert len(bank) == len(model.rows)


def test_states_that_were_given_out_are_copies() -> None:
    bank = StateBank(1 << 20)
    keep(bank, [1, 2], [0, 0], [5, 6])
    given_out = bank.states(find(bank, [1, 2], [1, 1]).slots)
    given_out["n"][:] = -1
    given_out["nested"][0][:] = -1
    assert bank.states(find(bank, [2, 1], [1, 1]).slots)["n"].tolist() == [6, 5]


def test_the_least_recently_used_rows_go_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    bank = StateBank(3 * ROW_BYTES)
    for step in range(3):
        for number in range(5):
            keep(bank, [number], [step], [number])
    assert bank.most_rows == 3
    assert len(bank) == 3
    assert find(bank, [0, 1, 2, 3, 4], [3] * 5).lost.tolist() == [True, True, False, False, False]
    assert [record.getMessage() for record in caplog.records] == [
        "the states of 3 env rows fill rollout.state_mb; those that were not asked for the longest go"
    ]


def test_large_states_take_no_more_than_their_bound_from_the_first_request_on() -> None:
    bank = StateBank(5 << 20)
    for step in range(2):
        for number in range(12):
            big = {"cache": np.full((1, 1 << 20), number, np.uint8)}
            bank.keep([key(number)], np.array([step]), 1, {"actions": np.zeros((1, 1))}, big)
            kept = bank._states._tree["cache"].nbytes
            assert kept <= 5 << 20
    assert bank.most_rows == len(bank) == 4
    assert bank.states(find(bank, [11, 8], [2, 2]).slots)["cache"][:, 5].tolist() == [11, 8]


def test_one_batch_is_kept_however_small_the_bank_is() -> None:
    bank = StateBank(1)
    keep(bank, list(range(100)), [0] * 100, list(range(100)))
    assert not find(bank, list(range(100)), [1] * 100).lost.any()
    keep(bank, [200], [0], [1])
    assert len(bank) == 1


def test_outputs_of_several_forms_and_of_text_are_kept_side_by_side() -> None:
    bank = StateBank(1 << 20)
    outputs = [
        {"actions": np.arange(2.0), "said": ["left", "right"]},
        {"actions": np.arange(4).reshape(2, 2), "more": {"x": np.ones((2, 3))}},
    ]
    for number, output in enumerate(outputs):
        values = np.array([number, number])
        bank.keep([key(2 * number), key(2 * number + 1)], np.zeros(2, int), 1, output, state(values))
    found = find(bank, [1, 0], [0, 0])
    blank = {"actions": np.zeros(2), "said": ["", ""]}
    answer = bank.with_outputs(blank, np.array([0, 1]), found.slots)
    assert answer["said"] == ["right", "left"]
    assert answer["actions"].tolist() == [1.0, 0.0]
    found = find(bank, [3], [0])
    blank = {"actions": np.zeros((1, 2)), "more": {"x": np.zeros((1, 3))}}
    answer = bank.with_outputs(blank, np.array([0]), found.slots)
    assert answer["actions"].tolist() == [[2, 3]]
    assert answer["more"]["x"].all()


def test_a_kept_text_that_is_longer_than_those_of_the_batch_is_not_cut() -> None:
    bank = StateBank(1 << 20)
    output = {"actions": np.array(["straight on"])}
    bank.keep([key(0)], np.zeros(1, int), 1, output, state(np.zeros(1, np.int64)))
    blank = {"actions": np.array(["left", "left"])}
    answer = bank.with_outputs(blank, np.array([1]), find(bank, [0], [0]).slots)
    assert answer["actions"].tolist() == ["left", "straight on"]


def test_of_many_forms_of_outputs_the_oldest_are_forgotten_but_no_state() -> None:
    bank = StateBank(1 << 20)
    for number in range(8):
        output = {"actions": np.zeros((1, number + 1))}
        bank.keep([key(number)], np.zeros(1, int), 1, output, state(np.array([number])))
    again = find(bank, list(range(8)), [0] * 8)
    assert again.repeated.tolist() == [False] * 4 + [True] * 4
    assert not find(bank, list(range(8)), [1] * 8).lost.any()


def test_tensors_stay_tensors() -> None:
    torch = pytest.importorskip("torch")
    bank = StateBank(1 << 20)
    for start in (0, 40, 80):  # more rows than there is room for at first
        with torch.inference_mode():
            h = torch.arange(start, start + 40, dtype=torch.bfloat16)[:, None].repeat(1, 5)
        keys = [key(n) for n in range(start, start + 40)]
        bank.keep(keys, np.zeros(40, int), 1, {"actions": np.zeros(40)}, (h, [h.double()]))
    h, (double,) = bank.states(find(bank, [100, 3], [1, 1]).slots)
    assert h.dtype == torch.bfloat16
    assert h[:, 0].tolist() == double[:, 4].tolist() == [100, 3]
