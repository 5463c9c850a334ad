"""Simulators that step many rows in one call, most of them with torch tensors on a GPU."""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from zmqrl.env.conversion import Tree
from zmqrl.errors import ConfigError
from zmqrl.transport.rows import on_cpu, one_per_row

log = logging.getLogger(__name__)

_IDS = ("env_idx", "env_ids", "env_id", "envs_idx", "ids")
_MASKS = ("reset_mask", "mask")
_ENDS = 3
"""Steps running that may end an episode of one row, the first of them a longer one."""

_FINAL = ("final_obs", "final_observation", "terminal_observation")

Rows = npt.NDArray[np.bool_]


class BatchedEnv(VectorEnv[Any, Any, Any]):
    """A natively batched simulator as a VectorEnv: ManiSkill, Isaac Lab, Genesis, or one's own.

    `step(actions)` returns what Gymnasium's does, or `(observation, reward, done, extras)`, with
    `extras["time_outs"]` for truncations. Actions are handed over as tensors on the simulator's device
    if its observations are tensors. Rewards and dones may be of any dtype, `[N]` or `[N, 1]`.

    Either it resets by itself in the step (SAME_STEP: its `metadata["autoreset_mode"]` says so, it has
    an `episode_length_buf`, as those that follow Isaac do, or `resets_itself` is given), or finished
    rows are reset here: `reset` is called with their numbers (`env_idx`, `env_ids`, `env_id`,
    `envs_idx` or `ids`), a `reset_mask` or `mask`, or `options` with `env_idx` and `reset_mask`.

    Args:
        env: The simulator.
        num_envs: The number of rows that it should have, N.
        resets_itself: It resets finished rows in the step.

    Raises:
        ConfigError: It has another number of rows, names no action space, or cannot reset single rows.
    """

    copy = True
    """Every answer is in memory of its own."""

    def __init__(self, env: Any, num_envs: int, resets_itself: bool = False) -> None:
        self._env = env
        self._name = type(_attribute(env, "unwrapped") or env).__name__
        if _attribute(env, "num_envs") != num_envs:
            raise ConfigError(
                f"{self._name} has num_envs={_attribute(env, 'num_envs')}, expected {num_envs}"
            )
        self.num_envs = num_envs
        self.single_action_space = self._action_space()
        single = _attribute(env, "single_observation_space")
        if single is not None:
            self.single_observation_space = single
        self.render_mode = _attribute(env, "render_mode")
        self._parameters = set(inspect.signature(env.reset).parameters)
        self._mode = self._autoreset_mode(resets_itself)
        self.metadata = {**(_attribute(env, "metadata") or {}), "autoreset_mode": self._mode}
        self._torch: Any = None  # the module, once an observation has been a tensor
        self._device = _attribute(env, "device")
        self._last: Tree = None
        self._ends = np.zeros(num_envs, np.int64)  # of episodes, in steps running, from a longer one on
        self._went_on = np.zeros(num_envs, np.bool_)  # in the step before
        self._warned: set[str] = set()

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        """Reset all rows, or those of `options["reset_mask"]`.

        Args:
            seed: None, or N seeds. With seeds, the simulator resets one row a call, so that the start
                state of a row depends on its own seed only.
            options: See above.
        """
        mask = (options or {}).get("reset_mask")
        if mask is None:
            observation, infos = self._reset_all()
            mask = np.ones(self.num_envs, np.bool_)
            merged = _host(observation, copied=True)
        else:
            merged, infos = _host(self._last, copied=True), {}
        seeds = [None] * self.num_envs if seed is None else seed
        seeded = [row for row in np.flatnonzero(mask) if seeds[row] is not None]
        if seeded and self._mode is AutoresetMode.DISABLED:
            for row in seeded:
                infos = self._reset_rows(np.arange(self.num_envs) == row, seeds[row], merged)
        elif options is not None:
            infos = self._reset_rows(mask, None, merged)
        self._last = merged
        return merged, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all rows."""
        answer = self._env.step(self._for_env(actions))
        if not isinstance(answer, (tuple, list)) or len(answer) not in (4, 5):
            raise ValueError("step returned no (observation, reward, terminated, truncated, infos)")
        if not isinstance(answer[-1], (Mapping, type(None))):
            raise ValueError(f"the infos are a {type(answer[-1]).__name__}, not a dict")
        infos = dict(answer[-1] or {})
        if len(answer) == 4:
            if self._mode is AutoresetMode.DISABLED:
                raise ConfigError(
                    f"{self._name} returns (observation, reward, done, extras), as simulators do that "
                    "reset by themselves: set env.autoreset_mode to same_step"
                )
            observation, reward, over, _ = answer
            done = self._flags("dones", over)
            truncated = done & self._flags("time_outs", infos.get("time_outs", False))
            terminated = done & ~truncated
        else:
            observation, reward, over, cut, _ = answer
            terminated, truncated = self._flags("terminations", over), self._flags("truncations", cut)
            done = terminated | truncated
        observation = _host(observation, copied=True)
        if self._mode is AutoresetMode.SAME_STEP:
            self._look_whether_it_resets(done)
            if done.any():
                infos["final_obs"] = self._final(observation, infos, done)
                if not isinstance(infos.get("final_info"), Mapping):
                    infos["final_info"] = dict(infos)
        self._last = observation
        return observation, on_cpu(reward), terminated, truncated, infos

    def render(self) -> Any:
        """What the simulator shows."""
        return self._env.render()

    def close_extras(self, **kwargs: Any) -> None:
        """Close the simulator, if it can be closed."""
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    # -- Resets

    def _reset_all(self) -> tuple[Any, dict[str, Any]]:
        kwargs = {}
        if self._last is None and "seed" in self._parameters:
            # Without one some of them begin with the same episodes in every process.
            kwargs["seed"] = secrets.randbelow(2**31)
        observation, infos = _observation_and_infos(self._env.reset(**kwargs))
        tensor = _any_tensor(observation)
        if tensor is not None:
            import torch

            self._torch = torch
            self._device = tensor.device if self._device is None else self._device
        return observation, infos

    def _reset_rows(self, mask: Rows, seed: int | None, into: Tree) -> dict[str, Any]:
        ids: Any = np.flatnonzero(mask)
        given: Any = mask
        if self._torch is not None:
            ids, given = (self._torch.as_tensor(part, device=self._device) for part in (ids, mask))
        kwargs: dict[str, Any] = {"options": {"env_idx": ids, "reset_mask": given}}
        for names, value in ((_IDS, ids), (_MASKS, given)):
            kwargs = next(({name: value} for name in names if name in self._parameters), kwargs)
        if seed is not None:
            kwargs["seed"] = int(seed)
        given_back, infos = _observation_and_infos(self._env.reset(**kwargs))
        observation = _host(given_back, copied=False)
        _put(into, observation, mask, "the observation of a reset of single rows")
        if mask.sum() < self.num_envs and _others_changed(into, observation, mask):
            self._warn(
                f"a reset of single rows of {self._name} changed the observations of all others, too; "
                "does it reset those? If it resets by itself, set env.autoreset_mode to same_step"
            )
        return infos

    def _final(self, observation: Tree, infos: dict[str, Any], done: Rows) -> Tree:
        """The observations of the rows that are done when they ended; of the others any."""
        final = next((infos[key] for key in _FINAL if key in infos), None)
        if final is None:
            self._warn(
                f"{self._name} resets by itself and gives no final_obs: the last observation before an "
                "episode's end stands in for it"
            )
            final = self._last
        merged = _host(observation, copied=True)
        _put(merged, _host(final, copied=False), done, "final_obs")
        return merged

    def _look_whether_it_resets(self, done: Rows) -> None:
        """Warn of rows that stay at their end. That they were not reset cannot be seen otherwise."""
        self._ends[~done] = 0
        self._ends[done & (self._went_on | (self._ends > 0))] += 1
        self._went_on = ~done
        if (self._ends >= _ENDS).any():
            self._warn(
                f"row {int(self._ends.argmax())} of {self._name} has ended an episode in {_ENDS} steps "
                "running, after a longer one: does it reset finished rows in the step? If not, leave "
                "env.autoreset_mode at disabled"
            )

    # -- What the simulator is

    def _autoreset_mode(self, resets_itself: bool) -> AutoresetMode:
        declared = (_attribute(self._env, "metadata") or {}).get("autoreset_mode")
        if declared is not None:
            return AutoresetMode(declared)
        if resets_itself or _attribute(self._env, "episode_length_buf") is not None:
            return AutoresetMode.SAME_STEP
        if not self._parameters & {"options", *_IDS, *_MASKS}:
            raise ConfigError(
                f"{self._name} cannot reset single rows: its reset takes none of options, "
                f"{', '.join(_IDS + _MASKS)}. If it resets by itself, set env.autoreset_mode to "
                "same_step"
            )
        return AutoresetMode.DISABLED

    def _action_space(self) -> spaces.Space[Any]:
        single = _attribute(self._env, "single_action_space")
        if single is None:
            count = _attribute(self._env, "num_actions")
            if count is None:
                raise ConfigError(f"{self._name} has neither single_action_space nor num_actions")
            return spaces.Box(-np.inf, np.inf, (int(count),), np.float32)
        return single  # type: ignore[no-any-return]

    # -- Values

    def _for_env(self, actions: Any) -> Any:
        if self._torch is None:
            return actions
        if isinstance(actions, Mapping):
            return {key: self._for_env(child) for key, child in actions.items()}
        if isinstance(actions, (list, tuple)):
            return type(actions)(self._for_env(child) for child in actions)
        # Copied, because the array may not be writable, which torch warns of.
        return self._torch.as_tensor(np.array(actions), device=self._device)

    def _flags(self, what: str, values: Any) -> Rows:
        values = on_cpu(values)
        if np.ndim(values) == 0:
            return np.full(self.num_envs, bool(values))
        rows: Rows = one_per_row(what, values, self.num_envs, np.bool_)
        return rows

    def _warn(self, message: str) -> None:
        """Say something once."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message)


def is_batched(made: Any) -> bool:
    """Whether `made` is a simulator of many rows that is no plain VectorEnv."""
    if isinstance(made, VectorEnv):
        return hasattr(made, "device")  # one of tensors, such as ManiSkill's
    return _attribute(made, "num_envs") is not None and hasattr(made, "step") and hasattr(made, "reset")


def _attribute(env: Any, name: str) -> Any:
    """What the simulator has under `name`, within its wrappers too; None if nothing."""
    if isinstance(env, gymnasium.Env) and env.has_wrapper_attr(name):
        return env.get_wrapper_attr(name)
    return getattr(env, name, None)


def _observation_and_infos(answer: Any) -> tuple[Any, dict[str, Any]]:
    """What `reset` returned: an observation, or one and infos, or one and None."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], (Mapping, type(None))):
        return answer[0], dict(answer[1] or {})
    return answer, {}


def _any_tensor(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return next((found for c in tree.values() if (found := _any_tensor(c)) is not None), None)
    if isinstance(tree, (list, tuple)):
        return next((found for c in tree if (found := _any_tensor(c)) is not None), None)
    return tree if hasattr(tree, "detach") else None


def _host(tree: Any, copied: bool) -> Tree:
    """The tree in arrays; with `copied`, none of them shares the simulator's memory."""
    if isinstance(tree, Mapping):
        return {key: _host(child, copied) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)) and not all(isinstance(item, str) for item in tree):
        return type(tree)(_host(child, copied) for child in tree)
    if isinstance(tree, (list, tuple)):
        return list(tree)
    elsewhere = getattr(getattr(tree, "device", None), "type", "cpu") != "cpu"
    array = np.asarray(on_cpu(tree))
    return array.copy() if copied and not elsewhere else array


def _put(tree: Tree, rows: Tree, mask: Rows, path: str) -> None:
    """Replace the rows of `mask` by those of `rows`, which has all rows or just these.

    Raises:
        ValueError: It has others, or another structure; names the key.
    """
    if isinstance(tree, dict):
        for key, child in tree.items():
            if not isinstance(rows, dict) or key not in rows:
                raise ValueError(f"{path} has no {key!r}")
            _put(child, rows[key], mask, f"{path}.{key}")
    elif isinstance(tree, np.ndarray):
        fits = isinstance(rows, np.ndarray) and rows.shape[1:] == tree.shape[1:]
        if not fits or len(rows) not in (len(mask), mask.sum()):
            is_what = list(rows.shape) if isinstance(rows, np.ndarray) else f"a {type(rows).__name__}"
            raise ValueError(
                f"{path} is {is_what}, expected {list(tree.shape)}, or just its {mask.sum()} rows"
            )
        tree[mask] = rows[mask] if len(rows) == len(mask) else rows
    elif isinstance(tree, list) and all(isinstance(item, str) for item in tree):
        chosen = np.flatnonzero(mask)
        if not isinstance(rows, list) or len(rows) not in (len(mask), len(chosen)):
            raise ValueError(f"{path} is not {len(mask)} str, or just those of the {len(chosen)} rows")
        for number, row in enumerate(chosen):
            tree[row] = rows[row] if len(rows) == len(mask) else rows[number]
    else:
        if not isinstance(rows, (list, tuple)) or len(rows) != len(tree):
            raise ValueError(f"{path} is not a list of {len(tree)}")
        for index, (child, part) in enumerate(zip(tree, rows, strict=True)):
            _put(child, part, mask, f"{path}[{index}]")


def _others_changed(before: Tree, after: Tree, mask: Rows) -> bool:
    """Whether none of the rows that are not in `mask` is what it was, in any array."""
    if isinstance(before, dict):
        return all(_others_changed(child, after[key], mask) for key, child in before.items())
    if not isinstance(before, np.ndarray):
        return True
    if len(after) != len(mask):
        return False
    differs = before[~mask] != after[~mask]
    return bool(differs.reshape(len(differs), -1).any(axis=1).all())
