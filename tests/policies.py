"""Policies of the tests: real ones, small, without torch so that their workers start quickly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


class Echo:
    """Returns the observation's `x`, plus the mode of each row; takes `seconds` a call.

    Marked rows (in `command`) make it misbehave.
    """

    def __init__(self, seconds: float = 0.0, version: int = 7) -> None:
        self.seconds = seconds
        self.version = version

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray) -> dict[str, Any]:
        x = observation["x"]
        if self.seconds:
            time.sleep(self.seconds)
        for command in observation.get("command", []):
            if command == "raise":
                raise RuntimeError("this row is marked")
            if command == "wrong rows":
                return {"actions": x[:-1]}
            if command == "object array":
                return {"actions": np.array([None] * len(x))}
            if command == "strided":
                # Twice the size of a large array, and no two of its numbers beside each other.
                return {"actions": np.asfortranarray(np.repeat(x, 4000, axis=1))[::-1, ::2]}
            if command.startswith("sleep "):
                time.sleep(float(command.split()[1]))
        return {"actions": x, "eval": eval_mask.copy(), "rows": np.full(len(x), len(x))}


class Static(Echo):
    """Writes every result into the same array, as a policy with static buffers does."""

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray) -> dict[str, Any]:
        if not hasattr(self, "_out"):
            self._out = np.empty((64, 64 * 1024), np.float32)
        out = self._out[: len(observation["x"])]
        out[:] = observation["x"][:, :1]
        return {"actions": out}


class Keeping(Echo):
    """Keeps its last observations, having changed them, and tells whether they are what it made them."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray) -> dict[str, Any]:
        x = observation["x"]
        intact = all((kept[:, ::1024] == sample).all() for kept, sample in self._kept)
        answer = {"actions": x[:, :1].copy(), "intact": np.full(len(x), intact)}
        x += 1
        self._kept.append((x, x[:, ::1024].copy()))
        del self._kept[:-5]
        return answer


class Mirror:
    """Returns the whole observation."""

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray) -> dict[str, Any]:
        return {**observation, "actions": eval_mask.copy()}


class InPlace:
    """Adds one to the observation's `x` where it stands, and returns it.

    Its process ends in the middle of that, once, if the file `once` is not there, which it makes then.
    """

    def __init__(self, once: str = "") -> None:
        self._once = once

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray) -> np.ndarray:
        observation["x"] += 1
        if self._once and not Path(self._once).exists():
            Path(self._once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return observation["x"]


class Touching(Echo):
    """Creates a file when a call begins, so that a test knows when that is."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__(seconds)
        self.path = Path(path)

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray) -> dict[str, Any]:
        self.path.touch()
        return super().infer(observation, eval_mask)


def raises_at_once(**kwargs: Any) -> None:
    raise FileNotFoundError("no weights at model.pt")


class Balance:
    """Chooses between two actions by the observation; balances CartPole with `damping` 0.5.

    Without damping it falls sooner or later; when depends on the start state alone.
    """

    def __init__(self, damping: float = 0.5) -> None:
        self.damping = damping

    def infer(self, observation: np.ndarray, eval_mask: np.ndarray) -> np.ndarray:
        lean = observation[:, -2] + self.damping * observation[:, -1]
        return (lean > 0).astype(np.int64)


class Constant:
    """Always chooses the same action."""

    def __init__(self, action: int) -> None:
        self.action = action

    def infer(self, observation: np.ndarray, eval_mask: np.ndarray) -> np.ndarray:
        return np.full(len(observation), self.action)


class HangsOnce(Balance):
    """Hangs in its tenth call, unless the file `once` is there, which it makes then."""

    def __init__(self, once: str) -> None:
        super().__init__()
        self._once, self._calls = Path(once), 0

    def infer(self, observation: np.ndarray, eval_mask: np.ndarray) -> np.ndarray:
        self._calls += 1
        if self._calls == 10 and not self._once.exists():
            self._once.touch()
            time.sleep(600)
        return super().infer(observation, eval_mask)


class Silent(Balance):
    """Takes weights, and tells nothing but its actions."""

    def load_state_dict(self, weights: dict[str, np.ndarray]) -> None:
        pass


class Biased:
    """Answers with its bias, which the tests publish as the version of the weights.

    A call takes `seconds`. Before weights are loaded the answer is -1.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.bias = np.array(-1.0)

    def load_state_dict(self, weights: dict[str, np.ndarray]) -> None:
        self.bias = weights["bias"].copy()

    def infer(self, observation: dict[str, Any], eval_mask: np.ndarray) -> dict[str, Any]:
        time.sleep(self.seconds)
        rows = len(observation["x"])
        return {"actions": np.full(rows, self.bias), "rows": np.full(rows, rows)}


class Judge:
    """A reward model whose rewards tell what it was asked about; a call takes `seconds`.

    The numbers are below 2^24, so that a float32 holds them all. `touch` names a file that is created
    when a call begins.
    """

    def __init__(self, seconds: float = 0.0, wrong_shape: bool = False, touch: str = "") -> None:
        self.seconds = seconds
        self.wrong_shape = wrong_shape
        self.touch = touch

    def infer(self, transitions: dict[str, Any], eval_mask: np.ndarray) -> np.ndarray:
        if self.touch:
            Path(self.touch).touch()
        time.sleep(self.seconds)
        rewards = judged(
            transitions["observation"],
            transitions["actions"],
            transitions["next_observation"],
            transitions["terminated"],
            transitions["truncated"],
        )
        return np.repeat(rewards[:, None], 2, 1) if self.wrong_shape else rewards


def judges_lines(hang_once: str = "", seconds: float = 600) -> Any:
    """A reward model for `training_sims.Line`: the reward of a step is its action.

    The first call takes `seconds` if `hang_once` names a file that is not there, which it makes then.
    """

    def judge(transitions: dict[str, Any]) -> Any:
        if hang_once and not Path(hang_once).exists():
            Path(hang_once).touch()
            time.sleep(seconds)
        return transitions["actions"][:, 0]

    return judge


def judged(
    observation: Any, actions: Any, next_observation: Any, terminated: Any, truncated: Any
) -> np.ndarray:
    """What `Judge` says of transitions `[..., N]` of `sims.Counter`."""
    steps = observation[..., 0] + 100 * next_observation[..., 0]
    rewards: np.ndarray = steps + 10_000 * actions + 100_000 * terminated + 1_000_000 * truncated
    return rewards


def biased_module(width: int = 3) -> Any:
    """The same as a torch module, with parameters and buffers of several kinds."""
    import torch

    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.full((width,), -1.0, dtype=torch.bfloat16))
            self.norm = torch.nn.BatchNorm1d(width)

        def forward(self, observation: dict[str, Any]) -> dict[str, Any]:
            zeros = torch.zeros(len(observation["x"]), 1)
            return {
                "actions": zeros + self.bias,
                "batches": zeros + self.norm.num_batches_tracked,
                "mean": zeros + self.norm.running_mean,
            }

    return Biased()


class Noop:
    """The first discrete action in every row, or `size` zeros, whatever it sees."""

    def __init__(self, size: int = 0) -> None:
        self.size = size

    def infer(self, observation: Any, eval_mask: np.ndarray) -> np.ndarray:
        rows = len(eval_mask)
        return np.zeros((rows, self.size), np.float32) if self.size else np.zeros(rows, np.int64)


class Counting:
    """Has a memory: counts the steps of each row's episode, and plays a queue of actions.

    Every `chunk` steps it plans: the actions of a plan are `x`, 2 `x`, 3 `x`, … of the observation that
    it was made from, in integers. `counts` tells how often each state has advanced. A marked row (in
    `command`) makes it raise, after it has written into its state.
    """

    def __init__(self, chunk: int = 3, seconds: float = 0.0, width: int = 1, touch: str = "") -> None:
        self.chunk, self.seconds, self.width, self.touch = chunk, seconds, width, touch

    def initial_state(self, rows: int) -> dict[str, np.ndarray]:
        return {
            "count": np.zeros(rows, np.int64),
            "queue": np.zeros((rows, self.chunk, self.width), np.int64),
        }

    def infer(
        self,
        observation: dict[str, Any],
        eval_mask: np.ndarray,
        valid_mask: np.ndarray,
        state: dict[str, np.ndarray],
    ) -> Any:
        if self.touch:
            Path(self.touch).touch()
        time.sleep(self.seconds)
        count, queue = state["count"], state["queue"]
        place = count % self.chunk
        plan = place == 0
        factors = np.arange(1, self.chunk + 1)[:, None]
        queue[plan] = observation["x"][plan, None, :1].astype(np.int64) * factors
        rows = np.arange(len(count))
        actions = queue[rows, place]
        count += 1
        if "raise" in observation.get("command", []):
            raise RuntimeError("this row is marked")
        output = {"actions": actions, "counts": count.copy(), "eval": eval_mask, "valid": valid_mask}
        return output, state


class Remembers:
    """Has a memory: knows how often each env was stepped, which `sims.Counter` shows as well.

    It raises where the two differ: then states, or the news of resets, went astray. A call takes
    `seconds`.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def initial_state(self, rows: int) -> np.ndarray:
        return np.zeros(rows, np.int64)

    def infer(self, observation: np.ndarray, eval_mask: np.ndarray, state: np.ndarray) -> Any:
        time.sleep(self.seconds)
        if (observation[:, 0] != state).any():
            raise RuntimeError(f"the envs were stepped {observation[:, 0]} times, I know of {state}")
        return np.zeros(len(state), np.int64), state + 1


def planning_network(chunk: int = 3) -> Any:
    """Has a memory: a queue of `chunk` actions, which a network plans whenever it is empty."""
    import torch

    class Planner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2 * chunk)
            )

        def initial_state(self, rows: int) -> Any:
            return torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, chunk, 2)

        def forward(self, observation: dict[str, Any], state: Any) -> Any:
            place, queue = state
            plan = self.net(observation["x"]).unflatten(1, (chunk, 2))
            queue = torch.where((place == 0)[:, None, None], plan, queue)
            action = queue[torch.arange(len(place)), place]
            return {"actions": action}, ((place + 1) % chunk, queue)

    return Planner()


class Continues:
    """Has a memory: the last observation of each env of CartPole, whose next place follows from it."""

    def initial_state(self, rows: int) -> np.ndarray:
        return np.full((rows, 4), np.nan, np.float32)

    def infer(self, observation: np.ndarray, eval_mask: np.ndarray, state: np.ndarray) -> Any:
        begins = np.isnan(state[:, 0])
        expected = np.where(begins, 0, state[:, 0] + 0.02 * state[:, 1])
        if (np.abs(observation[:, 0] - expected) > np.where(begins, 0.05, 1e-5)).any():
            raise RuntimeError("this is another env, or another episode")
        return np.ones(len(state), np.int64), observation.copy()
