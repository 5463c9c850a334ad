"""What SAC and PPO make of chunks of actions, held against numbers made by hand."""

import itertools

import gymnasium
import numpy as np
import pytest

from zmqrl.errors import ConfigError
from zmqrl.recording.builder import TrajectoryBuilder

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from hand_made import DISCRETE, config, spaces  # noqa: E402

from zmqrl.learner.algorithm import make_actor, make_algorithm  # noqa: E402
from zmqrl.learner.networks import mlp  # noqa: E402
from zmqrl.learner.ppo import PPO  # noqa: E402
from zmqrl.learner.sac import SAC  # noqa: E402
from zmqrl.learner.transitions import TransitionReader  # noqa: E402
from zmqrl.spaces import ActionSpace  # noqa: E402

K, GAMMA, LAMBDA = 3, 0.6, 0.8
CHUNK = ActionSpace("box", (K, 2), [-1.0, -0.5] * K, [3.0, 0.5] * K, text="Box(3, 2)")
CHUNKS = f"env.num_action_chunks={K}"
DISCOUNT = f"algorithm.gamma={GAMMA}"


def chunked(lengths, *, terminated=(), seed=0, rewards=None, final=None, following=None):
    """A trajectory of chunks of three; random but for what is given.

    Args:
        lengths: [T, N]: sub-steps of each step; where fewer than three, the episode ends.
        terminated: (step, row) of the ends that are terminations; the others are truncations.
        seed: What its numbers come from.
        rewards: [T, N, 3].
        final: Number that every final observation is made of.
        following: Number that the observation after the last step is made of.
    """
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    steps, rows = lengths.shape
    valid = np.arange(K) < lengths[..., None]
    builder = TrajectoryBuilder(steps, sub_steps=K)
    drawn = rng.normal(size=(steps, rows, K)) if rewards is None else np.asarray(rewards, float)
    builder.observe({"state": rng.normal(size=(rows, 3))})
    for step in range(steps):
        reply = {
            "actions": rng.uniform(-0.5, 0.5, (rows, K, 2)).astype(np.float32),
            "prev_logprobs": rng.normal(-4, 0.1, rows).astype(np.float32),
        }
        builder.act(reply, version=0)
        over = lengths[step] < K
        ends = np.array([(step, row) in terminated for row in range(rows)])
        last = rng.normal(size=(rows, 3)) if final is None else np.full((rows, 3), float(final))
        builder.outcome(drawn[step], over & ends, over & ~ends, {"state": last}, valid[step])
        after = rng.normal(size=(rows, 3))
        if following is not None and step == steps - 1:
            after[:] = following
        builder.observe({"state": after})
    (made,) = builder.take()
    return made


def test_a_chunk_is_one_transition_with_the_discounted_sum_of_its_rewards() -> None:
    made = chunked([[3, 2], [3, 1]], rewards=[[[1, 2, 4], [1, 2, 9]], [[3, 0, 1], [5, 9, 9]]])
    read = TransitionReader(spaces(CHUNK), GAMMA).read(made)
    expected = [[1 + 2 * GAMMA + 4 * GAMMA**2, 1 + 2 * GAMMA], [3 + GAMMA**2, 5]]
    assert read["next", "reward"][..., 0].numpy() == pytest.approx(np.array(expected))
    assert read["steps_to_next_obs"][..., 0].tolist() == [[3, 2], [3, 1]]
    assert read["valid"].all()
    assert read["action"].shape == (2, 2, K * 2)
    assert torch.equal(read["action"], torch.tensor(made.actions).reshape(2, 2, K * 2))


def sac(*overrides):
    return SAC(spaces(CHUNK), config("sac", "algorithm.update_epoch=1", CHUNKS, DISCOUNT, *overrides))


def value_after(lengths, **options):
    """What SAC's targets have beside the reward, on average; see test_sac.py."""
    found = []
    for reward in (0, 10):
        algorithm = sac()
        rewards = np.zeros((1, 2, K))
        rewards[..., 0] = reward
        algorithm.add(chunked([lengths], rewards=rewards, **options))
        found.append(algorithm.update(0.0).metrics)
    zero, ten = found
    growth = ten["train/sac/critic_loss"] - zero["train/sac/critic_loss"]
    return (growth - 200) / 40 + zero["train/critic/q_data"]


def test_sac_discounts_what_follows_by_the_sub_steps_that_were_made() -> None:
    whole = value_after([3, 3], following=2.0) / GAMMA**3
    assert abs(whole) > 0.01
    assert value_after([2, 2], final=2.0) / GAMMA**2 == pytest.approx(whole, abs=1e-3)
    assert value_after([1, 1], final=2.0) / GAMMA == pytest.approx(whole, abs=1e-3)


def test_sac_sees_no_value_after_a_termination_within_a_chunk() -> None:
    ends = [(0, 0), (0, 1)]
    assert value_after([2, 2], final=2.0, terminated=ends) == pytest.approx(0, abs=1e-4)


def test_sac_aims_at_an_entropy_for_each_number_of_a_chunk() -> None:
    assert sac()._loss.target_entropy == -6


def test_sac_goes_on_from_its_own_state() -> None:
    algorithm = sac()
    algorithm.add(chunked([[3, 2]]))
    algorithm.update(0.0)
    other = sac()
    other.load_state_dict(algorithm.state_dict())
    other.add(chunked([[3, 1]], seed=1))
    assert other.update(0.0).metrics["train/sac/critic_loss"] > 0


@pytest.mark.parametrize("bootstrap_type", ["standard", "always"])
def test_the_advantages_of_ppo_are_those_of_the_definition(bootstrap_type: str) -> None:
    algorithm = PPO(
        spaces(CHUNK),
        config(
            "ppo",
            "cluster.component_placement.env=0",
            f"algorithm={{gae_lambda: {LAMBDA}, update_epoch: 2, bootstrap_type: {bootstrap_type}}}",
            CHUNKS,
            DISCOUNT,
        ),
    )
    made = chunked([[3, 3], [2, 3], [3, 1], [3, 3]], terminated=[(1, 0)])
    expected = advantages_by_definition(algorithm, made, bootstrap_type == "always")
    algorithm.add(made)
    algorithm.update(0.0)
    batch = algorithm.state_dict()["batch"]
    found = {
        float(o[0]): float(a)
        for o, a in zip(batch["observation"], batch["advantage"].reshape(-1), strict=True)
    }
    assert found == pytest.approx(expected, abs=1e-5)
    assert len(found) == 8


def advantages_by_definition(algorithm, made, always):
    net = mlp(3, 1, algorithm._config.actor.model)
    parameters = algorithm.state_dict()["parameters"]
    net.load_state_dict(
        {n.removeprefix("critic."): t for n, t in parameters.items() if n.startswith("critic.")}
    )

    def value(observations):
        with torch.no_grad():
            return net(torch.tensor(observations, dtype=torch.float32))[..., 0].numpy()

    values, after = value(made.observation["state"]), value(made.next_observation()["state"])
    if not always:
        after = np.where(made.terminated, 0, after)
    discount = GAMMA**made.sub_steps
    rewards = (made.reward * GAMMA ** np.arange(K)).sum(-1)
    deltas = rewards + discount * after - values
    over = made.terminated | made.truncated
    steps, rows = over.shape
    advantages = {}
    for step, row in itertools.product(range(steps), range(rows)):
        total, weight = 0.0, 1.0
        for later in range(step, steps):
            total += weight * deltas[later, row]
            weight *= discount[later, row] * LAMBDA
            if over[later, row]:
                break
        advantages[float(np.float32(made.observation["state"][step, row, 0]))] = total
    return advantages


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_the_actor_gives_chunks_within_the_bounds_of_each_action(name: str) -> None:
    actor = make_actor(spaces(CHUNK), config(name, CHUNKS))
    reply = actor({"state": torch.zeros(500, 3)}, torch.zeros(500, dtype=torch.bool))
    assert reply["actions"].shape == (500, K, 2)
    assert reply["prev_logprobs"].shape == (500,)
    if name == "sac":
        low, high = (reply["actions"].flatten(0, 1).amin(0), reply["actions"].flatten(0, 1).amax(0))
        assert (low >= torch.tensor([-1.0, -0.5])).all()
        assert (high <= torch.tensor([3.0, 0.5])).all()
        assert (high - low > torch.tensor([3.0, 0.75])).all(), "each within its own"


def test_chunks_of_discrete_actions_are_refused_by_name() -> None:
    choices = gymnasium.spaces.MultiDiscrete([[3, 3], [3, 3]])
    several = ActionSpace.of(choices)
    words = r"^ppo learns chunks of actions in a Box only, not MultiDiscrete.*: set env\.num_action"
    for make in (make_algorithm, make_actor):
        with pytest.raises(ConfigError, match=words):
            make(spaces(several), config("ppo", CHUNKS))
    make_actor(spaces(DISCRETE), config("ppo"))


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_actions_that_are_not_carried_out_cannot_be_learned(name: str) -> None:
    made = config(name, CHUNKS, "env.replan_every=2")
    with pytest.raises(ConfigError, match=r"only 2 of 3 are carried out \(env.replan_every\)"):
        make_algorithm(spaces(CHUNK), made)
    make_actor(spaces(CHUNK), made)  # to be evaluated it is good enough


def test_trajectories_of_chunks_have_whole_chunks_and_pay_for_their_env_steps() -> None:
    steps = "env.train={total_num_envs: 4, max_steps_per_rollout_epoch: 16}"
    made = config("sac", "cluster.component_placement.env=0", steps, CHUNKS)
    assert made.env.trajectory_steps == 6
    assert made.least_slack_steps == 4 * 18
