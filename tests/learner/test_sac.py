import math

import numpy as np
import pytest

from zmqrl.errors import CheckpointError, ConfigError, DataError, RunFailed

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from hand_made import BOX, DISCRETE, config, copied, same, spaces, trajectory  # noqa: E402

from zmqrl.learner.algorithm import make_algorithm  # noqa: E402
from zmqrl.learner.sac import SAC  # noqa: E402
from zmqrl.spaces import ActionSpace  # noqa: E402

EVERY = [(0, 0), (0, 1)]


def sac(*overrides, action=BOX, **sizes):
    return SAC(spaces(action, **sizes), config("sac", "algorithm.update_epoch=1", *overrides))


def first_metrics(algorithm, *trajectories):
    for each in trajectories or [trajectory()]:
        algorithm.add(each)
    return algorithm.update(0.0).metrics


def bootstrap(*overrides, **marks):
    """What the critics' targets have beside the reward, on average.

    With rewards r, the loss is the sum over two critics of (q - r - v)^2; its growth from r = 0 to
    r = 10 is 200 - 40 (q - v).
    """
    zero, ten = (
        first_metrics(sac(*overrides), trajectory(1, 2, reward=reward, **marks)) for reward in (0, 10)
    )
    growth = ten["train/sac/critic_loss"] - zero["train/sac/critic_loss"]
    return (growth - 200) / 40 + zero["train/critic/q_data"]


def test_the_configuration_names_it():
    algorithm = make_algorithm(spaces(), config("sac"))
    assert isinstance(algorithm, SAC)
    assert not algorithm.on_policy


def test_a_termination_has_no_value_after_it():
    assert bootstrap(terminated=EVERY) == pytest.approx(0, abs=1e-4)


def test_a_truncation_is_bootstrapped():
    assert abs(bootstrap(truncated=EVERY)) > 0.01


def test_bootstrap_type_always_looks_past_a_termination():
    always = bootstrap("algorithm.bootstrap_type=always", terminated=EVERY)
    assert always == pytest.approx(bootstrap(truncated=EVERY), abs=1e-4)


def test_the_value_after_a_truncation_is_that_of_the_final_observation_not_of_the_reset():
    first = bootstrap(truncated=EVERY, final=2.0, seed=0)
    assert bootstrap(truncated=EVERY, final=-2.0, seed=0) != pytest.approx(first, abs=1e-3)
    one, other = (trajectory(1, 2, reward=1, truncated=EVERY, final=2.0) for _ in range(2))
    other.bootstrap = {"state": np.full((2, 3), 9.0)}
    losses = [first_metrics(sac(), each)["train/sac/critic_loss"] for each in (one, other)]
    assert losses[0] == losses[1]


def test_the_value_after_a_step_is_discounted():
    discounted = bootstrap("algorithm.gamma=0.5")
    assert discounted == pytest.approx(0.5 * bootstrap("algorithm.gamma=1.0"), abs=1e-4)


def test_the_mean_of_the_critics_is_above_their_minimum():
    assert bootstrap("algorithm.agg_q=mean") > bootstrap("algorithm.agg_q=min") + 1e-3


def test_the_mean_of_equal_critics_is_their_minimum():
    losses = []
    for agg_q in ("min", "mean"):
        algorithm = sac(f"algorithm.agg_q={agg_q}")
        state = algorithm.state_dict()
        for name, tensor in state["parameters"].items():
            if "critics" in name:
                tensor[1] = tensor[0]
        algorithm.load_state_dict(state)
        losses.append(first_metrics(algorithm)["train/sac/critic_loss"])
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("alpha_type", ["softplus", "exp", "fixed_alpha"])
@pytest.mark.parametrize("initial", [0.01, 0.37, 3.0])
def test_alpha_begins_at_its_initial_value(alpha_type, initial):
    algorithm = sac(
        f"algorithm.entropy_tuning.alpha_type={alpha_type}",
        f"algorithm.entropy_tuning.initial_alpha={initial}",
    )
    assert first_metrics(algorithm)["train/sac/alpha"] == pytest.approx(initial, rel=1e-5)


@pytest.mark.parametrize(
    ("alpha_type", "moves"), [("softplus", True), ("exp", True), ("fixed_alpha", False)]
)
def test_alpha_is_tuned_unless_it_is_fixed(alpha_type, moves):
    algorithm = sac(f"algorithm.entropy_tuning.alpha_type={alpha_type}")
    algorithm.add(trajectory())
    alphas = [algorithm.update(0.0).metrics["train/sac/alpha"] for _ in range(5)]
    assert (alphas[0] != alphas[-1]) == moves


@pytest.mark.parametrize(("given", "expected"), [("null", -2), ("-3.5", -3.5)])
def test_the_target_entropy_is_minus_the_size_of_the_action_unless_given(given, expected):
    metrics = first_metrics(sac(f"algorithm.entropy_tuning.target_entropy={given}"))
    # The loss of alpha is -log(alpha) (target - entropy).
    target = metrics["train/actor/entropy"] - metrics["train/sac/alpha_loss"] / math.log(0.1)
    assert target == pytest.approx(expected, abs=1e-3)


def test_what_is_learned_does_not_depend_on_the_bounds_of_the_box():
    narrow, wide = (ActionSpace("box", (2,), [-w, -w], [w, w]) for w in (1.0, 100.0))
    one, other = trajectory(), trajectory()
    other.policy["actions"] = 100 * one.policy["actions"]
    metrics = [
        first_metrics(sac(action=action), each) for action, each in ((narrow, one), (wide, other))
    ]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


def test_steps_that_were_resets_never_enter_the_buffer():
    algorithm = sac()
    made = trajectory(4, 2, truncated=[(1, 0)], invalid=[(2, 0)])
    algorithm.add(made)
    assert algorithm.metrics()["train/replay_buffer/total_samples"] == 7
    rewards = algorithm.state_dict()["replay"]["transitions"]["next"]["reward"]
    assert sorted(rewards.flatten().tolist()) == sorted(made.reward[made.valid].tolist())


def test_trajectories_of_shards_of_different_sizes_are_counted_each_as_one():
    algorithm = sac("algorithm.replay_buffer.cache_size=2")
    for rows in (3, 1, 2):
        algorithm.add(trajectory(4, rows))
    assert algorithm.metrics() == {
        "train/replay_buffer/num_trajectories": 2,
        "train/replay_buffer/total_samples": 12,
        "train/replay_buffer/cache_size": 2,
    }


def test_there_is_no_update_before_min_buffer_size_trajectories():
    algorithm = sac("algorithm.replay_buffer.min_buffer_size=2")
    algorithm.add(trajectory())
    assert algorithm.update(0.0) is None
    algorithm.add(trajectory())
    assert algorithm.update(0.0).updates == 1


def test_a_global_step_ends_every_update_epoch_updates_with_the_means_of_them():
    algorithm = sac("algorithm.update_epoch=3")
    algorithm.add(trajectory())
    done = [algorithm.update(0.0) for _ in range(6)]
    assert [each.ends_step for each in done] == [False, False, True] * 2
    assert set(done[2].metrics) == {
        *(f"train/sac/{name}" for name in ("critic_loss", "actor_loss", "alpha_loss", "alpha")),
        *(f"train/critic/{name}" for name in ("lr", "grad_norm", "q_data")),
        *(f"train/actor/{name}" for name in ("lr", "grad_norm", "entropy", "q_pi")),
    }
    assert done[0].metrics == {}


def test_targets_follow_the_critics_by_tau_every_target_update_freq_updates():
    algorithm = sac("algorithm.tau=0.25", "algorithm.target_update_freq=2")
    algorithm.add(trajectory())
    name = "module.net.0.weight"
    before = algorithm.state_dict()["parameters"][f"target_critics.{name}"]
    algorithm.update(0.0)
    assert torch.equal(algorithm.state_dict()["parameters"][f"target_critics.{name}"], before)
    algorithm.update(0.0)
    after = algorithm.state_dict()["parameters"]
    expected = 0.75 * before + 0.25 * after[f"critics.{name}"]
    torch.testing.assert_close(after[f"target_critics.{name}"], expected)


def test_a_tau_of_one_copies_the_critics():
    algorithm = sac("algorithm.tau=1.0")
    first_metrics(algorithm)
    parameters = algorithm.state_dict()["parameters"]
    name = "module.net.0.weight"
    assert torch.equal(parameters[f"target_critics.{name}"], parameters[f"critics.{name}"])


def test_learning_rates_fall_with_progress_and_the_critic_may_have_its_own():
    algorithm = sac(
        "actor.optim={lr: 1.0e-3, lr_scheduler: linear}",
        "actor.critic_optim={lr: 5.0e-4}",
        "runner.max_env_steps=1000",
    )
    algorithm.add(trajectory())
    metrics = algorithm.update(0.75).metrics
    assert metrics["train/actor/lr"] == pytest.approx(2.5e-4)
    assert metrics["train/critic/lr"] == pytest.approx(5e-4)


def test_the_same_seed_learns_the_same_and_another_does_not():
    one, same_seed, other = sac(), sac(), sac("actor.seed=1")
    for algorithm in (one, same_seed, other):
        first_metrics(algorithm)
    assert same(one.actor.state_dict(), same_seed.actor.state_dict())
    assert not same(one.actor.state_dict(), other.actor.state_dict())


def test_each_update_draws_transitions_anew():
    algorithm = sac("actor.optim.lr=1.0e-12")
    algorithm.add(trajectory(16, 8))
    losses = [algorithm.update(0.0).metrics["train/sac/critic_loss"] for _ in range(2)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_a_restored_state_goes_on_as_if_nothing_had_happened():
    algorithm = sac("algorithm.replay_buffer.cache_size=3")
    for seed in range(5):
        algorithm.add(trajectory(4, 2 + seed % 2, seed=seed))
        algorithm.update(0.0)
    restored = sac("algorithm.replay_buffer.cache_size=3")
    first_metrics(restored, trajectory(9, 3, seed=8))
    restored.load_state_dict(copied(algorithm.state_dict()))
    for each in (algorithm, restored):
        each.add(trajectory(seed=9))
        each.update(0.0)
    assert algorithm.update(0.0) == restored.update(0.0)
    assert same(algorithm.state_dict()["parameters"], restored.state_dict()["parameters"])


def test_a_saved_state_does_not_change_with_what_is_learned_later():
    algorithm = sac()
    first_metrics(algorithm)
    state = algorithm.state_dict()
    before = copied(state)
    algorithm.update(0.0)
    assert same(state["parameters"], before["parameters"])
    moments = [s["optimisers"]["actor"]["0"]["exp_avg"] for s in (state, before)]
    assert torch.equal(*moments)


def test_another_architecture_is_refused_by_name_and_nothing_changes():
    algorithm, other = sac(), sac("actor.model.hidden_sizes=[24, 16]")
    first_metrics(other)
    before = algorithm.state_dict()
    with pytest.raises(
        CheckpointError, match=r"actor.head.net.0.weight is \[24, 3\] there and \[16, 3\] here"
    ):
        algorithm.load_state_dict(other.state_dict())
    assert same(algorithm.state_dict()["parameters"], before["parameters"])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"algorithm": "ppo"}, "algorithm is ppo there and sac here"),
        ({"alpha_type": "softplus"}, "alpha_type is softplus there and exp here"),
        ({"replay": {"lengths": [3], "transitions": {}}}, "0 transitions, not 3"),
        ({"optimisers": {}}, "this is no state of sac"),
        ({"optimisers": {"actor": {"0": {}}}}, "this is no state of sac"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(broken, message):
    algorithm, other = sac(), sac("actor.seed=1")
    first_metrics(other)
    before = algorithm.state_dict()["parameters"]
    with pytest.raises(CheckpointError, match=message):
        algorithm.load_state_dict({**other.state_dict(), **broken})
    assert same(algorithm.state_dict()["parameters"], before)
    assert algorithm.update(0.0) is None


def test_discrete_actions_are_refused():
    with pytest.raises(ConfigError, match=r"use algorithm\.name ppo"):
        sac(action=DISCRETE)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: trajectory(width=4), r"observation 'state' has shape \[4, 2, 4\], not \[4, 2, 3\]"),
        (lambda: trajectory(action=DISCRETE), "the actions are int64"),
    ],
)
def test_a_trajectory_of_another_simulator_is_refused(made, message):
    with pytest.raises(DataError, match=message):
        sac().add(made())


def test_a_trajectory_with_another_tree_is_refused_by_the_name_of_the_leaf():
    made = trajectory()
    made.observation["speed"] = made.observation["state"]
    with pytest.raises(DataError, match="'speed' is unknown"):
        sac().add(made)
    del made.observation["speed"], made.bootstrap["state"]
    with pytest.raises(DataError, match="after the last step, 'state' is missing"):
        sac().add(made)


def test_numbers_too_large_for_the_networks_are_refused():
    made = trajectory()
    made.observation["state"][0, 0, 0] = 1e300
    with pytest.raises(DataError, match="not finite in float32"):
        sac().add(made)


def test_a_loss_that_is_not_finite_ends_the_run():
    algorithm = sac()
    algorithm.add(trajectory(reward=1e30))
    with pytest.raises(RunFailed, match="the loss is not finite: train/sac/critic_loss is inf"):
        algorithm.update(0.0)
