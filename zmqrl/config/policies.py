"""Several policies in one pool: what serves each, and which env workers it acts for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from pydantic import Field, model_validator

from zmqrl.config.section import Section
from zmqrl.transport.header import REWARD, policy_id_of


class Entry(Section):
    """An entry of a list or map; it refuses unknown keys itself, so that the error says where."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: object) -> object:
        keys = value if isinstance(value, dict) else {}
        unknown = [key for key in keys if key not in cls.model_fields]
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; known keys: {', '.join(cls.model_fields)}")
        return value


class NamedPolicyConfig(Entry):
    """A map in place of `rollout.policy`: the name of a policy, and what serves it."""

    policy: str | None = Field(
        None, description="as rollout.policy; null: the algorithm's actor, with ckpt_path"
    )
    policy_kwargs: dict[str, Any] = Field(default_factory=dict, description="for the factory")
    ckpt_path: str | None = Field(None, description="a checkpoint with its weights; null: none")
    workers: int = Field(1, ge=1, le=1000, description="rollout workers that serve it")

    @model_validator(mode="after")
    def _says_what_it_is(self) -> NamedPolicyConfig:
        if self.policy is None and self.ckpt_path is None:
            raise ValueError("give policy (module:factory), ckpt_path (a checkpoint), or both")
        return self


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are none, or that the broker could not tell apart.

    Args:
        names: Of the policies.

    Raises:
        ValueError: Saying why.
    """
    for name in names:
        # It is a part of keys on the command line, and of the names of metrics.
        if not re.fullmatch(r"[\w-]{1,100}", name):
            raise ValueError(f"a policy has a name of letters, digits, _ and -, not {name!r}")
        if name == REWARD:
            raise ValueError(f"{name!r} is what reward workers serve; name the policy otherwise")
    for one, other in pairwise(sorted(names, key=policy_id_of)):
        if policy_id_of(one) == policy_id_of(other):
            raise ValueError(f"{one!r} and {other!r} have the same number for the broker; rename one")


def assigned(weights: Mapping[str, float], workers: int) -> list[str]:
    """Which policy each env worker asks, by rank: as close to the weights as whole workers come.

    The next rank goes to the policy that has the fewest for its weight (the method of Webster and
    Sainte-Laguë), so that the policy of a rank does not depend on how many come after it.

    >>> assigned({"base": 3, "new": 1}, 8)
    ['base', 'base', 'new', 'base', 'base', 'base', 'new', 'base']

    Args:
        weights: Of the policies, by name; empty for the pool's own policy alone.
        workers: The number of env workers.
    """
    given = dict.fromkeys(weights, 0)
    ranks = []
    for _ in range(workers):
        name = max(weights, key=lambda name: weights[name] / (2 * given[name] + 1), default="")
        given[name] = given.get(name, 0) + 1
        ranks.append(name)
    return ranks
