"""Policies of other libraries: files of torch, actors of TorchRL, and objects with `select_action`."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from zmqrl.errors import PolicyError, PolicyLoadError
from zmqrl.rollout.batching import check_output
from zmqrl.rollout.loading import as_policy, load_policy
from zmqrl.rollout.policy import TensorPolicy

torch = pytest.importorskip("torch")

from zmqrl.policies import ActionModel  # noqa: E402 - it needs torch

pytestmark = [
    # What torch says about its own future.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]

TRAIN, EVAL = np.zeros(4, dtype=bool), np.ones(4, dtype=bool)
MIXED = np.array([True, False, False, True])
STATE = np.arange(12.0).reshape(4, 3)


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.drop = torch.nn.Dropout(0.9)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.drop(observation * self.weight)


class Masked(Scale):
    def forward(self, observation: torch.Tensor, eval_mask: torch.Tensor) -> torch.Tensor:
        return observation * self.weight * eval_mask[:, None]


class Two(Scale):
    def forward(self, state: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return state * self.weight + image.float().mean(1, keepdim=True)


class Nested(Scale):
    def forward(self, observation: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"actions": observation["b"] * self.weight, "extra": observation["a"][:, 0]}


NESTED = {"b": torch.zeros(2, 3), "a": torch.zeros(2, 1)}


def scripted(path: Path, module: torch.nn.Module) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), path)
    return path


def traced(path: Path, module: torch.nn.Module) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(module.eval(), torch.zeros(2, 3)), path)
    return path


def exported(path: Path, module: torch.nn.Module, *inputs, dynamic: bool = True) -> Path:
    rows = torch.export.Dim("rows")
    shapes = tuple({key: {0: rows} for key in i} if isinstance(i, dict) else {0: rows} for i in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module.eval(), inputs, dynamic_shapes=shapes if dynamic else None)
        torch.export.save(program, path)
    return path


def loaded(factory: str, path: Path, static_sizes=()) -> TensorPolicy:
    return load_policy(f"zmqrl.policies:{factory}", {"path": str(path)}, "cpu", static_sizes)


def file_of(kind: str, folder: Path, module: torch.nn.Module, *inputs) -> TensorPolicy:
    if kind == "torchscript":
        return loaded(kind, scripted(folder / "policy.pt", module))
    return loaded(kind, exported(folder / "policy.pt2", module, *inputs))


BOTH = pytest.mark.parametrize("kind", ["torchscript", "exported"])


@BOTH
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_file_answers_batches_of_any_size_without_dropout(kind, rows, tmp_path) -> None:
    policy = file_of(kind, tmp_path, Scale(), torch.zeros(2, 3))
    observation = np.ones((rows, 3))  # float64: cast to what the weights are
    output = policy.infer(observation, np.zeros(rows, bool))
    np.testing.assert_array_equal(output, np.tile([1, 2, 3], (rows, 1)))


@BOTH
def test_a_file_that_names_the_mask_gets_it(kind, tmp_path) -> None:
    policy = file_of(kind, tmp_path, Masked(), torch.zeros(2, 3), torch.zeros(2, dtype=torch.bool))
    output = policy.infer(np.ones((4, 3), np.float32), MIXED)
    np.testing.assert_array_equal(output, np.outer(MIXED, [1, 2, 3]))


@BOTH
def test_a_file_with_several_inputs_gets_the_parts_of_the_observation_by_name(kind, tmp_path) -> None:
    policy = file_of(kind, tmp_path, Two(), torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.uint8))
    observation = {"image": np.full((4, 4), 5, np.uint8), "state": STATE, "task": list("abcd")}
    np.testing.assert_array_equal(policy.infer(observation, TRAIN), STATE * [1, 2, 3] + 5)
    del observation["image"]
    with pytest.raises(PolicyError, match="an input 'image'; the observation has only state, task"):
        policy.infer(observation, TRAIN)


@BOTH
def test_a_file_that_takes_a_dict_gets_what_it_knows_in_its_own_order(kind, tmp_path) -> None:
    policy = file_of(kind, tmp_path, Nested(), NESTED)
    output = policy.infer({"a": np.full((4, 1), 7.0), "b": STATE}, TRAIN)
    np.testing.assert_array_equal(output["actions"], STATE * [1, 2, 3])
    assert output["extra"].tolist() == [7] * 4


def test_a_program_that_takes_a_dict_is_not_bothered_with_more_keys_and_misses_none(tmp_path) -> None:
    policy = file_of("exported", tmp_path, Nested(), NESTED)
    observation = {"a": np.full((4, 1), 7.0), "b": STATE, "c": STATE, "task": list("abcd")}
    np.testing.assert_array_equal(policy.infer(observation, TRAIN)["actions"], STATE * [1, 2, 3])
    del observation["b"]
    with pytest.raises(PolicyError, match="an input 'b'; the observation has only a, c, task"):
        policy.infer(observation, TRAIN)


def test_a_program_without_weights_gets_the_dtypes_that_it_was_exported_with(tmp_path) -> None:
    class Fixed(torch.nn.Module):
        def forward(self, state: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
            return state @ torch.ones(3) + steps

    policy = file_of("exported", tmp_path, Fixed(), torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32))
    output = policy.infer({"state": STATE, "steps": np.arange(4)}, TRAIN)
    np.testing.assert_array_equal(output, STATE.sum(1) + np.arange(4))


def test_a_traced_module_is_a_torchscript_file_too(tmp_path) -> None:
    policy = loaded("torchscript", traced(tmp_path / "policy.pt", Scale()))
    np.testing.assert_array_equal(policy.infer(STATE, TRAIN), STATE * [1, 2, 3])


def test_a_scripted_module_of_a_users_factory_is_asked_as_its_signature_says(tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = as_policy(torch.jit.script(Masked()), "cpu")
    assert policy.infer(np.ones((4, 3)), MIXED).tolist() == np.outer(MIXED, [1, 2, 3]).tolist()


@BOTH
def test_the_weights_of_a_file_can_be_replaced(kind, tmp_path) -> None:
    policy = file_of(kind, tmp_path, Scale(), torch.zeros(2, 3))
    other = copy.deepcopy(policy)
    policy.load_state_dict({"weight": np.zeros(3, np.float32)})
    assert not policy.infer(STATE, TRAIN).any()
    assert other.infer(STATE, TRAIN).any()


def test_a_program_of_a_fixed_number_of_rows_is_refused_unless_batches_are_padded(
    tmp_path,
) -> None:
    path = exported(tmp_path / "policy.pt2", Scale(), torch.zeros(4, 3), dynamic=False)
    with pytest.raises(PolicyLoadError, match=r"4 rows only: set rollout\.static_batch_sizes to \[4\]"):
        loaded("exported", path)
    policy = loaded("exported", path, [4])
    np.testing.assert_array_equal(policy.infer(STATE, TRAIN), STATE * [1, 2, 3])


def test_a_wrong_file_is_refused_with_what_it_is_and_what_reads_it(tmp_path) -> None:
    script = scripted(tmp_path / "policy.pt", Scale())
    program = exported(tmp_path / "policy.pt2", Scale(), torch.zeros(4, 3))
    weights, text, cut = tmp_path / "weights.pt", tmp_path / "policy.txt", tmp_path / "cut.pt"
    torch.save(Scale().state_dict(), weights)
    text.write_text("no model")
    cut.write_bytes(script.read_bytes()[:-100])
    for factory, path, message in (
        ("exported", script, "is a TorchScript file, not a torch.export file: .*:torchscript"),
        ("torchscript", program, "is a torch.export file, not a TorchScript file: .*:exported"),
        ("torchscript", weights, "is weights or a pickled module, of torch.save, .* a factory of your"),
        ("exported", weights, "a factory of your own builds the module"),
        ("stable_baselines3", script, "TorchScript file, not a model of Stable-Baselines3"),
        ("torchscript", text, "no zip archive"),
        ("torchscript", cut, "no zip archive, as such files are; is it complete"),
        ("torchscript", tmp_path / "none.pt", "there is no file .*none.pt"),
    ):
        more = {"algorithm": "PPO"} if factory == "stable_baselines3" else {}
        with pytest.raises(PolicyLoadError, match=message):
            load_policy(f"zmqrl.policies:{factory}", {"path": str(path), **more}, "cpu")


def test_a_factory_that_names_device_is_told_where_to_load(tmp_path) -> None:
    file = tmp_path / "own.py"
    file.write_text("told = []\ndef make(device):\n    told.append(device)\n    return lambda x: x\n")
    load_policy(f"{file}:make", {}, "auto")
    load_policy(f"{file}:make", {"device": "meta"}, "cpu")
    from zmqrl.imports import import_object

    assert import_object(f"{file}:told") == ["cuda" if torch.cuda.is_available() else "cpu", "meta"]


# -- TorchRL


@pytest.fixture
def actor():
    pytest.importorskip("torchrl")
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.modules import ProbabilisticActor, TanhNormal

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["state"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


def test_a_torchrl_actor_samples_and_is_deterministic_where_it_must_be(actor) -> None:
    policy = as_policy(actor, "cpu")
    observation = {"state": np.tile(STATE[1:2], (4, 1)), "task": list("abcd")}
    first, second = (policy.infer(observation, MIXED) for _ in range(2))
    assert first["actions"].shape == (4, 2)
    assert first["prev_logprobs"].shape == (4,)
    alike = (first["actions"] == second["actions"]).all(1)
    assert alike.tolist() == MIXED.tolist()
    assert (first["actions"][0] == first["actions"][3]).all()
    assert (first["actions"][1] != first["actions"][2]).all()


def test_a_torchrl_actor_with_one_in_key_takes_an_observation_that_is_an_array(actor) -> None:
    policy = as_policy(actor, "cpu")
    array, tree = policy.infer(STATE, EVAL), policy.infer({"state": STATE}, EVAL)
    np.testing.assert_array_equal(array["actions"], tree["actions"])


def test_an_observation_without_an_in_key_of_a_torchrl_actor_names_it(actor) -> None:
    with pytest.raises(PolicyError, match="the in_key 'state', but the observation has position"):
        as_policy(actor, "cpu").infer({"position": STATE}, TRAIN)


def test_a_copy_of_a_torchrl_actor_takes_weights_by_the_actors_own_names(actor) -> None:
    policy = as_policy(actor, "cpu")
    other = copy.deepcopy(policy)
    weights = {name: np.zeros_like(value.numpy()) for name, value in actor.state_dict().items()}
    other.load_state_dict(weights)
    assert (other.infer(STATE, EVAL)["actions"] == 0).all()
    assert (policy.infer(STATE, EVAL)["actions"] != 0).any()
    assert other.infer(STATE, MIXED)["actions"].shape == (4, 2)


def test_one_hot_actions_of_a_torchrl_actor_become_numbers_and_it_explores_in_train_mode() -> None:
    pytest.importorskip("torchrl")
    from tensordict.nn import TensorDictSequential
    from torchrl.data import OneHot
    from torchrl.modules import EGreedyModule, QValueActor

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 5)
    q = QValueActor(net, in_keys=["observation"], spec=OneHot(5))
    policy = as_policy(TensorDictSequential(q, EGreedyModule(OneHot(5), 1.0, 1.0)), "cpu")
    rows = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    best = net(torch.from_numpy(rows)).argmax(-1).numpy()
    actions = policy.infer(rows, np.ones(64, bool))["actions"]
    assert actions.dtype == np.int64
    np.testing.assert_array_equal(actions, best)
    assert (policy.infer(rows, np.zeros(64, bool))["actions"] != best).any()


def test_nested_keys_of_a_torchrl_module_are_looked_up_in_the_tree() -> None:
    pytest.importorskip("tensordict")
    from tensordict.nn import TensorDictModule

    module = TensorDictModule(Scale(), in_keys=[("agent", "state")], out_keys=[("agent", "action")])
    output = as_policy(module, "cpu").infer({"agent": {"state": STATE}}, TRAIN)
    np.testing.assert_array_equal(output["actions"], STATE * [1, 2, 3])


def test_a_torchrl_module_that_gives_no_action_is_refused() -> None:
    pytest.importorskip("tensordict")
    from tensordict.nn import TensorDictModule

    with pytest.raises(PolicyLoadError, match=r"out_keys are \['value'\], without 'action'"):
        as_policy(TensorDictModule(Scale(), in_keys=["state"], out_keys=["value"]), "cpu")


# -- Objects with select_action and its like


class Queueing(torch.nn.Module):
    """Hands out a queue of actions for the batch as a whole, as policies of LeRobot do."""

    def __init__(self, n_obs_steps: int = 1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.config = type("Config", (), {"n_obs_steps": n_obs_steps})
        self.seen = []
        self.reset()

    def forward(self, batch):
        raise AssertionError("this is the loss")

    def reset(self) -> None:
        self.queue = deque()

    def select_action(self, batch):
        if not self.queue:
            self.queue.extend(Queueing.predict_action_chunk(self, batch).transpose(0, 1))
        return self.queue.popleft()

    def predict_action_chunk(self, batch):
        self.seen.append(batch)
        return self.weight * batch["observation.state"][:, None] + torch.arange(4)[:, None]


class Selecting(Queueing):
    predict_action_chunk = None


class Single:
    def predict_action(self, batch):
        return {"action": batch["state"] + 1}


def test_a_policy_with_an_action_queue_gives_each_call_the_actions_of_its_own_rows() -> None:
    for policy in (Queueing(), Selecting(), Queueing(n_obs_steps=2)):
        served = as_policy(policy, "cpu")
        for rows in (4, 1, 3):
            output = check_output(served.infer({"observation.state": STATE[:rows]}, TRAIN[:rows]), rows)
            np.testing.assert_array_equal(output["actions"], 2 * STATE[:rows])


def test_chunks_of_actions_are_cut_to_the_length_that_is_wanted() -> None:
    policy = as_policy(ActionModel(Queueing(), chunk=3), "cpu")
    actions = policy.infer(STATE, TRAIN)["actions"]  # an array is the batch's observation.state
    assert actions.shape == (4, 3, 3)
    np.testing.assert_array_equal(actions[:, 2], 2 * STATE + 2)
    with pytest.raises(PolicyError, match="chunks have 4 actions; 9 are wanted"):
        as_policy(ActionModel(Queueing(), chunk=9), "cpu").infer(STATE, TRAIN)
    with pytest.raises(PolicyLoadError, match="select_action gives single actions, not chunks of 3"):
        ActionModel(Selecting(), chunk=3)


def test_the_batch_has_the_keys_images_and_texts_that_the_policy_wants() -> None:
    inner = Queueing()
    model = ActionModel(
        inner,
        keys={"agent_pos": "observation.state", "pixels.top": "observation.images.top"},
        preprocess=lambda batch: {**batch, "prepared": True},
        postprocess=lambda actions: actions + 100,
    )
    image = np.zeros((4, 6, 5, 3), np.uint8)
    image[:, 2, 1, 0] = 255
    observation = {"agent_pos": STATE, "pixels": {"top": image}, "task_descriptions": list("abcd")}
    actions = as_policy(model, "cpu").infer(observation, TRAIN)["actions"]
    np.testing.assert_array_equal(actions, 2 * STATE + 100)
    batch = inner.seen[-1]
    assert set(batch) == {"observation.state", "observation.images.top", "task", "prepared"}
    assert batch["task"] == list("abcd")
    top = batch["observation.images.top"]
    assert (tuple(top.shape), top.dtype) == ((4, 3, 6, 5), torch.float32)
    assert top[:, 0, 2, 1].tolist() == [1] * 4


def test_a_module_whose_forward_names_the_mask_is_called_although_it_has_select_action() -> None:
    class Own(Masked):
        def select_action(self, state):
            raise AssertionError("this is for a loop of its own")

    output = as_policy(Own(), "cpu").infer(np.ones((4, 3)), MIXED)
    np.testing.assert_array_equal(output, np.outer(MIXED, [1, 2, 3]))


def test_an_object_with_predict_action_alone_is_asked_by_it() -> None:
    output = as_policy(Single(), "cpu").infer({"state": STATE}, TRAIN)
    np.testing.assert_array_equal(output["actions"], STATE + 1)


def test_a_policy_that_answers_for_one_row_only_is_told_so() -> None:
    class OneRow:
        def predict_action(self, batch):
            return batch["state"][0]

    with pytest.raises(PolicyError, match="predict_action gave 3 rows of actions for 4"):
        as_policy(OneRow(), "cpu").infer({"state": STATE}, TRAIN)
