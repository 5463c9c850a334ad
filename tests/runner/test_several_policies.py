"""Several policies in one pool: real evaluations, in which each env worker acts as its policy does."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import TESTS, Pool
from runner.evaluation import BOTH_MODES, SIM, SLOW, Run

from zmqrl import AsyncPolicyClient, config
from zmqrl.config.policies import assigned
from zmqrl.errors import ConfigError, PolicyError, PolicyTimeout

POLICIES = TESTS / "policies.py"
TWO = (
    f"rollout.policies.idle={{policy: '{POLICIES}:Constant', policy_kwargs: {{action: 0}}}}",
    f"rollout.policies.busy={{policy: '{POLICIES}:Constant', policy_kwargs: {{action: 1}}, workers: 2}}",
)


def run(folder: Path, *overrides: str, decoupled: bool = True) -> Run:
    return Run(folder, *overrides, decoupled=decoupled, policy="rollout.device=cpu")


@BOTH_MODES
def test_each_env_worker_acts_as_its_policy_and_the_results_are_split(
    folder: Path, decoupled: bool
) -> None:
    evaluation = run(
        folder,
        *TWO,
        f"{SIM}:Paid",
        "env.policies={idle: 1, busy: 2}",
        "env.eval={total_num_envs: 7, rollout_epoch: 2}",
        "cluster.component_placement={env: 0-2, rollout: '0'}",
        decoupled=decoupled,
    )
    assert evaluation.wait() == 0, evaluation.text()
    result = evaluation.result()
    ranks = config.load(None, ["env.policies={idle: 1, busy: 2}", "cluster.component_placement.env=0-2"])
    assert ranks.policies_of("eval") == ["busy", "idle", "busy"]
    assert result["eval/busy/num_trajectories"] == 10  # of 3, 2 and 2 envs
    assert result["eval/idle/num_trajectories"] == 4
    assert result["eval/num_trajectories"] == 14
    assert (result["eval/busy/return"], result["eval/busy/success_once"]) == (10, 1)
    assert (result["eval/idle/return"], result["eval/idle/success_once"]) == (0, 0)
    assert result["eval/success_once"] == pytest.approx(10 / 14)
    for name in ("idle", "busy"):
        assert result[f"rollout/{name}/mean_rows_per_batch"] >= 2
        assert 0 < result[f"rollout/{name}/busy"] <= 1
    text = evaluation.text()
    assert "rollout-busy-1" in text
    assert "eval-1 (idle)" in text
    line = next(line for line in text.splitlines() if "success at any step" in line)
    assert [word for word in line.split() if "%" in word] == ["71.4%", "100.0%", "0.0%"]


@pytest.mark.slow
def test_a_policy_twice_with_other_arguments_plays_the_same_start_states(folder: Path) -> None:
    balance = f"policy: '{POLICIES}:Balance'"
    evaluation = run(
        folder,
        f"rollout.policies.new={{{balance}, policy_kwargs: {{damping: 0}}}}",
        f"rollout.policies.same={{{balance}, policy_kwargs: {{damping: 0}}}}",
        f"rollout.policies.base={{{balance}}}",
        "env.id=CartPole-v1",
        "env.eval={total_num_envs: 6, use_fixed_reset_state_ids: true, max_episode_steps: 400, seed: 5}",
        "cluster.component_placement.env=0-2",
    )
    assert evaluation.wait() == 0, evaluation.text()
    result = evaluation.result()
    assert result["eval/new/return"] == result["eval/same/return"] < 399
    assert result["eval/base/return"] == 400


TWO_SLOW = (
    *TWO,
    *SLOW,
    f"{SIM}:Paid",
    "env.eval={total_num_envs: 4, rollout_epoch: 2}",
    "cluster.component_placement.env=0-1",
)


def test_the_loss_of_a_policys_last_worker_does_not_touch_the_other_policy(folder: Path) -> None:
    evaluation = run(folder, *TWO_SLOW, "cluster.restart=never")
    evaluation.wait_until_it_steps()
    evaluation.part("start-rollout-worker", "idle").send_signal(signal.SIGKILL)
    assert evaluation.wait() == 1
    text, result = evaluation.text(), evaluation.result()
    assert "no rollout worker of the policy idle is left: rollout-idle-0 was killed by SIGKILL" in text
    assert result["eval/busy/num_trajectories"] == 4
    assert (result["eval/busy/return"], result["eval/busy/missing_trajectories"]) == (150, 0)
    assert result["eval/idle/missing_trajectories"] > 0


@pytest.mark.slow
def test_a_policys_worker_that_was_killed_is_started_again(folder: Path) -> None:
    evaluation = run(folder, *TWO_SLOW)
    evaluation.wait_until_it_steps()
    evaluation.part("start-rollout-worker", "idle").send_signal(signal.SIGKILL)
    assert evaluation.wait() == 0, evaluation.text()
    result = evaluation.result()
    assert (result["eval/busy/return"], result["eval/idle/return"]) == (150, 0)
    assert result["eval/missing_trajectories"] == 0


# -- Parts by hand


def serve(pool: Pool, serves: str, *words: str) -> None:
    pool.launcher.start(
        f"rollout-{serves}",
        ["start-rollout-worker", *pool.overrides, f"--serves={serves}", *words],
    )


def test_a_client_asks_policies_by_name_and_is_told_which_there_are(pool: Pool) -> None:
    pool.start_broker()
    for name, action in (("left", 0), ("right", 1)):
        # A key that is none of the configuration is for the factory.
        serve(pool, name, f"--policy={POLICIES}:Constant", f"action={action}")
    pool.wait_for_workers(2)
    client = pool.client()
    observation = np.zeros((3, 2))
    assert client.infer(observation, policy="left")["actions"].tolist() == [0, 0, 0]
    assert client.infer(observation, policy="right")["actions"].tolist() == [1, 1, 1]
    assert client.infer_one(observation[0], policy="right")["actions"] == 1
    with pytest.raises(PolicyError, match="weights of version 3"):
        client.infer(observation, policy="right", version=3)
    for policy in ("lift", ""):
        for timeout in (3, 1, 0.3):
            with pytest.raises(PolicyTimeout, match="the policy 'left', the policy 'right'") as error:
                client.infer(observation, policy=policy, timeout=timeout)
            assert ("the policy 'lift'" in str(error.value)) == bool(policy)

    async def ask() -> None:
        async with AsyncPolicyClient(pool.frontend) as asking:
            await asking.infer(observation, policy="lift", timeout=1)

    with pytest.raises(PolicyTimeout, match="the policy 'left', the policy 'right'"):
        asyncio.run(ask())
    served = {worker["name"]: worker["policy"] for worker in pool.status()["workers"]}
    assert sorted(served.values()) == ["left", "right"]


def test_env_workers_by_hand_ask_the_policy_of_their_rank(pool: Pool) -> None:
    pool.start_broker(decoupled=False)
    named = f"rollout.policies={{a: {{policy: '{POLICIES}:Constant', policy_kwargs: {{action: 1}}}}}}"
    serve(pool, "a", named)
    serve(pool, "b", f"--policy={POLICIES}:Constant", "action=0", "rollout.policy=x:y")
    pool.wait_for_workers(2)
    for rank, paid in ((0, "10.000"), (1, "0.000")):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "zmqrl", "start-env-worker", *pool.overrides, f"--rank={rank}"),
                f"{SIM}:Paid",
                "env.policies={a: 1, b: 1}",
                "cluster.component_placement.env=0-1",
            ],
            capture_output=True,
            text=True,
            timeout=40,
        )
        assert done.returncode == 0, done.stderr
        assert paid in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.policies.a.policy=x:y"], "which policy of several? give --serves a"),
        (["--serves=b", "rollout.policies.a.policy=x:y"], "has no 'b': it is a"),
        (["--serves=b"], "has no 'b': it is empty; --policy module:factory says"),
        (["--serves=reward", "--policy=x:y"], "'reward' is what reward workers serve"),
        (["--serves=a", "--policy=x:y", "--rank=1"], "--rank 1 is not one of the 1 rollout worker"),
        (["polcy=3"], "unknown key 'polcy' at the top level"),
        (["rolout.device=cpu"], "did you mean 'rollout'?"),
        ([f"--policy={POLICIES}:Constant", "actoin=3"], "unexpected keyword argument 'actoin'"),
    ],
)
def test_a_worker_that_cannot_know_what_to_serve_says_so(words: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zmqrl", "start-rollout-worker", *words],
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode in (1, 2)
    assert message in done.stderr


# -- The configuration


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.policies.a.polcy=x"], "rollout.policies.a: unknown key 'polcy'; known keys: policy"),
        (["rollout.policies.a.workers=2"], "rollout.policies.a: give policy"),
        (["rollout.policies.a.policy=x:y", "rollout.policy=x:y"], "either policy .* or policies"),
        (["rollout.policies.a.policy=x:y", "env.policies.b=1"], "names 'b', but rollout.policies are a"),
        (["rollout.policies={a b: {policy: x}}"], "letters, digits, _ and -, not 'a b'"),
        (["env.policies={a: 0}"], "the weight of a must be above 0"),
        (["env.policies={a: 100, b: 1}"], "of 8 env workers none is for the policy 'b'"),
        (["rollout.policies.a.policy=x:y", "runner.ckpt_path=x"], "each of them has a ckpt_path"),
        # Two names of one number.
        (["env.policies={plumless: 1, buckeroo: 1}"], "the same number for the broker"),
    ],
)
def test_policies_that_cannot_be_told_apart_or_served_are_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load(None, overrides)


def test_a_training_of_several_policies_is_refused(folder: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "zmqrl", "train", "algorithm.name=ppo", "env.id=CartPole-v1"),
            *("rollout.policies.a.policy=x:y", f"runner.logger.log_path={folder}"),
        ],
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert (done.returncode, "one policy is trained" in done.stderr) == (2, True)


def test_words_of_a_command_line_go_to_the_configuration_or_to_the_factory() -> None:
    words = ["path=a=b", "env.id=x", "algorithm=PPO", "algorithm={name: ppo}", "keys.env=3", "env=4"]
    loaded = config.load(None, config.for_policy("m:f", words, "rollout", "policy"))
    wanted = {"path": "a=b", "algorithm": "PPO", "keys": {"env": 3}, "env": 4}
    assert (loaded.rollout.policy, loaded.rollout.policy_kwargs) == ("m:f", wanted)
    assert (loaded.env.id, loaded.algorithm.name) == ("x", "ppo")
    assert config.for_policy(None, words, "rollout", "policy") == words


@pytest.mark.parametrize("weights", [{"a": 3, "b": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 0.7, "b": 0.2}])
def test_env_workers_are_shared_out_by_weight_and_keep_their_policy_when_others_come(weights) -> None:
    ranks = assigned(weights, 100)
    for workers in range(1, 101):
        assert assigned(weights, workers) == ranks[:workers]
        for name, weight in weights.items():
            exact = workers * weight / sum(weights.values())
            assert abs(ranks[:workers].count(name) - exact) < 1.01
    assert assigned({}, 3) == ["", "", ""]


def test_a_configuration_with_several_policies_reads_back_as_it_was(folder: Path) -> None:
    loaded = config.load(None, [*TWO, "env.policies={idle: 1, busy: 2}"])
    config.dump(loaded, folder / "config.yaml")
    assert config.load(folder / "config.yaml") == loaded
    assert loaded.of_policy("busy").rollout.policy_kwargs == {"action": 1}
