"""Policies with memory in a worker: what goes into a call, what is kept of it, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqrl.errors import DecodeError, PolicyLoadError, PolicyOutputError
from zmqrl.imports import import_object
from zmqrl.rollout.download import Weights
from zmqrl.rollout.inference import Inference
from zmqrl.rollout.loading import as_policy, load_policy
from zmqrl.rollout.policy import TensorPolicy, keeps_state
from zmqrl.rollout.stateful import Memory, States, are_apart, split_off, turns
from zmqrl.rollout.versions import PolicyVersions
from zmqrl.transport.codec import decode, encode

torch = pytest.importorskip("torch")


class Recurrent(torch.nn.Module):
    """Two states in a tuple, of which the second, in half precision, is written where it stands."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell = torch.nn.GRUCell(3, 4)
        self.head = torch.nn.Linear(4, 2)

    def initial_state(self, rows: int) -> Any:
        return torch.zeros(rows, 4), {"sum": torch.zeros(rows, 2, dtype=torch.bfloat16)}

    def forward(self, observation: Any, deterministic: bool, state: Any) -> Any:
        assert isinstance(state, tuple)
        h = self.cell(observation["x"], state[0])
        total = state[1]["sum"]
        total += 1
        mean = self.head(h)
        actions = mean if deterministic else mean + 10
        return {"actions": actions, "steps": total.clone()}, (h, {"sum": total})


class Static(Recurrent):
    """Writes each output and state into the same tensors."""

    def forward(self, observation: Any, deterministic: bool, state: Any) -> Any:
        output, (h, more) = super().forward(observation, deterministic, state)
        if not hasattr(self, "_memory"):
            self._memory = torch.empty(64, 2), torch.empty(64, 4)
        actions, kept = (memory[: len(h)] for memory in self._memory)
        actions[:], kept[:] = output["actions"], h
        return {**output, "actions": actions}, (kept, more)


def memory(ids: list[int], steps: list[int], reset: list[bool], state: Any = None) -> Memory:
    fields = {
        "key": np.array([[5, i] for i in ids], np.int64).reshape(-1, 2),
        "step": np.array(steps, np.int64),
        "reset": np.array(reset, bool),
    }
    if state is not None:
        fields["state"] = state
    return Memory.of(fields, len(ids))


def travelled(tree: Any) -> Any:
    encoded = encode(tree)
    return decode(encoded.meta, encoded.buffers)


@pytest.mark.parametrize("most_mb", [16, None], ids=["kept", "carried"])
@pytest.mark.parametrize("sizes", [(), (2, 4)], ids=["any size", "static"])
@pytest.mark.parametrize("kind", [Recurrent, Static])
def test_each_row_gets_what_it_gets_alone(most_mb: int | None, sizes: Any, kind: Any) -> None:
    """Shards of both modes, in random groups, of envs that begin episodes at times of their own."""
    random = np.random.default_rng(0)
    inference = Inference(PolicyVersions(TensorPolicy(kind(), "cpu")), "actions", sizes)
    alone = Recurrent().eval()
    states = States(most_mb)
    carried: dict[int, Any] = {}
    steps = dict.fromkeys(range(6), 0)
    true_states: dict[int, Any] = {}
    for _ in range(30):
        shards = [part for part in np.split(random.permutation(6), [random.integers(1, 5)]) if len(part)]
        observations, memories, is_eval, resets = [], [], [], []
        for shard in shards:
            reset = [steps[env] == 0 or bool(random.random() < 0.2) for env in shard]
            if any(env not in carried for env in shard):
                reset = [True] * len(shard)
            state = None
            if most_mb is None and all(env in carried for env in shard):
                rows = [carried[env] for env in shard]
                state = [
                    np.stack([row[0] for row in rows]),
                    {"sum": np.stack([row[1]["sum"] for row in rows])},
                ]
            observations.append({"x": random.normal(size=(len(shard), 3)).astype(np.float32)})
            memories.append(memory(list(shard), [steps[env] for env in shard], reset, state))
            is_eval.append(bool(random.random() < 0.5))
            resets.append(reset)
        if len({m.state is None for m in memories}) > 1:
            continue  # of two structures: no batch of a worker
        recall = states.recall(memories)
        assert not recall.lost.any()
        counts = [len(shard) for shard in shards]
        prediction = inference.run(observations, counts, is_eval, 0, recall)
        answer = recall.answer(prediction.output, prediction.version, prediction.state)
        recall.commit()
        output = answer["output"] if most_mb is None else answer
        back = travelled(answer["state"]) if most_mb is None else None
        at = 0
        for shard, observation, eval_mode, reset in zip(
            shards, observations, is_eval, resets, strict=True
        ):
            for row, env in enumerate(shard):
                if reset[row]:
                    true_states[env] = alone.initial_state(1)
                with torch.no_grad():
                    expected, true_states[env] = alone(
                        {"x": torch.from_numpy(observation["x"][row : row + 1])},
                        eval_mode,
                        true_states[env],
                    )
                assert output["actions"][at] == pytest.approx(expected["actions"][0].numpy(), abs=1e-5)
                assert output["steps"][at].tolist() == expected["steps"][0].tolist()
                if back is not None:
                    carried[env] = [back[0][at], {"sum": back[1]["sum"][at]}]
                else:
                    carried[env] = None
                steps[env] += 1
                at += 1


def test_a_repeated_step_is_answered_with_the_output_and_version_of_the_first_time() -> None:
    policy = TensorPolicy(Recurrent(), "cpu")
    versions = PolicyVersions(policy, version=3)
    inference, states = Inference(versions, "actions"), States(1)
    x = {"x": np.ones((2, 3), np.float32)}

    def run(memories: list[Memory]) -> tuple[Any, list[int]]:
        recall = states.recall(memories)
        counts = [len(m.keys) for m in memories]
        prediction = inference.run([x] * len(memories), counts, [True] * len(memories), 0, recall)
        answer = recall.answer(prediction.output, prediction.version, prediction.state)
        recall.commit()
        return answer, recall.versions(counts)

    first, of_first = run([memory([0, 1], [0, 0], [True, True])])
    weights = {name: tensor.numpy() * 2 for name, tensor in policy._module.state_dict().items()}
    versions.load(Weights(1, 4, weights, None))
    answer, of_both = run([memory([1, 0], [0, 0], [True, True]), memory([2, 3], [0, 0], [True, True])])
    assert (of_first, of_both) == ([3], [3, 4])
    assert answer["actions"][:2].tolist() == first["actions"][::-1].tolist()
    assert answer["actions"][2].tolist() != first["actions"][0].tolist()
    later, _ = run([memory([1, 2], [1, 1], [False, False])])
    assert later["steps"].tolist() == [[2, 2], [2, 2]]


def test_what_is_lost_is_told_and_changes_nothing() -> None:
    states = States(1)
    recall = states.recall([memory([0, 1], [0, 0], [True, False])])
    assert recall.lost.tolist() == [False, True]
    carrying = States(None)
    assert carrying.recall([memory([0, 1], [3, 4], [True, False])]).lost.tolist() == [False, True]


def run_once(policy: Any, rows: int = 2, state: Any = None) -> Any:
    inference = Inference(PolicyVersions(as_policy(policy, "cpu")), "actions")
    recall = States(None).recall([memory(list(range(rows)), [1] * rows, [state is None] * rows, state)])
    return inference.run([{"x": np.zeros((rows, 3), np.float32)}], [rows], [True], 0, recall)


class Wrong:
    """Returns what it is told to."""

    def __init__(self, new_state: Any, initial: Any = None) -> None:
        self.new_state = new_state
        self.initial = np.zeros((2, 1)) if initial is None else initial

    def initial_state(self, rows: int) -> Any:
        return {"h": self.initial}

    def infer(self, observation: Any, eval_mask: np.ndarray, state: Any) -> Any:
        actions = np.zeros(len(eval_mask))
        return actions if self.new_state is None else (actions, self.new_state)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Wrong(None), r"returns a pair, \(output, new state\); this one returned a ndarray"),
        (Wrong({"h": np.zeros((3, 1))}), r"new state has an array of shape \[3, 1\] for 2 rows"),
        (Wrong({"h": [1, 2]}), "new state holds a list, not an array"),
        (Wrong({"h": np.zeros((2, 4))}), r"has float64\[4\] at 'h', but it was given .* float64\[1\]"),
        (Wrong({"h": np.zeros((2, 1), int)}), r"has int64\[1\] at 'h'"),
        (Wrong({"c": np.zeros((2, 1))}), "has nothing at 'h'"),
        (Wrong({"h": torch.zeros(2, 1, dtype=torch.float64)}), r"has torch.float64\[1\] at 'h'"),
        (Wrong({"h": np.zeros((2, 1))}, np.zeros(())), r"initial_state has an array of shape \[\]"),
        (Wrong({"h": np.zeros((2, 1))}, "zero"), "initial_state holds a str"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_state_is_an_error_that_says_what_is_wrong(policy: Any, message: str) -> None:
    with pytest.raises(PolicyOutputError, match=message):
        run_once(policy)


def test_a_policy_that_puts_more_into_its_state_than_it_was_given_is_told_so() -> None:
    class Hoards(Wrong):
        def infer(self, observation: Any, eval_mask: np.ndarray, state: Any) -> Any:
            state["more"] = observation["x"]
            return np.zeros(len(eval_mask)), state

    with pytest.raises(PolicyOutputError, match=r"new state has float32\[3\] at 'more'"):
        run_once(Hoards(None))


def test_an_initial_state_of_another_shape_than_those_before_is_refused() -> None:
    """A narrower one would be spread over the places of those that are kept."""

    class Shrinks:
        width = 4

        def initial_state(self, rows: int) -> Any:
            return np.ones((rows, self.width))

        def infer(self, observation: Any, eval_mask: np.ndarray, state: Any) -> Any:
            return np.zeros(len(eval_mask)), state

    policy, states = Shrinks(), States(1)
    inference = Inference(PolicyVersions(policy), "actions")

    def step(number: int, *reset: bool) -> None:
        recall = states.recall([memory([0, 1], [number] * 2, list(reset))])
        made = inference.run([{"x": np.zeros((2, 3))}], [2], [True], 0, recall)
        recall.answer(made.output, made.version, made.state)
        recall.commit()

    step(0, True, True)
    policy.width = 1
    for reset in ([True, True], [True, False]):
        with pytest.raises(PolicyOutputError, match=r"initial_state has float64\[1\] .* float64\[4\]"):
            step(1, *reset)
    step(1, False, False)


@pytest.mark.parametrize(
    "state",
    [
        np.zeros((2, 4)),
        [np.zeros((2, 4), np.float32)],
        [np.zeros((2, 5), np.float32), {"sum": np.zeros((2, 2), np.float32)}],
        [np.zeros((2, 4), np.float64), {"sum": np.zeros((2, 2), np.float32)}],
        [np.zeros((2, 4), np.float32), {"other": np.zeros((2, 2), np.float32)}],
    ],
    ids=["array", "short", "shape", "dtype", "key"],
)
def test_a_carried_state_that_is_none_of_the_policys_is_refused(state: Any) -> None:
    with pytest.raises(DecodeError, match=r"memory\.state is not a state of this policy"):
        run_once(Recurrent(), state=state)


GOOD = {"key": np.array([[1, 2], [1, 3]]), "step": np.array([0, 4]), "reset": np.array([True, False])}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key": None}, "memory.key"),
        ({"key": np.array([1, 2])}, "memory.key"),
        ({"key": np.array([[1, 2], [1, 2]])}, "same memory.key"),
        ({"key": np.array([[1.0, 2], [1, 2]])}, "memory.key"),
        ({"step": np.array([0, -1])}, "below 0"),
        ({"step": np.array([0])}, "memory.step"),
        ({"reset": np.array([0, 1])}, "memory.reset"),
        ({"state": np.zeros((3, 4))}, "other rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_memory_of_strangers_is_checked(wrong: Any, message: str) -> None:
    assert Memory.of(GOOD, 2).steps.tolist() == [0, 4]
    with pytest.raises(DecodeError, match=message):
        Memory.of({**GOOD, **wrong}, 2)


@pytest.mark.parametrize("tree", [[1], {}, {"observation": 1}, {"observation": 1, "memory": 2}], ids=str)
def test_a_body_without_its_two_parts_is_refused(tree: Any) -> None:
    with pytest.raises(DecodeError):
        split_off(tree)


def test_requests_about_the_same_row_are_not_apart() -> None:
    one, other, both = (
        memory([1], [0], [True]),
        memory([2], [0], [True]),
        memory([1, 2], [0, 0], [True] * 2),
    )
    assert are_apart([one, other])
    assert not are_apart([one, other, both])


def test_a_policy_that_takes_a_state_needs_an_initial_one() -> None:
    def function(observation: Any, state: Any) -> Any:
        return observation, state

    with pytest.raises(PolicyLoadError, match=r"needs initial_state\(rows\)"):
        keeps_state(as_policy(function, "cpu"))
    with pytest.raises(PolicyLoadError, match=r"Headless takes a state, so it needs initial_state"):
        PolicyVersions(as_policy(Headless(), "cpu"))
    assert keeps_state(TensorPolicy(Recurrent(), "cpu"))
    assert not keeps_state(TensorPolicy(torch.nn.Linear(1, 1), "cpu"))


def test_an_observation_may_be_called_state() -> None:
    class Actor(torch.nn.Module):
        def forward(self, state: Any) -> Any:
            return state["x"]

    class Plain:
        def infer(self, state: Any, eval_mask: np.ndarray) -> Any:
            return state["x"]

    for source in (Actor(), Plain(), lambda state: state["x"]):
        policy = as_policy(source, "cpu")
        assert not keeps_state(policy)
        inference = Inference(PolicyVersions(policy), "actions")
        output = inference.run([{"x": np.ones((2, 3))}], [2], [True], 0).output
        assert output["actions"].tolist() == [[1.0] * 3] * 2


class Headless:
    def infer(self, observation: Any, eval_mask: np.ndarray, state: Any) -> Any:
        return observation, state


def test_the_warm_up_calls_a_policy_with_memory(tmp_path: Any) -> None:
    module = tmp_path / "warm.py"
    module.write_text(
        "import numpy as np\n"
        "class Warm:\n"
        "    example_observation = {'x': np.zeros((1, 2))}\n"
        "    calls = []\n"
        "    def initial_state(self, rows): return np.zeros(rows)\n"
        "    def infer(self, observation, eval_mask, state):\n"
        "        self.calls.append(len(state))\n"
        "        return observation['x'], state\n"
    )
    assert load_policy(f"{module}:Warm", {}, "cpu").calls == [1]
    assert load_policy(f"{module}:Warm", {}, "cpu", [2, 4]).calls[-4:] == [2, 2, 4, 4]


@pytest.mark.parametrize("most_mb", [1, None])
def test_a_compiled_policy_with_memory_is_compiled_in_the_warm_up(tmp_path: Any, most_mb: Any) -> None:
    module = tmp_path / "compiled.py"
    module.write_text(COMPILED)
    policy = load_policy(f"{module}:make", {}, "cpu", [2, 4])
    shapes = import_object(f"{module}:shapes")
    assert sorted(shapes) == [2, 4]
    inference, states = Inference(PolicyVersions(policy), "actions", [2, 4]), States(most_mb)
    carried = None
    for step, rows in enumerate([2, 2, 4, 3, 9, 1, 9]):
        ids = list(range(rows))
        part = None if carried is None or len(carried) < rows else carried[:rows]
        begins = [(part is None and most_mb is None) or step < 2 or i >= 2 for i in ids]
        recall = states.recall([memory(ids, [step] * rows, begins, part)])
        tree = {"x": np.ones((rows, 3), np.float32)}
        said = inference.run([tree], [rows], [False], 0, recall)
        answer = recall.answer(said.output, said.version, said.state)
        recall.commit()
        carried = answer["state"] if most_mb is None else None
    assert sorted(shapes) == [2, 4]


COMPILED = """
import numpy as np
import torch

shapes = []


def backend(graph, inputs):
    shapes.append(next(i.shape[0] for i in inputs if i.shape[-1] == 3 and i.shape[0] != 12))
    return graph.forward


class Recurrent(torch.nn.Module):
    example_observation = {"x": np.zeros((1, 3), np.float32)}

    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRUCell(3, 4)

    def initial_state(self, rows):
        return torch.zeros(rows, 4)

    def forward(self, observation, state):
        state = self.cell(observation["x"], state)
        return {"actions": state[:, :2]}, state


def make():
    torch.compiler.reset()
    return torch.compile(Recurrent(), backend=backend, dynamic=False)
"""


def test_requests_about_one_row_take_turns_in_their_order_however_many_there_are() -> None:
    memories = [
        memory(ids, [0] * len(ids), [True] * len(ids)) for ids in ([1, 2], [3], [2, 4], [4], [1])
    ]
    names = ["12", "3", "24", "4", "1"]
    assert turns(names, [*memories]) == [["12", "3"], ["24", "1"], ["4"]]
    many = [memory([number], [0], [True]) for number in range(3000)]
    assert turns(range(3001), [*many, many[-1]]) == [list(range(3000)), [3000]]
