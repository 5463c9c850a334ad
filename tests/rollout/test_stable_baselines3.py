"""Models that Stable-Baselines3 has saved, served by its own `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from zmqrl.errors import PolicyLoadError
from zmqrl.rollout.loading import as_policy, load_policy

sb3 = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")

from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.vec_env import VecNormalize  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

MIXED = np.array([True, False, False, True] * 8)
DISCRETE, BOX = spaces.Discrete(5), spaces.Box(-2.0, 2.0, (2,), np.float32)
STATE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (40, 40, 3), np.uint8)


class Blank(gymnasium.Env[Any, Any]):
    """Has spaces, and nothing else that a model needs to be made."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, False, {}


def saved(folder: Path, name: str, observation: Any, action: Any, policy: str = "MlpPolicy") -> Any:
    model = getattr(sb3, name)(policy, Blank(observation, action), device="cpu", seed=0)
    model.save(folder / "model.zip")
    return model


def loaded(folder: Path, algorithm: str, **kwargs: Any) -> Any:
    named = {"path": str(folder / "model.zip"), "algorithm": algorithm, **kwargs}
    return load_policy("zmqrl.policies:stable_baselines3", named, "cpu")


def rows_of(space: Any, count: int) -> Any:
    space.seed(1)
    samples = [space.sample() for _ in range(count)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in space.spaces}
    return np.stack(samples)


@pytest.mark.parametrize(
    ("algorithm", "observation", "action", "policy"),
    [
        ("PPO", STATE, BOX, "MlpPolicy"),
        ("PPO", STATE, DISCRETE, "MlpPolicy"),
        ("A2C", STATE, DISCRETE, "MlpPolicy"),
        ("SAC", STATE, BOX, "MlpPolicy"),
        ("TD3", STATE, BOX, "MlpPolicy"),
        ("DQN", STATE, DISCRETE, "MlpPolicy"),
        ("PPO", IMAGE, DISCRETE, "CnnPolicy"),
        ("PPO", spaces.Dict({"image": IMAGE, "state": STATE}), BOX, "MultiInputPolicy"),
    ],
)
def test_a_saved_model_acts_as_it_did(
    tmp_path: Path, algorithm: str, observation: Any, action: Any, policy: str
) -> None:
    model = saved(tmp_path, algorithm, observation, action, policy)
    batch = rows_of(observation, len(MIXED))
    served = loaded(tmp_path, algorithm)
    actions = served.infer(batch, MIXED)["actions"]
    expected, _ = model.predict(batch, deterministic=True)
    np.testing.assert_allclose(actions[MIXED], expected[MIXED], rtol=1e-5, atol=1e-6)
    assert (actions.shape, actions.dtype) == (expected.shape, expected.dtype)
    if algorithm not in ("TD3", "DQN"):  # they sample with noise, or rarely
        assert (actions[~MIXED] != expected[~MIXED]).any()
    assert all(action.contains(row) for row in actions)


def test_observations_are_normalised_as_in_training(tmp_path: Path) -> None:
    envs = VecNormalize(make_vec_env(lambda: Blank(STATE, BOX), n_envs=2))
    model = sb3.PPO("MlpPolicy", envs, device="cpu", n_steps=16, batch_size=16, seed=0)
    model.learn(64)
    model.save(tmp_path / "model.zip")
    envs.save(str(tmp_path / "stats.pkl"))
    served = loaded(tmp_path, "PPO", vec_normalize=str(tmp_path / "stats.pkl"))
    batch = rows_of(STATE, len(MIXED))
    expected, _ = model.predict(envs.normalize_obs(batch), deterministic=True)
    plain, _ = model.predict(batch, deterministic=True)
    actions = served.infer(batch, np.ones(len(MIXED), bool))["actions"]
    np.testing.assert_allclose(actions, expected, rtol=1e-5)
    assert not np.allclose(actions, plain)
    assert (batch == rows_of(STATE, len(MIXED))).all(), "the observation was normalised in place"


def test_a_model_or_its_policy_of_a_users_factory_is_a_policy(tmp_path: Path) -> None:
    model = saved(tmp_path, "PPO", STATE, BOX)
    batch, mask = rows_of(STATE, 4), np.ones(4, bool)
    expected, _ = model.predict(batch, deterministic=True)
    for source in (model, model.policy):
        np.testing.assert_array_equal(as_policy(source, "cpu").infer(batch, mask)["actions"], expected)


def test_a_model_of_another_algorithm_and_other_statistics_are_named(tmp_path: Path) -> None:
    saved(tmp_path, "SAC", STATE, BOX)
    with pytest.raises(PolicyLoadError, match=r"model\.zip is no model of DQN: \w+: "):
        loaded(tmp_path, "DQN")
    with pytest.raises(PolicyLoadError, match=r"no algorithm 'ppo'; there are A2C, .*PPO"):
        loaded(tmp_path, "ppo")
    with pytest.raises(PolicyLoadError, match=r"there is no file .*stats\.pkl"):
        loaded(tmp_path, "SAC", vec_normalize=str(tmp_path / "stats.pkl"))
    envs = VecNormalize(make_vec_env(lambda: Blank(IMAGE, BOX), n_envs=1))
    envs.save(str(tmp_path / "stats.pkl"))
    with pytest.raises(PolicyLoadError, match=r"stats\.pkl is no VecNormalize for these observations"):
        loaded(tmp_path, "SAC", vec_normalize=str(tmp_path / "stats.pkl"))
