"""Which weights answer: the newest ones that fit, or those that a request is pinned to."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import wait_for
from policies import Biased, Echo, biased_module

from zmqrl.errors import PolicyError, WeightsError
from zmqrl.learner.port import Learner
from zmqrl.rollout.download import WeightsDownload
from zmqrl.rollout.policy import TensorPolicy, state_difference
from zmqrl.rollout.versions import PolicyVersions

torch = pytest.importorskip("torch")

X = {"x": np.ones((2, 3))}
MASK = np.zeros(2, dtype=bool)


@pytest.fixture
def learner(folder: Path) -> Iterator[Learner]:
    with Learner(f"ipc://{folder}/learner") as port:
        yield port


@pytest.fixture
def versions(learner: Learner) -> Iterator[PolicyVersions]:
    made = PolicyVersions(Biased(), WeightsDownload(learner.endpoint, "rollout-0"))
    yield made
    made.close()


def publish(learner: Learner, version: int, **more: Any) -> None:
    learner.publish({"bias": np.array(float(version)), **more}, version)


def refreshed(versions: PolicyVersions, version: int) -> None:
    wait_for(lambda: versions.refresh() or versions.version == version, f"version {version}")


def answer(versions: PolicyVersions, version: int = 0) -> tuple[float, int]:
    """What a policy says, and which version it is said to be."""
    policy, number = versions.of(version)
    return float(policy.infer(X, MASK)["actions"][0]), number


def test_without_a_learner_the_policy_tells_its_own_version() -> None:
    versions = PolicyVersions(Echo(version=7))
    versions.refresh()
    assert versions.version == 7
    assert versions.of(0) == versions.of(7)
    assert not versions.lacks(8), "nothing will ever bring it"
    with pytest.raises(PolicyError, match="version 8"):
        versions.of(8)


def test_a_checkpoints_version_counts_for_more_than_the_policys_own() -> None:
    assert PolicyVersions(Echo(version=7), version=3).of(3)[1] == 3


def test_newer_weights_are_loaded_once(learner: Learner, versions: PolicyVersions) -> None:
    for version in (1, 2):
        publish(learner, version)
        refreshed(versions, version)
        versions.refresh()
        assert answer(versions) == (version, version)
    assert versions._download is not None
    assert versions._download.loaded == 2


def test_weights_that_do_not_fit_are_counted_once_and_change_nothing(
    learner: Learner, versions: PolicyVersions
) -> None:
    publish(learner, 1)
    refreshed(versions, 1)
    learner.publish({"weight": np.zeros(3)})
    download = versions._download
    assert download is not None
    wait_for(lambda: versions.refresh() or download.failed, "the failure")
    versions.refresh()
    assert (download.failed, download.loaded) == (1, 1)
    assert answer(versions) == (1, 1)


def test_a_pinned_version_is_held_by_a_copy_and_the_newest_by_the_policy_itself(
    learner: Learner, versions: PolicyVersions
) -> None:
    publish(learner, 1)
    learner.evaluate(env_steps=0)
    publish(learner, 2)
    refreshed(versions, 2)
    wait_for(lambda: not versions.lacks(1), "version 1")
    assert answer(versions, 1) == (1, 1)
    assert answer(versions) == (2, 2)
    assert answer(versions, 2) == (2, 2)
    learner.evaluate(env_steps=0)
    publish(learner, 3)
    refreshed(versions, 3)
    wait_for(lambda: not versions.lacks(2), "version 2")
    assert answer(versions, 2) == (2, 2)
    assert answer(versions) == (3, 3)


def test_a_version_that_may_still_come_is_lacking_and_not_waited_for(
    learner: Learner, versions: PolicyVersions
) -> None:
    publish(learner, 1)
    refreshed(versions, 1)
    assert not versions.lacks(0)
    assert not versions.lacks(1)
    assert versions.lacks(2)


def test_a_number_that_another_life_of_the_learner_gave_is_not_that_version(
    learner: Learner, versions: PolicyVersions
) -> None:
    publish(learner, 3)
    refreshed(versions, 3)
    learner.close()
    with Learner(learner.endpoint) as restarted:
        restarted.publish({"bias": np.array(300.0)}, 3)
        wait_for(lambda: versions._download.epoch == restarted.epoch, "its weights")  # type: ignore[union-attr]
        assert answer(versions, 3) == (300, 3)
        versions.refresh()
        assert answer(versions) == (300, 3)


# -- Torch modules


def tensors(value: float) -> dict[str, np.ndarray]:
    module = biased_module()
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(value)
    return {name: tensor.float().numpy() for name, tensor in module.state_dict().items()}


def values(policy: TensorPolicy) -> set[float]:
    state = policy._function.state_dict()  # type: ignore[attr-defined]
    return {float(value) for tensor in state.values() for value in tensor.flatten()}


def test_all_parameters_and_buffers_are_replaced() -> None:
    policy = TensorPolicy(biased_module(), "cpu")
    policy.load_state_dict(tensors(4.0))
    assert values(policy) == {4.0}


LAST = list(biased_module().state_dict())[-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({LAST: np.zeros((2, 2))}, rf"'{LAST}' has shape \[2, 2\]; the policy's has \[\]"),
        ({LAST: np.array("text")}, f"'{LAST}' is not made of numbers"),
        ({LAST: None}, rf"1 parameters are missing, such as '{LAST}'"),
        ({"more": np.zeros(2)}, "the policy has no 'more'"),
        ({"more": np.zeros(2), "still": np.zeros(2)}, "no 'more', and 1 more are not its own"),
    ],
    ids=["shape", "text", "missing", "foreign", "foreign ones"],
)
def test_weights_of_which_one_does_not_fit_replace_no_parameter(
    change: dict[str, Any], words: str
) -> None:
    policy = TensorPolicy(biased_module(), "cpu")
    policy.load_state_dict(tensors(4.0))
    given = {name: array for name, array in {**tensors(5.0), **change}.items() if array is not None}
    with pytest.raises(WeightsError, match=words):
        policy.load_state_dict(given)
    assert values(policy) == {4.0}


def test_a_function_takes_no_weights() -> None:
    with pytest.raises(WeightsError, match="a function, not a module"):
        TensorPolicy(lambda observation: observation, "cpu").load_state_dict({})


def test_a_copy_of_a_policy_has_weights_of_its_own() -> None:
    policy = TensorPolicy(biased_module(), "cpu")
    policy.load_state_dict(tensors(1.0))
    twin = copy.deepcopy(policy)
    twin.load_state_dict(tensors(2.0))
    assert (values(policy), values(twin)) == ({1.0}, {2.0})
    assert twin.device == policy.device
    assert twin.infer(X, MASK)["actions"].max() == 2
    assert not twin._function.training  # type: ignore[attr-defined]


def test_states_of_one_architecture_do_not_differ() -> None:
    state = biased_module().state_dict()
    assert state_difference(state, tensors(0.0)) == ""
    assert state_difference(state, state) == ""


class Tells:
    """Its `version` is what the test says; an exception is raised."""

    def __init__(self, told):
        self._told = told

    @property
    def version(self):
        if isinstance(self._told, Exception):
            raise self._told
        return self._told

    def infer(self, observation, eval_mask):
        return observation


@pytest.mark.parametrize("told", [7, np.int64(7), torch.tensor(7)], ids=repr)
def test_a_policy_may_tell_its_version_by_any_int(told):
    assert PolicyVersions(Tells(told)).version == 7


@pytest.mark.parametrize(
    "told", ["v2", -1, 2**63, float("nan"), torch.zeros(3), RuntimeError("not loaded")], ids=repr
)
def test_a_version_that_is_no_number_of_weights_is_told_as_0_and_warned_of_once(told, caplog):
    versions = PolicyVersions(Tells(told))
    assert [versions.version, versions.version] == [0, 0]
    assert len(caplog.messages) == 1
    assert "replies carry version 0" in caplog.text


def test_a_policy_without_a_version_has_version_0(caplog):
    assert PolicyVersions(Tells(None)).version == 0
    assert not caplog.messages
