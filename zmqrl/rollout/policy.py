"""What a policy is, and one of a torch module or a function of tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from zmqrl.errors import PolicyLoadError, PolicyOutputError, WeightsError
from zmqrl.rollout.bank import copied, joined, mapped, taken
from zmqrl.rollout.batching import merge, select


@runtime_checkable
class Policy(Protocol):
    """Answers batches of observations. The rollout worker's loop, in short:

        policy.load()                                  # if it has load()
        policy.infer(policy.example_observation, …)    # if it has one, as a warm-up
        while True:
            policy.infer(observation, eval_mask)

    A policy may have an attribute `version` (int): which weights it holds; replies carry it. One that
    learns has `load_state_dict(weights)`, with a dict of arrays by name.

    If `infer` names a parameter `valid_mask`, it gets a bool array [N] too: False for rows that only
    fill the batch up to one of `rollout.static_batch_sizes`, and whose actions nobody gets.

    If `infer` names a parameter `state`, the policy has a memory: it gets the state of each row, a tree
    of arrays or tensors [N, ...], and returns `(output, new state)`. The state of rows that begin an
    episode comes from its `initial_state(rows)`.
    """

    def infer(self, observation: Any, eval_mask: np.ndarray) -> Any:
        """Choose actions.

        Args:
            observation: A tree of arrays [N, ...], writable, in native byte order; row lists of N str.
                It is the policy's own: it may be changed and kept.
            eval_mask: bool [N]; True where the action must be deterministic.

        Returns:
            A dict of arrays [N, ...] with the actions under `actions`, or an array of actions.
        """


class TensorPolicy:
    """Makes a policy of a torch module, or of any function of a tree of tensors.

    What the function's signature names, it gets beside the observation:

    * `eval_mask`: a bool tensor [N];
    * `deterministic`: a bool; a batch with both kinds of rows then takes two calls;
    * neither: it is called without;
    * `valid_mask`: a bool tensor [N]; see `Policy`;
    * `state`: a tree of tensors [N, ...] on the device, as its `initial_state(rows)` made it for rows
      that begin an episode. It then returns `(output, new state)`.

    Floating point observations are cast to the dtype of the module's parameters; a function without
    parameters gets them as they came. Arrays of text stay numpy arrays, row lists stay lists.

    Args:
        function: An `nn.Module`, or a function of a tree of tensors.
        device: `cpu`, `cuda`, `cuda:1`, …; `auto` takes a GPU if there is one.
    """

    def __init__(self, function: Callable[..., Any], device: str = "auto") -> None:
        import torch

        self._torch = torch
        self.device = torch.device(device_of(device))
        self._function = function
        self._dtype: Any = None
        # What torch.compile() makes of a module hides its signature, and has other names of weights.
        self._module: Any = getattr(function, "_orig_mod", function)
        target: Any = function
        if isinstance(function, torch.nn.Module):
            function.to(self.device).eval()
            floating = (p.dtype for p in function.parameters() if p.is_floating_point())
            self._dtype = next(floating, None)
            target = getattr(self._module, "forward", None)
        # An adapter tells: names in the signature of what is inside may mean something else.
        parameters = getattr(function, "takes", None) or parameters_of(target)
        self._takes_mask = "eval_mask" in parameters
        self._takes_valid_mask = "valid_mask" in parameters
        self.keeps_state = _takes_state(parameters)
        self.takes_one_mode = "deterministic" in parameters and not self._takes_mask
        self.wants_pinned = self.device.type == "cuda"

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorPolicy:
        return type(self)(copy.deepcopy(self._function, memo), str(self.device))

    @property
    def only_rows(self) -> int | None:
        """The only number of rows that the module takes; None if any."""
        return getattr(self._function, "only_rows", None)

    @property
    def version(self) -> Any:
        """The version of the weights, if the module tells one in an attribute `version`."""
        return getattr(self._module, "version", 0)

    @property
    def example_observation(self) -> Any:
        """The module's `example_observation`, for the warm-up; None if it has none."""
        return getattr(self._module, "example_observation", None)

    def load(self) -> None:
        """Call the module's own `load`, if it has one."""
        load = getattr(self._module, "load", None)
        if callable(load):
            load()

    def load_state_dict(self, weights: dict[str, np.ndarray]) -> None:
        """Replace the weights of the module; all of them, or in an error none.

        Args:
            weights: Arrays by name, those of the module's `state_dict`.

        Raises:
            WeightsError: The function is no module, or a name or shape differs; says which.
        """
        module = self._module
        if not isinstance(module, self._torch.nn.Module):
            raise WeightsError("the policy is a function, not a module with weights")
        difference = state_difference(module.state_dict(), weights)
        if difference:
            raise WeightsError(difference)
        # All of them before the first is replaced: torch leaves a module half loaded.
        module.load_state_dict({name: self._parameter(name, array) for name, array in weights.items()})

    def _parameter(self, name: str, array: Any) -> Any:
        try:
            return self._torch.as_tensor(array)
        except (TypeError, ValueError) as error:
            raise WeightsError(f"{name!r} is not made of numbers: {error}") from None

    def initial_state(self, rows: int) -> Any:
        """What the module's `initial_state` says, on the device."""
        with self._torch.inference_mode():
            state = self._module.initial_state(rows)
            return mapped(lambda leaf: self._torch.as_tensor(leaf).to(self.device), state)

    def infer(
        self,
        observation: Any,
        eval_mask: np.ndarray,
        valid_mask: np.ndarray | None = None,
        state: Any = None,
    ) -> Any:
        """See `Policy.infer`; without `valid_mask` all rows are valid."""
        if valid_mask is None:
            valid_mask = np.ones_like(eval_mask)
        try:
            with self._torch.inference_mode():
                return self._infer(observation, eval_mask, valid_mask, state)
        finally:
            if self.wants_pinned:
                # Memory of a batch is used again once nobody refers to it, which a GPU cannot: nothing
                # may still be copied from it.
                self._torch.cuda.current_stream(self.device).synchronize()

    def _infer(self, observation: Any, eval_mask: np.ndarray, valid_mask: np.ndarray, state: Any) -> Any:
        tensors = self._to_tensors(observation)
        more = {}
        if self._takes_mask:
            more["eval_mask"] = self._to_tensors(eval_mask)
        if self._takes_valid_mask:
            more["valid_mask"] = self._to_tensors(valid_mask)
        if self.keeps_state:
            more["state"] = state
        if not self.takes_one_mode:
            return self._answer(self._function(tensors, **more))
        if eval_mask.all() or not eval_mask.any():
            return self._answer(self._function(tensors, deterministic=bool(eval_mask.all()), **more))
        parts, states, order = [], [], []
        for deterministic in (True, False):
            rows = np.flatnonzero(eval_mask == deterministic)
            part = self._function(
                select(tensors, rows), deterministic=deterministic, **taken(more, rows)
            )
            if self.keeps_state:
                part, new_state = output_and_state(part)
                states.append(mapped(copied, new_state))
            # Copied: the function may write its next output into the same tensors.
            parts.append(select(self._to_arrays(part), np.arange(len(rows))))
            order.append(rows)
        back = np.argsort(np.concatenate(order))
        output = select(merge(parts), back)
        return (output, taken(joined(states), back)) if self.keeps_state else output

    def _answer(self, result: Any) -> Any:
        if not self.keeps_state:
            return self._to_arrays(result)
        output, state = output_and_state(result)
        return self._to_arrays(output), state

    def _to_tensors(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self._to_tensors(child) for key, child in tree.items()}
        if isinstance(tree, list):
            return [self._to_tensors(child) for child in tree]
        if isinstance(tree, self._torch.Tensor):  # in an example, say
            tensor = tree
        elif isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
            tensor = self._torch.from_numpy(tree)
        else:
            return tree
        if self.wants_pinned and tensor.device.type == "cpu":
            # Only from pinned memory is copied while the GPU computes. A batch lies in it already.
            tensor = tensor.pin_memory()
        dtype = self._dtype if tensor.is_floating_point() else None
        return tensor.to(self.device, dtype, non_blocking=self.wants_pinned)

    def _to_arrays(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self._to_arrays(child) for key, child in tree.items()}
        if isinstance(tree, (list, tuple)):
            return [self._to_arrays(child) for child in tree]
        if isinstance(tree, self._torch.Tensor):
            if tree.dtype == self._torch.bfloat16:
                tree = tree.float()  # numpy has no bfloat16; float32 holds the same values
            return tree.numpy(force=True)
        return tree


def state_difference(own: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """What keeps `given` from being loaded in place of `own`, in words; empty if nothing does.

    Args:
        own: A module's `state_dict`.
        given: Arrays or tensors by name.
    """
    missing = [name for name in own if name not in given]
    if missing:
        return f"{len(missing)} parameters are missing, such as {missing[0]!r}"
    foreign = [name for name in given if name not in own]
    if foreign:
        return f"the policy has no {foreign[0]!r}" + (
            f", and {len(foreign) - 1} more are not its own" if len(foreign) > 1 else ""
        )
    for name, tensor in own.items():
        shape, here = tuple(getattr(given[name], "shape", ())), tuple(getattr(tensor, "shape", ()))
        if shape != here:
            return f"{name!r} has shape {list(shape)}; the policy's has {list(here)}"
    return ""


def keeps_state(policy: Policy) -> bool:
    """Whether a policy has a memory.

    Raises:
        PolicyLoadError: It takes a state, but has no `initial_state`.
    """
    keeps = getattr(policy, "keeps_state", None)
    if keeps is None:
        keeps = _takes_state(parameters_of(getattr(policy, "infer", None)))
    source = getattr(policy, "_module", policy) if isinstance(policy, TensorPolicy) else policy
    if keeps and not callable(getattr(source, "initial_state", None)):
        raise PolicyLoadError(
            f"{type(source).__name__} takes a state, so it needs initial_state(rows), which returns the "
            "state of rows that begin an episode: arrays or tensors [rows, ...]"
        )
    return bool(keeps)


def _takes_state(parameters: Collection[str]) -> bool:
    """Whether a function takes a state beside the observation; many call that one `state`."""
    return "state" in list(parameters)[1:]


def output_and_state(result: Any) -> tuple[Any, Any]:
    """What a policy with memory returned.

    Raises:
        PolicyOutputError: It is no pair.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise PolicyOutputError(
            f"a policy that takes a state returns a pair, (output, new state); this one returned a "
            f"{type(result).__name__}"
        )
    return result


def parameters_of(function: Any) -> Collection[str]:
    """The names of a function's parameters; none if it does not tell them."""
    if hasattr(function, "schema"):  # TorchScript
        return [argument.name for argument in function.schema.arguments][1:]
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def device_of(name: str) -> str:
    """A device of torch; `auto` is a GPU if there is one."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
