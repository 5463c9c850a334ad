"""The counters of a broker and of its successors are one."""

from __future__ import annotations

from typing import Any

from zmqrl.telemetry.epochs import BrokerEpochs


def status(
    epoch: int, requests: int, answered: int, *workers: str, still_open: int = 0
) -> dict[str, Any]:
    """Of a broker all of whose workers have answered the same share."""
    share = {"batches": answered // 2, "shards": answered, "rows": answered, "predict_s": 0.5}
    return {
        "epoch": epoch,
        "counters": {"requests": requests, "answered": answered},
        "open_requests": still_open,
        "totals": {name: {**share, "policy_version": epoch} for name in workers},
    }


def test_before_the_first_word_of_a_broker_there_is_nothing() -> None:
    epochs = BrokerEpochs()
    epochs.take(None)
    assert epochs.status() == {}


def test_what_a_broker_did_counts_once_however_often_it_is_asked() -> None:
    epochs = BrokerEpochs()
    for answered in (4, 6, 6):
        epochs.take(status(7, 8, answered, "rollout-0"))
    assert epochs.status() == status(7, 8, 6, "rollout-0")


def test_the_counters_of_a_restarted_broker_come_on_top() -> None:
    epochs = BrokerEpochs()
    epochs.take(status(7, 10, 8, "rollout-0", "rollout-1", still_open=2))
    epochs.take(None)  # it is away
    epochs.take(status(3, 2, 0, "rollout-0", still_open=2))
    epochs.take(status(3, 6, 6, "rollout-0"))
    epochs.take(status(9, 4, 4, "rollout-2"))
    now = epochs.status()
    assert now["epoch"] == 9
    assert now["counters"] == {"requests": 18, "answered": 18}, "those sent again count once"
    assert {name: totals["shards"] for name, totals in now["totals"].items()} == {
        "rollout-0": 14,
        "rollout-1": 8,
        "rollout-2": 4,
    }
    assert now["totals"]["rollout-0"]["policy_version"] == 3
