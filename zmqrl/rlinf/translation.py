"""RLinf's keys in, our keys out.

Keys that both have keep name and value. The tables below say what is named differently, and why the
rest is left out.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from zmqrl import config

_RENAMED = {
    "rollout.pipeline_stage_num": "env.pipeline_stages",
    "algorithm.rollout_epoch": "env.train.rollout_epoch",
    "algorithm.eval_rollout_epoch": "env.eval.rollout_epoch",
    "actor.model.hidden_dims": "actor.model.hidden_sizes",
    "env.eval.video_cfg.save_video": "env.eval.save_video",
}

_DELAYS = {
    "constant": {"delay": "delay"},
    "uniform": {"min_delay": "low", "max_delay": "high", "low": "low", "high": "high"},
    "exponential": {"rate": "mean", "mean": "mean", "scale": "mean"},
    "gaussian": {"mean": "mean", "stddev": "std", "std": "std", "scale": "std"},
}
"""The parameters of each type of delay, there and here."""

_SCHEDULES = {"torch_constant": "constant", "constant": "constant", "linear": "linear"}

_REASONS = {
    "hydra*": "of Hydra itself",
    "cluster.component_placement.*": "no such worker here",
    "cluster.*": "no Ray cluster here",
    "*.group_name": "names are fixed here",
    "*.auto_reset": "always so here",
    "rollout.collect_transitions": "always so here",
    "actor.sync_weight_no_wait": "always so here",
    "weight_syncer*": "workers pull weights here",
    "runner.resume_dir": "a checkpoint of RLinf",
    "runner.ckpt_path": "a checkpoint of RLinf",
    "reward.*": "see reward.model",
    "critic*": "part of actor here",
    "env.*.init_params.*": "see env.kwargs",
    "env.*.video_cfg.*": "in the run folder, of evaluations",
    "actor.model*": "follows from the spaces",
    "rollout.*": "of RLinf's inference",
    "actor.*": "of RLinf's training",
    "algorithm.*": "no such part of the algorithm",
    "env.*": "of RLinf's simulators",
}
"""Patterns of keys that are left out, each with the reason; the first that fits holds."""


@dataclass(slots=True)
class Imported:
    """What came of an import.

    Attributes:
        values: Our keys and their values.
        kept: Keys with the same name and value.
        translated: Keys whose name or value changed, as text: before and after.
        left_out: Reasons, each with its keys.
        to_fill_in: What the user must still decide, in a line each.
        origin: For each of our keys the one of RLinf that it came from.
    """

    values: dict[str, Any] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    translated: list[tuple[str, str]] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    to_fill_in: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)

    def write(self, key: str, value: Any, own: str, own_value: Any) -> None:
        """Write `own`; `key` is where it came from."""
        if own in self.values and self.values[own] != own_value:
            self.leave_out(key, f"{self.origin[own]} says otherwise")
            return
        self.values[own] = own_value
        self.origin[own] = key
        if key == own and value == own_value:
            self.kept.append(key)
        else:
            after = shown(own_value) if key == own else f"{own}: {shown(own_value)}"
            self.translated.append((f"{key}: {shown(value)}", after))

    def leave_out(self, key: str, reason: str) -> None:
        """Say that `key` has no place here."""
        self.left_out.setdefault(reason, []).append(key)


def translate(tree: dict[str, Any]) -> Imported:
    """Turn RLinf's sections into keys of ours.

    Args:
        tree: Sections and values, without interpolations.
    """
    made = Imported()
    given = dict(_leaves(tree))
    for key in [key for key, value in given.items() if value is None]:
        made.leave_out(key, "not set")
        del given[key]
    for rule in _RULES:
        rule(given, made)
    ours = set(own_keys(config.Config))
    for key in [key for key in given if key in ours and not _is_left_out(key)]:
        made.write(key, given[key], key, given.pop(key))
    for key in [key for key in given if key in _RENAMED]:
        made.write(key, given[key], _RENAMED[key], given.pop(key))
    for key in given:
        reasons = (reason for pattern, reason in _REASONS.items() if fnmatchcase(key, pattern))
        made.leave_out(key, next(reasons, "no counterpart"))
    _fit_the_env_workers(made)
    _say_what_is_missing(made)
    return made


def _is_left_out(key: str) -> bool:
    """Whether we have a key of that name, but for something else."""
    return key.startswith(("runner.resume_dir", "runner.ckpt_path", "reward.model"))


def _place_workers(given: dict[str, Any], made: Imported) -> None:
    """`resources:processes` for several components becomes the number of processes of each."""
    prefix = "cluster.component_placement."
    for key in [key for key in given if key.startswith(prefix)]:
        names, _, part = key.removeprefix(prefix).partition(".")
        if part not in ("", "placement"):
            continue
        placement = given.pop(key)
        count = _processes(str(placement))
        for name in (name.strip() for name in names.split(",")):
            where = key if "," not in names else f"{key} ({name})"
            if name == "actor":
                made.leave_out(where, "one learner here")
            elif name not in ("env", "rollout", "reward"):
                made.leave_out(where, _REASONS[f"{prefix}*"])
            elif count is None:
                why = "depends on the machines" if "all" in str(placement) else "cannot be counted"
                made.leave_out(where, f"{shown(placement)}: {why}")
                made.to_fill_in.append(f"{prefix}{name}: how many; RLinf says {shown(placement)}")
            else:
                made.write(where, str(placement), f"{prefix}{name}", _ranks(count))


def _processes(placement: str) -> int | None:
    """The number of processes of a placement such as `0-1:0-3,4`; None if it cannot be told."""
    count = 0
    for part in filter(None, (part.strip() for part in placement.split(","))):
        resources, _, processes = part.partition(":")
        ranks = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", (processes or resources).strip())
        if ranks is None or int(ranks[2] or ranks[1]) < int(ranks[1]):
            return None
        count += int(ranks[2] or ranks[1]) - int(ranks[1]) + 1
    return count or None


def _ranks(count: int) -> str:
    return f"0-{count - 1}" if count > 1 else "0"


def _name_the_algorithm(given: dict[str, Any], made: Imported) -> None:
    kinds = {
        key: given.pop(key) for key in ("algorithm.loss_type", "algorithm.adv_type") if key in given
    }
    words = [str(kind) for kind in kinds.values()]
    name = None
    if "embodied_sac" in words:
        name = "sac"
    elif words and all(word == "gae" or "ppo" in word or "actor_critic" in word for word in words):
        name = "ppo"
    for key, kind in kinds.items():
        if name is None:
            made.leave_out(key, f"{kind}: no such algorithm here")
        else:
            made.write(key, kind, "algorithm.name", name)
            if name == "ppo":
                # Its Gaussian leaves the bounds of a Box, and RLinf's simulators clip by themselves.
                made.write(key, kind, "env.clip_actions", True)


def _join_the_clip_ratios(given: dict[str, Any], made: Imported) -> None:
    keys = [key for key in ("algorithm.clip_ratio_high", "algorithm.clip_ratio_low") if key in given]
    bounds = {key: given.pop(key) for key in keys}
    for key, bound in bounds.items():
        if len(set(map(str, bounds.values()))) == 1:
            made.write(key, bound, "algorithm.clip_ratio", bound)
        else:
            made.leave_out(key, "clip_ratio is one bound here")


def _rename_the_delays(given: dict[str, Any], made: Imported) -> None:
    for section in ("env.delay_sampler", "env.train.delay_sampler", "env.eval.delay_sampler"):
        kind = given.pop(f"{section}.type", None)
        if kind is None:
            continue
        own_kind = str(kind).lower()
        made.write(f"{section}.type", kind, f"{section}.type", own_kind)
        for key in [key for key in given if key.startswith(f"{section}.")]:
            name = key.removeprefix(f"{section}.")
            own = _DELAYS.get(own_kind, {}).get(name)
            if own is not None:
                value = given.pop(key)
                own_value = _mean_of(value) if name == "rate" else value
                made.write(key, value, f"{section}.{own}", own_value)
            elif name not in ("seed", "per_worker", "stall"):
                del given[key]
                made.leave_out(key, f"not of type {own_kind}")
    if "env.delay_sampler.type" in made.values and "env.eval.delay_sampler.type" not in made.values:
        none = {"type": "constant", "delay": 0.0}
        made.values.update({f"env.eval.delay_sampler.{key}": value for key, value in none.items()})
        made.translated.append(
            ("env.delay_sampler: of training only", f"env.eval.delay_sampler: {none}")
        )


def _mean_of(rate: Any) -> Any:
    """The mean of an exponential distribution; our configuration says what is wrong with another one."""
    if not isinstance(rate, (int, float)):
        return rate
    return 1 / rate if rate else math.inf


def _rename_the_schedules(given: dict[str, Any], made: Imported) -> None:
    for key in [key for key in given if key.endswith("optim.lr_scheduler")]:
        name = given.pop(key)
        if str(name) in _SCHEDULES:
            made.write(key, name, key, _SCHEDULES[str(name)])
        else:
            made.leave_out(key, f"{name}: no such schedule here")


def _choose_the_loggers(given: dict[str, Any], made: Imported) -> None:
    key = "runner.logger.logger_backends"
    if key not in given:
        return
    named = [given[key]] if isinstance(given[key], str) else given[key]
    if not isinstance(named, list):
        return  # The general rule takes it over, and our configuration says what is wrong with it.
    given.pop(key)
    own = [name for name in named if name in ("tensorboard", "wandb")]
    for name in named:
        if name not in own:
            made.leave_out(f"{key}: {name}", "no such logger here")
    made.write(key, named, key, own)


def _find_the_simulator(given: dict[str, Any], made: Imported) -> None:
    for mode in ("train", "eval"):
        key = f"env.{mode}.init_params.id"
        if key in given:
            made.write(key, given[key], "env.id", given.pop(key))
    kinds = (given.get(f"env.train.{key}") for key in ("env_type", "simulator_type"))
    kind = next((f" (RLinf: {shown(kind)})" for kind in kinds if kind is not None), "")
    if "env.id" in made.values:
        name = shown(made.values["env.id"])
        made.to_fill_in.append(f"env.id: install the package of {name}{kind}; write package:{name}")
    else:
        made.to_fill_in.append(f"env.id or env.factory: the simulator{kind}")


def _leave_the_reward_model_out(given: dict[str, Any], made: Imported) -> None:
    if given.get("reward.use_reward_model") is True:
        del given["reward.use_reward_model"]
        made.leave_out("reward.use_reward_model", _REASONS["reward.*"])
        made.to_fill_in.append("reward.model and reward.use_reward_model: the reward model")


_RULES: tuple[Callable[[dict[str, Any], Imported], None], ...] = (
    _place_workers,
    _name_the_algorithm,
    _join_the_clip_ratios,
    _rename_the_delays,
    _rename_the_schedules,
    _choose_the_loggers,
    _find_the_simulator,
    _leave_the_reward_model_out,
)


def _fit_the_env_workers(made: Imported) -> None:
    """Our default number of env workers must not be more than the file has envs."""
    key = "cluster.component_placement.env"
    stages = made.values.get("env.pipeline_stages", 1)
    totals = [made.values.get(f"env.{mode}.total_num_envs") for mode in ("train", "eval")]
    numbers = [total for total in totals if isinstance(total, int)]
    workers = config.Config().env_workers("train")
    if key not in made.values and numbers and isinstance(stages, int) and stages > 0:
        most = min(numbers) // stages
        if 0 < most < workers:
            made.values[key] = _ranks(most)


def _say_what_is_missing(made: Imported) -> None:
    if made.values.get("runner.only_eval") is True:
        made.to_fill_in.append("rollout.policy or runner.ckpt_path: what is evaluated")
    elif "algorithm.name" not in made.values:
        made.to_fill_in.append("algorithm.name, or rollout.policy: what is learned, or evaluated")


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def own_keys(section: type[config.Section], prefix: str = "") -> Iterator[str]:
    """Every key path of our configuration, sections before what is in them."""
    for name, part in section.model_fields.items():
        yield f"{prefix}{name}"
        for inner in (part.annotation, *typing.get_args(part.annotation)):
            is_list = typing.get_origin(part.annotation) is list
            if inspect.isclass(inner) and issubclass(inner, config.Section) and not is_list:
                yield from own_keys(inner, f"{prefix}{name}.")


def shown(value: Any) -> str:
    """A value in one line of a report or comment."""
    return str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
