"""Whole evaluations with policies of other libraries, as docs/policies.md shows them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

LENGTH = 150


class Balancer(torch.nn.Module):
    """Balances CartPole; `damping` is its only weight."""

    def __init__(self) -> None:
        super().__init__()
        self.damping = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (observation[:, -2] + self.damping * observation[:, -1] > 0).long()


OF_TORCHRL = """
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import OneHot
from torchrl.modules import OneHotCategorical, ProbabilisticActor


class Net(torch.nn.Module):
    def forward(self, observation):
        lean = 1000 * (observation[:, -2] + 0.5 * observation[:, -1])
        return torch.stack([-lean, lean], 1)


def make():
    net = TensorDictModule(Net(), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=OneHotCategorical, spec=OneHot(2)
    )
"""

OF_HUGGING_FACE = """
import torch
from zmqrl.policies import ActionModel


class Policy(torch.nn.Module):
    def reset(self):
        self.queue = []

    def select_action(self, batch):
        if not self.queue:
            state = batch["observation.state"]
            self.queue = 8 * [(state[:, -2] + 0.5 * state[:, -1] > 0).long()]
        return self.queue.pop()


def make():
    return ActionModel(Policy())
"""


def evaluate(folder: Path, *words: str) -> dict[str, float]:
    """The results of CartPole, which falls at once unless each row gets the action of its own."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "zmqrl", "evaluate", f"--json={folder / 'result.json'}", *words),
            *("env.id=CartPole-v1", f"runner.logger.log_path={folder}", "rollout.device=cpu"),
            f"env.eval={{total_num_envs: 5, rollout_epoch: 1, max_episode_steps: {LENGTH}}}",
            "cluster.component_placement={env: 0-1, rollout: '0'}",
            "runner.enable_decoupled_mode=true",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, float] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("torchscript", marks=pytest.mark.slow),
        "exported",
        pytest.param("static", marks=pytest.mark.slow),
        pytest.param("torchrl", marks=pytest.mark.slow),
        pytest.param("hugging_face", marks=pytest.mark.slow),
    ],
)
def test_a_policy_of_another_library_balances_the_pole(folder: Path, kind: str) -> None:
    path, words = folder / "policy.pt", []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own future
        if kind == "torchscript":
            torch.jit.save(torch.jit.script(Balancer()), path)
            words = ["--policy=zmqrl.policies:torchscript", f"path={path}"]
        elif kind in ("exported", "static"):
            path = path.with_suffix(".pt2")
            shapes = ({0: torch.export.Dim("rows")},) if kind == "exported" else None
            program = torch.export.export(Balancer(), (torch.zeros(3, 4),), dynamic_shapes=shapes)
            torch.export.save(program, path)
            words = ["--policy=zmqrl.policies:exported", f"path={path}"]
            words += ["rollout.static_batch_sizes=[3]"] if kind == "static" else []
        else:
            if kind == "torchrl":
                pytest.importorskip("torchrl")
            source = folder / "own.py"
            source.write_text(OF_TORCHRL if kind == "torchrl" else OF_HUGGING_FACE)
            words = [f"--policy={source}:make"]
    result = evaluate(folder, *words)
    assert result["eval/num_trajectories"] == 5
    assert result["eval/episode_len"] == LENGTH


@pytest.mark.slow
def test_a_saved_model_of_stable_baselines3_plays_whole_episodes(folder: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sb3.PPO("MlpPolicy", "CartPole-v1", seed=0, device="cpu").save(folder / "model.zip")
    policy = ("--policy=zmqrl.policies:stable_baselines3", f"path={folder / 'model.zip'}")
    result = evaluate(folder, *policy, "algorithm=PPO")
    assert result["eval/num_trajectories"] == 5
    assert 8 <= result["eval/episode_len"] <= LENGTH
