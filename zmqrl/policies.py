"""Factories for `--policy`: policies that other libraries have saved.

bin/start-rollout-worker --policy zmqrl.policies:torchscript path=actor.pt
bin/start-rollout-worker --policy zmqrl.policies:exported path=actor.pt2
bin/start-rollout-worker --policy zmqrl.policies:stable_baselines3 path=model.zip algorithm=PPO

What they return is loaded on `rollout.device`: a factory that names an argument `device` is told. Only
for files that you trust: reading them may run code that is in them.
"""

from __future__ import annotations

import importlib
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zmqrl.errors import PolicyLoadError, in_a_line
from zmqrl.rollout.adapters import ActionModel, ModelFile, Predict

__all__ = ["ActionModel", "exported", "stable_baselines3", "torchscript"]

_KINDS = {
    "a TorchScript file": ("constants.pkl", "torchscript"),
    "a torch.export file": ("archive_format", "exported"),
    "a model of Stable-Baselines3": ("_stable_baselines3_version", "stable_baselines3"),
    "weights or a pickled module, of torch.save": ("data.pkl", ""),
}
"""What a zip archive is, by the name of a file in it; and the factory that reads it."""

_OF_WEIGHTS = "a factory of your own builds the module, and loads them into it"


def torchscript(path: str, device: str = "cpu") -> Any:
    """A module saved by `torch.jit.save`.

    Args:
        path: Of the file.
        device: Where its weights go.

    Raises:
        PolicyLoadError: It is no such file.
    """
    _check_kind(path, "torchscript")
    module = torch.jit.load(path, map_location=device)  # type: ignore[no-untyped-call]
    return ModelFile(module.eval())


def exported(path: str, device: str = "cpu") -> Any:
    """A program saved by `torch.export.save`.

    Its first axis, the rows, should be dynamic. If it is not, `rollout.static_batch_sizes` must be the
    only number of rows that it takes.

    Args:
        path: Of the file; by custom it ends in .pt2.
        device: Where its weights go.

    Raises:
        PolicyLoadError: It is no such file.
    """
    from torch.export.passes import move_to_device_pass
    from torch.utils._pytree import tree_unflatten

    _check_kind(path, "exported")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        program = torch.export.load(path)
        tensors = {
            node.name: node.meta["val"]
            for node in program.graph.nodes
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        }
        given = [tensors.get(name) for name in program.graph_signature.user_inputs]
        module = move_to_device_pass(program, device).module()
    spec = program.call_spec.in_spec
    dtypes = [None if tensor is None else tensor.dtype for tensor in given]
    inputs = None if spec is None else tree_unflatten(dtypes, spec)
    first = [tensor.shape[0] for tensor in given if tensor is not None and tensor.ndim]
    only_rows = next((size for size in first if isinstance(size, int)), None)
    return ModelFile(module, inputs, only_rows)


def stable_baselines3(
    path: str, algorithm: str, vec_normalize: str | None = None, device: str = "cpu"
) -> Any:
    """A model of Stable-Baselines3 or of sb3-contrib, as its `save` wrote it.

    Only for files that you trust: they are unpickled, which runs whatever code is in them.

    Args:
        path: Of the zip file.
        algorithm: The name of its class: `PPO`, `SAC`, `DQN`, …
        vec_normalize: A file that `VecNormalize.save` wrote, if observations were normalised in
            training; also unpickled.
        device: Where its weights go.

    Raises:
        PolicyLoadError: It is no model of this algorithm, or a library is missing.
    """
    _check_kind(path, "stable_baselines3")
    known = {}
    for library in ("stable_baselines3", "sb3_contrib"):
        with suppress(ImportError):
            known.update(vars(importlib.import_module(library)))
    algorithms = [name for name in known if callable(getattr(known[name], "load", None))]
    if not algorithms:
        raise PolicyLoadError("there is no stable_baselines3 here: pip install stable-baselines3")
    if algorithm not in algorithms:
        raise PolicyLoadError(f"there is no algorithm {algorithm!r}; there are {', '.join(algorithms)}")
    try:
        model = known[algorithm].load(path, device=device)
    except Exception as error:
        raise PolicyLoadError(f"{path} is no model of {algorithm}: {in_a_line(error)}") from error
    return Predict(model, None if vec_normalize is None else _normalizer(vec_normalize, model))


def _normalizer(path: str, model: Any) -> Any:
    """The `normalize_obs` of a saved `VecNormalize`."""
    import gymnasium
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    class Spaces(gymnasium.Env[Any, Any]):
        observation_space, action_space = model.observation_space, model.action_space

    if not Path(path).is_file():
        raise PolicyLoadError(f"there is no file {path} (looked in {Path.cwd()})")
    try:
        loaded = VecNormalize.load(path, DummyVecEnv([Spaces]))
        return loaded.normalize_obs
    except Exception as error:
        raise PolicyLoadError(
            f"{path} is no VecNormalize for these observations: {in_a_line(error)}"
        ) from error


def _check_kind(path: str, factory: str) -> None:
    """Refuse a file that another factory reads, or none.

    Raises:
        PolicyLoadError: Saying what it is, and what reads it.
    """
    file = Path(path)
    if not file.is_file():
        raise PolicyLoadError(f"there is no file {path} (looked in {Path.cwd()})")
    if not zipfile.is_zipfile(file):
        raise PolicyLoadError(f"{path} is no zip archive, as such files are; is it complete?")
    with zipfile.ZipFile(file) as archive:
        names = {name.rpartition("/")[2] for name in archive.namelist()}
    wanted = next(kind for kind, (_, reads) in _KINDS.items() if reads == factory)
    for kind, (name, reads) in _KINDS.items():
        if name in names and reads == factory:
            return
        if name in names:
            hint = f"take --policy zmqrl.policies:{reads}" if reads else _OF_WEIGHTS
            raise PolicyLoadError(f"{path} is {kind}, not {wanted}: {hint}")
    raise PolicyLoadError(f"{path} is a zip archive, but not {wanted}")
