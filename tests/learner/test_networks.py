import subprocess
import sys

import numpy as np
import pytest

from zmqrl.config.training import ModelConfig
from zmqrl.errors import ConfigError
from zmqrl.rollout.policy import TensorPolicy
from zmqrl.spaces import ActionSpace, Spaces

torch = pytest.importorskip("torch")

from hand_made import BOX, DISCRETE, OPEN_BOX, spaces  # noqa: E402

from zmqrl.learner.networks import TanhGaussian, ppo_actor, sac_actor, seeded  # noqa: E402

MODEL = ModelConfig(hidden_sizes=[16, 16])
LOW, HIGH = np.array(BOX.low, np.float32), np.array(BOX.high, np.float32)


def states(rows, seed=0):
    return {"state": np.random.default_rng(seed).normal(size=(rows, 3))}


def reply(actor, rows=64, evaluated=False):
    return TensorPolicy(actor, "cpu").infer(states(rows), np.full(rows, evaluated))


def saturated(actor):
    with torch.no_grad():
        actor.head.net[-1].bias[: len(LOW)].fill_(50)
    return actor


def test_rollout_workers_need_no_torchrl_to_serve_an_actor():
    code = "import sys, zmqrl.learner.networks; sys.exit(any('torchrl' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sac_chooses_actions_within_the_bounds_of_the_box():
    actions = reply(sac_actor(spaces(), MODEL), rows=2000)["actions"]
    assert actions.dtype == np.float32
    assert actions.shape == (2000, 2)
    assert (actions >= LOW).all()
    assert (actions <= HIGH).all()
    assert (actions[:, 0] > 2).any()


def test_saturated_actions_stay_in_the_box_and_have_a_finite_log_probability():
    replied = reply(saturated(sac_actor(spaces(), MODEL)))
    np.testing.assert_array_equal(replied["actions"], np.tile(HIGH, (64, 1)))
    assert np.isfinite(replied["prev_logprobs"]).all()


def test_the_log_probabilities_of_sac_are_those_of_torchrls_squashed_gaussian():
    modules = pytest.importorskip("torchrl.modules")
    actor = sac_actor(spaces(), MODEL)
    replied = reply(actor)
    inputs = torch.tensor(states(64)["state"], dtype=torch.float32)
    with torch.no_grad():
        loc, scale = actor.head(inputs)
    theirs = modules.TanhNormal(
        loc, scale, low=torch.tensor(LOW), high=torch.tensor(HIGH), tanh_loc=False
    ).log_prob(torch.tensor(replied["actions"]))
    np.testing.assert_allclose(replied["prev_logprobs"], theirs.numpy(), rtol=1e-3, atol=1e-3)


def test_the_density_of_a_squashed_gaussian_integrates_to_one():
    low, high = torch.tensor([-1.0]), torch.tensor([3.0])
    grid = torch.linspace(-1, 3, 40_001, dtype=torch.float64)[1:-1]
    density = TanhGaussian(torch.tensor([0.4]), torch.tensor([0.6]), low, high).log_prob(grid[:, None])
    assert torch.trapezoid(density.exp(), grid).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("make", [sac_actor, ppo_actor])
def test_eval_rows_of_a_mixed_batch_are_deterministic_and_train_rows_are_not(make):
    policy = TensorPolicy(make(spaces(), MODEL), "cpu")
    mixed = np.array([True, False] * 8)
    replies = [policy.infer(states(16), mixed) for _ in range(2)]
    np.testing.assert_array_equal(*(r["actions"][mixed] for r in replies))
    assert (replies[0]["actions"][~mixed] != replies[1]["actions"][~mixed]).all()
    np.testing.assert_array_equal(*(r["prev_logprobs"][mixed] for r in replies))


def test_discrete_actions_are_int64_and_come_with_the_log_of_their_probability():
    actor = ppo_actor(spaces(DISCRETE), MODEL)
    replied = reply(actor)
    assert replied["actions"].dtype == np.int64
    assert replied["actions"].shape == (64,)
    assert set(replied["actions"]) == {0, 1, 2}
    with torch.no_grad():
        (logits,) = actor.head(torch.tensor(states(64)["state"], dtype=torch.float32))
    expected = logits.log_softmax(-1).numpy()[np.arange(64), replied["actions"]]
    np.testing.assert_allclose(replied["prev_logprobs"], expected, rtol=1e-5)
    likeliest = reply(actor, evaluated=True)["actions"]
    np.testing.assert_array_equal(likeliest, logits.argmax(-1).numpy())


def test_ppo_begins_in_the_middle_of_a_box_with_half_its_width_as_deviation():
    actor = ppo_actor(spaces(), MODEL)
    actions = reply(actor, rows=20_000)["actions"]
    np.testing.assert_allclose(actions.mean(0), (LOW + HIGH) / 2, atol=0.1)
    np.testing.assert_allclose(actions.std(0), (HIGH - LOW) / 2, rtol=0.05)


def test_ppo_learns_in_a_box_without_bounds_in_the_simulators_units():
    actions = reply(ppo_actor(spaces(OPEN_BOX), MODEL), rows=20_000)["actions"]
    np.testing.assert_allclose(actions.std(0), 1, rtol=0.05)


def test_an_action_has_the_shape_of_the_space():
    box = ActionSpace("box", (2, 3), [-1.0] * 6, [1.0] * 6)
    assert reply(sac_actor(spaces(box), MODEL))["actions"].shape == (64, 2, 3)
    scalar = ActionSpace("box", (), [-1.0], [1.0])
    assert reply(sac_actor(spaces(scalar), MODEL))["actions"].shape == (64,)


def test_all_numbers_of_an_observation_are_joined_in_the_order_of_their_paths():
    rows = 5
    tree = {
        "b": np.full((rows, 2, 2), 2, np.uint8),
        "a": {"y": np.ones(rows, bool), "x": np.zeros((rows, 3), np.float32)},
        "c": 7.0,
    }
    found = Spaces.of(tree, None).observation
    actor = sac_actor(Spaces(found, BOX), MODEL)
    seen = []
    actor.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    TensorPolicy(actor, "cpu").infer(tree, np.zeros(rows, bool))
    TensorPolicy(actor, "cpu").infer(dict(reversed(tree.items())), np.zeros(rows, bool))
    np.testing.assert_array_equal(seen[0].numpy(), [[0, 0, 0, 1, 2, 2, 2, 2, 7]] * rows)
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("make", [sac_actor, ppo_actor])
def test_text_and_images_are_refused_by_name(make):
    for name, leaf in (
        ("task_descriptions", ["push", "pull"]),
        ("camera", np.zeros((2, 8, 8, 3), np.uint8)),
    ):
        observation = {"state": np.zeros((2, 3)), name: leaf}
        found = Spaces(Spaces.of(observation, None).observation, BOX)
        with pytest.raises(ConfigError, match=rf"'{name}'.*algorithm\.factory"):
            make(found, MODEL)


def test_sac_refuses_discrete_actions_and_names_ppo():
    with pytest.raises(ConfigError, match=r"not Discrete\(3\); use algorithm\.name ppo"):
        sac_actor(spaces(DISCRETE), MODEL)


def test_sac_refuses_a_box_without_bounds():
    with pytest.raises(ConfigError, match="finite bounds"):
        sac_actor(spaces(OPEN_BOX), MODEL)


def test_ppo_refuses_other_spaces():
    other = ActionSpace("other", text="MultiBinary(3)")
    with pytest.raises(ConfigError, match=r"MultiBinary\(3\).*algorithm\.factory"):
        ppo_actor(spaces(other), MODEL)


def test_seeded_numbers_repeat_and_leave_others_alone():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    drawn = []
    for seed in (5, 5, 6):
        with seeded(torch.device("cpu"), seed, 0):
            drawn.append(torch.rand(1))
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.rand(2), expected)
