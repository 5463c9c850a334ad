"""Trajectories made by hand, and the spaces that they fit."""

from __future__ import annotations

import io

import numpy as np

from zmqrl.config import load
from zmqrl.recording.builder import TrajectoryBuilder
from zmqrl.spaces import ActionSpace, Spaces

BOX = ActionSpace("box", (2,), [-1.0, -0.5], [3.0, 0.5], text="Box([-1, -0.5], [3, 0.5])")
OPEN_BOX = ActionSpace("box", (2,), [-np.inf] * 2, [np.inf] * 2, text="Box(-inf, inf)")
DISCRETE = ActionSpace("discrete", n=3, text="Discrete(3)")


def spaces(action=BOX, width=3):
    return Spaces({"state": ((width,), "float64")}, action)


def config(name, *overrides):
    small = ("actor.model.hidden_sizes=[16, 16]", "actor.device=cpu", "actor.global_batch_size=32")
    return load(None, [f"algorithm.name={name}", *small, *overrides])


def trajectory(
    steps=4,
    rows=2,
    *,
    action=BOX,
    width=3,
    seed=0,
    terminated=(),
    truncated=(),
    invalid=(),
    observation=None,
    final=None,
    reward=None,
    log_prob=None,
):
    """A trajectory of random numbers.

    Args:
        steps, rows, action, width, seed: Its sizes, and what its numbers come from.
        terminated, truncated, invalid: (step, row) of the steps that are so.
        observation, final, reward, log_prob: Numbers to have everywhere, in place of random ones.
    """
    rng = np.random.default_rng(seed)
    marks = np.zeros((3, steps, rows), dtype=bool)
    for mark, places in zip(marks, (terminated, truncated, invalid), strict=True):
        for place in places:
            mark[place] = True

    def state(constant):
        drawn = rng.normal(size=(rows, width))
        return {"state": drawn if constant is None else np.full((rows, width), float(constant))}

    builder = TrajectoryBuilder(steps, origin="env-0")
    builder.observe(state(observation))
    for step in range(steps):
        builder.act(_reply(rng, action, rows, log_prob), version=step)
        rewards = rng.normal(size=rows) if reward is None else np.full(rows, float(reward))
        ends, cuts, resets = marks[:, step]
        builder.outcome(rewards, ends, cuts, state(final), ~resets)
        builder.observe(state(observation))
    (made,) = builder.take()
    return made


def copied(state):
    """A state of torch, as it comes back from a file."""
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one, other):
    """Whether two states have the same tensors."""
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def _reply(rng, action, rows, log_prob):
    if action.kind == "discrete":
        chosen = rng.integers(0, action.n, rows)
        drawn = np.full(rows, np.log(1 / action.n))
    else:
        chosen = rng.uniform(-0.5, 0.5, (rows, *action.shape)).astype(np.float32)
        drawn = rng.normal(-1.5, 0.1, rows)
    replied = drawn if log_prob is None else np.full(rows, log_prob)
    return {"actions": chosen, "prev_logprobs": replied.astype(np.float32)}
