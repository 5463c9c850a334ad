"""What the shared queue is for: env workers that do not all take equally long."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from faults.pool import Pool, wait_for

ABOUT = "Env steps per second of both modes, with env workers of uneven speed."

COLUMNS = (
    "case",
    "policy",
    "delay",
    "env_steps_per_s",
    "to_normal",
    "to_bound",
    "others_per_s",
    "others_to_bound",
    "others_kept",
    "ok",
)

ENVS = 16

PARTS = Path(__file__).resolve().parent / "uneven.py"

POLICIES = {
    "0.5 ms": {"base": 0.0005},
    "60 ms + 4 ms/row": {"base": 0.06, "per_row": 0.004},
}

CASES = {"normal": 2, "decoupled": 2, "bound": ENVS}
"""The rollout workers of each. In `bound` each env worker has one of its own, so none waits for another:
no scheduler can be faster, unless its batches are cheaper."""

UNDISTURBED = "undisturbed"
"""Beside those where one env worker falls behind: the same as `decoupled`, and none does."""

DELAYS = {
    "constant": "{type: constant, delay: 0.1}",
    "uniform": "{type: uniform, low: 0.1, high: 0.2}",
    "tail": "{type: tail, base: 0.1, probability: 0.05, extra: 1.0}",
    "slow": "{type: constant, delay: 0.1, per_worker: {0: 5.0}}",
    "stuck": "{type: constant, delay: 0.1, stall: {rank: 0, at_step: 20, seconds: 10}}",
}
"""Each but `uniform` differs from `constant` in one thing: 5 % of the steps take a second longer, or env
worker 0 is five times slower, or hangs for ten seconds."""

OTHERS = ("slow", "stuck")
"""Delays that befall env worker 0 alone; the other env workers are counted apart."""

_NOTHING_LOST = 0.9
"""What the others must keep. Their batches fill up by chance, so a twentieth more or less means nothing;
who waits for a slow env worker loses four tenths."""

_BEGUN = 5
_STUCK_AT = 20

STAGES = {"10 ms": {"base": 0.01}, "20 ms": {"base": 0.02}}
"""Policies for the comparison of `env.pipeline_stages`: 1 and 2."""

_STEP_S = 0.01


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=5, help="windows of each row (default 5)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each window, up to 8 (default 6)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*DELAYS, "stages"],
        default=[*DELAYS, "stages"],
        help="these delays; stages: 1 and 2 pipeline stages",
    )
    parser.add_argument(
        "--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="only these"
    )


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows: of each policy and delay the three cases, which run at the same time.

    All of them sleep nearly all the time, so they do not disturb each other, and what else the machine
    has to do disturbs them alike.
    """
    delays = [delay for delay in DELAYS if delay in options.only]
    for policy in options.policies if delays else ():
        with _pools(policy) as pools:
            for delay in delays:
                rates = _measure(pools, delay, options)
                yield from _rows(rates, policy, delay)
    if "stages" in options.only:
        for policy in STAGES:
            yield from _stages(policy, options)


# -- Rows


def _rows(rates: dict[str, np.ndarray], policy: str, delay: str) -> Iterator[dict[str, Any]]:
    """The rows of one delay.

    Args:
        rates: Of each case, env steps per second [rounds, env workers].
        policy: Its name.
        delay: Its name.
    """
    for case in CASES:
        row: dict[str, Any] = {"case": case, "policy": policy, "delay": delay}
        total = rates[case].sum(1)
        row["env_steps_per_s"] = float(np.median(total))
        for other in ("normal", "bound"):
            row[f"to_{other}"] = float(np.median(total / rates[other].sum(1)))
        if delay in OTHERS:
            others = rates[case][:, 1:].sum(1)
            row["others_per_s"] = float(np.median(others))
            row["others_to_bound"] = float(np.median(others / rates["bound"][:, 1:].sum(1)))
        if case == "decoupled":
            if delay in OTHERS:
                row["others_kept"] = float(np.median(others / rates[UNDISTURBED][:, 1:].sum(1)))
            row["ok"] = _is_ok(row)
        yield row


def _is_ok(row: dict[str, Any]) -> bool:
    return (
        (row["policy"] != "0.5 ms" or row["to_bound"] >= 0.95)
        and (row["delay"] != "tail" or row["to_normal"] >= 1.5)
        and row.get("others_kept", 1.0) >= _NOTHING_LOST
    )


def _stages(policy: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One env worker with two simulators, stepped as one group, and as two in turn."""
    with ExitStack() as stack:
        crowds = {}
        for stages in (1, 2):
            pool = _pool(stack, STAGES[policy], workers=2)
            overrides = [f"env.pipeline_stages={stages}", "env.train.total_num_envs=2"]
            crowds[stages] = Crowd(pool, 1, overrides, seconds=_STEP_S)
        for crowd in crowds.values():
            crowd.wait_for(20)
        rates = [_window(list(crowds.values()), options.seconds / 2) for _ in range(options.rounds)]
    ratios = [float(two.sum() / one.sum()) for one, two in rates]
    for place, stages in enumerate(crowds):
        yield {
            "case": f"{stages} stage{'s' if stages > 1 else ''}",
            "policy": policy,
            "delay": f"2 envs, {_STEP_S * 1000:.0f} ms each",
            "env_steps_per_s": statistics.median(float(one[place].sum()) for one in rates),
            "to_1_stage": statistics.median(ratios) if stages > 1 else 1.0,
        }


# -- The picture

_COLOURS = {"normal": "#D55E00", "decoupled": "#0072B2", "bound": "#BBBBBB"}

_LABELS = {
    "constant": "0.1 s",
    "uniform": "0.1 to 0.2 s",
    "tail": "0.1 s, 5 % of\nsteps 1.1 s",
    "slow": "0.1 s, one env\nworker 0.5 s",
    "stuck": "0.1 s, one env\nworker stuck",
}


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw env steps per second, by policy and delay, into `decoupled.png`."""
    policies = [policy for policy in POLICIES if any(row["policy"] == policy for row in rows)]
    if not policies:
        return
    from pictures import figure, save

    canvas, axes_of = figure(1, len(policies), width=5.2 * len(policies), height=4.2)
    all_axes = axes_of if len(policies) > 1 else [axes_of]
    for axes, policy in zip(all_axes, policies, strict=True):
        chosen = [row for row in rows if row["policy"] == policy]
        delays = [delay for delay in DELAYS if any(row["delay"] == delay for row in chosen)]
        for place, case in enumerate(CASES):
            rates = [row["env_steps_per_s"] for row in chosen if row["case"] == case]
            bars = axes.bar(
                [i + (place - 1) * 0.28 for i in range(len(rates))], rates, 0.26, color=_COLOURS[case]
            )
            bars.set_label(case)
            axes.bar_label(bars, fmt="%.0f", fontsize=7)
        axes.set_xticks(range(len(delays)), [_LABELS[delay] for delay in delays], fontsize=8)
        axes.set(title=f"policy: {policy} a batch", ylabel="env steps/s")
        axes.grid(visible=False, axis="x")
    canvas.legend(*axes.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
    canvas.suptitle(f"{ENVS} env workers, 2 rollout workers (bound: one for each env worker)")
    save(canvas, folder / "decoupled.png")


# -- Measuring


class Crowd:
    """Env workers of a pool, from its making to `close`.

    Args:
        pool: Whose broker they ask.
        count: How many.
        overrides: Of their configuration.
        seconds: Of a step of a simulator, besides the delay of its env worker.
    """

    def __init__(self, pool: Pool, count: int, overrides: list[str], seconds: float = 0.0) -> None:
        self._pool = pool
        file = pool.folder / "steps"
        file.write_bytes(bytes(8 * count))
        self._counters = np.memmap(file, np.uint64, "r")
        placement = f"cluster.component_placement.env=0-{count - 1}"
        factory = f"env.factory={PARTS}:counting"
        ranks = []
        for rank in range(count):
            kwargs = f"env.kwargs={{file: {file}, place: {rank}, seconds: {seconds}}}"
            ranks.append((rank, [*pool.overrides, placement, factory, kwargs, *overrides]))
        pool.launcher.start("crowd", [json.dumps(ranks)], program=[str(PARTS)])

    def steps(self) -> np.ndarray:
        """Steps so far of each env worker, float64."""
        return self._counters.astype(np.float64)

    def wait_for(self, steps: int, timeout: float = 60.0) -> None:
        """Wait until each env worker has made so many."""
        said = self._pool.lines
        wait_for(lambda: self.steps().min() >= steps, f"{steps} steps of each; {said}", timeout)

    def end(self) -> None:
        """Tell them to end."""
        self._pool.terminate("crowd")

    def close(self) -> None:
        """Wait for their end."""
        self._pool.wait_for_exit("crowd", 60.0)
        wait_for(lambda: not self._pool.status()["clients"], "the goodbye of all env workers")


def _pool(stack: ExitStack, kwargs: dict[str, float], workers: int = 2, decoupled: bool = True) -> Pool:
    """A broker and rollout workers, on sockets of their own."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zb-"))
    pool = Pool(Path(folder), PARTS, "Sleeping", **kwargs)
    stack.callback(pool.close)
    pool.start_broker(decoupled=decoupled)
    for rank in range(workers):
        pool.start_worker(rank, world_size=workers)
    return pool


@contextmanager
def _pools(policy: str) -> Iterator[dict[str, Pool]]:
    """The pools of all cases."""
    with ExitStack() as stack:
        pools = {}
        for case, workers in {**CASES, UNDISTURBED: CASES["decoupled"]}.items():
            pools[case] = _pool(
                stack, POLICIES[policy], workers, decoupled=case in ("decoupled", UNDISTURBED)
            )
        for case, pool in pools.items():
            pool.wait_for_workers(CASES.get(case, CASES["decoupled"]))
        yield pools


def _measure(pools: dict[str, Pool], delay: str, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Env steps per second under one delay, by case [rounds, env workers]."""
    rounds = []
    pools = {case: pool for case, pool in pools.items() if case in CASES or delay in OTHERS}
    if delay == "stuck":  # each window is within the ten seconds of a stall
        for _ in range(options.rounds):
            rounds += _windows(pools, delay, 1, options.seconds)
    else:
        rounds = _windows(pools, delay, options.rounds, options.seconds)
    return {case: np.stack([one[i] for one in rounds]) for i, case in enumerate(pools)}


def _windows(pools: dict[str, Pool], delay: str, count: int, seconds: float) -> list[list[np.ndarray]]:
    """Env workers of all pools come, are measured so many times, and go."""
    crowds = []
    for case, pool in pools.items():
        sampler = DELAYS["constant" if case == UNDISTURBED else delay]
        crowds.append(Crowd(pool, ENVS, [f"env.delay_sampler={sampler}"]))
    for crowd in crowds:
        crowd.wait_for(_STUCK_AT if delay == "stuck" else _BEGUN)
    windows = [_window(crowds, seconds) for _ in range(count)]
    for crowd in crowds:
        crowd.end()
    for crowd in crowds:
        crowd.close()
    return windows


def _window(crowds: list[Crowd], seconds: float) -> list[np.ndarray]:
    """Steps per second of each env worker of each crowd, over so many seconds."""
    begin = time.monotonic()
    before = [crowd.steps() for crowd in crowds]
    time.sleep(seconds)
    after = [crowd.steps() for crowd in crowds]
    spent = time.monotonic() - begin
    return [(now - then) / spent for now, then in zip(after, before, strict=True)]
