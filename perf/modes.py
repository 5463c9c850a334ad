"""Decoupled against normal mode under a long tail of step times: env steps/s and their ratio.

The two runs of a round differ in `runner.enable_decoupled_mode` alone; 5 % of the steps of each env
worker take a second longer.

    .venv/bin/python perf/modes.py [--rounds N] [--json FILE] [key=value ...]
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

ROOT = Path(__file__).resolve().parent.parent
TAIL = "env.delay_sampler={type: tail, base: 0.01, probability: 0.05, extra: 1.0}"


def evaluate(decoupled: bool, overrides: list[str], folder: Path) -> dict[str, Any]:
    """The metrics of one evaluation."""
    result = folder / "result.json"
    command = [
        *(sys.executable, "-m", "zmqrl", "evaluate"),
        f"--config={ROOT / 'config/fetch_reach_eval.yaml'}",
        f"--json={result}",
        f"runner.enable_decoupled_mode={str(decoupled).lower()}",
        f"runner.logger.log_path={folder}",
        "env.eval.rollout_epoch=1",
        TAIL,
        *overrides,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout)
    metrics: dict[str, Any] = json.loads(result.read_text())
    return metrics


def main() -> None:
    """Measure, print a line a round, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    rows, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            speed = {}
            for decoupled in (True, False):
                metrics = evaluate(decoupled, options.overrides, Path(folder))
                case = "decoupled" if decoupled else "normal"
                speed[case] = metrics["env_steps_per_s"]
                rows.append(
                    {"case": case, "round": number, "env_steps_per_s": speed[case]}
                    | {key: metrics[key] for key in ("eval/success_once", "bottleneck", "wall_s")}
                )
            ratios.append(speed["decoupled"] / speed["normal"])
            print(
                f"decoupled {speed['decoupled']:.0f} env steps/s, normal {speed['normal']:.0f}: "
                f"{ratios[-1]:.2f} times as fast",
                flush=True,
            )
    print(f"median of {options.rounds}: {statistics.median(ratios):.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
