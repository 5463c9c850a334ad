"""Trajectories: put together as single simulators would tell it, and read with suspicion."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqrl.errors import DecodeError
from zmqrl.recording.builder import TrajectoryBuilder
from zmqrl.trajectory import Trajectory
from zmqrl.transport.codec import decode, encode

pytestmark = pytest.mark.timeout(30)

STEPS = 5


class Counting(gymnasium.Env):
    """Shows its episode, its step and its last action; each episode has a length of its own.

    Args:
        number: Makes its episodes differ from those of others.
        form: Of the observation: `box`, `dict` or `tuple`.
    """

    def __init__(self, number: int = 0, form: str = "box") -> None:
        self.number, self.form = number, form
        self.episode = -1
        box = spaces.Box(-1e6, 1e6, (3,), np.float32)
        steps = spaces.Discrete(1000)
        self.observation_space = {
            "box": box,
            "dict": spaces.Dict({"state": box, "inner": spaces.Dict({"steps": steps})}),
            "tuple": spaces.Tuple((box, steps)),
        }[form]
        self.action_space = spaces.Discrete(7)

    def _observation(self, action):
        state = np.array([self.episode, self.steps, action], np.float32)
        if self.form == "dict":
            return {"state": state, "inner": {"steps": self.steps}}
        return (state, self.steps) if self.form == "tuple" else state

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.steps = 0
        return self._observation(-1), {}

    def step(self, action):
        self.steps += 1
        length = 2 + (3 * self.number + 2 * self.episode) % 5
        over = self.steps >= length
        ends = over and (self.number + self.episode) % 2 == 0
        reward = 100.0 * self.number + 10 * self.episode + self.steps
        return self._observation(int(action)), reward, ends, over and not ends, {}


def leaf(tree, form):
    """The box in an observation."""
    return {"box": lambda: tree, "dict": lambda: tree["state"], "tuple": lambda: tree[0]}[form]()


def actions_of(step, rows):
    return (np.arange(rows) + step) % 7


def transitions(numbers, steps, skip_resets=False):
    """What single simulators do: by row, a list of (observation, action, reward, end, cut, next)."""
    rows = []
    for row, number in enumerate(numbers):
        env, found, over = Counting(number), [], False
        observation, _ = env.reset()
        for step in range(steps):
            if over and skip_resets:
                observation, _ = env.reset()
                over = False
                found.append(None)
                continue
            action = int(actions_of(step, len(numbers))[row])
            following, reward, ends, cut, _ = env.step(action)
            found.append((observation, action, reward, ends, cut, following))
            observation, over = following, ends or cut
            if over and not skip_resets:
                observation, _ = env.reset()
        rows.append(found)
    return rows


def run(envs, mode, steps, form="box"):
    """Step a vector env as a client does, and return the trajectories."""
    builder = TrajectoryBuilder(STEPS, "env-0", final_is_next=mode is AutoresetMode.NEXT_STEP)
    observation, _ = envs.reset()
    resets = np.zeros(envs.num_envs, bool)
    taken = []
    for step in range(steps):
        builder.observe(observation)
        actions = actions_of(step, envs.num_envs) % envs.single_action_space.n
        builder.act({"actions": actions}, version=step)
        observation, reward, ends, cuts, infos = envs.step(actions)
        final, valid = infos.get("final_obs"), None
        if mode is AutoresetMode.NEXT_STEP:
            valid, resets = ~resets, (ends | cuts) & ~resets
        if mode is AutoresetMode.DISABLED and (ends | cuts).any():
            final = observation
            observation, _ = envs.reset(options={"reset_mask": ends | cuts})
        builder.outcome(reward, ends, cuts, final, valid)
        taken += builder.take()
    builder.observe(observation)
    return taken + builder.take()


def check(trajectories, reference, form="box"):
    """Compare trajectories with what single simulators did."""
    step = 0
    for trajectory in trajectories:
        Trajectory.of_tree(trajectory.tree())
        observation = leaf(trajectory.observation, form)
        following = leaf(trajectory.next_observation(), form)
        for t in range(STEPS):
            for row, found in enumerate(reference):
                if found[step] is None:
                    assert not trajectory.valid[t, row]
                    continue
                before, action, reward, ends, cut, after = found[step]
                assert trajectory.valid[t, row]
                np.testing.assert_array_equal(observation[t, row], before)
                np.testing.assert_array_equal(following[t, row], after)
                assert trajectory.actions[t, row] == action
                assert trajectory.reward[t, row] == np.float32(reward)
                assert trajectory.terminated[t, row] == ends
                assert trajectory.truncated[t, row] == cut
            assert trajectory.versions[t] == step
            step += 1
    return step


@pytest.mark.parametrize("form", ["box", "dict", "tuple"])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_gives_the_transitions_of_single_simulators(mode, form):
    envs = SyncVectorEnv([lambda n=n: Counting(n, form) for n in range(4)], autoreset_mode=mode)
    trajectories = run(envs, mode, 6 * STEPS, form)
    reference = transitions(range(4), 6 * STEPS, skip_resets=mode is AutoresetMode.NEXT_STEP)
    assert len(trajectories) == 6
    assert check(trajectories, reference, form) == 6 * STEPS
    ends = [int(step) for t in trajectories for step in t.final_index[:, 0]]
    assert {0, STEPS - 1} <= set(ends), "no episode ended at the edge of a trajectory"


def test_an_async_vector_env_gives_the_same_transitions():
    mode = AutoresetMode.SAME_STEP
    envs = AsyncVectorEnv([lambda n=n: Counting(n, "dict") for n in range(2)], autoreset_mode=mode)
    try:
        trajectories = run(envs, mode, 2 * STEPS, "dict")
    finally:
        envs.close()
    assert check(trajectories, transitions(range(2), 2 * STEPS), "dict") == 2 * STEPS


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_in_cartpole_each_next_observation_is_the_observation_that_follows_or_a_final_one(mode):
    envs = gymnasium.make_vec("CartPole-v1", 3, "sync", vector_kwargs={"autoreset_mode": mode})
    envs.reset(seed=3)
    trajectories = run(envs, mode, 20 * STEPS)
    observation = np.concatenate([t.observation for t in trajectories])
    following = np.concatenate([t.next_observation() for t in trajectories])
    done = np.concatenate([t.terminated | t.truncated for t in trajectories])
    valid = np.concatenate([t.valid for t in trajectories])
    same = (observation[1:] == following[:-1]).all(axis=-1)
    assert same[(valid & ~done)[:-1]].all()
    assert done.any()
    fallen = np.abs(following[done])
    assert ((fallen[:, 2] > 0.2095) | (fallen[:, 0] > 2.4)).all(), (
        "a final observation is of a new episode"
    )
    envs.close()


# -- One step at a time


def observation(value=0.0, rows=2):
    return np.full((rows, 3), value, np.float32)


NOTHING = np.zeros(2, bool)


def play(builder, steps, reward=(1.0, 2.0), **outcome):
    """Some steps without an end, and the observation after them."""
    for step in range(steps):
        builder.observe(observation(step))
        builder.act({"actions": np.array([step, step])}, 1)
        builder.outcome(reward, NOTHING, NOTHING, **outcome)
    builder.observe(observation(steps))
    return builder.take()


def test_a_trajectory_has_the_observation_after_its_last_step_to_bootstrap_from():
    first, second = play(TrajectoryBuilder(2), 4)
    assert first.observation[:, 0, 0].tolist() == [0, 1]
    assert first.bootstrap[0, 0] == 2
    assert second.observation[:, 0, 0].tolist() == [2, 3]
    assert second.bootstrap[0, 0] == 4
    assert first.next_observation()[:, 0, 0].tolist() == [1, 2]


@pytest.mark.parametrize(
    "reward",
    [[1, 2], (1.0, 2.0), np.array([1, 2]), np.array([[1.0], [2.0]]), [[1], [2]], [np.int64(1), 2.0]],
    ids=repr,
)
def test_rewards_may_have_any_numeric_form(reward):
    (trajectory,) = play(TrajectoryBuilder(2), 2, reward)
    assert trajectory.reward.dtype == np.float32
    assert trajectory.reward.tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    "reward", [[1, 2, 3], 1.0, [[1, 2]], None, ["a", "b"], {"r": 1}, [[1], [2, 3]]], ids=repr
)
def test_rewards_of_another_shape_are_refused_and_the_step_can_be_recorded_again(reward):
    builder = TrajectoryBuilder(1)
    builder.observe(observation())
    builder.act({"actions": NOTHING}, 1)
    handle = builder.outcome(None, NOTHING, NOTHING)
    with pytest.raises(ValueError, match="reward"):
        builder.late_reward(handle, reward)
    builder.late_reward(handle, [1, 2])
    builder.observe(observation())
    assert builder.take()[0].reward.tolist() == [[1, 2]]


def test_a_step_that_is_refused_leaves_nothing_behind():
    builder = TrajectoryBuilder(1)
    builder.observe(observation())
    builder.act({"actions": NOTHING}, 1)
    with pytest.raises(ValueError, match="final_obs"):
        builder.outcome([np.nan, 0], [True, False], NOTHING)
    with pytest.raises(ValueError, match="final_obs"):
        builder.outcome([0, 0], [True, True], NOTHING, [np.zeros(3), None])
    builder.outcome([5, 6], [True, False], NOTHING, observation(9))
    builder.observe(observation())
    (trajectory,) = builder.take()
    assert trajectory.final_index.tolist() == [[0, 0]]
    assert trajectory.final_observation.tolist() == [[9, 9, 9]]
    assert builder.dropped == 0


def test_late_rewards_may_come_in_any_order_and_complete_their_trajectory():
    builder = TrajectoryBuilder(2)
    handles = []
    for step in range(4):
        builder.observe(observation(step))
        builder.act({"actions": NOTHING}, step)
        handles.append(builder.outcome(None, NOTHING, NOTHING))
    builder.observe(observation(4))
    assert builder.take() == []
    for step in (3, 2, 0):
        builder.late_reward(handles[step], [step, -step])
        assert builder.take() == [], "the first trajectory lacks a reward, and they leave in order"
    builder.late_reward(handles[1], [[1], [-1]])
    first, second = builder.take()
    assert first.reward.tolist() == [[0, 0], [1, -1]]
    assert second.reward.tolist() == [[2, -2], [3, -3]]


def test_a_late_reward_before_the_last_observation_does_not_complete_anything():
    builder = TrajectoryBuilder(1)
    builder.observe(observation())
    builder.act({"actions": NOTHING}, 1)
    builder.late_reward(builder.outcome(None, NOTHING, NOTHING), [1, 2])
    assert builder.take() == []
    builder.observe(observation())
    assert len(builder.take()) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["observation", "final observation", "reward"])
def test_numbers_that_are_not_finite_drop_their_trajectory_and_are_named(place, bad):
    builder = TrajectoryBuilder(2)
    for step in range(4):
        state = {"state": observation(step)}
        final = {"state": observation(7)}
        reward = [0.0, 0.0]
        if step == 2:
            if place == "reward":
                reward[1] = bad
            else:
                (state if place == "observation" else final)["state"][1, 2] = bad
        builder.observe(state)
        builder.act({"actions": NOTHING}, 1)
        builder.outcome(reward, [False, step == 2], NOTHING, final if step == 2 else None)
    builder.observe({"state": observation(4)})
    # The observation that follows a trajectory belongs to it, too.
    assert builder.dropped == (2 if place == "observation" else 1)
    assert len(builder.take()) == 2 - builder.dropped
    assert place in builder.problem
    assert str(np.float32(bad)) in builder.problem


def test_a_reward_too_large_for_float32_drops_its_trajectory():
    builder = TrajectoryBuilder(2)
    assert play(builder, 2, np.array([0.0, 1e300])) == []
    assert (builder.dropped, builder.problem) == (1, "reward is inf in row 1")


def test_what_is_not_finite_in_a_reset_row_does_no_harm():
    (trajectory,) = play(TrajectoryBuilder(2), 2, [np.nan, 1], valid=[False, True])
    assert trajectory.reward.tolist() == [[0, 1], [0, 1]]
    assert trajectory.env_steps == 2


def test_an_end_in_a_reset_row_is_none():
    builder = TrajectoryBuilder(1)
    builder.observe(observation())
    builder.act({"actions": NOTHING}, 1)
    builder.outcome([0, 0], [True, False], [True, False], None, valid=[False, True])
    builder.observe(observation())
    (trajectory,) = builder.take()
    assert not trajectory.terminated.any()
    assert not trajectory.truncated.any()
    assert len(trajectory.final_index) == 0


def test_text_and_nested_trees_are_kept_as_they_are():
    builder = TrajectoryBuilder(2)

    def show(step):
        return {
            "task_descriptions": [f"open {step}", f"close {step}"],
            "images": [{"wrist": observation(step)}, (observation(step), ("a", f"b{step}"))],
            "names": np.array(["x", "y" * (step + 1)]),
        }

    for step in range(2):
        builder.observe(show(step))
        builder.act({"actions": NOTHING}, 1)
        builder.outcome([0, 0], [step == 1, False], NOTHING, show(9) if step else None)
    builder.observe(show(2))
    (trajectory,) = builder.take()
    trajectory = through_the_codec(trajectory)
    following = trajectory.next_observation()
    assert trajectory.observation["task_descriptions"] == [["open 0", "close 0"], ["open 1", "close 1"]]
    assert following["task_descriptions"] == [["open 1", "close 1"], ["open 9", "close 2"]]
    assert following["images"][1][1] == [["a", "b1"], ["a", "b2"]]
    assert following["images"][0]["wrist"][1, :, 0].tolist() == [9, 2]
    assert following["names"].tolist() == [["x", "yy"], ["x", "yyy"]]
    assert trajectory.bootstrap["task_descriptions"] == ["open 2", "close 2"]


def test_constants_are_repeated_for_every_row():
    builder = TrajectoryBuilder(1)
    tree = {"x": observation(), "task": "open", "dt": 0.5, "numbers": [1.0, 2.0], "wrist": None}
    builder.observe(tree)
    builder.act({"actions": NOTHING}, 1)
    builder.outcome(
        [0, 0],
        [True, False],
        NOTHING,
        tree | {"task": ["a", "b"], "dt": np.ones(2), "wrist": [None] * 2},
    )
    builder.observe(tree)
    (trajectory,) = builder.take()
    trajectory = through_the_codec(trajectory)
    assert trajectory.observation["task"] == [["open", "open"]]
    assert trajectory.observation["dt"].tolist() == [[0.5, 0.5]]
    assert trajectory.observation["numbers"].tolist() == [[1, 2]]
    assert trajectory.observation["wrist"] == [[None, None]]
    assert trajectory.next_observation()["task"] == [["a", "open"]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_are_recorded_as_arrays(dtype):
    torch = pytest.importorskip("torch")
    builder = TrajectoryBuilder(1)
    state = torch.ones(2, 3, dtype=getattr(torch, dtype), requires_grad=True)
    builder.observe({"state": state})
    builder.act({"actions": torch.zeros(2)}, 1)
    builder.outcome(
        torch.ones(2), torch.tensor([True, False]), torch.zeros(2, dtype=torch.bool), {"state": state}
    )
    builder.observe({"state": state})
    (trajectory,) = builder.take()
    assert (
        through_the_codec(trajectory).next_observation()["state"].tolist() == np.ones((1, 2, 3)).tolist()
    )


def test_a_number_in_a_list_that_is_not_finite_is_found():
    builder = TrajectoryBuilder(1)
    for _ in range(2):
        builder.observe({"x": [0.0, float("nan")]})
        builder.act({"actions": NOTHING}, 1)
        builder.outcome([0, 0], NOTHING, NOTHING)
    assert builder.dropped == 1


def test_buffers_that_are_overwritten_in_place_do_not_change_what_was_recorded():
    builder = TrajectoryBuilder(3)
    state, action, final = {"a": [observation()]}, NOTHING.astype(int), np.zeros((2, 3), np.float32)
    reward, ends = np.zeros(2), np.zeros(2, bool)
    for step in range(3):
        state["a"][0][:] = step
        builder.observe(state)
        action[:] = step
        builder.act({"actions": action}, 1)
        reward[:], ends[:], final[:] = step, step == 1, step + 100
        builder.outcome(reward, ends, NOTHING, {"a": [final]})
    state["a"][0][:] = 3
    builder.observe(state)
    state["a"][0][:] = final[:] = action[:] = -1
    (trajectory,) = builder.take()
    assert trajectory.observation["a"][0][:, 0, 0].tolist() == [0, 1, 2]
    assert trajectory.bootstrap["a"][0][:, 0].tolist() == [3, 3]
    assert trajectory.actions[:, 0].tolist() == [0, 1, 2]
    assert trajectory.next_observation()["a"][0][:, 0, 0].tolist() == [1, 101, 3]


@pytest.mark.parametrize(
    "final",
    [
        None,
        [None, None],
        np.array([None, None]),
        {"state": None},
        {},
        [np.zeros(3)] * 2,
        [{"state": np.zeros(4)}] * 2,
    ],
    ids=repr,
)
def test_a_missing_final_observation_is_a_clear_error(final):
    builder = TrajectoryBuilder(1)
    builder.observe({"state": observation()})
    builder.act({"actions": NOTHING}, 1)
    with pytest.raises(ValueError, match=r"row 1.*done|done.*final_obs"):
        builder.outcome([0, 0], [False, True], NOTHING, final)


@pytest.mark.parametrize(
    "final",
    [
        {"state": observation(5), "_state": np.ones(2, bool)},
        [None, {"state": np.full(3, 5)}],
        np.array([None, {"state": np.full(3, 5.0)}]),
        ({}, {"state": [5, 5, 5]}),
    ],
    ids=["tree", "list", "object array", "tuple"],
)
def test_final_observations_may_be_a_tree_of_rows_or_rows_of_trees(final):
    builder = TrajectoryBuilder(1)
    builder.observe({"state": observation()})
    builder.act({"actions": NOTHING}, 1)
    builder.outcome([0, 0], [False, True], NOTHING, final)
    builder.observe({"state": observation(1)})
    (trajectory,) = builder.take()
    assert trajectory.final_observation["state"].dtype == np.float32
    assert trajectory.next_observation()["state"].tolist() == [[[1] * 3, [5] * 3]]


def test_an_outcome_without_a_reply_is_refused():
    builder = TrajectoryBuilder(1)
    builder.observe(observation())
    with pytest.raises(ValueError, match="infer"):
        builder.outcome([0, 0], NOTHING, NOTHING)
    builder.act({"actions": NOTHING}, 1)
    builder.outcome([0, 0], NOTHING, NOTHING)
    with pytest.raises(ValueError, match="infer"):
        builder.outcome([0, 0], NOTHING, NOTHING)


def test_of_two_questions_in_a_row_the_later_one_counts():
    builder = TrajectoryBuilder(1)
    for value in (1, 2):
        builder.observe(observation(value))
        builder.act({"actions": np.array([value, value])}, value)
        builder.act({"actions": np.array([value, value])}, value)
    builder.outcome([0, 0], NOTHING, NOTHING)
    builder.observe(observation(3))
    builder.observe(observation(4))
    (trajectory,) = builder.take()
    assert trajectory.observation[:, 0, 0].tolist() == [2]
    assert trajectory.actions.tolist() == [[2, 2]]
    assert trajectory.versions.tolist() == [2]
    assert trajectory.bootstrap[0, 0] == 3


@pytest.mark.parametrize(
    "other",
    [
        observation(rows=3),
        observation().astype(float),
        np.zeros((2, 4), np.float32),
        {"x": observation()},
    ],
)
def test_observations_that_change_their_form_are_refused(other):
    builder = TrajectoryBuilder(2)
    builder.observe(observation())
    builder.act({"actions": NOTHING}, 1)
    builder.outcome([0, 0], NOTHING, NOTHING)
    with pytest.raises(ValueError, match="observation"):
        builder.observe(other)
    builder.observe(observation())
    builder.act({"actions": NOTHING}, 1)
    builder.outcome([0, 0], NOTHING, NOTHING)
    builder.observe(observation())
    assert len(builder.take()) == 1


def test_replies_that_change_their_form_drop_the_trajectory():
    builder = TrajectoryBuilder(2)
    for reply in ({"actions": NOTHING}, {"actions": NOTHING, "prev_logprobs": np.zeros(2)}):
        builder.observe(observation())
        builder.act(reply, 1)
        builder.outcome([0, 0], NOTHING, NOTHING)
    builder.observe(observation())
    assert builder.take() == []
    assert "repl" in builder.problem


def test_a_trajectory_begins_with_the_leave_of_its_own():
    builder = TrajectoryBuilder(1)
    builder.observe(observation())
    assert builder.begins
    builder.leave = True
    builder.act({"actions": NOTHING}, 1)
    assert not builder.begins
    builder.outcome([0, 0], NOTHING, NOTHING)
    builder.observe(observation())
    assert builder.begins
    assert not builder.leave


# -- Random histories, against a reference that knows rows and lists only


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["told", "next"]))
def test_random_histories_give_what_a_naive_reference_says(data, steps, rows, finals):
    builder = TrajectoryBuilder(steps, final_is_next=finals == "next")
    bits = st.lists(st.booleans(), min_size=rows, max_size=rows)
    lists = [[] for _ in range(rows)]  # by row: (observation, action, reward, end, cut, valid, next)
    count = data.draw(st.integers(0, 3 * steps), label="steps")
    shown = 0
    late = []

    def show():
        nonlocal shown
        shown += 1
        return {"n": np.arange(rows) + 10 * shown, "text": [f"{shown}-{row}" for row in range(rows)]}

    now = show()
    for step in range(count):
        for _ in range(data.draw(st.integers(0, 1), label="asked in vain")):
            # What follows the last step of a trajectory, or of an episode, is what was asked with first.
            other = step % steps and finals == "told"
            builder.observe(show() if other else now)
            if data.draw(st.booleans()):
                builder.act({"actions": np.full(rows, -1)}, -1)
        builder.observe(now)
        builder.act({"actions": np.full(rows, step)}, step)
        ends, cuts, valid = (np.array(data.draw(bits)) for _ in range(3))
        following, final = show(), show()
        reward = np.arange(rows) + step
        told = final if finals == "told" else None
        if data.draw(st.booleans(), label="late"):
            late.append((builder.outcome(None, ends, cuts, told, valid), reward))
        else:
            builder.outcome(reward, ends, cuts, told, valid)
        last = final if finals == "told" else following
        for row in range(rows):
            over = (ends[row] or cuts[row]) and valid[row]
            after = (last if over else following)["n"][row], (last if over else following)["text"][row]
            real = bool(valid[row])
            lists[row].append(
                (
                    (now["n"][row], now["text"][row]),
                    step,
                    reward[row] * real,
                    ends[row] & real,
                    cuts[row] & real,
                    real,
                    after,
                )
            )
        now = following
    builder.observe(now)
    for handle, reward in data.draw(st.permutations(late)):
        builder.late_reward(handle, reward)
    trajectories = [through_the_codec(t) for t in builder.take()]
    assert len(trajectories) == count // steps
    for number, t in enumerate(trajectories):
        following = t.next_observation()
        for row in range(rows):
            for i in range(steps):
                expected = lists[row][number * steps + i]
                assert expected == (
                    (t.observation["n"][i, row], t.observation["text"][i][row]),
                    t.actions[i, row],
                    t.reward[i, row],
                    t.terminated[i, row],
                    t.truncated[i, row],
                    t.valid[i, row],
                    (following["n"][i, row], following["text"][i][row]),
                )
        assert t.env_steps == t.valid.sum()


# -- What comes from an untrusted sender


def through_the_codec(trajectory):
    encoded = encode(trajectory.tree())
    return Trajectory.of_tree(decode(encoded.meta, [bytearray(b) for b in encoded.buffers]))


def good():
    """The tree of a trajectory of 3 steps, 2 rows, and one end."""
    builder = TrajectoryBuilder(3, "env-0")
    for step in range(3):
        state = {"state": observation(step), "task": ["a", "b"], "parts": [observation(), NOTHING]}
        builder.observe(state)
        builder.act({"actions": np.zeros((2, 4)), "prev_logprobs": np.zeros(2)}, step)
        builder.outcome([0, 0], [step == 1, False], NOTHING, state)
    builder.observe(state)
    (trajectory,) = builder.take()
    return trajectory.tree()


F32 = np.float32
MUTATIONS = {
    "missing field": lambda t: t.pop("reward"),
    "unknown field": lambda t: t.update(more=1),
    "reward is a number": lambda t: t.update(reward=1.0),
    "reward is a scalar": lambda t: t.update(reward=np.float32(1)),
    "reward is None": lambda t: t.update(reward=None),
    "reward is a list": lambda t: t.update(reward=[[0.0, 0.0]] * 3),
    "reward of one axis": lambda t: t.update(reward=np.zeros(3, F32)),
    "reward of three axes": lambda t: t.update(reward=np.zeros((3, 2, 1), F32)),
    "reward of ints": lambda t: t.update(reward=np.zeros((3, 2), int)),
    "reward of text": lambda t: t.update(reward=np.zeros((3, 2), "U3")),
    "no steps": lambda t: t.update(reward=np.zeros((0, 2), F32)),
    "no rows": lambda t: t.update(reward=np.zeros((3, 0), F32)),
    "terminated transposed": lambda t: t.update(terminated=t["terminated"].T),
    "terminated of numbers": lambda t: t.update(terminated=t["terminated"].astype(F32)),
    "truncated is a dict": lambda t: t.update(truncated={}),
    "valid is text": lambda t: t.update(valid="yes"),
    "valid is short": lambda t: t.update(valid=t["valid"][:2]),
    "versions of floats": lambda t: t.update(versions=np.zeros(3)),
    "versions are short": lambda t: t.update(versions=np.zeros(2, int)),
    "versions are negative": lambda t: t.update(versions=np.full(3, -1)),
    "versions unsigned": lambda t: t.update(versions=np.full(3, 2**63, np.uint64)),
    "versions are a list": lambda t: t.update(versions=[0, 0, 0]),
    "policy is an array": lambda t: t.update(policy=np.zeros((3, 2))),
    "policy is a list": lambda t: t.update(policy=[np.zeros((3, 2))]),
    "policy is None": lambda t: t.update(policy=None),
    "policy is empty": lambda t: t.update(policy={}),
    "no actions": lambda t: t["policy"].pop("actions"),
    "actions of one axis": lambda t: t["policy"].update(actions=np.zeros(3)),
    "actions are short": lambda t: t["policy"].update(actions=np.zeros((2, 2))),
    "actions are a number": lambda t: t["policy"].update(actions=5),
    "log probabilities of other rows": lambda t: t["policy"].update(prev_logprobs=np.zeros((3, 3))),
    "observation is None": lambda t: t.update(observation=None),
    "observation is a number": lambda t: t.update(observation=1),
    "observation of other steps": lambda t: t["observation"].update(state=np.zeros((4, 2, 3), F32)),
    "observation of one axis": lambda t: t["observation"].update(state=np.zeros(5, F32)),
    "observation of no axis": lambda t: t["observation"].update(state=np.zeros((), F32)),
    "observation without a leaf": lambda t: t["observation"].pop("task"),
    "observation with a leaf more": lambda t: t["observation"].update(more=np.zeros((3, 2))),
    "observation of another dtype": lambda t: t["observation"].update(state=np.zeros((3, 2, 3))),
    "observation of another shape": lambda t: t["observation"].update(state=np.zeros((3, 2, 4), F32)),
    "text of other steps": lambda t: t["observation"].update(task=[["a", "b"]] * 2),
    "text of other rows": lambda t: t["observation"].update(task=[["a", "b", "c"]] * 3),
    "text of one axis": lambda t: t["observation"].update(task=["a", "b", "c"]),
    "text is empty": lambda t: t["observation"].update(task=[]),
    "numbers as text": lambda t: t["observation"].update(task=[[1, 2]] * 3),
    "a list of other length": lambda t: t["observation"]["parts"].pop(),
    "bootstrap with steps": lambda t: t.update(bootstrap=t["observation"]),
    "bootstrap is None": lambda t: t.update(bootstrap=None),
    "bootstrap without a leaf": lambda t: t["bootstrap"].pop("state"),
    "bootstrap of text": lambda t: t["bootstrap"].update(state=["a", "b"]),
    "bootstrap text is an array": lambda t: t["bootstrap"].update(task=np.zeros(2)),
    "bootstrap text is one str": lambda t: t["bootstrap"].update(task="ab"),
    "final_index is a list": lambda t: t.update(final_index=[[1, 0]]),
    "final_index of floats": lambda t: t.update(final_index=np.array([[1.0, 0.0]])),
    "final_index of one axis": lambda t: t.update(final_index=np.array([1, 0])),
    "final_index of three columns": lambda t: t.update(final_index=np.array([[1, 0, 0]])),
    "final_index out of range": lambda t: t.update(final_index=np.array([[3, 0]])),
    "final_index of a huge row": lambda t: t.update(final_index=np.array([[1, 2**62]])),
    "final_index is negative": lambda t: t.update(final_index=np.array([[-2, 0]])),
    "final_index names another": lambda t: t.update(final_index=np.array([[1, 1]])),
    "final_index names one twice": lambda t: t.update(
        final_index=np.array([[1, 0], [1, 0]]),
        final_observation={
            "state": np.zeros((2, 3), F32), "task": ["a", "b"], "parts": [np.zeros((2, 3), F32), NOTHING]
        },
    ),
    "final_index is empty": lambda t: t.update(final_index=np.zeros((0, 2), int)),
    "an end that is not named": lambda t: t["terminated"].__setitem__((2, 1), True),
    "an end that is not valid": lambda t: t["valid"].__setitem__((1, 0), False),
    "no final observation": lambda t: t.update(final_observation=None),
    "final observation of other rows": lambda t: t["final_observation"].update(
        state=np.zeros((2, 3), F32)
    ),
    "final observation of another shape": lambda t: t["final_observation"].update(
        state=np.zeros((1, 4), F32)
    ),
    "final observation without a leaf": lambda t: t["final_observation"].pop("task"),
    "a final observation too many": lambda t: (
        t["terminated"].fill(False), t.update(final_index=np.zeros((0, 2), int))
    ),
    "origin is a number": lambda t: t.update(origin=1),
    "origin is None": lambda t: t.update(origin=None),
}  # fmt: skip


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)
def test_a_malformed_trajectory_is_refused(mutate):
    tree = copy.deepcopy(good())
    Trajectory.of_tree(copy.deepcopy(tree))
    mutate(tree)
    with pytest.raises(DecodeError):
        Trajectory.of_tree(tree)


@pytest.mark.parametrize("tree", [None, 1, "text", [], {}, np.zeros(3), {"reward": {}}], ids=repr)
def test_what_is_no_trajectory_at_all_is_refused(tree):
    with pytest.raises(DecodeError):
        Trajectory.of_tree(tree)


LEAVES = [
    None, 0, -1, 2**63, 1.5, "", "ab", b"", [], {}, ["a", "b"], [1, 2], [[]], {"state": 1},
    np.zeros(()), np.zeros((3, 2)), np.zeros((2, 3), F32), np.zeros((3, 2), int), np.full((1, 2), 2**62),
    np.zeros((3, 2), bool), np.zeros((0, 2), int), np.array(["x"]), np.array([["x", "y"]] * 3),
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_trajectory_it_is_read_safely_or_refused(data):
    tree = good()
    for _ in range(data.draw(st.integers(1, 3))):
        node, key = tree, data.draw(st.sampled_from(sorted(tree)))
        while isinstance(node[key], dict) and node[key] and data.draw(st.booleans()):
            node = node[key]
            key = data.draw(st.sampled_from(sorted(node)))
        node[key] = copy.deepcopy(data.draw(st.sampled_from(LEAVES)))
    try:
        trajectory = Trajectory.of_tree(tree)
    except DecodeError:
        return
    trajectory.next_observation()
    assert 0 <= trajectory.env_steps <= 6


def test_an_abandoned_trajectory_leaves_no_trace_in_the_next_one():
    builder = TrajectoryBuilder(steps=2)
    builder.leave = True
    for value in (0.0, 50.0, 51.0):
        builder.observe(np.full((2, 3), value))
        if value == 51.0:
            break
        builder.act({"actions": np.full(2, value)}, version=1)
        builder.outcome(np.full(2, value), np.zeros(2, bool), np.zeros(2, bool))
        if value == 0.0:
            builder.observe(np.full((2, 3), 1.0))  # asked for, and never answered
            builder.abandon()
            assert builder.begins
            assert builder.leave
            assert builder.rows == 2
    builder.act({"actions": np.full(2, 51.0)}, version=1)
    builder.outcome(np.full(2, 51.0), np.zeros(2, bool), np.zeros(2, bool))
    assert builder.take() == []
    builder.observe(np.full((2, 3), 52.0))
    (trajectory,) = builder.take()
    assert trajectory.observation[:, 0, 0].tolist() == [50.0, 51.0]
    assert trajectory.reward[:, 0].tolist() == [50.0, 51.0]
    assert trajectory.bootstrap[0, 0] == 52.0
    assert builder.dropped == 0
