"""Which policy a configured rollout worker serves, and with which weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TESTS

from zmqrl import config
from zmqrl.errors import CheckpointError, ConfigError, PolicyLoadError, StartupFailed
from zmqrl.learner.port import Learner
from zmqrl.spaces import ActionSpace, Spaces

torch = pytest.importorskip("torch")

from zmqrl.learner import checkpoint  # noqa: E402 - they need torch
from zmqrl.learner.algorithm import make_algorithm  # noqa: E402
from zmqrl.runner.policies import make_policy  # noqa: E402

BOX = ActionSpace("box", (2,), [-1.0, -1.0], [1.0, 1.0])
SPACES = Spaces({"": ((3,), "float32")}, BOX)
POLICIES = TESTS / "policies.py"


def loaded(*overrides: str) -> config.Config:
    return config.load(None, ["rollout.device=cpu", "actor.device=cpu", *overrides])


def never() -> bool:
    return False


def saved(folder: Path, weights: dict[str, Any]) -> Path:
    actor = {"version": 42, "spaces": SPACES.fields(), "weights": weights}
    return checkpoint.save(folder / "checkpoints", 5, actor, {})


def saved_actor(folder: Path, name: str) -> Path:
    torch.manual_seed(1)
    algorithm = make_algorithm(SPACES, loaded(f"algorithm.name={name}", "actor.seed=1"))
    return saved(folder, dict(algorithm.actor.state_dict()))


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_a_checkpoints_actor_acts_as_the_one_that_was_saved(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torchrl")
    saved_actor(tmp_path, name)
    original = make_algorithm(SPACES, loaded(f"algorithm.name={name}", "actor.seed=1")).actor
    versions = make_policy(
        loaded(f"algorithm.name={name}", f"runner.ckpt_path={tmp_path}", "actor.seed=2"), "r", never
    )
    assert versions is not None
    assert versions.version == 42
    policy, version = versions.of(0)
    assert version == 42
    observation = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    mask = np.ones(4, dtype=bool)
    actions = policy.infer(observation, mask)["actions"]
    with torch.no_grad():
        expected = original(torch.from_numpy(observation), eval_mask=torch.from_numpy(mask))["actions"]
    np.testing.assert_allclose(actions, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_a_checkpoint_of_a_smaller_actor_names_the_parameter_and_both_shapes(
    tmp_path: Path, name: str
) -> None:
    pytest.importorskip("torchrl")
    saved_actor(tmp_path, name)
    other = loaded(
        f"algorithm.name={name}", f"runner.ckpt_path={tmp_path}", "actor.model.hidden_sizes=[64, 64]"
    )
    with pytest.raises(
        CheckpointError, match=r"global_step_5 does not fit.*weight' has shape \[128, 3\].*\[64, 3\]"
    ):
        make_policy(other, "r", never)


def test_a_checkpoint_without_an_algorithm_to_build_its_actor_says_what_to_set(tmp_path: Path) -> None:
    saved(tmp_path, {})
    with pytest.raises(ConfigError, match=r"algorithm\.name or algorithm\.factory"):
        make_policy(loaded(f"runner.ckpt_path={tmp_path}"), "r", never)


def of_checkpoint(folder: Path, policy: str, *overrides: str) -> config.Config:
    return loaded(f"runner.ckpt_path={folder}", f"rollout.policy={POLICIES}:{policy}", *overrides)


def test_a_checkpoints_weights_go_into_the_users_own_policy(tmp_path: Path) -> None:
    from policies import biased_module

    module = biased_module()
    with torch.no_grad():
        module.bias.fill_(6)
        module.norm.num_batches_tracked.fill_(7)
    saved(tmp_path, dict(module.state_dict()))
    versions = make_policy(of_checkpoint(tmp_path, "biased_module"), "r", never)
    assert versions is not None
    reply = versions.of(42)[0].infer({"x": np.ones((2, 3))}, np.zeros(2, bool))
    assert (reply["actions"].max(), reply["batches"].max()) == (6, 7)


def test_a_policy_of_the_users_own_gets_arrays_whether_from_a_checkpoint_or_a_learner(
    tmp_path: Path,
) -> None:
    saved(tmp_path, {"bias": torch.tensor(6.0, dtype=torch.bfloat16)})
    versions = make_policy(of_checkpoint(tmp_path, "Biased"), "r", never)
    assert versions is not None
    policy: Any = versions.of(0)[0]
    assert isinstance(policy.bias, np.ndarray)
    assert (policy.bias, policy.bias.shape) == (6.0, ())


def test_a_checkpoint_of_another_users_policy_names_the_parameter_and_both_shapes(
    tmp_path: Path,
) -> None:
    from policies import biased_module

    saved(tmp_path, dict(biased_module(width=5).state_dict()))
    with pytest.raises(
        CheckpointError,
        match=r"global_step_5 does not fit .*biased_module: 'bias' has shape \[5\]; .* has \[3\]",
    ):
        make_policy(of_checkpoint(tmp_path, "biased_module"), "r", never)


def test_a_policy_that_takes_no_weights_is_not_run_in_place_of_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, {"bias": torch.tensor(6.0)})
    with pytest.raises(CheckpointError, match="Echo has no load_state_dict"):
        make_policy(of_checkpoint(tmp_path, "Echo"), "r", never)


def test_an_actor_file_without_weights_is_a_named_error(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "checkpoints", 5, {"version": 1}, {})
    for overrides in (["algorithm.name=ppo"], [f"rollout.policy={POLICIES}:Biased"]):
        with pytest.raises(CheckpointError, match="global_step_5"):
            make_policy(loaded(f"runner.ckpt_path={tmp_path}", *overrides), "r", never)


# -- With a learner


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_a_learning_pool_serves_the_algorithms_actor_with_the_learners_weights(
    folder: Path, name: str
) -> None:
    pytest.importorskip("torchrl")
    with Learner(f"ipc://{folder}/learner", with_spaces=True) as learner:
        learner._shared.spaces = SPACES
        settings = loaded(f"algorithm.name={name}", f"actor.endpoint={learner.endpoint}")
        weights = make_algorithm(SPACES, settings).actor.state_dict()
        learner.publish({key: torch.full_like(value, 0.25) for key, value in weights.items()}, 3)
        versions = make_policy(settings, "r", never)
        assert versions is not None
        policy: Any = versions.of(0)[0]
        assert versions.version == 3
        assert all((value == 0.25).all() for value in policy._function.state_dict().values())
        versions.close()


def test_a_learner_that_tells_no_spaces_cannot_be_served_without_a_policy(folder: Path) -> None:
    with Learner(f"ipc://{folder}/learner") as learner:
        learner.publish({"bias": np.zeros(3)})
        settings = loaded("algorithm.name=ppo", f"actor.endpoint={learner.endpoint}")
        with pytest.raises(StartupFailed, match=r"set rollout\.policy"):
            make_policy(settings, "r", never)


def test_first_weights_that_do_not_fit_are_an_error_that_names_the_parameter(folder: Path) -> None:
    with Learner(f"ipc://{folder}/learner") as learner:
        learner.publish({"weight": np.zeros(3)})
        settings = loaded(
            f"rollout.policy={POLICIES}:biased_module", f"actor.endpoint={learner.endpoint}"
        )
        with pytest.raises(PolicyLoadError, match=r"learner: version 1 does not fit.*such as 'bias'"):
            make_policy(settings, "r", never)


def test_a_pool_that_names_neither_policy_nor_algorithm_is_refused_before_a_learner_is_awaited() -> None:
    with pytest.raises(ConfigError, match=r"set rollout\.policy"):
        make_policy(loaded("actor.endpoint=tcp://127.0.0.1:9"), "r", never)


def test_a_worker_that_is_stopped_while_it_waits_for_weights_makes_no_policy(folder: Path) -> None:
    settings = loaded(f"rollout.policy={POLICIES}:Biased", f"actor.endpoint=ipc://{folder}/nobody")
    assert make_policy(settings, "r", lambda: True) is None
