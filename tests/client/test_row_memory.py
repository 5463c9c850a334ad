"""What a client remembers of its envs: numbers of steps, episodes that go on, states that it carries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqrl.client.asking import Request
from zmqrl.client.memory import Ask, Memory
from zmqrl.errors import EncodeError, PolicyTimeout, StateLost
from zmqrl.transport.header import FLAG_BEGINS, FLAG_KEPT, FLAG_MEMORY, Header, Op


def observation(rows: int) -> dict[str, Any]:
    return {"x": np.zeros((rows, 2))}


class Client:
    """Asks, and has its requests end as a test wants it."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.requests: list[Request] = []

    def send(self, rows: int, reset: Any, ids: Any = None, stage: int = 0, policy: str = "") -> Ask:
        ask = self.memory.ask(observation(rows), reset, ids, stage, policy)
        request = Request(Header(Op.INFER, rows=rows), b"", [], 0.0)
        ask.sent(request)
        self.requests.append(request)
        return ask

    def steps(self, *args: Any, **options: Any) -> tuple[list[int], list[bool]]:
        memory = self.send(*args, **options).tree["memory"]
        self.end()
        return memory["step"].tolist(), memory["reset"].tolist()

    def end(self, state: Any = None, error: Any = None, kept: int = FLAG_KEPT) -> None:
        request = self.requests.pop()
        request.carried = state
        flags = kept if state is None else FLAG_MEMORY
        request.reply = Header(Op.REPLY, flags) if error is None else None
        request.end({} if error is None else None, error)


def test_steps_count_what_was_answered_and_go_on_over_resets() -> None:
    client = Client()
    assert client.steps(2, True) == ([0, 0], [True, True])
    assert client.steps(2, [False, True]) == ([1, 1], [False, True])
    assert client.steps(1, False, ids=[1]) == ([2], [False])
    assert client.steps(2, np.array([[False], [False]])) == ([2, 3], [False, False])


def test_what_was_not_answered_keeps_its_number_unless_an_episode_begins() -> None:
    client = Client()
    client.send(2, True)
    client.end(error=PolicyTimeout("late"))
    # Still the beginning of an episode, although the caller does not say so again.
    assert client.steps(1, False, ids=[0]) == ([0], [True])
    assert client.steps(2, [False, True]) == ([1, 1], [False, True])
    client.send(2, False)
    client.end(error=PolicyTimeout("late"))
    assert client.steps(2, [False, True]) == ([2, 3], [False, True])


def test_stages_and_policies_count_apart_and_keys_differ() -> None:
    client, other = Client(), Client()
    keys = set()
    for who, stage, policy in [(client, 0, ""), (client, 3, ""), (client, 3, "base"), (other, 0, "")]:
        ask = who.send(2, True, ids=[5, 4], stage=stage, policy=policy)
        assert ask.tree["memory"]["step"].tolist() == [0, 0]
        keys |= {(policy, *key) for key in ask.tree["memory"]["key"].tolist()}
        assert [key[1] & 0xFFFFFFFF for key in ask.tree["memory"]["key"].tolist()] == [5, 4]
    assert len(keys) == 8


def test_of_an_env_one_request_can_be_under_way() -> None:
    client = Client()
    client.send(2, True)
    with pytest.raises(ValueError, match=r"row 0 \(env 1 of stage 0\) is asked about already"):
        client.send(1, True, ids=[1])
    client.send(1, True, ids=[2])
    client.send(2, True, stage=1)


def test_an_env_without_an_episode_has_to_begin_one() -> None:
    client = Client()
    with pytest.raises(ValueError, match=r"row 1 \(env 1 of stage 0\) has no episode that goes on"):
        client.send(2, [True, False])
    client.send(3, True)
    client.end()
    client.send(3, False)
    client.end(error=StateLost("gone", [2, 0]))
    with pytest.raises(ValueError, match=r"row 0 \(env 0 .*StateLost"):
        client.send(3, False)
    assert client.steps(3, [True, False, True]) == ([2, 1, 2], [True, False, True])


def test_that_states_were_lost_is_told_to_the_next_request_of_the_stage() -> None:
    client = Client()
    assert not client.send(1, True).lost
    client.end(error=StateLost("gone"))
    assert not client.send(1, True, stage=1).lost
    assert client.send(1, True).lost
    client.end()
    assert not client.send(1, False).lost


def test_a_request_that_needs_no_state_at_all_says_so() -> None:
    client = Client()

    def begins(*args: Any, **options: Any) -> bool:
        ask = client.send(*args, **options)
        client.end()
        return bool(ask.flags & FLAG_BEGINS)

    assert begins(2, True)
    assert not begins(2, [True, False])
    assert not begins(1, True, ids=[1])  # env 0 goes on
    assert begins(2, True)
    assert begins(2, True, policy="other")
    assert not begins(2, True, stage=1)
    assert not begins(2, True)  # and now those of stage 1 do
    client.send(2, False, stage=1)
    client.end(error=StateLost("gone"))
    assert begins(4, True, stage=1) is False
    client.send(2, False)
    client.end(error=StateLost("gone"))
    client.send(4, False, stage=1)
    client.end(error=StateLost("gone"))
    assert not begins(2, True)  # that stage 1 has lost its own is seen when it asks
    assert not begins(4, True, stage=1)


def test_that_states_were_lost_is_told_until_a_request_is_sent() -> None:
    client = Client()
    client.send(1, True)
    client.end(error=StateLost("gone"))
    assert client.memory.ask(observation(1), True, None, 0, "").lost  # too large to be sent, say
    assert client.send(1, True).lost


@pytest.mark.parametrize(
    ("reset", "ids", "message"),
    [
        ([True], None, r"expected reset of shape \(2,\), got \(1,\)"),
        (True, [0, 0], "different numbers"),
        (True, [0, -1], "different numbers"),
        (True, [0, 1 << 40], "different numbers"),
        (True, [0], r"ids of shape \(2,\)"),
        (True, [0.0, 1.0], "float64"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(reset: Any, ids: Any, message: str) -> None:
    client = Client()
    with pytest.raises(ValueError, match=message):
        client.send(2, reset, ids)
    assert client.steps(2, True) == ([0, 0], [True, True])


def test_an_observation_whose_rows_differ_is_refused() -> None:
    with pytest.raises(EncodeError):
        Memory().ask({"x": np.zeros((2, 1)), "y": np.zeros((3, 1))}, True, None, 0, "")


def state(*values: float) -> Any:
    array = np.array(values)
    return {"h": array, "more": [np.repeat(array[:, None], 3, 1)]}


def carried(ask: Ask) -> Any:
    tree = ask.tree["memory"].get("state")
    if tree is not None:
        assert (tree["more"][0] == tree["h"][:, None]).all()
    return None if tree is None else tree["h"].tolist()


def test_states_go_back_with_the_rows_that_they_came_for() -> None:
    client = Client()
    assert carried(client.send(3, True)) is None
    client.end(state(10, 11, 12))
    assert carried(client.send(3, False)) == [10, 11, 12]
    client.end(error=PolicyTimeout("late"))
    assert carried(client.send(2, False, ids=[2, 0])) == [12, 10]
    client.end(state(22, 20))
    assert carried(client.send(3, False)) == [20, 11, 22]
    client.end(state(30, 31, 32))
    assert carried(client.send(2, True, ids=[1, 4])) == [31, 0]
    client.end(state(41, 44))
    assert carried(client.send(5, [False, False, False, True, False])) == [30, 41, 32, 0, 44]


def test_a_state_that_was_sent_does_not_change_any_more() -> None:
    client = Client()
    client.send(2, True)
    client.end(state(1, 2))
    sent = client.send(2, False).tree["memory"]["state"]
    client.end(error=PolicyTimeout("late"))  # but it may still be on its way
    client.send(1, False, ids=[0])
    client.end(state(9))
    client.send(1, False, ids=[0])
    assert sent["h"].tolist() == [1, 2]


def test_states_of_another_form_replace_those_before() -> None:
    client = Client()
    client.send(2, True)
    client.end(state(1, 2))
    client.send(1, False, ids=[1])
    client.end({"c": np.array([5.0])})
    with pytest.raises(ValueError, match="row 0 "):
        client.send(2, False)
    assert client.send(2, [True, False]).tree["memory"]["state"]["c"].tolist() == [0, 5]
    client.end()
    assert "state" not in client.send(2, False).tree["memory"]


def test_a_policy_that_keeps_no_states_is_not_told_again_until_it_is_another() -> None:
    client = Client()
    client.send(2, True)
    client.end(kept=0)
    ask = client.send(2, False)
    assert (sorted(ask.tree), ask.flags) == (["x"], 0)
    assert client.requests[-1].leaves_memory_out
    assert client.send(2, False).flags == 0  # both are under way
    client.end()
    client.end(error=StateLost("there is a policy with memory now"))
    with pytest.raises(ValueError, match="row 0"):
        client.send(2, False)
    ask = client.send(2, True)
    assert ask.flags & FLAG_MEMORY
    assert ask.tree["memory"]["step"].tolist() == [1, 1]
