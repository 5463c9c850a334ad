"""Infos and the task in the observation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TESTS
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from odd_shards import BOTH, MODES, Make, odd_shards
from odd_sims import Told, same

from zmqrl.config import EnvConfig
from zmqrl.env.adapters import ShardEnv
from zmqrl.env.making import make_shard
from zmqrl.errors import ConfigError, EnvironmentFailure

make = pytest.fixture(odd_shards)


def told(row: Any) -> Any:
    return {
        "number": row,
        "pose": np.array([row, -row], np.float64),
        "said": f"at {row}",
        "deep": {"flag": np.bool_(row % 2), "word": f"deep {row}"},
    }


def row_of(tree: Any, row: int) -> Any:
    return {k: row_of(v, row) for k, v in tree.items()} if isinstance(tree, dict) else tree[row]


@BOTH
@pytest.mark.parametrize("autoreset_mode", MODES)
@pytest.mark.parametrize(("keyed", "rambling"), [(True, False), (False, False), (False, True)])
def test_infos_and_the_task_stand_in_every_observation(
    make: Make, vectorization: str, autoreset_mode: str, keyed: bool, rambling: bool
) -> None:
    """Rambling simulators tell infos that nobody asks for, of other sizes and kinds each time."""
    shard = make(
        "Told",
        kwargs={"keyed": keyed, "rambling": rambling},
        vectorization=vectorization,
        autoreset_mode=autoreset_mode,
        info_keys=["number", "pose", "said", "deep"],
        task_description="tidy up",
    )

    def check(tree: Any) -> None:
        count = tree["count" if keyed else "observation"]
        assert tree["task_descriptions"] == ["tidy up", "tidy up"]
        for row in range(2):
            assert same(row_of({k: tree[k] for k in told(0)}, row), told(int(count[row, 0])))

    check(shard.reset())
    ends = 0
    for _ in range(9):
        step = shard.step(np.array([0, 1]))
        check(step.observation)
        if step.final_observation is not None:
            ends += 1
            final = step.final_observation
            check(final)
            assert final["number"].tolist() == [100 * (ends - 1) + 3] * 2
    assert ends >= 2


def test_rows_that_end_at_other_times_keep_their_own_infos(folder: Path) -> None:
    (folder / "uneven.py").write_text(
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from odd_sims import Told\n"
        "lengths = iter([2, 3])\n"
        "def make(): return Told(length=next(lengths))\n"
    )
    section = EnvConfig(factory=f"{folder}/uneven.py:make", info_keys=["said", "pose"])
    shard = make_shard(section, "train", 2, lambda row: None)
    shard.reset()
    said = [shard.step(np.array([0, 1])).observation["said"] for _ in range(4)]
    assert said == [["at 1", "at 1"], ["at 100", "at 2"], ["at 101", "at 100"], ["at 200", "at 101"]]
    shard.close()


@BOTH
@pytest.mark.parametrize(("silent_at", "where"), [(0, "reset"), (2, "step"), (3, "step")])
@pytest.mark.parametrize("autoreset_mode", MODES)
def test_an_info_that_is_not_there_is_an_error_that_names_it(
    make: Make, vectorization: str, silent_at: int, where: str, autoreset_mode: str
) -> None:
    shard = make(
        "Told",
        kwargs={"silent_at": silent_at},
        info_keys=["number"],
        vectorization=vectorization,
        autoreset_mode=autoreset_mode,
    )
    words = rf"row \d: the infos of {where} have no 'number' \(env\.info_keys\); they have 'pose', 's"

    def run() -> None:
        shard.reset()
        for _ in range(3):
            shard.step(np.array([0, 1]))

    with pytest.raises(EnvironmentFailure, match=words):
        run()


@pytest.mark.parametrize("autoreset_mode", AutoresetMode)
def test_a_ready_vector_env_tells_infos_too(autoreset_mode: AutoresetMode) -> None:
    ready = SyncVectorEnv([Told, Told], autoreset_mode=autoreset_mode)
    shard = ShardEnv(ready, info_keys=["number", "deep"])
    tree = shard.reset()
    for _ in range(7):
        assert tree["number"].tolist() == tree["observation"][:, 0].tolist()
        assert tree["deep"]["word"] == [f"deep {number}" for number in tree["number"]]
        tree = shard.step(np.array([0, 1])).observation
    shard.close()


class Plain(VectorEnv[Any, Any, Any]):
    """Tells its infos without the masks of Gymnasium's own vector envs, and rewrites them."""

    num_envs = 2
    single_observation_space = spaces.Discrete(1000)
    single_action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.count = torch.zeros(2, dtype=torch.int64)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count[(options or {}).get("reset_mask", np.ones(2, bool))] = 0
        return self.count.numpy(), {"count": self.count, "said": ["reset", "reset"]}

    def step(self, actions: Any) -> Any:
        self.count += torch.tensor([1, 2])
        over = (self.count >= 4).numpy()
        said = ["step", "step"]
        return self.count.numpy(), [0, 0], over, [0, 0], {"count": self.count, "said": said}


def test_infos_may_be_tensors_and_lists_without_masks() -> None:
    shard = ShardEnv(Plain(), info_keys=["count", "said"])
    first = shard.reset()
    steps = [shard.step(np.array([0, 1])) for _ in range(2)]
    assert first["count"].tolist() == [0, 0], "what was given is not rewritten"
    assert steps[1].observation["count"].tolist() == [2, 0]
    assert steps[1].observation["said"] == ["step", "reset"]
    assert steps[1].final_observation["count"].tolist() == [2, 4]
    assert steps[1].final_observation["said"] == ["step", "step"]


def test_a_key_that_the_observation_has_already_is_refused(make: Make) -> None:
    shard = make("Told", kwargs={"keyed": True}, info_keys=["number"])
    shard.reset()  # fine
    with pytest.raises(ConfigError, match=r"env\.info_keys: .* has a 'x' of its own"):
        make("odd", info_keys=["x"]).reset()
