"""Policies as other libraries have them, as modules that `TensorPolicy` can call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zmqrl.errors import PolicyError, PolicyLoadError
from zmqrl.rollout.policy import parameters_of
from zmqrl.transport.tree import rows_of

# Each adapter says in `takes` what it is called with, because the signature of what is inside says other
# things: an input `state` of a file, for instance, is the entry of that name in the observation.

_MASKS = ("eval_mask", "deterministic", "valid_mask")

_CHUNKS = ("predict_action_chunk",)
_ACTIONS = ("select_action", "predict_action")
"""Methods by which policies of the Hugging Face world are asked, the best one first."""


def adapted(source: Any, device: str) -> tuple[Any, str]:
    """What a factory returned, as a function of a tree of tensors, and where its tensors belong.

    Args:
        source: An actor of TorchRL, a model of Stable-Baselines3, or an object with `select_action` and
            its like; anything else is returned as it is.
        device: For the tensors of the others.

    Raises:
        PolicyLoadError: It keeps a state from call to call.
    """
    if _is_a(source, "tensordict.nn", "TensorDictModuleBase"):
        return TensorDictActor(source), device
    algorithm = _is_a(source, "stable_baselines3.common.base_class", "BaseAlgorithm")
    if algorithm or _is_a(source, "stable_baselines3.common.policies", "BasePolicy"):
        return Predict(source), "cpu"  # it takes arrays, and moves them to its own device itself
    is_ours = any(name in parameters_of(getattr(source, "forward", None)) for name in _MASKS)
    if not is_ours and any(callable(getattr(source, name, None)) for name in (*_CHUNKS, *_ACTIONS)):
        return ActionModel(source), device
    if isinstance(source, torch.jit.ScriptModule):
        return ModelFile(source), device
    return source, device


def _is_a(source: Any, module: str, name: str) -> bool:
    """Whether `source` is of a class of a library, which nobody needs to have."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(source, found)


class ModelFile(torch.nn.Module):
    """A module that came out of a file, whose inputs are named by its signature.

    One that has a single input beside the masks gets the observation; one that has several gets the
    entries of the observation that have their names.

    Args:
        module: It.
        inputs: Its positional and its keyword arguments, each a tree of dtypes whose dicts have the keys
            that it wants, in the order in which it wants them; None if it minds neither.
        only_rows: The only number of rows that it takes; None if any.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        only_rows: int | None = None,
    ) -> None:
        super().__init__()
        self._orig_mod = module
        self.only_rows = only_rows
        names = list(parameters_of(module.forward))
        self._args: tuple[Any, ...] = inputs[0] if inputs else (None,) * len(names)
        self._kwargs: dict[str, Any] = inputs[1] if inputs else {}
        self._names = [*names[: len(self._args)], *self._kwargs]
        self._single = sum(name not in _MASKS for name in self._names) == 1
        self.takes = ("observation", *(name for name in self._names if name in _MASKS))

    def train(self, mode: bool = True) -> ModelFile:
        """Nothing: an exported module has its mode built in, and refuses to be told another."""
        return self

    def forward(self, observation: Any, **masks: Any) -> Any:
        """The module's output, as a `Policy` returns it."""
        given = [self._input(name, observation, masks) for name in self._names]
        count = len(self._args)
        args = [_shaped(want, value) for want, value in zip(self._args, given[:count], strict=True)]
        kwargs = {
            name: _shaped(want, value)
            for (name, want), value in zip(self._kwargs.items(), given[count:], strict=True)
        }
        return self._orig_mod(*args, **kwargs)

    def _input(self, name: str, observation: Any, masks: Mapping[str, Any]) -> Any:
        if name in masks:
            return masks[name]
        return observation if self._single else _entry(observation, name)


def _shaped(want: Any, tree: Any) -> Any:
    """`tree` with the keys of `want` alone, in its order, and with its dtypes."""
    if isinstance(want, Mapping):
        return {key: _shaped(child, _entry(tree, key)) for key, child in want.items()}
    if isinstance(want, (list, tuple)) and isinstance(tree, list):
        return type(want)(_shaped(child, item) for child, item in zip(want, tree, strict=True))
    is_array = isinstance(want, torch.dtype) and isinstance(tree, torch.Tensor)
    return tree.to(want) if is_array else tree


def _entry(observation: Any, key: str) -> Any:
    if isinstance(observation, Mapping) and key in observation:
        return observation[key]
    there = ", ".join(observation) if isinstance(observation, Mapping) else "one array"
    raise PolicyError(f"the model has an input {key!r}; the observation has only {there}")


class TensorDictActor(torch.nn.Module):
    """An actor of TorchRL: the observation goes under its `in_keys`, the actions are its `action`.

    `prev_logprobs` and `prev_values` come with them, if it tells them. Rows to be deterministic are
    asked for with the exploration type DETERMINISTIC, others with RANDOM. Actions of a one-hot spec
    become numbers.

    Args:
        actor: A `TensorDictModule`, such as a `ProbabilisticActor` or a `QValueActor`.

    Raises:
        PolicyLoadError: It has no output `action`.
    """

    takes = ("observation", "deterministic")

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self._orig_mod = actor
        outputs = {_last(key): key for key in actor.out_keys}
        self._action = outputs.get("action")
        if self._action is None:
            raise PolicyLoadError(f"the actor's out_keys are {list(actor.out_keys)}, without 'action'")
        self._more = {
            name: outputs[key]
            for key, name in (
                ("sample_log_prob", "prev_logprobs"),
                ("action_log_prob", "prev_logprobs"),
                ("state_value", "prev_values"),
            )
            if key in outputs
        }
        self._one_hot = _is_one_hot(actor)

    def forward(self, observation: Any, deterministic: bool) -> dict[str, Any]:
        """Actions for rows of one mode."""
        from tensordict import TensorDict
        from tensordict.nn import InteractionType, set_interaction_type

        fields = self._fields(observation)
        rows = next(iter(fields.values())).shape[:1]
        mode = InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM
        with set_interaction_type(mode):
            output = self._orig_mod(TensorDict(fields, batch_size=rows))
        actions = output.get(self._action)
        if self._one_hot:
            actions = actions.long().argmax(-1)
        return {"actions": actions, **{name: output.get(key) for name, key in self._more.items()}}

    def _fields(self, observation: Any) -> dict[Any, Any]:
        keys = self._orig_mod.in_keys
        if not isinstance(observation, Mapping):
            if len(keys) != 1:
                raise PolicyError(
                    f"the actor has the in_keys {list(keys)}; the observation is one array"
                )
            return {keys[0]: observation}
        fields = {}
        for key in keys:
            found: Any = observation
            for part in (key,) if isinstance(key, str) else key:
                found = found.get(part) if isinstance(found, Mapping) else None
            if not isinstance(found, torch.Tensor):
                raise PolicyError(
                    f"the actor has the in_key {key!r}, but the observation has {', '.join(observation)}"
                )
            fields[key] = found
        return fields


class Predict:
    """A model of Stable-Baselines3, by its `predict`.

    Args:
        model: An algorithm, such as `PPO`, or its policy.
        normalize: Of a `VecNormalize`: what observations go through first.
    """

    def __init__(self, model: Any, normalize: Callable[[Any], Any] | None = None) -> None:
        self.model = model
        self._normalize = normalize

    def __call__(self, observation: Any, deterministic: bool) -> dict[str, Any]:
        """Actions for rows of one mode."""
        arrays = _as_arrays(observation)
        if self._normalize is not None:
            arrays = self._normalize(arrays)
        actions, state = self.model.predict(arrays, deterministic=deterministic)
        if state is not None:
            raise PolicyError(
                f"a {type(self.model).__name__} keeps a state from call to call, which rows of a pool "
                "do not share; write a policy that takes it as an argument (docs/policies.md)"
            )
        return {"actions": actions}


class ActionModel(torch.nn.Module):
    """A policy that is asked with `predict_action_chunk`, `select_action` or `predict_action`.

    Its batch is the observation, flattened: `{"pixels": {"top": …}}` has the key `pixels.top`. The first
    of these methods is used that it has. `select_action` hands out a queue of actions which it keeps for
    the batch as a whole, and so for the rows of an earlier call: `reset()` comes before each call of it.

    Args:
        policy: It; a torch module is moved to `rollout.device`.
        keys: The keys of the batch, by those of the observation; others keep theirs. Rows of text go
            under `task` if there is a key `task_descriptions`.
        chunk: How many actions of a chunk are returned, as `[N, chunk, …]` (`env.num_action_chunks`);
            None for the first one, as `[N, …]`.
        images: Whether uint8 arrays `[N, H, W, C]` become floats `[N, C, H, W]` from 0 to 1.
        preprocess: What the batch goes through before the policy, such as normalisation.
        postprocess: What the policy's actions go through.

    Raises:
        PolicyLoadError: The policy has none of these methods, or gives no chunks.
    """

    takes = ("observation",)

    def __init__(
        self,
        policy: Any,
        keys: Mapping[str, str] | None = None,
        chunk: int | None = None,
        images: bool = True,
        preprocess: Callable[[dict[str, Any]], Any] | None = None,
        postprocess: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self._orig_mod = policy
        self._keys = {"task_descriptions": "task", **(keys or {})}
        self._chunk = chunk
        self._images = images
        self._preprocess, self._postprocess = preprocess, postprocess
        methods = [name for name in (*_CHUNKS, *_ACTIONS) if callable(getattr(policy, name, None))]
        if not methods:
            raise PolicyLoadError(
                f"a {type(policy).__name__} has none of {', '.join((*_CHUNKS, *_ACTIONS))}"
            )
        # One that looks at several observations has its queues filled by select_action alone.
        history = getattr(getattr(policy, "config", None), "n_obs_steps", 1) > 1
        self._method = "select_action" if history and "select_action" in methods else methods[0]
        if chunk is not None and self._method not in _CHUNKS:
            raise PolicyLoadError(f"{self._method} gives single actions, not chunks of {chunk}")

    def forward(self, observation: Any) -> dict[str, Any]:
        """Actions for a batch."""
        batch = dict(self._flat(observation))
        rows = rows_of(observation)
        if self._preprocess is not None:
            batch = self._preprocess(batch)
        reset = getattr(self._orig_mod, "reset", None)
        if self._method == "select_action" and callable(reset):
            reset()
        output = getattr(self._orig_mod, self._method)(batch)
        if self._method in _CHUNKS and self._chunk is None:
            output = output[:, 0]
        elif self._method in _CHUNKS:
            if output.shape[1] < (self._chunk or 0):
                raise PolicyError(
                    f"the policy's chunks have {output.shape[1]} actions; {self._chunk} are wanted"
                )
            output = output[:, : self._chunk]
        if self._postprocess is not None:
            output = self._postprocess(output)
        if isinstance(output, Mapping):
            output = output["action"] if "action" in output else output["actions"]
        if len(output) != rows:
            raise PolicyError(f"{self._method} gave {len(output)} rows of actions for {rows}")
        return {"actions": output}

    def _flat(self, tree: Any, path: str = "") -> list[tuple[str, Any]]:
        if isinstance(tree, Mapping):
            below = [self._flat(child, f"{path}.{key}" if path else key) for key, child in tree.items()]
            return [item for items in below for item in items]
        if self._images and isinstance(tree, torch.Tensor) and tree.dtype == torch.uint8:
            tree = tree.movedim(-1, 1).float() / 255 if tree.ndim == 4 else tree
        return [(self._keys.get(path, path) or "observation.state", tree)]


def _as_arrays(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _as_arrays(child) for key, child in tree.items()}
    return tree.numpy() if isinstance(tree, torch.Tensor) else tree


def _last(key: Any) -> str:
    """The name in a key of a tensordict, which may be a path."""
    return str(key if isinstance(key, str) else key[-1])


def _is_one_hot(actor: Any) -> bool:
    for module in actor.modules():
        spec: Any = getattr(module, "spec", None)
        if _is_a(spec, "torchrl.data", "Composite"):
            spec = spec.get("action", None)
        told = getattr(module, "action_space", None)
        if _is_a(spec, "torchrl.data", "OneHot") or (isinstance(told, str) and told == "one_hot"):
            return True
    return False
