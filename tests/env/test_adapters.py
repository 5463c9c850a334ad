import itertools
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from zmqrl.config import EnvConfig, EnvModeConfig
from zmqrl.env.adapters import ShardEnv
from zmqrl.env.making import make_shard
from zmqrl.errors import ConfigError, EnvironmentFailure

MODES = ("disabled", "next_step", "same_step")


class Countdown(gymnasium.Env):
    """Counts its steps in one array that it reuses, and ends after `length` of them."""

    observation_space = spaces.Dict(
        {
            "count": spaces.Box(-np.inf, np.inf, (1,), np.float32),
            "pair": spaces.Tuple((spaces.Discrete(1000), spaces.Dict({"text": spaces.Text(20)}))),
        }
    )
    action_space = spaces.Box(-2.0, 4.0, (2,), np.float32)

    def __init__(self, length=3, success_key="success"):
        self.length = length
        self.success_key = success_key
        self.episode = -1
        self.array = np.zeros(1, np.float32)
        self.count = self.length
        self.last_action = None
        self.seed = None

    def _observation(self):
        self.array[0] = 100 * self.episode + self.count
        text = f"episode{self.episode}step{self.count}"
        return {"count": self.array, "pair": (self.count, {"text": text})}

    def reset(self, *, seed=None, options=None):
        assert not options
        self.seed = seed
        self.episode += 1
        self.count = 0
        return self._observation(), {self.success_key: False}

    def step(self, action):
        assert self.count < self.length, "stepped past its end"
        self.last_action = action
        self.count += 1
        over = self.count == self.length
        return self._observation(), self.count, over, False, {self.success_key: over}


class Endless(gymnasium.Env):
    """Terminates at each step, and does not mind being stepped on."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {"success": np.True_}

    def step(self, action):
        return 1, 1.0, True, False, {"success": np.True_}


class Failing(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, where="step"):
        self.where = where
        if where == "init":
            raise RuntimeError("no display")

    def reset(self, *, seed=None, options=None):
        if self.where == "reset":
            raise RuntimeError("no display")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        # A lambda cannot be pickled, so neither can this error.
        raise UnpicklableError("no display", lambda: None)


class UnpicklableError(Exception):
    pass


class ReusedArrays(VectorEnv):
    """A ready vector env of two rows, which rewrites the arrays that it returned."""

    num_envs = 2
    single_observation_space = spaces.Box(-1e9, 1e9, (1,), np.float32)
    observation_space = spaces.Box(-1e9, 1e9, (2, 1), np.float32)
    single_action_space = spaces.Discrete(2)
    action_space = spaces.MultiDiscrete([2, 2])

    def __init__(self, mode=AutoresetMode.DISABLED):
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.observations = np.zeros((2, 1), np.float32)
        self.rewards = np.zeros((2, 1), np.float16)
        self.over = np.zeros((2, 1), np.int64)
        self.seeds = []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        rows = (options or {}).get("reset_mask", np.ones(2, bool))
        self.observations[rows] = -1
        return self.observations, {}

    def step(self, actions):
        self.observations += 10
        self.rewards += 1
        self.over[0] = self.rewards[0, 0] == 2
        return self.observations, self.rewards, self.over, np.zeros((2, 1), bool), {}


def countdown(length=3, success_key="success"):
    return Countdown(length, success_key)


def failing(where):
    return Failing(where)


def ready(num_envs, wrong=0):
    return SyncVectorEnv([Countdown] * (num_envs + wrong))


def not_an_env():
    return "nothing"


def ref(name):
    return f"{__file__}:{name}"


def no_seed(row):
    return None


class SeedOnce:
    """Seeds the first episode of each row, and lets the simulator go on after that."""

    def __init__(self):
        self.calls = []

    def __call__(self, row):
        first = row not in self.calls
        self.calls.append(row)
        return 100 + row if first else None


@pytest.fixture
def make():
    """`make_shard` that closes what it made."""
    made = []

    def build(num_envs=2, mode="train", seed_of=no_seed, limits=None, **config):
        sections = {mode: EnvModeConfig(**(limits or {}))}
        shard = make_shard(EnvConfig(**config, **sections), mode, num_envs, seed_of)
        made.append(shard)
        return shard

    yield build
    for shard in made:
        shard.close()


def sub_envs(shard):
    return [env.unwrapped for env in shard._base.envs]


NO_MOVE = np.zeros((2, 2), np.float32)


def valid_transitions(shard, actions):
    """Per row, what a learner would see."""
    seen = [[] for _ in range(shard.num_envs)]
    observation = shard.reset()
    cursor = [0] * shard.num_envs
    for _ in range(120):
        # A row's own count of valid steps picks its action, so that reset rows take none.
        step = shard.step(np.array([actions[row, cursor[row]] for row in range(shard.num_envs)]))
        for row in np.flatnonzero(step.valid):
            cursor[row] += 1
            done = step.terminated[row] or step.truncated[row]
            after = step.final_observation if done else step.observation
            ends = step.terminated[row], step.truncated[row]
            seen[row].append((observation[row].tolist(), step.reward[row], *ends, after[row].tolist()))
        observation = step.observation
    return [transitions[:90] for transitions in seen]


def test_the_three_autoreset_modes_give_the_same_transitions(make):
    actions = np.random.default_rng(5).integers(0, 2, (3, 200))
    disabled, next_step, same_step = (
        valid_transitions(
            make(
                num_envs=3,
                id="CartPole-v1",
                autoreset_mode=mode,
                seed_of=SeedOnce(),
                limits={"max_episode_steps": 17},
            ),
            actions,
        )
        for mode in MODES
    )
    assert disabled == next_step == same_step
    assert any(terminated for row in disabled for _, _, terminated, _, _ in row)
    assert any(truncated for row in disabled for _, _, _, truncated, _ in row)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("autoreset_mode", MODES)
def test_a_finished_env_is_never_stepped_past_its_end(make, autoreset_mode, vectorization):
    shard = make(factory=ref("countdown"), autoreset_mode=autoreset_mode, vectorization=vectorization)
    shard.reset()
    ends = sum(shard.step(NO_MOVE).terminated.any() for _ in range(10))
    assert ends >= 2


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("autoreset_mode", MODES)
def test_the_final_observation_survives_a_simulator_that_reuses_its_array(
    make, autoreset_mode, vectorization
):
    shard = make(factory=ref("countdown"), autoreset_mode=autoreset_mode, vectorization=vectorization)
    shard.reset()
    steps = [shard.step(NO_MOVE) for _ in range(3)]
    assert steps[0].final_observation is None
    final = steps[2].final_observation
    assert final["count"].tolist() == [[3], [3]]
    assert final["pair"][0].tolist() == [3, 3]
    assert final["pair"][1]["text"] == ["episode0step3", "episode0step3"]
    if autoreset_mode != "next_step":
        assert steps[2].observation["count"].tolist() == [[100], [100]]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_observations_are_trees_of_arrays_and_lists_of_str(make, vectorization):
    shard = make(factory=ref("countdown"), vectorization=vectorization)
    first = shard.reset()
    second = shard.step(NO_MOVE).observation
    assert type(first) is dict
    assert type(first["pair"]) is tuple
    assert first["pair"][1] == {"text": ["episode0step0", "episode0step0"]}
    assert second["pair"][1] == {"text": ["episode0step1", "episode0step1"]}
    assert second["count"].dtype == np.float32
    assert second["count"].shape == (2, 1)


def test_a_box_observation_stays_an_array(make):
    observation = make(id="CartPole-v1").reset()
    assert type(observation) is np.ndarray
    assert observation.shape == (2, 4)


def test_the_step_after_an_end_is_not_valid_where_the_vector_env_resets_in_it(make):
    shard = make(factory=ref("countdown"), autoreset_mode="next_step", kwargs={"length": 1})
    shard.reset()
    end, begin, end_again = (shard.step(NO_MOVE) for _ in range(3))
    assert end.valid.all()
    assert end.terminated.all()
    assert not begin.valid.any()
    assert begin.reward.tolist() == [0, 0]
    assert not begin.terminated.any()
    assert begin.observation["count"].tolist() == [[100], [100]]
    assert end_again.valid.all()


def test_a_success_told_by_a_reset_is_not_one_of_the_step(make):
    shard = make(factory=ref("Endless"), autoreset_mode="next_step")
    shard.reset()
    steps = [shard.step(np.array([0, 0])) for _ in range(2)]
    assert [step.success.tolist() for step in steps] == [[True, True], [False, False]]


def test_a_full_reset_forgets_the_reset_that_was_due(make):
    shard = make(factory=ref("countdown"), autoreset_mode="next_step", kwargs={"length": 1})
    shard.reset()
    shard.step(NO_MOVE)
    shard.reset()
    assert shard.step(NO_MOVE).valid.all()


@pytest.mark.parametrize("autoreset_mode", MODES)
def test_seeds_are_asked_for_as_each_episode_begins(make, autoreset_mode):
    seeds = SeedOnce()
    shard = make(factory=ref("countdown"), autoreset_mode=autoreset_mode, seed_of=seeds)
    shard.reset()
    assert seeds.calls == [0, 1]
    for _ in range(4):
        shard.step(NO_MOVE)
    assert seeds.calls == [0, 1, 0, 1]


def test_each_episode_begins_with_the_seed_of_its_row(make):
    seeds = itertools.count()
    shard = make(
        factory=ref("countdown"), kwargs={"length": 1}, seed_of=lambda row: 10 * next(seeds) + row
    )
    shard.reset()
    assert [env.seed for env in sub_envs(shard)] == [0, 11]
    shard.step(NO_MOVE)
    assert [env.seed for env in sub_envs(shard)] == [20, 31]


def test_a_ready_vector_env_is_given_one_int_as_its_seed():
    env = ReusedArrays()
    shard = ShardEnv(env, seed_of=lambda row: 40 + row)
    shard.reset()
    for _ in range(2):
        shard.step(np.array([0, 1]))
    assert env.seeds == [40, 40]


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, None])
def test_nothing_returned_changes_when_a_vector_env_reuses_its_arrays(mode):
    shard = ShardEnv(ReusedArrays(mode))
    first = shard.reset()
    steps = [shard.step(np.array([0, 1])) for _ in range(3)]
    assert first.tolist() == [[-1], [-1]]
    assert steps[0].observation.tolist() == [[9], [9]]
    assert [step.reward.tolist() for step in steps[:2]] == [[1, 1], [2, 2]]
    assert steps[1].terminated.tolist() == [True, False]
    assert steps[1].final_observation.tolist() == [[19], [19]]
    if mode is AutoresetMode.DISABLED:
        assert steps[1].observation.tolist() == [[-1], [19]]


def test_rewards_and_flags_of_one_column_become_vectors():
    shard = ShardEnv(ReusedArrays())
    shard.reset()
    step = shard.step(np.array([0, 1]))
    assert (step.reward.dtype, step.reward.shape) == (np.float64, (2,))
    assert (step.terminated.dtype, step.terminated.shape) == (np.bool_, (2,))
    assert (step.truncated.dtype, step.truncated.shape) == (np.bool_, (2,))


def test_a_vector_env_without_a_mode_resets_in_the_next_step():
    assert ShardEnv(ReusedArrays(None)).autoreset_mode is AutoresetMode.NEXT_STEP


@pytest.mark.parametrize("autoreset_mode", MODES)
def test_success_is_that_of_the_final_step(make, autoreset_mode):
    shard = make(
        factory=ref("countdown"), autoreset_mode=autoreset_mode, kwargs={"success_key": "is_success"}
    )
    shard.reset()
    successes = [shard.step(NO_MOVE).success.tolist() for _ in range(4)]
    assert successes == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]


def test_a_configured_success_key_is_the_only_one_looked_up(make):
    own = make(factory=ref("countdown"), kwargs={"success_key": "won"}, success_key="won")
    own.reset()
    assert own.step(NO_MOVE).success.tolist() == [False, False]
    other = make(factory=ref("countdown"), success_key="won")
    other.reset()
    assert other.step(NO_MOVE).success is None


def test_a_simulator_without_a_success_key_reports_none(make):
    shard = make(id="CartPole-v1")
    shard.reset()
    assert shard.step(np.array([0, 1])).success is None


@pytest.mark.parametrize("autoreset_mode", MODES)
def test_fetch_reach_reports_success_and_ends_at_its_limit(make, autoreset_mode):
    shard = make(
        id="gymnasium_robotics:FetchReachDense-v4",
        autoreset_mode=autoreset_mode,
        limits={"max_episode_steps": 3},
    )
    observation = shard.reset()
    assert {key: leaf.shape for key, leaf in observation.items()} == {
        "achieved_goal": (2, 3),
        "desired_goal": (2, 3),
        "observation": (2, 10),
    }
    steps = [shard.step(np.zeros((2, 4))) for _ in range(3)]
    assert steps[2].truncated.all()
    assert not steps[2].terminated.any()
    assert steps[2].success.dtype == np.bool_
    goal = observation["desired_goal"]
    assert (steps[2].final_observation["desired_goal"] == goal).all()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_ignored_terminations_keep_success_and_run_to_the_limit(make, vectorization):
    shard = make(
        factory=ref("Endless"),
        vectorization=vectorization,
        limits={"ignore_terminations": True, "max_episode_steps": 4},
    )
    shard.reset()
    steps = [shard.step(np.array([0, 0])) for _ in range(4)]
    assert not any(step.terminated.any() for step in steps)
    assert [step.truncated.all() for step in steps] == [False, False, False, True]
    assert all(step.success.all() for step in steps)


@pytest.mark.parametrize("key", ["ignore_terminations", "max_episode_steps"])
def test_what_must_go_inside_a_ready_vector_env_is_refused(make, key):
    with pytest.raises(ConfigError, match=rf"env\.eval\.{key} needs single envs"):
        make(factory=ref("ready"), mode="eval", limits={key: 1})


def test_a_factory_with_num_envs_gives_a_ready_vector_env(make):
    shard = make(factory=ref("ready"), num_envs=3)
    assert shard.reset()["count"].shape == (3, 1)
    assert shard.autoreset_mode is AutoresetMode.NEXT_STEP


def test_a_ready_vector_env_of_another_size_is_refused(make):
    with pytest.raises(ConfigError, match=r"expected a VectorEnv or batched simulator with num_envs=2"):
        make(factory=ref("ready"), kwargs={"wrong": 1})


def test_a_factory_that_makes_no_env_is_refused(make):
    with pytest.raises(ConfigError, match=r"not_an_env returned a str, expected a gymnasium\.Env"):
        make(factory=ref("not_an_env"))


def test_fixed_start_states_need_seeds_at_each_reset(make):
    with pytest.raises(ConfigError, match="use_fixed_reset_state_ids needs autoreset_mode disabled"):
        make(
            id="CartPole-v1",
            autoreset_mode="same_step",
            limits={"use_fixed_reset_state_ids": True},
        )


def test_kwargs_reach_the_simulator(make):
    shard = make(factory=ref("countdown"), kwargs={"length": 7})
    assert [env.length for env in sub_envs(shard)] == [7, 7]


def test_an_unknown_id_is_answered_with_gymnasiums_suggestion(make):
    with pytest.raises(EnvironmentFailure, match=r"no simulator CartPol-v1: .*Did you mean: `CartPole`"):
        make(id="CartPol-v1")
    with pytest.raises(EnvironmentFailure, match=r"no simulator CartPole-v9: .*versioned environments"):
        make(id="CartPole-v9")
    with pytest.raises(EnvironmentFailure, match=r"write package:PickCube-v1$"):
        make(id="PickCube-v1")


def test_a_missing_module_of_an_id_is_named(make):
    with pytest.raises(EnvironmentFailure, match=r"no_such_module_x:Env-v0 .*No module named"):
        make(id="no_such_module_x:Env-v0")


def test_no_simulator_at_all_is_refused(make):
    with pytest.raises(ConfigError, match=r"give env\.id or env\.factory"):
        make()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("where", ["construction", "reset", "step"])
def test_an_error_of_the_simulator_names_it_and_where_it_failed(make, where, vectorization):
    def run():
        kwargs = {"where": {"construction": "init"}.get(where, where)}
        shard = make(factory=ref("failing"), vectorization=vectorization, kwargs=kwargs)
        shard.reset()
        shard.step(np.array([0, 1]))

    with pytest.raises(EnvironmentFailure, match=rf"failing failed in {where}: .*no display") as error:
        run()
    assert error.value.__cause__ is not None


def test_a_killed_process_of_a_simulator_is_a_failure_and_can_be_closed(make):
    shard = make(id="CartPole-v1", vectorization="async")
    shard.reset()
    shard._base.processes[1].kill()
    shard._base.processes[1].join()
    with pytest.raises(EnvironmentFailure, match="row 1: its process was killed by SIGKILL"):
        shard.step(np.array([0, 1]))
    shard.close()
    assert not any(process.is_alive() for process in shard._base.processes)


def test_closing_twice_is_closing_once(make):
    shard = make(id="CartPole-v1", vectorization="async")
    assert isinstance(shard._base, AsyncVectorEnv)
    shard.close()
    shard.close()


class Odd(ReusedArrays):
    def __init__(self, observation, reward):
        super().__init__()
        self.observation, self.reward = observation, reward

    def step(self, actions):
        no = np.zeros(2, bool)
        return self.observation, self.reward, no, no, {}


@pytest.mark.parametrize(
    ("observation", "reward", "message"),
    [
        (np.zeros((2, 1), np.float32), np.zeros(3), r"rewards of shape \(2,\), got \(3,\)"),
        (np.zeros((3, 1)), np.zeros(2), r"2 rows of numbers or text in observation, got shape \(3, 1\)"),
        ({"a": (None, np.zeros(2))}, np.zeros(2), r"in observation\.a\[0\], got shape \(\)"),
        (np.array([None, None]), np.zeros(2), "dtype object"),
    ],
)
def test_a_vector_env_that_returns_something_odd_is_a_failure(observation, reward, message):
    shard = ShardEnv(Odd(observation, reward), name="Odd")
    shard.reset()
    with pytest.raises(EnvironmentFailure, match=f"Odd failed in step: .*{message}"):
        shard.step(np.array([0, 1]))


def test_nothing_is_printed_and_no_torch_imported():
    code = """
import sys
from zmqrl.config import EnvConfig
from zmqrl.env.making import make_shard
config = EnvConfig(id="gymnasium_robotics:FetchReachDense-v4")
make_shard(config, "train", 1, lambda row: None).close()
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    assert (done.stdout, done.stderr) == ("", "")
