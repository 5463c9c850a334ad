import itertools

import numpy as np
import pytest

from zmqrl.errors import CheckpointError, DataError, RunFailed

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from hand_made import BOX, DISCRETE, config, copied, same, spaces, trajectory  # noqa: E402

from zmqrl.learner.algorithm import make_algorithm  # noqa: E402
from zmqrl.learner.networks import mlp  # noqa: E402
from zmqrl.learner.ppo import PPO  # noqa: E402

ONE_WORKER = "cluster.component_placement.env=0"
TWO_WORKERS = "cluster.component_placement.env=0-1"


def ppo(*overrides, action=BOX):
    return PPO(spaces(action), config("ppo", ONE_WORKER, "algorithm.update_epoch=2", *overrides))


def batch_metrics(algorithm, *trajectories):
    """Learn from one whole batch."""
    for each in trajectories or [trajectory()]:
        algorithm.add(each)
    while not (done := algorithm.update(0.0)).ends_step:
        pass
    return done.metrics


def begun(algorithm, *trajectories):
    """The batch after its first update: tensors by name."""
    for each in trajectories:
        algorithm.add(each)
    assert not algorithm.update(0.0).ends_step
    return algorithm.state_dict()["batch"]


def value_function(algorithm):
    """The critic as it is now, of numpy arrays."""
    net = mlp(3, 1, algorithm._config.actor.model)
    parameters = algorithm.state_dict()["parameters"]
    critic = {name: t for name, t in parameters.items() if name.startswith("critic.")}
    net.load_state_dict({name.removeprefix("critic."): t for name, t in critic.items()})

    def value(observations):
        with torch.no_grad():
            return net(torch.tensor(observations, dtype=torch.float32))[..., 0].numpy()

    return value


def reference_advantages(made, value, gamma, lam, always):
    """GAE by its definition: for each transition, the sum over what follows it in its episode."""
    values = value(made.observation["state"])
    after = value(made.next_observation()["state"])
    if not always:
        after = np.where(made.terminated, 0, after)
    deltas = made.reward + gamma * after - values
    advantages = {}
    steps, rows = made.reward.shape
    for step, row in itertools.product(range(steps), range(rows)):
        if not made.valid[step, row]:
            continue
        total, weight = 0.0, 1.0
        for k in range(step, steps):
            if not made.valid[k, row]:
                break
            total += weight * deltas[k, row]
            weight *= gamma * lam
            if made.terminated[k, row] or made.truncated[k, row]:
                break
        advantages[float(np.float32(made.observation["state"][step, row, 0]))] = total
    return advantages


def test_the_configuration_names_it():
    algorithm = make_algorithm(spaces(DISCRETE), config("ppo"))
    assert isinstance(algorithm, PPO)
    assert algorithm.on_policy


@pytest.mark.parametrize("bootstrap_type", ["standard", "always"])
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_advantages_are_those_of_the_definition(bootstrap_type, lam):
    algorithm = ppo(
        f"algorithm.bootstrap_type={bootstrap_type}",
        f"algorithm.gae_lambda={lam}",
        "algorithm.gamma=0.97",
    )
    made = trajectory(
        9,
        4,
        terminated=[(2, 0), (8, 1), (0, 3)],
        truncated=[(4, 1), (5, 2)],
        invalid=[(3, 0), (6, 2), (1, 3), (7, 3)],
    )
    expected = reference_advantages(
        made, value_function(algorithm), 0.97, lam, bootstrap_type == "always"
    )
    batch = begun(algorithm, made)
    firsts = batch["observation"][:, 0].tolist()
    assert sorted(firsts) == sorted(expected)
    np.testing.assert_allclose(
        batch["advantage"][:, 0], [expected[first] for first in firsts], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(batch["value_target"], batch["advantage"] + batch["state_value"])


def test_the_value_after_a_truncation_is_that_of_the_final_observation_not_of_the_reset():
    advantages = []
    for final, reset in ((2.0, 0.0), (2.0, 9.0), (-2.0, 0.0)):
        made = trajectory(1, 2, truncated=[(0, 0), (0, 1)], final=final)
        made.bootstrap = {"state": np.full((2, 3), reset)}
        advantages.append(begun(ppo(), made)["advantage"])
    assert torch.equal(advantages[0], advantages[1])
    assert not torch.allclose(advantages[0], advantages[2])


def test_old_log_probabilities_are_those_of_the_replies():
    kl = [
        batch_metrics(ppo("algorithm.update_epoch=1"), trajectory(log_prob=replied))[
            "train/ppo/approx_kl"
        ]
        for replied in (-1.0, -1.3)
    ]
    assert kl[0] - kl[1] == pytest.approx(0.3, abs=1e-5)


def test_a_policy_far_from_that_of_the_replies_is_clipped():
    metrics = batch_metrics(ppo("algorithm.update_epoch=1"), trajectory(log_prob=-30.0))
    assert metrics["train/ppo/clip_fraction"] == 1


def test_replies_without_log_probabilities_are_refused():
    made = trajectory()
    del made.policy["prev_logprobs"]
    with pytest.raises(DataError, match="no 'prev_logprobs'"):
        ppo().add(made)
    made.policy["prev_logprobs"] = np.full((4, 2), np.nan, np.float32)
    with pytest.raises(DataError, match="'prev_logprobs' holds a number that is not finite"):
        ppo().add(made)


@pytest.mark.parametrize("action", [BOX, DISCRETE], ids=["box", "discrete"])
def test_an_action_that_turned_out_well_becomes_likelier(action):
    torch.manual_seed(0)
    algorithm = ppo(
        "algorithm.update_epoch=20", "actor.optim.lr=1e-2", "algorithm.gae_lambda=0", action=action
    )
    made = trajectory(32, 4, action=action, observation=0.5, final=0.5)
    chosen = made.actions
    good = chosen == 1 if action.kind == "discrete" else chosen[..., 0] > 0.2
    made.reward[:] = good
    observation = {"state": torch.full((500, 3), 0.5)}

    def share():
        actions = algorithm.actor(observation, eval_mask=torch.zeros(500, dtype=torch.bool))["actions"]
        return (actions == 1 if action.kind == "discrete" else actions[:, 0] > 0.2).float().mean()

    before = share()
    batch_metrics(algorithm, made)
    assert share() > before + 0.1


def test_a_batch_is_rollout_epoch_trajectories_of_each_stage_of_each_worker():
    algorithm = ppo(TWO_WORKERS, "env.pipeline_stages=2", "env.train.rollout_epoch=3")
    for _ in range(11):
        algorithm.add(trajectory())
        assert algorithm.update(0.0) is None
    algorithm.add(trajectory())
    assert algorithm.update(0.0) is not None


@pytest.mark.parametrize(("size", "minibatches"), [(8, 3), (11, 2), (24, 1), (100, 1)])
def test_every_pass_takes_each_transition_once_in_minibatches_of_about_the_size(size, minibatches):
    algorithm = ppo(TWO_WORKERS, f"actor.global_batch_size={size}", "algorithm.update_epoch=3")
    algorithm.add(trajectory(4, 2))
    algorithm.add(trajectory(4, 5, invalid=[(0, 0), (1, 0), (2, 0), (3, 0)]))
    done = [algorithm.update(0.0) for _ in range(3 * minibatches)]
    assert [each.ends_step for each in done] == [False] * (3 * minibatches - 1) + [True]
    assert all(each.updates == 1 for each in done)
    assert algorithm.update(0.0) is None


def test_what_comes_while_a_batch_is_learned_from_waits_for_the_next():
    algorithm = ppo()
    batch = begun(algorithm, trajectory(seed=1))
    algorithm.add(trajectory(seed=2))
    assert torch.equal(algorithm.state_dict()["batch"]["observation"], batch["observation"])
    assert algorithm.update(0.0).ends_step
    assert not algorithm.update(0.0).ends_step
    following = algorithm.state_dict()["batch"]["observation"]
    expected = trajectory(seed=2).observation["state"]
    np.testing.assert_allclose(following, expected.swapaxes(0, 1).reshape(-1, 3), rtol=1e-5)


def test_a_batch_without_a_transition_is_passed_over():
    algorithm = ppo()
    algorithm.add(trajectory(1, 1, invalid=[(0, 0)]))
    assert algorithm.update(0.0) is None
    assert batch_metrics(algorithm, trajectory())


def test_a_batch_in_which_everything_is_equal_is_survived():
    algorithm = ppo()
    metrics = batch_metrics(
        algorithm, trajectory(observation=0.5, terminated=list(np.ndindex(4, 2)), final=0.5, reward=1.0)
    )
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["train/ppo/policy_loss"] == pytest.approx(0, abs=1e-5)
    assert metrics["train/ppo/explained_variance"] == 0
    assert all(t.isfinite().all() for t in algorithm.state_dict()["parameters"].values())


def test_a_single_transition_is_survived():
    metrics = batch_metrics(ppo(), trajectory(1, 1))
    assert np.isfinite(list(metrics.values())).all()


def test_the_metrics_of_a_batch():
    metrics = batch_metrics(ppo("actor.optim={lr: 1.0e-3}", "actor.critic_optim={lr: 2.0e-3}"))
    losses = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance")
    assert set(metrics) == {
        *(f"train/ppo/{name}" for name in losses),
        *(f"train/{net}/{name}" for net in ("actor", "critic") for name in ("lr", "grad_norm")),
    }
    assert metrics["train/actor/lr"] == pytest.approx(1e-3)
    assert metrics["train/critic/lr"] == pytest.approx(2e-3)


def test_the_learning_rate_falls_with_progress():
    algorithm = ppo(
        "actor.optim={lr: 1.0e-3, lr_scheduler: linear}",
        "runner.max_env_steps=1000",
        "algorithm.update_epoch=1",
    )
    algorithm.add(trajectory())
    metrics = algorithm.update(0.9).metrics
    assert metrics["train/actor/lr"] == pytest.approx(1e-4)
    assert metrics["train/critic/lr"] == pytest.approx(1e-4)


def test_an_entropy_bonus_keeps_the_policy_wider():
    entropies = []
    for bonus in (0.0, 10.0):
        algorithm = ppo(f"algorithm.entropy_bonus={bonus}", "algorithm.update_epoch=20")
        batch_metrics(algorithm)
        entropies.append(batch_metrics(algorithm)["train/ppo/entropy"])
    assert entropies[1] > entropies[0]


def test_without_a_value_coefficient_the_critic_does_not_learn():
    algorithm = ppo("algorithm.value_coef=0")
    before = algorithm.state_dict()["parameters"]
    batch_metrics(algorithm)
    after = algorithm.state_dict()["parameters"]
    assert torch.equal(before["critic.0.weight"], after["critic.0.weight"])
    assert not torch.equal(before["actor.head.net.0.weight"], after["actor.head.net.0.weight"])


@pytest.mark.parametrize("action", [BOX, DISCRETE], ids=["box", "discrete"])
@pytest.mark.parametrize("updates", [0, 3, 5])
def test_a_restored_state_goes_on_as_if_nothing_had_happened(action, updates):
    def learner():
        return ppo("actor.global_batch_size=4", "algorithm.update_epoch=3", action=action)

    algorithm, restored = learner(), learner()
    for seed in (1, 2):
        algorithm.add(trajectory(action=action, seed=seed))
    for _ in range(updates):
        algorithm.update(0.0)
    begun(restored, trajectory(action=action, seed=3))
    restored.load_state_dict(copied(algorithm.state_dict()))
    for _ in range(7):
        ends = [each.update(0.0).ends_step for each in (algorithm, restored)]
        assert ends[0] == ends[1]
    assert same(algorithm.state_dict()["parameters"], restored.state_dict()["parameters"])
    assert same(algorithm.state_dict()["batch"], restored.state_dict()["batch"])


def test_the_same_seed_learns_the_same_and_another_does_not():
    one, same_seed, other = ppo(), ppo(), ppo("actor.seed=1")
    for algorithm in (one, same_seed, other):
        batch_metrics(algorithm)
    assert same(one.actor.state_dict(), same_seed.actor.state_dict())
    assert not same(one.actor.state_dict(), other.actor.state_dict())


def test_another_architecture_is_refused_by_name_and_nothing_changes():
    algorithm, other = ppo(), ppo("actor.model.hidden_sizes=[16]", action=DISCRETE)
    before = algorithm.state_dict()["parameters"]
    with pytest.raises(CheckpointError, match=r"actor\.head\.log_scale is missing there and \[2\] here"):
        algorithm.load_state_dict(other.state_dict())
    assert same(algorithm.state_dict()["parameters"], before)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"algorithm": "sac"}, "algorithm is sac there and ppo here"),
        ({"optimisers": {}}, "this is no state of ppo"),
        ({"waiting": [{}]}, "this is no state of ppo"),
        ({"position": "x"}, "this is no state of ppo"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(broken, message):
    algorithm, other = ppo(), ppo("actor.seed=1")
    before = algorithm.state_dict()["parameters"]
    with pytest.raises(CheckpointError, match=message):
        algorithm.load_state_dict({**other.state_dict(), **broken})
    assert same(algorithm.state_dict()["parameters"], before)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: trajectory(width=4, action=DISCRETE), r"shape \[4, 2, 4\], not \[4, 2, 3\]"),
        (lambda: trajectory(), r"the actions are float32 \[4, 2, 2\], which does not fit Discrete\(3\)"),
    ],
)
def test_a_trajectory_of_another_simulator_is_refused(made, message):
    with pytest.raises(DataError, match=message):
        ppo(action=DISCRETE).add(made())


def test_a_discrete_action_that_does_not_exist_is_refused():
    made = trajectory(action=DISCRETE)
    made.policy["actions"][0, 0] = 3
    with pytest.raises(DataError, match=r"outside of Discrete\(3\)"):
        ppo(action=DISCRETE).add(made)


def test_a_loss_that_is_not_finite_ends_the_run():
    algorithm = ppo()
    algorithm.add(trajectory(reward=1e30))
    algorithm.update(0.0)
    with pytest.raises(RunFailed, match="the loss is not finite"):
        algorithm.update(0.0)
