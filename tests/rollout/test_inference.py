import warnings

import numpy as np
import pytest

from zmqrl.errors import PolicyOutputError
from zmqrl.rollout.inference import Inference, static_calls
from zmqrl.rollout.loading import as_policy, load_policy
from zmqrl.rollout.policy import TensorPolicy
from zmqrl.rollout.versions import PolicyVersions

SIZES = [2, 4, 16]


def shard(rows, seed=0):
    random = np.random.default_rng(seed)
    return {
        "state": random.normal(size=(rows, 3)).astype(np.float32),
        "task": [f"{seed}.{row}" for row in range(rows)],
        "fps": 30,
    }


def frozen(tree):
    """The same shard in arrays that cannot be written to, as they come out of a message."""
    return {**tree, "state": np.frombuffer(tree["state"].tobytes(), np.float32).reshape(-1, 3)}


def inference(policy, sizes=(), key="actions"):
    return Inference(PolicyVersions(policy), key, sizes)


class Recording:
    """Answers with the state and the task; keeps what it was given."""

    def __init__(self):
        self.calls = []

    def infer(self, observation, eval_mask, valid_mask):
        self.calls.append((observation, eval_mask, valid_mask))
        return {"actions": 2 * observation["state"], "task": [f"did {t}" for t in observation["task"]]}

    @property
    def rows(self):
        return [len(observation["state"]) for observation, _, _ in self.calls]


@pytest.mark.parametrize(
    ("rows", "calls"),
    [
        (0, [0]),
        (1, [2]),
        (2, [2]),
        (3, [4]),
        (5, [16]),
        (16, [16]),
        (17, [16, 2]),
        (32, [16, 16]),
        (40, [16, 16, 16]),
    ],
)
def test_a_batch_takes_calls_of_the_static_sizes(rows, calls):
    assert static_calls(rows, SIZES) == calls
    assert static_calls(rows, []) == [rows]


@pytest.mark.parametrize("rows", [[1], [2], [1, 2], [4, 6, 1], [16], [17], [3, 30, 7]], ids=str)
def test_static_sizes_change_no_answer_and_are_all_that_the_policy_sees(rows):
    trees = [frozen(shard(count, seed)) for seed, count in enumerate(rows)]
    is_eval = [seed % 2 == 1 for seed in range(len(rows))]
    fixed, free = Recording(), Recording()
    padded = inference(fixed, SIZES).run(trees, rows, is_eval, 0).output
    plain = inference(free).run(trees, rows, is_eval, 0).output
    total = sum(rows)
    assert padded["actions"][:total].tobytes() == plain["actions"].tobytes()
    assert padded["task"][:total] == plain["task"]
    assert set(fixed.rows) <= set(SIZES)
    assert free.rows == [total]
    for part in (1, 2):  # the masks
        given = np.concatenate([call[part] for call in fixed.calls])
        assert given.dtype == bool
        assert given[:total].tolist() == free.calls[0][part].tolist()
    valid = np.concatenate([call[2] for call in fixed.calls])
    assert valid.sum() == valid[:total].sum() == total
    assert free.calls[0][2].all()


def test_the_rows_that_fill_a_batch_are_like_its_last_one():
    policy = Recording()
    inference(policy, SIZES).run([shard(3)], [3], [True], 0)
    (observation, eval_mask, valid_mask) = policy.calls[0]
    assert observation["state"][3].tolist() == observation["state"][2].tolist()
    assert observation["task"] == ["0.0", "0.1", "0.2", "0.2"]
    assert observation["fps"] == 30
    assert eval_mask.tolist() == [True] * 4
    assert valid_mask.tolist() == [True, True, True, False]


def test_a_policy_that_does_not_ask_for_the_valid_rows_is_not_told():
    class Plain:
        def infer(self, observation, eval_mask):
            return np.full(len(eval_mask), len(observation["state"]))

    assert (
        inference(Plain(), SIZES).run([shard(3)], [3], [True], 0).output["actions"].tolist() == [4] * 4
    )


def test_a_policy_may_write_its_output_of_several_calls_into_the_same_array():
    class Static:
        out = np.empty((16, 3), np.float32)

        def infer(self, observation, eval_mask):
            rows = len(observation["state"])
            self.out[:rows] = observation["state"]
            return self.out[:rows]

    tree = shard(40)
    actions = inference(Static(), SIZES).run([tree], [40], [False], 0).output["actions"]
    assert actions[:40].tolist() == tree["state"].tolist()


def test_wrong_rows_of_a_padded_batch_are_an_error():
    class Wrong:
        def infer(self, observation, eval_mask):
            return observation["state"][:3]  # as many as are valid, but not as it was given

    with pytest.raises(PolicyOutputError, match="for 4 observations"):
        inference(Wrong(), SIZES).run([shard(3)], [3], [False], 0)


@pytest.mark.parametrize("rows", [[3], [1, 2]], ids=["one shard", "two"])
def test_a_policy_may_write_into_its_observation(rows):
    class Writing:
        def infer(self, observation, eval_mask):
            observation["state"] += 1
            return observation["state"]

    trees = [frozen(shard(count, seed)) for seed, count in enumerate(rows)]
    expected = np.concatenate([tree["state"] for tree in trees]) + 1
    for _ in range(2):
        output = inference(Writing()).run(trees, rows, [False] * len(rows), 0).output
        assert output["actions"].tolist() == expected.tolist()


@pytest.mark.parametrize("shards", [1, 3])
def test_an_observation_that_the_policy_keeps_is_never_written_over(shards):
    class Keeping:
        def __init__(self):
            self.kept = []

        def infer(self, observation, eval_mask):
            image = observation["image"]
            self.kept.append((int(image[0, 0]), image if len(self.kept) % 2 else image[-1:, 5:]))
            del self.kept[:-7]
            return image[:, :1]

    policy = Keeping()
    run = inference(policy, [4]).run
    for number in range(60):
        image = np.frombuffer(bytes([number]) * (1 << 20), np.uint8).reshape(1, -1)
        run([{"image": image}] * shards, [1] * shards, [False] * shards, 0)
        for value, kept in policy.kept:
            assert (kept[:, ::4096] == value).all()


def test_memory_of_large_batches_is_used_again():
    addresses = set()

    class Looking:
        def infer(self, observation, eval_mask):
            addresses.add(observation["image"].__array_interface__["data"][0])
            return observation["image"][:, :1]

    run = inference(Looking()).run
    image = np.zeros((1, 1 << 20), np.uint8)
    for shards in (4, 3, 4, 5, 4):
        run([{"image": image}] * shards, [1] * shards, [False] * shards, 0)
    assert len(addresses) == 1


# -- torch


def test_a_module_is_told_the_valid_rows_in_a_tensor():
    torch = pytest.importorskip("torch")

    def function(observation, valid_mask):
        assert valid_mask.dtype == torch.bool
        return torch.where(valid_mask[:, None], observation["state"], torch.nan)

    tree = shard(3)
    output = inference(TensorPolicy(function, "cpu"), SIZES).run([tree], [3], [False], 0).output
    assert np.isnan(output["actions"]).any(axis=1).tolist() == [False, False, False, True]
    assert inference(TensorPolicy(function, "cpu")).run([tree], [3], [False], 0).output[
        "actions"
    ].tolist() == (tree["state"].tolist())


def test_a_function_that_takes_one_mode_a_call_wants_batches_of_one_mode_if_sizes_are_static():
    pytest.importorskip("torch")
    both = TensorPolicy(lambda x, eval_mask, deterministic=False: x, "cpu")
    one = TensorPolicy(lambda x, deterministic: x, "cpu")
    assert inference(one, SIZES).wants_one_mode
    assert not inference(one).wants_one_mode
    assert not inference(both, SIZES).wants_one_mode
    assert not inference(Recording(), SIZES).wants_one_mode


def test_a_tensor_gets_no_memory_that_torch_warns_of():
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in ([3], [1, 2]):
            trees = [frozen(shard(count)) for count in rows]
            policy = TensorPolicy(lambda x: x["state"].mul_(2), "cpu")
            output = inference(policy).run(trees, rows, [False] * len(rows), 0).output
            expected = 2 * torch.cat([torch.tensor(tree["state"].copy()) for tree in trees])
            assert output["actions"].tolist() == expected.tolist()


def test_batches_for_a_gpu_are_copied_to_it_from_pinned_memory_before_that_is_used_again():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")

    class Looking(TensorPolicy):
        def _to_tensors(self, tree):
            if isinstance(tree, np.ndarray) and tree.dtype == np.uint8:
                assert torch.from_numpy(tree).is_pinned()
                addresses.add(tree.__array_interface__["data"][0])
            return super()._to_tensors(tree)

    addresses = set()
    kept = []
    policy = Looking(lambda observation: kept.append(observation["image"]) or np.zeros((3, 1)), "cuda")
    run = inference(policy).run
    for number in range(20):
        image = np.full((1, 8 << 20), number, np.uint8)
        run([{"image": image}] * 3, [1] * 3, [False] * 3, 0)
    assert len(addresses) == 1
    assert [bool((tensor == number).all()) for number, tensor in enumerate(kept)] == [True] * 20


def compiled(kind):
    """An actor that is compiled, and the shapes for which that was done."""
    torch = pytest.importorskip("torch")
    shapes = []

    def backend(graph, inputs):
        shapes.append(next(tuple(i.shape) for i in inputs if i.ndim == 2 and i.shape[1] == 3))
        return graph.forward

    class Actor(torch.nn.Module):
        example_observation = shard(1)

        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.arange(6.0).reshape(3, 2))

        def forward(self, observation, eval_mask):
            actions = observation["state"] @ self.weight
            return {"actions": torch.where(eval_mask[:, None], actions, -actions)}

    module = Actor()
    torch.compiler.reset()
    if kind == "torch.compile":
        return torch.compile(module, backend=backend, dynamic=False), shapes
    module.compile(backend=backend, dynamic=False)
    return module, shapes


@pytest.mark.parametrize("kind", ["torch.compile", "Module.compile"])
def test_a_compiled_module_is_compiled_once_for_each_static_size(kind):
    module, shapes = compiled(kind)
    policy = TensorPolicy(module, "cpu")
    run = inference(policy, SIZES).run
    for rows in (1, 2, 3, 4, 5, 9, 16, 17, 40, 1, 3, 7):
        tree = shard(rows, rows)
        output = run([tree], [rows], [rows % 2 == 0], 0).output["actions"]
        expected = tree["state"] @ np.arange(6, dtype=np.float32).reshape(3, 2)
        np.testing.assert_allclose(output[:rows], expected if rows % 2 == 0 else -expected, rtol=1e-5)
    assert sorted(shapes) == [(size, 3) for size in SIZES]


@pytest.mark.parametrize("kind", ["torch.compile", "Module.compile"])
def test_a_compiled_module_takes_weights_and_masks_by_the_names_of_the_module(kind):
    module, _ = compiled(kind)
    policy = as_policy(module, "cpu")
    policy.load_state_dict({"weight": np.eye(3, 2, dtype=np.float32)})
    mask = np.array([True, False])
    tree = shard(2)
    output = policy.infer(tree, mask)["actions"]
    np.testing.assert_allclose(output, tree["state"][:, :2] * [[1], [-1]])


SOURCE = """
import numpy as np

calls = []


class Own:
    example_observation = {"state": np.arange(6.0).reshape(3, 2), "task": ["a", "b", "c"]}

    def infer(self, observation, eval_mask, valid_mask):
        calls.append((observation["state"][:, 0].tolist(), observation["task"], eval_mask.tolist()))
        assert valid_mask.all()
        return observation["state"]
"""


def test_a_policy_is_warmed_up_in_both_modes_with_every_static_size(tmp_path):
    from zmqrl.imports import import_object

    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    load_policy(f"{path}:Own", {}, static_sizes=[1, 4])
    assert import_object(f"{path}:calls") == [
        (state, task, [is_eval] * len(task))
        for state, task in (([0.0], ["a"]), ([0.0, 2.0, 4.0, 0.0], ["a", "b", "c", "a"]))
        for is_eval in (True, False)
    ]
