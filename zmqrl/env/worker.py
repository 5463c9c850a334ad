"""The env loop: observations to the pool, actions to the simulators."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from zmqrl.client import Pending, PolicyClient
from zmqrl.config import Config, Mode
from zmqrl.env.adapters import ShardEnv, Step, make_shard
from zmqrl.env.delays import DelaySampler
from zmqrl.process import StopSignal
from zmqrl.telemetry.report import Episode, Report, Reporter
from zmqrl.transport import sockets

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.25
"""Seconds after which a wait for actions looks whether it should go on."""


class Stage:
    """One group of an env worker's simulators: a shard, its request in flight, its episodes.

    Args:
        shard: The simulators.
        index: The pipeline stage.
        first_env: Index, over all env workers, of the shard's first row.
        quota: Episodes that each row plays; None for no end.
    """

    def __init__(self, shard: ShardEnv, index: int, first_env: int, quota: int | None) -> None:
        self.shard = shard
        self.index = index
        self.first_env = first_env
        self.pending: Pending | None = None
        self.sent = 0.0
        self._quota = quota
        rows = shard.num_envs
        self._played = np.zeros(rows, dtype=np.int64)
        self._return = np.zeros(rows)
        self._length = np.zeros(rows, dtype=np.int64)
        self._success_once = np.zeros(rows, dtype=bool)

    def finished(self) -> bool:
        """Whether every row has played its episodes."""
        return self._quota is not None and bool((self._played >= self._quota).all())

    def account(self, step: Step) -> list[Episode]:
        """Count a step; rows that have played their episodes are stepped on but no longer counted.

        Returns:
            The episodes that it ended.
        """
        self._return += np.where(step.valid, step.reward, 0.0)
        self._length += step.valid
        if step.success is not None:
            self._success_once |= step.success & step.valid
        ended = []
        for row in np.flatnonzero((step.terminated | step.truncated) & step.valid):
            if self._quota is None or self._played[row] < self._quota:
                ended.append(self._episode(int(row), step))
            self._played[row] += 1
            self._return[row] = self._length[row] = 0
            self._success_once[row] = False
        return ended

    def _episode(self, row: int, step: Step) -> Episode:
        known = step.success is not None
        return Episode(
            env=self.first_env + row,
            number=int(self._played[row]),
            total_return=float(self._return[row]),
            length=int(self._length[row]),
            success_once=bool(self._success_once[row]) if known else None,
            success_at_end=bool(step.success[row]) if step.success is not None else None,
        )


class EnvWorker:
    """Steps simulators with actions from the pool.

    In `eval` mode every env plays `rollout_epoch` episodes, so that slow envs count as much as fast
    ones; in `train` mode the worker goes on until it is stopped.

    Args:
        config: The whole configuration; `runner.report` is where reports go.
        mode: `train` or `eval`.
        rank: This env worker's number.
        stop: Ends the loop between two steps.

    Raises:
        EnvironmentFailure: The simulator cannot be made.
    """

    def __init__(self, config: Config, mode: Mode, rank: int, stop: StopSignal) -> None:
        self.name = f"env-{rank}" if mode == "train" else f"eval-{rank}"
        self.report = Report(self.name, rank)
        self._stop = stop
        self._success_key = config.env.success_key
        self._delays = DelaySampler(config.env.delays_of(mode), rank)
        self._stages = self._make_stages(config, mode, rank)
        # After the simulators: some of them fork, which a ZeroMQ context must not live through.
        self.reporter = Reporter(config.runner.report)
        self._client = PolicyClient(
            config.broker.frontend or sockets.local_endpoint("frontend"),
            timeout=config.env.request_timeout_s,
            name=self.name,
            mode=mode,
            rank=rank,
            world_size=config.env_workers(mode),
            max_message_mb=config.broker.max_message_mb,
        )

    def run(self) -> bool:
        """Run to the end.

        Returns:
            Whether it got there; False if it was stopped.

        Raises:
            EnvironmentFailure: A simulator failed.
            ClientError: The pool gave no actions, with the reason.
        """
        try:
            active = list(self._stages)
            for stage in active:
                begin = time.perf_counter()
                self._delay()
                observation = stage.shard.reset()
                self.report.totals.resets += 1
                self.report.totals.reset_s += time.perf_counter() - begin
                self._ask(stage, observation)
            self._tell(now=True)
            while active and not self._stop():
                for stage in list(active):
                    self._advance(stage)
                    if stage.finished():
                        active.remove(stage)
                        self._client.rest(stage.index)
            self.report.finished = not active
            self._warn_of_a_success_key_that_never_came()
            return self.report.finished
        finally:
            self._tell(now=True)
            self._client.close()
            self.reporter.close()
            for stage in self._stages:
                stage.shard.close()

    def _warn_of_a_success_key_that_never_came(self) -> None:
        key, episodes = self._success_key, self.reporter.episodes
        if key is not None and episodes and all(e.success_once is None for e in episodes):
            log.warning("env.success_key is %r, but the simulator never reported it", key)

    def _advance(self, stage: Stage) -> None:
        """Wait for the actions of `stage`, step its simulators, and ask for the next actions."""
        pending = stage.pending
        assert pending is not None
        while not pending.wait(_LOOK_EVERY):
            self._tell()
            if self._stop():
                return
        actions = pending.result()["actions"]
        totals = self.report.totals
        if self.report.began is None:
            self.report.began = time.monotonic()
        if stage.sent >= self.report.began:
            totals.requests += 1
            totals.wait_s += time.monotonic() - stage.sent
            totals.queue_s += pending.queue_seconds or 0.0
            totals.predict_s += pending.predict_seconds or 0.0
        self._delay()
        step = stage.shard.step(actions)
        totals.shard_steps += 1
        totals.env_steps += int(step.valid.sum())
        totals.step_s += step.step_seconds
        totals.reset_s += step.reset_seconds
        totals.resets += step.reset_seconds > 0
        self.report.ended = time.monotonic()
        for episode in stage.account(step):
            self.reporter.add(episode)
        if not stage.finished():
            self._ask(stage, step.observation)
        self._tell()

    def _ask(self, stage: Stage, observation: Any) -> None:
        stage.sent = time.monotonic()
        # The shard owns the observation's memory and makes a new one at each step: no copy is needed.
        stage.pending = self._client.submit(observation, copy=False, stage=stage.index)

    def _delay(self) -> None:
        seconds = self._delays.sample(self.report.totals.shard_steps)
        begin = time.perf_counter()
        self._stop.sleep(seconds)
        self.report.totals.delay_s += time.perf_counter() - begin

    def _tell(self, now: bool = False) -> None:
        if now or self.reporter.due():
            self.report.delays = self._delays.metrics()
            self.reporter.send(self.report)
            if not self.reporter.has_runner and not now:
                steps, episodes = self.report.totals.env_steps, len(self.reporter.episodes)
                waiting = (
                    "" if self.report.began else f", waiting for actions from {self._client.endpoint}"
                )
                log.info("%d steps, %d episodes%s", steps, episodes, waiting)

    def _make_stages(self, config: Config, mode: Mode, rank: int) -> list[Stage]:
        section = config.env.of_mode(mode)
        total = config.total_envs(mode)
        first = config.first_env_of(mode, rank)
        stages = []
        for index, rows in enumerate(config.stage_sizes(mode, rank)):
            seeds = _Seeds(section.seed, first, total) if section.use_fixed_reset_state_ids else _no_seed
            shard = make_shard(config.env, mode, rows, seeds)
            quota = section.rollout_epoch if mode == "eval" else None
            stages.append(Stage(shard, index, first, quota))
            first += rows
        return stages


class _Seeds:
    """The same start states each time: one seed for each env and episode, whoever steps it."""

    def __init__(self, base: int, first_env: int, total_envs: int) -> None:
        self._base = base
        self._first = first_env
        self._total = total_envs
        self._begun: dict[int, int] = {}

    def __call__(self, row: int) -> int:
        number = self._begun.get(row, 0)
        self._begun[row] = number + 1
        return self._base + self._first + row + number * self._total


def _no_seed(row: int) -> None:
    return None
