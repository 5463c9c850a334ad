"""From `module:factory` to a policy that is ready: imported, built, loaded and warmed up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqrl.errors import PolicyLoadError, in_a_line
from zmqrl.imports import import_object
from zmqrl.rollout.bank import copied, mapped
from zmqrl.rollout.batching import select
from zmqrl.rollout.policy import Policy, TensorPolicy, device_of, keeps_state, parameters_of
from zmqrl.rollout.stateful import initial_state
from zmqrl.transport.tree import rows_of


def load_policy(
    reference: str,
    kwargs: dict[str, Any],
    device: str = "auto",
    static_sizes: Sequence[int] = (),
    torch_threads: int = 1,
) -> Policy:
    """Import, build, load and warm up a policy.

    Args:
        reference: `module:factory` or `path/to/file.py:factory`; the factory is called with `kwargs`.
        kwargs: For the factory; `device` comes with them if it names such a parameter.
        device: See `TensorPolicy`.
        static_sizes: The numbers of rows that it will be called with, for a warm-up call each; empty for
            one call with the rows of its example.
        torch_threads: Set before the warm-up: what is compiled with another number is compiled anew.

    Raises:
        ConfigError: The reference cannot be imported.
        PolicyLoadError: The factory, `load`, or the warm-up call raised; the cause is chained.
    """
    factory = import_object(reference)
    limit_torch_threads(torch_threads)
    step = "could not be built"
    try:
        if "device" in parameters_of(factory):
            kwargs = {"device": device_of(device), **kwargs}
        policy = as_policy(factory(**kwargs), device)
        limit_torch_threads(torch_threads)  # the factory may have brought torch, or set them
        only_rows = getattr(policy, "only_rows", None)
        if only_rows is not None and list(static_sizes) != [only_rows]:
            raise PolicyLoadError(
                f"the policy {reference} takes batches of {only_rows} rows only: set "
                f"rollout.static_batch_sizes to [{only_rows}], or export it with a dynamic first axis"
            )
        step = "failed in load()"
        load = getattr(policy, "load", None)
        if callable(load):
            load()
        step = "failed in the warm-up call on its example_observation"
        example = getattr(policy, "example_observation", None)
        if example is not None:
            _warm_up(policy, example, static_sizes)
    except PolicyLoadError:
        raise
    except Exception as error:
        raise PolicyLoadError(f"the policy {reference} {step}: {in_a_line(error)}") from error
    return policy


def as_policy(source: Any, device: str = "auto") -> Policy:
    """Make a policy of what a user's factory returned.

    Args:
        source: A `Policy`, an `nn.Module`, a function of a tree of tensors, or what `adapters` knows of
            other libraries.
        device: For all but the first; see `TensorPolicy`.

    Raises:
        PolicyLoadError: It is none of these.
    """
    if isinstance(source, Policy):
        return source
    function = source
    if "torch" in sys.modules:  # else it is of none of these libraries
        from zmqrl.rollout.adapters import adapted

        function, device = adapted(source, device)
    if callable(function):
        return TensorPolicy(function, device)
    raise PolicyLoadError(
        f"the factory returned a {type(source).__name__}; it must return an nn.Module, a function of a "
        "tree of tensors, or an object with infer(observation, eval_mask)"
    )


def limit_torch_threads(threads: int) -> str:
    """Bound torch's threads, if torch is there; many processes share the cores. Tells it for the log."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    torch.set_num_threads(threads)
    return f", {threads} torch thread{'s' if threads > 1 else ''}"


def _warm_up(policy: Policy, example: Any, static_sizes: Sequence[int]) -> None:
    rows = rows_of(example)
    takes_valid_mask = "valid_mask" in parameters_of(policy.infer)
    has_memory = keeps_state(policy)

    def call(observation: Any, eval_mask: np.ndarray) -> None:
        more: dict[str, Any] = {"valid_mask": np.ones_like(eval_mask)} if takes_valid_mask else {}
        if has_memory:
            # Copied as for a request: torch compiles anew for a tensor that inference mode has made.
            more["state"] = mapped(copied, initial_state(policy, len(eval_mask)))
        policy.infer(observation, eval_mask, **more)

    if not static_sizes:
        call(example, np.ones(rows, dtype=bool))
    for size in static_sizes:
        # Each way through the policy that is compiled here is not compiled while a request waits.
        for is_eval in (True, False):
            call(select(example, np.arange(size) % rows), np.full(size, is_eval))
