import functools

import numpy as np
import pytest

from zmqrl.errors import ConfigError, PolicyLoadError
from zmqrl.rollout.loading import as_policy, load_policy
from zmqrl.rollout.policy import Policy, TensorPolicy

torch = pytest.importorskip("torch")


class Own:
    def infer(self, observation, eval_mask):
        return observation


class Caller:
    def __call__(self, observation):
        return observation


def test_an_object_with_infer_is_a_policy_as_it_is():
    own = Own()
    assert as_policy(own) is own


@pytest.mark.parametrize(
    "source",
    [torch.nn.Linear(3, 3), lambda x: x, functools.partial(lambda scale, x: x * scale, 2), Caller()],
    ids=lambda s: type(s).__name__,
)
def test_a_module_or_a_callable_becomes_a_policy(source):
    policy = as_policy(source, "cpu")
    assert isinstance(policy, TensorPolicy)
    assert isinstance(policy, Policy)


@pytest.mark.parametrize("source", [3, None, "policy", {"infer": 1}], ids=repr)
def test_what_is_no_policy_is_refused_by_its_type(source):
    with pytest.raises(
        PolicyLoadError, match=f"returned a {type(source).__name__}; it must return an nn"
    ):
        as_policy(source)


SOURCE = """
import numpy as np
import torch

calls = []


class Own:
    def __init__(self, load_error=None, infer_error=None, example=None):
        self.load_error, self.infer_error = load_error, infer_error
        if example is not None:
            self.example_observation = np.full(example, 1.5)

    def load(self):
        calls.append("load")
        if self.load_error:
            raise OSError(self.load_error)

    def infer(self, observation, eval_mask):
        calls.append(("infer", observation.shape, eval_mask.tolist()))
        if self.infer_error:
            raise ArithmeticError(self.infer_error)
        return observation


class Module(torch.nn.Module):
    example_observation = np.zeros((2, 3), dtype=np.float64)

    def __init__(self, size=3):
        super().__init__()
        self.layer = torch.nn.Linear(size, 1)

    def load(self):
        calls.append("load")

    def forward(self, observation):
        calls.append(("forward", tuple(observation.shape)))
        return self.layer(observation)


class Threads(Module):
    def load(self):
        calls.append(("load", torch.get_num_threads()))

    def forward(self, observation):
        calls.append(("forward", torch.get_num_threads()))
        return self.layer(observation)


def many_threads():
    torch.set_num_threads(7)
    return Threads()


def broken(**kwargs):
    raise KeyError("no checkpoint")


def number():
    return 7
"""


@pytest.fixture
def source(tmp_path):
    """The path of a file of factories."""
    path = tmp_path / "policies.py"
    path.write_text(SOURCE)
    return path


def calls_of(path):
    from zmqrl.imports import import_object

    return import_object(f"{path}:calls")


def test_a_policy_is_built_loaded_and_warmed_up(source):
    policy = load_policy(f"{source}:Own", {"example": [2, 3]})
    assert calls_of(source) == ["load", ("infer", (2, 3), [True, True])]
    assert policy.infer(np.ones((4, 3)), np.zeros(4, bool)).shape == (4, 3)


@pytest.mark.parametrize("factory", ["Threads", "many_threads"])
def test_a_policy_is_warmed_up_with_as_many_threads_as_it_will_serve_with(source, factory):
    before = torch.get_num_threads()
    try:
        load_policy(f"{source}:{factory}", {}, "cpu", torch_threads=3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert calls_of(source) == [("load", 3), ("forward", 3)]


def test_a_policy_without_an_example_is_not_warmed_up(source):
    load_policy(f"{source}:Own", {})
    assert calls_of(source) == ["load"]


def test_a_module_is_loaded_and_warmed_up_on_its_device(source):
    policy = load_policy(f"{source}:Module", {}, "cpu")
    assert calls_of(source) == ["load", ("forward", (2, 3))]
    assert policy.infer(np.ones((4, 3)), np.zeros(4, bool)).shape == (4, 1)


@pytest.mark.parametrize(
    ("factory", "kwargs", "message", "cause"),
    [
        ("broken", {}, "could not be built: KeyError: 'no checkpoint'", KeyError),
        ("Own", {"size": 1}, "could not be built: TypeError: .*'size'", TypeError),
        ("Own", {"load_error": "no file"}, r"failed in load\(\): OSError: no file", OSError),
        (
            "Own",
            {"infer_error": "inf", "example": [2]},
            "failed in the warm-up call on its example_observation: ArithmeticError: inf",
            ArithmeticError,
        ),
        ("Module", {"size": 5}, "failed in the warm-up call .*: RuntimeError: mat1", RuntimeError),
        ("Own", {"example": []}, "failed in the warm-up call .*infer_one", Exception),
    ],
    ids=["factory", "arguments", "load", "warm-up", "module", "example without rows"],
)
def test_a_policy_that_fails_to_load_says_at_which_step_and_why(source, factory, kwargs, message, cause):
    with pytest.raises(PolicyLoadError, match=message) as error:
        load_policy(f"{source}:{factory}", kwargs, "cpu")
    assert f"{source}:{factory}" in str(error.value)
    assert isinstance(error.value.__cause__, cause)


def test_a_factory_that_returns_no_policy_is_refused_by_the_type(source):
    with pytest.raises(
        PolicyLoadError, match=r"the factory returned a int; it must return an nn\.Module"
    ):
        load_policy(f"{source}:number", {})


def test_a_factory_that_does_not_exist_is_an_error_of_the_configuration(source):
    with pytest.raises(ConfigError, match="has no 'Modul'; did you mean 'Module'"):
        load_policy(f"{source}:Modul", {})


def test_a_device_that_does_not_exist_is_an_error_of_loading(source):
    with pytest.raises(PolicyLoadError, match="could not be built: RuntimeError"):
        load_policy(f"{source}:Module", {}, "abacus")
