"""A rollout worker in a real pool: static batch sizes, and memory that is used again."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Pool

from zmqrl.client import Pending
from zmqrl.errors import PolicyError

SIZES = "rollout.static_batch_sizes=[1,4,16]"


def ask(pool: Pool, rows: list[int], **options: str) -> list[Pending]:
    """Requests of one batch: one keeps the worker busy while the others come."""
    client = pool.client()
    blocker = client.submit({"x": np.zeros((1, 3)), "command": ["sleep 0.3"]})
    pending = [
        client.submit({"x": np.arange(3.0 * count).reshape(count, 3) + count}, **options)
        for count in rows
    ]
    blocker.result()
    return pending


def start(pool: Pool, policy: str = "") -> None:
    pool.start_broker(SIZES, "rollout.rollout_queue_size=8")
    pool.start_worker(0, policy, overrides=(SIZES,))
    pool.wait_for_workers(1)


def test_batches_are_padded_to_static_sizes_and_the_padding_reaches_nobody(pool: Pool) -> None:
    start(pool)
    for rows in ([1], [2], [1, 2], [3, 5, 1], [16]):
        for count, request in zip(rows, ask(pool, rows), strict=True):
            result = request.result()
            expected = np.arange(3.0 * count).reshape(count, 3) + count
            assert result["actions"].tolist() == expected.tolist()
            assert set(result["rows"]) < {1, 4, 16}
            assert result["eval"].tolist() == [False] * count


def test_a_request_larger_than_the_largest_static_size_takes_several_calls(pool: Pool) -> None:
    start(pool)
    (request,) = ask(pool, [35], mode="eval")
    result = request.result()
    assert result["actions"].tolist() == (np.arange(105.0).reshape(35, 3) + 35).tolist()
    assert result["rows"].tolist() == [16] * 32 + [4] * 3
    assert result["eval"].all()


def test_a_batch_holds_no_more_rows_than_the_largest_static_size(pool: Pool) -> None:
    start(pool)
    assert [r.result()["rows"].tolist() for r in ask(pool, [9, 9])] == [[16] * 9] * 2


def test_of_a_padded_batch_only_the_guilty_request_gets_the_error(pool: Pool) -> None:
    start(pool)
    client = pool.client()
    blocker = client.submit({"x": np.zeros((1, 3)), "command": ["sleep 0.3"]})
    guilty, good = (
        client.submit({"x": np.full((1, 3), 5.0), "command": [command]}) for command in ("raise", "go")
    )
    blocker.result()
    assert good.result()["actions"].tolist() == [[5.0] * 3]
    with pytest.raises(PolicyError, match="this row is marked"):
        guilty.result()


@pytest.mark.parametrize("sizes", ["[]", "[1,4]"])
def test_a_policy_may_keep_and_change_its_observations(pool: Pool, sizes: str) -> None:
    override = f"rollout.static_batch_sizes={sizes}"
    pool.start_broker(override)
    pool.start_worker(0, "Keeping", overrides=(override,))
    pool.wait_for_workers(1)
    client = pool.client()
    for step in range(40):
        images = [np.full((1, 1 << 20), step * 3 + number, np.uint8) for number in range(step % 3 + 1)]
        for image, request in zip(images, [client.submit({"x": i}) for i in images], strict=True):
            result = request.result()
            assert result["actions"].tolist() == image[:, :1].tolist()
            assert result["intact"].all(), "what the policy kept has been written over"
