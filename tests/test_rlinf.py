"""RLinf's configurations, made into ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TESTS

from zmqrl import config
from zmqrl.rlinf import main

SAC = """
defaults:
  - env/reach@env.train
  - env/reach@env.eval
  - model/mlp@actor.model
  - override hydra/job_logging: stdout
hydra: {run: {dir: .}}
cluster:
  num_nodes: 1
  component_placement: {actor: 0, rollout: "0:0-1", env: 0-3}
runner:
  enable_decoupled_mode: True
  logger: {log_path: out, logger_backends: [tensorboard, swanlab]}
  max_epochs: 5
algorithm:
  adv_type: embodied_sac
  loss_type: embodied_sac
  bootstrap_type: always
  gamma: 0.8
  entropy_tuning: {alpha_type: softplus, optim: {lr: 3e-4, lr_scheduler: torch_constant}}
env:
  delay_sampler: {type: uniform, min_delay: 0.1, max_delay: 0.2}
  train: {total_num_envs: 40, group_size: "${algorithm.group_size}"}
  eval: {total_num_envs: "${env.train.total_num_envs}"}
rollout: {pipeline_stage_num: 2, rollout_queue_size: 5, backend: huggingface}
"""

REACH = """
simulator_type: maniskill
init_params: {id: Reach-v1, obs_mode: state}
max_episode_steps: 50
total_num_envs: 7
video_cfg: {save_video: true, video_base_dir: "${runner.logger.log_path}/video"}
"""


def imported(
    tmp_path: Path, text: str, *options: str, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], str]:
    """What comes of importing `text`: our YAML as a tree, and the report."""
    (tmp_path / "theirs.yaml").write_text(text)
    ours = tmp_path / "ours.yaml"
    assert main([str(tmp_path / "theirs.yaml"), "--output", str(ours), *options]) == 0
    config.load(ours)
    tree = yaml.safe_load(ours.read_text())
    return tree, capsys.readouterr().err


def refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of importing `text`: one line, and nothing on stdout."""
    (tmp_path / "theirs.yaml").write_text(text)
    assert main([str(tmp_path / "theirs.yaml")]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def key(tree: dict[str, Any], path: str) -> Any:
    """The value at a key path; None if it is not there."""
    node: Any = tree
    for part in path.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def with_defaults(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "reach.yaml").write_text(REACH)


def test_the_command_writes_yaml_on_stdout_and_the_report_on_stderr(tmp_path: Path) -> None:
    with_defaults(tmp_path)
    (tmp_path / "theirs.yaml").write_text(SAC)
    script = TESTS.parent / "bin" / "import-rlinf"
    done = subprocess.run([script, tmp_path / "theirs.yaml"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# Made by bin/import-rlinf from theirs.yaml")
    assert str(tmp_path) not in done.stdout
    (tmp_path / "ours.yaml").write_text(done.stdout)
    assert config.load(tmp_path / "ours.yaml").algorithm.name == "sac"
    for word in ("translated", "left out", "hydra.run.dir", "to fill in"):
        assert word in done.stderr


def test_keys_that_both_have_keep_name_and_value(tmp_path: Path, capsys: Any) -> None:
    tree, _ = imported(tmp_path, SAC, capsys=capsys)
    assert key(tree, "algorithm.gamma") == 0.8
    assert key(tree, "algorithm.bootstrap_type") == "always"
    assert key(tree, "algorithm.entropy_tuning.optim.lr") == 3e-4
    assert key(tree, "rollout.rollout_queue_size") == 5


def test_what_is_named_differently_is_translated_and_reported(tmp_path: Path, capsys: Any) -> None:
    tree, report = imported(tmp_path, SAC, capsys=capsys)
    for theirs, ours, value in (
        ("algorithm.loss_type", "algorithm.name", "sac"),
        ("rollout.pipeline_stage_num", "env.pipeline_stages", 2),
        ("env.delay_sampler.min_delay", "env.delay_sampler.low", 0.1),
        ("env.delay_sampler.max_delay", "env.delay_sampler.high", 0.2),
    ):
        assert key(tree, ours) == value
        line = next(line for line in report.splitlines() if line.strip().startswith(theirs))
        assert f"-> {ours}: {value}" in line


def test_the_number_of_action_chunks_is_one_of_the_simulators(tmp_path: Path, capsys: Any) -> None:
    text = SAC + "actor: {model: {num_action_chunks: 5, action_dim: 7}}\n"
    tree, report = imported(tmp_path, text, capsys=capsys)
    assert key(tree, "env.num_action_chunks") == 5
    assert "actor.model.num_action_chunks: 5" in report
    assert "actor.model.action_dim" in report.partition("left out")[2]


def test_every_key_without_a_place_is_reported_with_a_reason(tmp_path: Path, capsys: Any) -> None:
    _, report = imported(tmp_path, SAC, capsys=capsys)
    left = report.partition("left out")[2]
    for name in ("hydra.run.dir", "cluster.num_nodes", "rollout.backend", "swanlab", "placement.actor"):
        assert name in left
    assert "not found: give --config-dir" in left
    assert "env/reach@env.train" in left


def test_evaluations_are_not_delayed_as_in_rlinf(tmp_path: Path, capsys: Any) -> None:
    tree, _ = imported(tmp_path, SAC, capsys=capsys)
    assert key(tree, "env.eval.delay_sampler") == {"type": "constant", "delay": 0.0}


def test_files_of_the_defaults_list_are_merged_at_their_package(tmp_path: Path, capsys: Any) -> None:
    with_defaults(tmp_path)
    tree, report = imported(tmp_path, SAC, capsys=capsys)
    assert key(tree, "env.train.max_episode_steps") == 50
    assert key(tree, "env.eval.save_video") is True
    assert "env/reach@env.train" not in report


def test_the_file_itself_wins_over_its_defaults(tmp_path: Path, capsys: Any) -> None:
    with_defaults(tmp_path)
    tree, _ = imported(tmp_path, SAC, capsys=capsys)
    assert key(tree, "env.train.total_num_envs") == 40


def test_self_in_the_defaults_list_says_when_the_file_itself_counts(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "more.yaml").write_text("runner: {max_epochs: 9}\n")
    text = "defaults: [_self_, more]\nrunner: {max_epochs: 5, max_steps: 3}\n"
    tree, _ = imported(tmp_path, text, capsys=capsys)
    assert tree["runner"] == {"max_epochs": 9, "max_steps": 3}


def test_a_group_with_an_option_is_placed_at_its_group(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "folder" / "algorithm").mkdir(parents=True)
    (tmp_path / "folder" / "algorithm" / "a.yaml").write_text("defaults: [b]\ngamma: 0.5\n")
    (tmp_path / "folder" / "algorithm" / "b.yaml").write_text("gamma: 0.4\ntau: 0.1\n")
    text = "defaults:\n  - algorithm: a\n"
    tree, _ = imported(tmp_path, text, "--config-dir", str(tmp_path / "folder"), capsys=capsys)
    assert tree["algorithm"] == {"gamma": 0.5, "tau": 0.1}


def test_interpolations_are_resolved(tmp_path: Path, capsys: Any) -> None:
    tree, _ = imported(tmp_path, SAC, capsys=capsys)
    assert key(tree, "env.eval.total_num_envs") == 40


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${oc.env:ZMQRL_NOT_SET}", "environment variable ZMQRL_NOT_SET is not set"),
        ("${algorithm.nowhere}", "refers to a key that is not there"),
        ("${multiply:2,3}", "needs the resolver 'multiply'"),
        ("???", "has no value yet"),
        ("null", "not set"),
    ],
)
def test_a_key_without_a_value_is_left_out(tmp_path: Path, capsys: Any, value: str, reason: str) -> None:
    quoted = value if value == "null" else f'"{value}"'
    tree, report = imported(tmp_path, f"runner: {{max_epochs: {quoted}, max_steps: 3}}", capsys=capsys)
    assert tree == {"runner": {"max_steps": 3}}
    assert f"{reason}" in report
    assert "runner.max_epochs" in report


@pytest.mark.parametrize(
    ("placement", "ranks"),
    [
        ("env: 0-3", "0-3"),
        ("env: 5", "0"),
        ("env: 1:0-1", "0-1"),
        ("env: 0-3:0-7", "0-7"),
        ("env: '0-1:0-3,3-5,7-10:7-14'", "0-14"),
        ("env: all:0-2", "0-2"),
        ("'actor, env,rollout': 0-1", "0-1"),
        ("env: {node_group: arms, placement: 0-1:0-4}", "0-4"),
    ],
)
def test_a_placement_becomes_a_number_of_workers(
    tmp_path: Path, capsys: Any, placement: str, ranks: str
) -> None:
    tree, _ = imported(tmp_path, f"cluster: {{component_placement: {{{placement}}}}}", capsys=capsys)
    assert key(tree, "cluster.component_placement.env") == ranks


def test_a_placement_that_depends_on_the_machines_is_left_to_the_user(
    tmp_path: Path, capsys: Any
) -> None:
    text = "cluster: {component_placement: {'env,rollout': all}}\nenv: {train: {total_num_envs: 4}}\n"
    tree, report = imported(tmp_path, text, capsys=capsys)
    assert key(tree, "cluster.component_placement.rollout") is None
    assert "all: depends on the machines" in report
    assert "cluster.component_placement.env: how many; RLinf says all" in report


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("{type: constant, delay: 1}", {"type": "constant", "delay": 1}),
        ("{type: Uniform, min_delay: 1, max_delay: 2}", {"type": "uniform", "low": 1, "high": 2}),
        ("{type: exponential, rate: 4}", {"type": "exponential", "mean": 0.25}),
        ("{type: gaussian, mean: 1, stddev: 2}", {"type": "gaussian", "mean": 1, "std": 2}),
        ("{type: constant, delay: 1, rate: 4}", {"type": "constant", "delay": 1}),
    ],
)
def test_delays_keep_their_distribution(
    tmp_path: Path, capsys: Any, theirs: str, ours: dict[str, Any]
) -> None:
    tree, _ = imported(tmp_path, f"env: {{delay_sampler: {theirs}}}", capsys=capsys)
    assert key(tree, "env.delay_sampler") == ours


def test_links_keep_their_keys(tmp_path: Path, capsys: Any) -> None:
    links = {
        "enabled": True,
        "crossdc_pairs": [{"src": ["Env:0"], "dst": ["Rollout:0", "Actor:0"], "delay_ms": 10}],
        "bandwidth_groups": [{"members": ["Env:0"], "bandwidth_mbps": 1000}],
    }
    text = yaml.safe_dump({"cluster": {"net_emulation": {**links, "proxy": {"node_rank": 0}}}})
    tree, report = imported(tmp_path, text, capsys=capsys)
    assert key(tree, "cluster.net_emulation") == links
    assert "cluster.net_emulation.proxy.node_rank" in report


def test_ppo_is_known_by_its_losses(tmp_path: Path, capsys: Any) -> None:
    text = """
    algorithm:
      {adv_type: gae, loss_type: actor_critic, clip_ratio_high: 0.3, clip_ratio_low: 0.3,
       gae_lambda: 0.9, entropy_bonus: 0.01, normalize_advantages: false, eval_rollout_epoch: 2}
    """
    tree, _ = imported(tmp_path, text, capsys=capsys)
    assert tree["algorithm"] == {
        "name": "ppo",
        "gae_lambda": 0.9,
        "clip_ratio": 0.3,
        "entropy_bonus": 0.01,
        "normalize_advantages": False,
    }
    assert key(tree, "env.eval.rollout_epoch") == 2


def test_an_algorithm_that_we_do_not_have_is_left_to_the_user(tmp_path: Path, capsys: Any) -> None:
    tree, report = imported(
        tmp_path,
        "algorithm: {adv_type: grpo, loss_type: actor, clip_ratio_high: 0.3, clip_ratio_low: 0.2}",
        capsys=capsys,
    )
    assert tree == {}
    for words in ("grpo: no such algorithm", "clip_ratio is one bound", "algorithm.name"):
        assert words in report


def test_a_simulators_id_is_written_with_a_word_on_its_package(tmp_path: Path, capsys: Any) -> None:
    with_defaults(tmp_path)
    tree, report = imported(tmp_path, SAC, capsys=capsys)
    assert key(tree, "env.id") == "Reach-v1"
    assert "package of Reach-v1 (RLinf: maniskill)" in report
    assert "# " in (tmp_path / "ours.yaml").read_text()
    assert "package of Reach-v1" in (tmp_path / "ours.yaml").read_text()


def test_what_only_rlinf_can_read_is_left_out(tmp_path: Path, capsys: Any) -> None:
    text = "runner: {ckpt_path: /a.pt, max_steps: 3}\nreward: {use_reward_model: true, model: {a: 1}}\n"
    tree, report = imported(tmp_path, text, capsys=capsys)
    assert tree == {"runner": {"max_steps": 3}}
    assert "a checkpoint of RLinf" in report
    assert "reward.model and reward.use_reward_model: the reward model" in report


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ["not valid YAML"]),
        ("- a", ["must hold sections"]),
        ("3", ["must hold sections"]),
        ("a: !!python/object/apply:os.getcwd []", ["not valid YAML"]),
        ('a: "${b}"\nb: "${a}"', ["a: ", "leads back to itself"]),
        ('a: {b: "${a}"}', ["a.b", "leads back to itself"]),
        ('a: "${b"', ["a: "]),
        ("defaults: [theirs]", ["defaults", "leads back"]),
        ("runner: {max_epochs: many}", ["runner.max_epochs", "integer", "many"]),
        ("runner: {max_epochs: a, max_steps: b}", ["runner.max_epochs", "runner.max_steps"]),
        ("rollout: {pipeline_stage_num: two}", ["rollout.pipeline_stage_num", "two"]),
        ("env: {delay_sampler: {type: uniform, min_delay: a, max_delay: 1}}", ["sampler.min_delay"]),
        ("env: {delay_sampler: {type: exponential, rate: 0}}", ["env.delay_sampler.rate"]),
        ("env: {train: {init_params: {id: 3}}}", ["env.train.init_params.id"]),
        ("env: 3", ["env", "3"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_file_and_key(
    tmp_path: Path, capsys: Any, text: str, words: list[str]
) -> None:
    error = refused(tmp_path, text, capsys)
    for word in ["theirs.yaml", *words]:
        assert word in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        (["a.yaml", "--config-dir", "nowhere"], "--config-dir nowhere"),
        (["a.yaml", "--output", "a.yaml"], "is the file that is imported"),
        (["a.yaml", "--output", "nowhere/b.yaml"], "cannot write --output"),
    ],
)
def test_a_path_that_will_not_do_is_named(
    tmp_path: Path, capsys: Any, monkeypatch: Any, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("runner: {max_steps: 3}\n")
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "a.yaml").read_text() == "runner: {max_steps: 3}\n"


def test_a_missing_omegaconf_is_said_with_the_way_to_get_it(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    monkeypatch.delitem(sys.modules, "zmqrl.rlinf.hydra", raising=False)
    monkeypatch.delattr("zmqrl.rlinf.hydra", raising=False)
    assert main(["a.yaml"]) == 1
    assert "zmqrl[rlinf]" in capsys.readouterr().err
