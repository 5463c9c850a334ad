"""Shards of one structure through the policy, in as few calls as may be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from zmqrl.rollout.bank import copied, joined, mapped
from zmqrl.rollout.batching import check_output, merge, select
from zmqrl.rollout.memory import BatchMemory
from zmqrl.rollout.policy import Policy, output_and_state
from zmqrl.rollout.stateful import Recall, check_state
from zmqrl.rollout.versions import PolicyVersions


class Prediction(NamedTuple):
    """What a policy said of a batch."""

    output: dict[str, Any]
    """Arrays of as many rows as the batch has, or more."""
    version: int
    """Of the weights that made it."""
    seconds: float
    """Spent in the policy."""
    state: Any = None
    """What a policy with memory made of the state of the rows: arrays or tensors, of as many rows."""


class Inference:
    """Makes a batch, and calls the policy with it.

    Args:
        versions: The policy.
        key: Of its answers in its output: `actions` or `rewards`.
        static_sizes: The only numbers of rows that it is called with, ascending; batches are padded, and
            one that is larger than the largest takes several calls. Empty: a batch is a call.
    """

    def __init__(self, versions: PolicyVersions, key: str, static_sizes: Sequence[int] = ()) -> None:
        self._versions = versions
        self._key = key
        self._sizes = static_sizes
        self._memory = BatchMemory(versions.wants_pinned)

    @property
    def wants_one_mode(self) -> bool:
        """Whether a batch should hold rows of one mode only.

        Of both they would be two calls, each with a number of rows of its own.
        """
        return bool(self._sizes) and self._versions.takes_one_mode

    def run(
        self,
        trees: Sequence[Any],
        rows: Sequence[int],
        is_eval: Sequence[bool],
        version: int,
        recall: Recall | None = None,
    ) -> Prediction:
        """The policy's output for the rows of all shards, in order.

        Args:
            trees: A shard each, of one structure; they may be read-only.
            rows: Of each shard.
            is_eval: The mode of each shard.
            version: Of the weights to use; 0 for the newest.
            recall: Of a policy with memory: where the state of the rows comes from.

        Raises:
            PolicyOutputError: What the policy returned is no output for these rows.
            Exception: Whatever the policy raises, or tells that the shards differ in structure.
        """
        count = sum(rows)
        calls = static_calls(count, self._sizes)
        padding = sum(calls) - count
        observation = merge(trees, self._memory, padding)
        eval_mask = np.zeros(count + padding, bool)
        if any(is_eval):
            eval_mask[:] = np.repeat(is_eval, [*rows[:-1], rows[-1] + padding])
        valid_mask = np.arange(count + padding) < count if self._versions.takes_valid_mask else None
        policy, version = self._versions.of(version)
        state = None if recall is None else recall.state(policy, padding)
        begin = time.perf_counter()
        if len(calls) == 1:
            output, state = self._call(policy, observation, eval_mask, valid_mask, state)
        else:
            outputs, states = [], []
            for end, size in zip(accumulate(calls), calls, strict=True):
                part = slice(end - size, end)
                valid = None if valid_mask is None else valid_mask[part]
                own = None if recall is None else mapped(lambda leaf, part=part: leaf[part], state)
                one, new = self._call(policy, select(observation, part), eval_mask[part], valid, own)
                # Copied: a policy may write its next output into the same arrays.
                outputs.append(select(one, np.arange(size)))
                states.append(None if recall is None else mapped(copied, new))
            output = merge(outputs)
            state = None if recall is None else joined(states)
        return Prediction(output, version, time.perf_counter() - begin, state)

    def _call(
        self,
        policy: Policy,
        observation: Any,
        eval_mask: np.ndarray,
        valid_mask: np.ndarray | None,
        state: Any,
    ) -> tuple[dict[str, Any], Any]:
        rows = len(eval_mask)
        more: dict[str, Any] = {} if valid_mask is None else {"valid_mask": valid_mask}
        if state is None:
            return check_output(policy.infer(observation, eval_mask, **more), rows, self._key), None
        # The policy may replace what is in a dict of its state; `state` stays what it was given.
        more["state"] = mapped(lambda leaf: leaf, state)
        result = policy.infer(observation, eval_mask, **more)
        output, new_state = output_and_state(result)
        check_state(new_state, state, rows)
        return check_output(output, rows, self._key), new_state


def static_calls(rows: int, sizes: Sequence[int]) -> list[int]:
    """The rows of the policy calls that take a batch, when only some numbers of rows may be used.

    Args:
        rows: Of the batch.
        sizes: What may be used, ascending; empty if anything may.

    Returns:
        Sizes that have `rows` rows together, or more: the largest as often as it can be filled, and the
        smallest that holds the rest. A batch without rows stays without.
    """
    if not sizes or not rows:
        return [rows]
    full, rest = divmod(rows, sizes[-1])
    calls = [sizes[-1]] * full
    if rest:
        calls.append(next(size for size in sizes if size >= rest))
    return calls
