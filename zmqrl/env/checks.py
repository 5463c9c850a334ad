"""A look at the configured simulator, without a pool: `--check-env`."""

from __future__ import annotations

import logging
import re
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space

from zmqrl.config import Config, Mode
from zmqrl.env import batched, observations
from zmqrl.env.adapters import ShardEnv, Step
from zmqrl.env.making import make_shard
from zmqrl.errors import EnvironmentFailure
from zmqrl.spaces import Spaces
from zmqrl.transport.rows import not_finite

_STEPS = 300
_SECONDS = 10.0
"""The look ends with the first of both."""

_ENOUGH_EPISODES = 3
"""Of each row."""


class EnvCheck:
    """What Gymnasium's checker finds, and what our own steps show.

    Args:
        config: The whole configuration.
        mode: Whose limits apply.
        say: Called with each finding, a line of text that begins with `ok`, `warning` or `error`.

    Attributes:
        errors: The number of findings that begin with `error`.
    """

    def __init__(self, config: Config, mode: Mode, say: Callable[[str], None]) -> None:
        self.errors = 0
        self._config = config
        self._mode: Mode = mode
        self._say = say

    def run(self) -> None:
        """Make the simulators, check them, and close them.

        Raises:
            ConfigError: The configuration is wrong.
        """
        try:
            self._ask_gymnasium()
            rows = self._config.stage_sizes(self._mode, 0)[0]
            shard = make_shard(self._config.env, self._mode, rows, lambda row: row)
            with self._warnings():
                try:
                    self._look_at(shard)
                finally:
                    shard.close()
        except EnvironmentFailure as error:
            self._error(str(error))

    def _ask_gymnasium(self) -> None:
        """Run Gymnasium's own checker on one simulator, in this process."""
        alone = self._config.env.model_copy(update={"vectorization": "sync"})
        shard = make_shard(alone, self._mode, 1, lambda row: None)
        try:
            if not isinstance(shard.vector_env, SyncVectorEnv):
                self._ok("Gymnasium's checker takes single envs; this one is batched")
                return
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                try:
                    env = shard.vector_env.envs[0].unwrapped
                    check_env(env, skip_render_check=True, skip_close_check=True)
                except (Exception, SystemExit) as error:
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    words = _plain(f"{type(error).__name__}: {error}") or where.line or where.name
                    self._error(f"Gymnasium's checker: {words}")
                else:
                    self._ok("Gymnasium's checker is content")
            for words in dict.fromkeys(_plain(str(warning.message)) for warning in found):
                self._warning(f"Gymnasium's checker: {words}")
        finally:
            shard.close()

    def _look_at(self, shard: ShardEnv) -> None:
        space = shard.policy_action_space
        count = f"{shard.num_envs} row{'' if shard.num_envs == 1 else 's'}"
        self._ok(
            f"{shard.name}: {count} in {type(shard.vector_env).__name__}, "
            f"autoreset mode {shard.autoreset_mode.value}"
        )
        begin = time.perf_counter()
        observation = shard.reset()
        self._ok(f"the first reset took {_seconds(time.perf_counter() - begin)}")
        for path, (shape, dtype) in Spaces.of(observation, space).observation.items():
            key = f"observation {path!r}" if path else "observation"
            self._ok(f"{key}: {dtype} {list(shape)}")
        self._ok(f"actions: {space}")
        self._step(shard)

    def _step(self, shard: ShardEnv) -> None:
        actions = batch_space(shard.policy_action_space, len(shard.rows))
        actions.seed(0)
        steps: list[Step] = []
        bad = ""
        episodes = 0
        until = time.perf_counter() + _SECONDS
        enough = _ENOUGH_EPISODES * len(shard.rows)
        while len(steps) < _STEPS and episodes < enough and time.perf_counter() < until:
            step = shard.step(actions.sample())
            bad = (
                bad
                or not_finite(step.observation, "the observation", step.rows)
                or not_finite(step.reward, "the reward", step.rows)
            )
            episodes += int((step.terminated | step.truncated).sum())
            steps.append(step)
        rewards = np.concatenate([s.reward[s.valid] for s in steps])
        self._ok(
            f"{len(rewards)} steps of random actions, {episodes} ends of episodes; rewards from "
            f"{rewards.min():g} to {rewards.max():g}"
        )
        self._ok(f"a step took {_seconds(statistics.median(s.step_seconds for s in steps))}")
        resets = [s.reset_seconds for s in steps if s.reset_seconds]
        if resets:
            self._ok(f"a reset took {_seconds(statistics.median(resets))}")
        if not episodes:
            self._warning("no episode ended; has it a time limit (env.eval.max_episode_steps)?")
        if steps[-1].success is not None:
            self._ok("success is reported")
        else:
            key = self._config.env.success_key
            looked_for = repr(key) if key else "'success' or 'is_success'"
            self._warning(f"no info {looked_for}: there will be no success metric (env.success_key)")
        if bad:
            self._warning(bad)

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        """What is logged of observations and of batched simulators becomes a finding."""
        logs = (observations.log, batched.log)
        handler = _Handler(self._warning)
        for log in logs:
            log.addHandler(handler)
            log.propagate = False
        try:
            yield
        finally:
            for log in logs:
                log.propagate = True
                log.removeHandler(handler)

    def _ok(self, words: str) -> None:
        self._say(f"ok       {words}")

    def _warning(self, words: str) -> None:
        self._say(f"warning  {words}")

    def _error(self, words: str) -> None:
        self.errors += 1
        self._say(f"error    {words}")


class _Handler(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = say

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


def _plain(text: str) -> str:
    """In one line, without Gymnasium's colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(text.removeprefix("WARN: ").split())


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
