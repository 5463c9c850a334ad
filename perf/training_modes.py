"""Trains the same thing in both modes, with simulators that are slow now and then, and compares.

.venv/bin/python perf/training_modes.py [--picture docs/training_modes.png]

Eight simulators, one to each env worker; a step in twenty takes a second longer. Both runs keep to the
same ratio of updates to env steps, so what differs is how fast env steps come in. Each run ends when 100
fixed episodes succeed; the learner must not be what limits either of them (gate wait below 10 %).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zmqrl.telemetry import curve

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "config" / "fetch_reach_sac_decoupled.yaml"
OVERRIDES = [
    "env.train.total_num_envs=8",
    "env.train.delay_sampler={type: tail, base: 0.0, probability: 0.05, extra: 1.0}",
    "algorithm.updates_per_env_step=0.25",
    "algorithm.ratio_slack_steps=2048",
    "runner.val_check_interval=16",
    "runner.stop_patience=1",
    "runner.max_env_steps=40000",
]
COLOURS = {"decoupled": "#0072B2", "normal": "#D55E00"}


def train(folder: Path, mode: str) -> dict[str, Any]:
    """One run; its last metrics, and the records of its course."""
    result = folder / f"{mode}.json"
    command = [sys.executable, "-m", "zmqrl", "train", "--config", str(CONFIG), "--json", str(result)]
    decoupled = f"runner.enable_decoupled_mode={str(mode == 'decoupled').lower()}"
    logger = f"runner.logger={{log_path: {folder}, experiment_name: {mode}}}"
    with (folder / f"{mode}.txt").open("w") as output:
        subprocess.run(
            [*command, decoupled, logger, *OVERRIDES], stdout=output, stderr=output, check=True
        )
    records = curve.read(folder / mode / "metrics.jsonl")
    return {**json.loads(result.read_text()), "records": records}


def summary(run: dict[str, Any]) -> dict[str, float]:
    """Env steps/s while stepping, seconds to success, and the share of time at the learner's gate."""
    training = [r for r in run["records"] if "eval/number" not in r and r["env_steps"] > 0]
    first, last = training[0], training[-2]
    parts = ("time/env/step", "time/env/wait", "time/env/gate_wait")
    # The median over windows of some seconds: the first ones wait for the learner to come up.
    gate = statistics.median(r[parts[2]] / sum(r[part] for part in parts) for r in training)
    reached = [r for r in run["records"] if (r.get("eval/success_at_end") or 0) >= 0.95]
    return {
        "env_steps_per_s": (last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"]),
        "seconds_to_success": reached[0]["wall_s"] if reached else float("nan"),
        "env_steps_to_success": reached[0]["env_steps"] if reached else float("nan"),
        "gate_wait_share": gate,
    }


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Success over time, and env steps over time."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    success, steps = figure.subplots(1, 2)
    for mode, run in runs.items():
        records = run["records"]
        evaluations = [r for r in records if "eval/success_at_end" in r]
        training = [r for r in records if "eval/number" not in r]
        colour = COLOURS[mode]
        minutes = [r["wall_s"] / 60 for r in evaluations]
        rates = [100 * r["eval/success_at_end"] for r in evaluations]
        success.plot(minutes, rates, "o-", color=colour, label=mode, markersize=4)
        steps.plot(
            [r["wall_s"] / 60 for r in training],
            [r["env_steps"] for r in training],
            color=colour,
            label=mode,
        )
    success.set(xlabel="minutes", ylabel="success at the end of 100 episodes (%)", ylim=(-3, 103))
    steps.set(xlabel="minutes", ylabel="env steps")
    for axes in (success, steps):
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    success.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, help="where to draw")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zmqrl-perf-") as folder:
        runs = {mode: train(Path(folder), mode) for mode in ("decoupled", "normal")}
    for mode, run in runs.items():
        print(mode, {key: round(value, 2) for key, value in summary(run).items()})
    fast, slow = summary(runs["decoupled"]), summary(runs["normal"])
    pace = fast["env_steps_per_s"] / slow["env_steps_per_s"]
    time = slow["seconds_to_success"] / fast["seconds_to_success"]
    print(f"env steps/s, decoupled : normal = {pace:.2f}")
    print(f"seconds to success, normal : decoupled = {time:.2f}")
    if options.picture is not None:
        draw(runs, options.picture)


if __name__ == "__main__":
    main()
