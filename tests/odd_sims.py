"""Simulators with unusual spaces, infos and values, and some that break Gymnasium's rules on purpose."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class Odd(gymnasium.Env[dict[str, Any], dict[str, Any]]):
    """Keeps the rules until its action `move` is 2, and then does what `what` says."""

    observation_space = spaces.Dict(
        {"x": spaces.Box(-1, 1, (3,), np.float32), "sub": spaces.Dict({"y": spaces.Discrete(4)})}
    )
    action_space = spaces.Dict({"move": spaces.Discrete(3), "grip": spaces.Box(-1, 1, (2,), np.float32)})

    def __init__(self, what: str = "") -> None:
        self.what = what
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        if self.what == "incomplete reset":
            return {"x": np.zeros(3, np.float32)}, {}
        return _shown(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        observation, info = _shown(), {}
        reward: Any = 1.0
        if action["move"] == 2:
            match self.what:
                case "missing key":
                    del observation["sub"]["y"]
                case "wider":
                    observation["x"] = np.zeros(4, np.float32)
                case "would be stretched":
                    observation["x"] = np.zeros(1, np.float32)
                case "fraction":
                    observation["sub"]["y"] = 1.5
                case "out of range":
                    observation["x"][1] = 3
                case "two rewards":
                    reward = [1.0, 2.0]
                case "no info":
                    info = None  # type: ignore[assignment]
                case "four values":
                    return observation, reward, False, info
                case "exits":
                    sys.exit(3)
                case "no number":
                    return observation, reward, float("nan"), False, info
                case "says nothing":
                    raise Unspeakable
                case "ragged":
                    observation["x"] = [np.zeros(2), np.zeros(1)]
                case "raises":
                    raise ArithmeticError("it\nexploded")
        return observation, reward, self.count >= 5, False, info


class Unspeakable(Exception):
    """Cannot be told in words."""

    def __str__(self) -> str:
        raise ValueError("no words")


def _shown() -> dict[str, Any]:
    return {"x": np.zeros(3, np.float32), "sub": {"y": np.int64(1)}}


def odd(what: str = "") -> Odd:
    return Odd(what)


class Scattered(gymnasium.Env[Any, Any]):
    """Has a space that cannot be batched, in the observation or the action `where`."""

    def __init__(self, where: str, kind: str) -> None:
        number = spaces.Box(-1, 1, (2,), np.float32)
        scattered = {
            "graph": spaces.Graph(number, None),
            "sequence": spaces.Sequence(number),
            "one of": spaces.OneOf([number, spaces.Discrete(2)]),
        }[kind]
        within = spaces.Dict({"a": spaces.Tuple([number, scattered])})
        self.observation_space = within if where == "observation" else number
        self.action_space = within if where == "action" else number


class Mission(spaces.Space[str]):
    """A space of its own, as MiniGrid's missions are."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mission)

    __hash__ = None  # type: ignore[assignment]


class OnAMission(gymnasium.Env[dict[str, Any], int]):
    """Tells its step in text of a space of its own."""

    observation_space = spaces.Dict(
        {"mission": Mission(), "image": spaces.Box(0, 255, (4, 4), np.uint8)}
    )
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self._shown(), {}

    def step(self, action: int) -> Any:
        self.count += 1
        return self._shown(), 0.0, self.count == 2, False, {}

    def _shown(self) -> dict[str, Any]:
        return {"mission": f"step {self.count}", "image": np.full((4, 4), self.count, np.uint8)}


class Rewards(gymnasium.Env[np.ndarray, np.ndarray]):
    """Ends after two steps; its rewards and flags are what `form` says."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, form: str) -> None:
        self.form = form
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        over = self.count == 2
        return np.zeros(1, np.float32), self._as(1), self._as(over), self._as(False), {}

    def _as(self, value: Any) -> Any:
        match self.form:
            case "bool":
                return bool(value)
            case "int":
                return int(value)
            case "float32":
                return np.float32(value)
            case "numpy bool":
                return np.bool_(value)
            case "column":
                return np.array([value])
            case "list":
                return [value]
            case _:
                import torch

                return torch.tensor([value]) if self.form == "tensor column" else torch.tensor(value)


class Told(gymnasium.Env[np.ndarray, np.ndarray]):
    """Tells of each step in its infos; without `key` from step `silent_at` on (0: already in the reset).

    Episodes have `length` steps. The observation is a dict if `keyed`. One that is `rambling` tells
    more: arrays of another size, and things of another type, each time.
    """

    told = 0

    action_space = spaces.Discrete(2)

    def __init__(
        self, length: int = 3, silent_at: int = -1, keyed: bool = False, rambling: bool = False
    ) -> None:
        self.length, self.silent_at, self.keyed = length, silent_at, keyed
        self.rambling = rambling
        self.count, self.episode = 0, -1
        box = spaces.Box(-1e9, 1e9, (1,), np.float32)
        self.observation_space = spaces.Dict({"count": box}) if keyed else box

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        self.episode += 1
        return self._shown()

    def step(self, action: Any) -> Any:
        self.count += 1
        observation, info = self._shown()
        return observation, 1.0, self.count == self.length, False, info

    def _shown(self) -> Any:
        number = 100 * self.episode + self.count
        count = np.array([number], np.float32)
        info = {
            "number": number,
            "pose": np.array([number, -number], np.float64),
            "said": f"at {number}",
            "deep": {"flag": np.bool_(number % 2), "word": f"deep {number}"},
        }
        if self.count == self.silent_at:
            del info["number"]
        if self.rambling:
            Told.told += 1
            info["contacts"] = np.zeros(Told.told)
            info["kind"] = [1, "two", None][Told.told % 3]
        return ({"count": count} if self.keyed else count), info


class Painter(gymnasium.Env[np.ndarray, int]):
    """Renders its steps: a picture that gets redder, and blue in other rows than the first made."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 10, render_mode: str | None = None, broken: bool = False) -> None:
        self.length, self.render_mode, self.broken = length, render_mode, broken
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        self.count += 1
        return np.zeros(2, np.float32), 1.0, self.count == self.length, False, {}

    def render(self) -> Any:
        if self.broken:
            raise OSError("no display")
        picture = np.zeros((64, 96, 3), np.uint8)
        picture[:, : 96 * self.count // self.length] = (200, 30, 30)
        return picture


class LongTail(gymnasium.Env[np.ndarray, np.ndarray]):
    """Episodes of 1 step mostly, and of up to 40 now and then; all by its own random numbers."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self) -> None:
        self.left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = min(int(self.np_random.pareto(1.0)) + 1, 40)
        return self.np_random.random(3), {"left": self.left}

    def step(self, action: Any) -> Any:
        self.left -= 1
        observation = self.np_random.random(3) + action.sum()
        truncated = bool(self.np_random.random() < 0.05)
        return observation, float(observation.sum()), self.left == 0, truncated, {"left": self.left}


class Asks(gymnasium.Env[dict[str, Any], Any]):
    """Shows an action that it wants, in every kind of space; the reward is 1 if it gets just that."""

    wanted_space = spaces.Dict(
        {
            "pick": spaces.Discrete(5, start=-2),
            "parts": spaces.Tuple(
                [
                    spaces.MultiDiscrete([3, 4]),
                    spaces.Dict({"bits": spaces.MultiBinary([2, 3]), "say": spaces.Text(8)}),
                ]
            ),
            "force": spaces.Box(-3, 3, (2, 2), np.float64),
            "level": spaces.Box(0, 255, (3,), np.uint8),
        }
    )
    observation_space = spaces.Dict(
        {
            "wanted": wanted_space,
            "image": spaces.Box(0, 255, (84, 84, 3), np.uint8),
            "task": spaces.Text(30),
            "nested": spaces.Tuple([spaces.Box(-1, 1, (), np.float16), spaces.Discrete(3, start=7)]),
        }
    )
    action_space = wanted_space

    def __init__(self) -> None:
        self.count = 0
        self.wanted: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        right = self.action_space.contains(action) and same(action, self.wanted)
        return self._shown(), float(right), self.count == 6, False, {"success": right}

    def _shown(self) -> Any:
        shown = self.observation_space.sample()
        self.wanted = shown["wanted"]
        return shown


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal bit for bit, tuples and lists alike."""
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, str):
        return bool(one == other)
    one, other = np.asarray(one), np.asarray(other)
    return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())


def gives_what_is_asked_for() -> Any:
    """A policy for `Asks`."""

    class Obedient:
        def infer(self, observation: Any, eval_mask: np.ndarray) -> Any:
            return {"actions": observation["wanted"]}

    return Obedient()


def moves(forgets: str = "", far: bool = False) -> Any:
    """A policy for `Odd`, which may forget a key of its actions, or `actions` itself, or go too far."""

    class Moves:
        def infer(self, observation: Any, eval_mask: np.ndarray) -> Any:
            rows = len(observation["x"])
            actions = {"move": np.full(rows, 2), "grip": np.zeros((rows, 2), np.float32)}
            if far:
                actions["grip"][-1, 1] = 2
            actions.pop(forgets, None)
            return {"action" if forgets == "actions" else "actions": actions}

    return Moves()
