import numpy as np
import pytest

from zmqrl.rollout.batching import check_output
from zmqrl.rollout.policy import TensorPolicy

torch = pytest.importorskip("torch")

TRAIN = np.zeros(4, dtype=bool)
EVAL = np.ones(4, dtype=bool)
MIXED = np.array([True, False, False, True])


class Linear(torch.nn.Module):
    """Doubles the state; keeps what it was given."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3, bias=False, dtype=dtype)
        torch.nn.init.eye_(self.layer.weight)
        self.given = None

    def forward(self, observation):
        self.given = observation
        return {"actions": 2 * self.layer(observation["state"])}


def state(dtype=np.float64):
    return np.arange(12, dtype=dtype).reshape(4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_module_gets_floats_in_the_dtype_of_its_parameters(dtype):
    module = Linear(dtype)
    output = TensorPolicy(module, "cpu").infer({"state": state()}, TRAIN)
    assert module.given["state"].dtype == dtype
    np.testing.assert_array_equal(output["actions"], 2 * state())


def test_only_floats_are_cast():
    module = Linear()
    observation = {
        "state": state(),
        "nested": [{"image": np.zeros((4, 2), np.uint8)}],
        "mask": MIXED,
        "steps": np.arange(4),
        "wave": np.zeros(4, np.complex64),
        "names": np.array(["a", "b", "c", "d"]),
        "task_descriptions": ["push", "pull", "push", "pull"],
        "fps": 30,
    }
    TensorPolicy(module, "cpu").infer(observation, TRAIN)
    given = module.given
    assert given["nested"][0]["image"].dtype == torch.uint8
    assert given["mask"].dtype == torch.bool
    assert given["steps"].dtype == torch.int64
    assert given["wave"].dtype == torch.complex64
    assert given["names"] is observation["names"]
    assert given["task_descriptions"] == observation["task_descriptions"]
    assert given["fps"] == 30


def test_a_module_without_floating_parameters_gets_floats_as_they_came():
    class Plain(torch.nn.Module):
        def forward(self, observation):
            return observation

    assert TensorPolicy(Plain(), "cpu").infer(state(), TRAIN).dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_function_gets_floats_as_they_came(dtype):
    seen = []

    def function(observation):
        seen.append(observation.dtype)
        return observation

    output = TensorPolicy(function, "cpu").infer(state(dtype), TRAIN)
    assert output.dtype == dtype
    assert seen == [getattr(torch, np.dtype(dtype).name)]


def test_a_module_runs_in_eval_mode_and_without_gradients():
    class Modes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.9)
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, observation):
            assert torch.is_inference_mode_enabled()
            return self.drop(observation * self.weight)

    np.testing.assert_array_equal(TensorPolicy(Modes(), "cpu").infer(state(), TRAIN), state())


def test_the_eval_mask_is_given_as_a_tensor_to_a_function_that_names_it():
    def function(observation, eval_mask):
        assert eval_mask.dtype == torch.bool
        return torch.where(eval_mask, 0.0, observation[:, 0])

    output = TensorPolicy(function, "cpu").infer(state(), MIXED)
    assert output.tolist() == [0, 3, 6, 0]


class Counting:
    """Returns the rows that it was given, the deterministic ones negated."""

    def __init__(self):
        self.calls = []

    def __call__(self, observation, deterministic):
        self.calls.append((deterministic, len(observation["state"]), observation["task"]))
        sign = -1 if deterministic else 1
        return {
            "actions": sign * observation["state"],
            "nested": {"value": sign * observation["state"][:, 0]},
            "text": [f"{task} {deterministic}" for task in observation["task"]],
        }


@pytest.mark.parametrize(
    ("mask", "deterministic"), [(TRAIN, False), (EVAL, True)], ids=["train", "eval"]
)
def test_rows_of_one_mode_take_one_call(mask, deterministic):
    function = Counting()
    TensorPolicy(function, "cpu").infer({"state": state(), "task": list("abcd")}, mask)
    assert function.calls == [(deterministic, 4, list("abcd"))]


def test_rows_of_both_modes_take_two_calls_and_come_back_in_their_order():
    function = Counting()
    output = TensorPolicy(function, "cpu").infer({"state": state(), "task": list("abcd")}, MIXED)
    assert sorted(function.calls) == [(False, 2, ["b", "c"]), (True, 2, ["a", "d"])]
    np.testing.assert_array_equal(output["actions"], state() * [[-1], [1], [1], [-1]])
    np.testing.assert_array_equal(output["nested"]["value"], [0, 3, 6, -9])
    assert output["text"] == ["a True", "b False", "c False", "d True"]


@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_modes_keeps_the_order_of_rows(seed):
    mask = np.random.default_rng(seed).random(37) < 0.4
    rows = np.arange(37.0)
    policy = TensorPolicy(lambda x, deterministic: -x if deterministic else x, "cpu")
    np.testing.assert_array_equal(policy.infer(rows, mask), np.where(mask, -rows, rows))


def test_a_function_of_one_mode_may_write_both_outputs_into_the_same_tensor():
    out = torch.empty(4, 3, dtype=torch.float64)

    def function(observation, deterministic):
        return torch.mul(observation, -1 if deterministic else 1, out=out[: len(observation)])

    output = TensorPolicy(function, "cpu").infer(state(), MIXED)
    np.testing.assert_array_equal(output, state() * [[-1], [1], [1], [-1]])


def test_a_module_is_told_deterministic_through_its_forward():
    class Actor(torch.nn.Module):
        def forward(self, observation, deterministic=False):
            return observation * (0 if deterministic else 1)

    output = TensorPolicy(Actor(), "cpu").infer(state(), MIXED)
    np.testing.assert_array_equal(output, state() * [[0], [1], [1], [0]])


def test_a_function_that_names_neither_is_called_once_without():
    calls = []
    TensorPolicy(lambda observation: calls.append(1) or observation, "cpu").infer(state(), MIXED)
    assert calls == [1]


def test_a_bare_tensor_becomes_the_actions_of_the_reply():
    output = TensorPolicy(lambda observation: observation + 1, "cpu").infer(state(), TRAIN)
    np.testing.assert_array_equal(check_output(output, 4)["actions"], state() + 1)


def test_a_bfloat16_output_comes_as_float32():
    output = TensorPolicy(lambda x: {"actions": (x.bfloat16(), x.half())}, "cpu").infer(state(), TRAIN)
    assert [array.dtype for array in output["actions"]] == [np.float32, np.float16]
    np.testing.assert_array_equal(output["actions"][0], state())


def test_a_gradient_of_the_function_does_not_keep_its_output_from_being_sent():
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    output = TensorPolicy(lambda x: x * weight, "cpu").infer(state(), TRAIN)
    np.testing.assert_array_equal(output, state())


def test_a_module_tells_its_version_and_example():
    module = Linear()
    assert TensorPolicy(module, "cpu").version == 0
    assert TensorPolicy(module, "cpu").example_observation is None
    module.version, module.example_observation = 7, {"state": state()}
    assert TensorPolicy(module, "cpu").version == 7
    assert TensorPolicy(module, "cpu").example_observation is module.example_observation


def test_an_example_of_tensors_goes_to_the_device_in_the_dtype_of_the_module():
    seen = []

    class Seeing(torch.nn.Linear):
        def forward(self, observation):
            seen.append((observation.device.type, observation.dtype))
            return np.zeros((2, 1))

    example = torch.zeros(2, 3, dtype=torch.float64)
    TensorPolicy(Seeing(3, 1), "meta").infer(example, np.ones(2, bool))
    assert seen == [("meta", torch.float32)]
