"""Simulators with the interface of dm_env: of one's own, and those of dm_control."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Pool
from env.test_worker import env_worker
from gymnasium import spaces

from zmqrl.config import EnvConfig, EnvModeConfig
from zmqrl.env.dm import DmEnv
from zmqrl.env.making import make_shard

dm_env = pytest.importorskip("dm_env", reason="dm_env is not installed")

OWN = """
import dm_env, numpy as np
from dm_env import specs

class Own(dm_env.Environment):
    '''Ends after three steps with the discount that it was made with.'''

    def __init__(self, discount=0.0):
        self.discount, self.random_state = discount, np.random.default_rng()

    def observation_spec(self):
        return {
            "nested": {"count": specs.Array((), np.int32), "flag": specs.Array((1,), bool)},
            "draw": specs.BoundedArray((2,), np.float64, [0, 0], [1, 2]),
            "which": specs.DiscreteArray(4),
            "text": specs.StringArray((), name="text"),
        }

    def action_spec(self):
        return {"move": specs.BoundedArray((2,), np.float32, -1, 1), "grip": specs.DiscreteArray(2)}

    def _seen(self):
        return {
            "nested": {"count": self.count, "flag": np.array([True])},
            "draw": self.draw,
            "which": 3,
            "text": np.array("go"),
        }

    def reset(self):
        self.count, self.draw = 0, self.random_state.random(2)
        return dm_env.restart(self._seen())

    def step(self, action):
        self.count += 1
        if self.count < 3:
            return dm_env.transition(1.0, self._seen())
        return dm_env.TimeStep(dm_env.StepType.LAST, 1.0, self.discount, self._seen())
"""


@pytest.fixture
def own(tmp_path: Any) -> Any:
    path = tmp_path / "own.py"
    path.write_text(OWN)

    def make(**kwargs: Any) -> Any:
        config = EnvConfig(factory=f"{path}:Own", kwargs=kwargs, eval=EnvModeConfig())
        return make_shard(config, "eval", 2, lambda row: 30 + row)

    return make


def last_step(shard: Any) -> Any:
    shard.reset()
    actions = {"move": np.zeros((2, 2), np.float32), "grip": np.zeros(2, np.int64)}
    steps = [shard.step(actions) for _ in range(3)]
    assert not any(step.terminated.any() or step.truncated.any() for step in steps[:2])
    assert all(step.reward.tolist() == [1, 1] for step in steps)
    return steps[2]


@pytest.mark.parametrize(
    ("discount", "terminates"), [(0.0, True), (1.0, False), (0.9, False), (None, True)]
)
def test_a_last_step_terminates_if_its_discount_is_0_and_truncates_otherwise(
    own: Any, discount: float | None, terminates: bool
) -> None:
    step = last_step(own(discount=discount))
    assert step.terminated.tolist() == [terminates] * 2
    assert step.truncated.tolist() == [not terminates] * 2


def test_observations_keep_their_structure(own: Any) -> None:
    observation = own().reset()
    assert observation["nested"]["count"].tolist() == [0, 0]
    assert observation["nested"]["flag"].tolist() == [[True], [True]]
    assert observation["which"].tolist() == [3, 3]
    assert observation["text"] == ["go", "go"]


def test_the_seed_decides_the_start_state(own: Any) -> None:
    first, again = own().reset()["draw"], own().reset()["draw"]
    assert (first == again).all()
    assert (first[0] != first[1]).all()


def test_actions_and_bounds_have_spaces() -> None:
    namespace: dict[str, Any] = {}
    exec(OWN, namespace)
    env = DmEnv(namespace["Own"]())
    assert env.action_space["move"] == spaces.Box(-1, 1, (2,), np.float32)
    assert env.action_space["grip"] == spaces.Discrete(2)
    assert env.observation_space["draw"].high.tolist() == [1, 2]
    observation, info = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    assert info == {"discount": 1.0}


def test_dm_controls_cartpole_plays_the_same_episodes_from_the_same_seeds(pool: Pool) -> None:
    pytest.importorskip("dm_control", reason="dm_control is not installed")
    pool.start(policy="Noop", size=1)
    common = (
        "env.factory=dm_control.suite:load",
        "env.kwargs={domain_name: cartpole, task_name: balance}",
        "env.eval={total_num_envs: 2, rollout_epoch: 2, max_episode_steps: 30, seed: 3, "
        "use_fixed_reset_state_ids: true}",
    )
    returns = []
    for _ in range(2):
        worker = env_worker(pool, *common)
        assert worker.run()
        assert [episode.length for episode in worker.reporter.episodes] == [30] * 4
        returns.append([episode.total_return for episode in worker.reporter.episodes])
    assert returns[0] == returns[1]
    assert len(set(returns[0])) == 4
