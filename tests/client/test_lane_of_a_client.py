"""What a client does with its shared memory when it is interrupted, and when it is idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Pool

from zmqrl import PolicyClient
from zmqrl.client.pending import Pending
from zmqrl.errors import ClientError
from zmqrl.transport.sharedmem import slots

Submit = Callable[[float], Pending]


@pytest.fixture
def client(echo: Pool) -> PolicyClient:
    client = echo.client()
    client.infer({"x": np.zeros((1, 1))})
    assert client._connection.shares_memory
    return client


@pytest.fixture
def submit(client: PolicyClient) -> Submit:
    return lambda value: client.submit({"x": np.full((2, 50_000), value)})


@pytest.fixture
def broken_off(client: PolicyClient, submit: Submit) -> Pending:
    """A request whose end Ctrl-C broke off, in the moment when its memory had been given back."""
    lane = client._connection._lane
    give_back = lane.slots.give_back

    def interrupted(slot: Any, is_unread: bool) -> None:
        give_back(slot, is_unread)
        lane.slots.give_back = give_back  # type: ignore[method-assign]
        raise KeyboardInterrupt

    request = submit(1.0)
    lane.slots.give_back = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        request.wait()
    return request


def test_memory_is_given_back_once_although_ctrl_c_broke_that_off(
    broken_off: Pending, submit: Submit
) -> None:
    second = submit(2.0)
    broken_off.cancel()
    third = submit(3.0)
    assert second._request.slot is not third._request.slot
    assert (second.result()["actions"] == 2).all()
    assert (third.result()["actions"] == 3).all()


def test_a_request_whose_end_ctrl_c_broke_off_ends_in_an_error_at_once(
    broken_off: Pending, submit: Submit
) -> None:
    with pytest.raises(ClientError, match="Ctrl-C came with the reply"):
        broken_off.result()
    assert (submit(2.0).result()["actions"] == 2).all()


def test_a_client_that_is_idle_lets_go_of_its_memory(
    client: PolicyClient, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(1.0).result()
    lane = client._connection._lane
    assert lane.slots._free
    assert client.catch_up() <= slots.KEPT_S, "a loop of one's own looks again in time"
    assert lane.slots._free
    monkeypatch.setattr(slots, "KEPT_S", 0.0)
    client.catch_up()
    assert not lane.slots._free
