"""Shards of the simulators in `odd_sims.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import TESTS

from zmqrl.config import EnvConfig
from zmqrl.env.adapters import ShardEnv
from zmqrl.env.making import make_shard

MODES = ("disabled", "next_step", "same_step")
BOTH = pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.slow)])
Make = Callable[..., ShardEnv]


def odd_shards() -> Iterator[Make]:
    """Makes them, and closes them in the end; for a fixture."""
    made = []

    def build(name: str, rows: int = 2, **options: Any) -> ShardEnv:
        section = EnvConfig(factory=f"{TESTS / 'odd_sims.py'}:{name}", **options)
        shard = make_shard(section, "train", rows, lambda row: None)
        made.append(shard)
        return shard

    yield build
    for shard in made:
        shard.close()
