"""The env loop: observations to the pool, actions to the simulators, trajectories to the learner."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from zmqrl.client import PolicyClient
from zmqrl.config import Config, Mode
from zmqrl.env.adapters import Rows, SeedOf, Step
from zmqrl.env.delays import DelaySampler
from zmqrl.env.links import LinkEmulation
from zmqrl.env.making import make_shard
from zmqrl.env.orders import Order, Orders
from zmqrl.env.rewards import RewardRequests
from zmqrl.env.seeds import Seeds, no_seed
from zmqrl.env.stage import Stage
from zmqrl.errors import (
    ClientError,
    ConfigError,
    EnvironmentFailure,
    StateLost,
    TrainingEnded,
    ZmqrlError,
)
from zmqrl.process import StopSignal
from zmqrl.recording import Recording
from zmqrl.telemetry.report import Report, Reporter
from zmqrl.transport import sockets
from zmqrl.transport.rows import not_finite

log = logging.getLogger(__name__)

_Error = TypeVar("_Error", bound=ZmqrlError)

_LOOK_EVERY = 0.25
"""Seconds after which a wait looks whether it should go on."""

_MOST_LOST = 100
"""Times that states may be lost with no episode in between that came to its end."""

_MOST_DROPPED = 5
"""Trajectories in a row that may be dropped before the simulator counts as broken."""


class EnvWorker:
    """Steps simulators with actions from the pool.

    In `eval` mode every env plays `rollout_epoch` episodes, so that slow envs count as much as fast
    ones: once, or, in a pool that learns, whenever the learner asks for an evaluation. In `train` mode
    the worker goes on until it is stopped, and sends trajectories to the learner, if there is one.

    Args:
        config: The whole configuration; `runner.report` is where reports go.
        mode: `train` or `eval`.
        rank: This env worker's number.
        stop: Ends the loop between two steps.
        on_demand: In `eval` mode: wait for the learner to ask, again and again.

    Raises:
        ConfigError: It is to ask a named policy, and a learner.
        EnvironmentFailure: The simulator cannot be made.
    """

    def __init__(
        self, config: Config, mode: Mode, rank: int, stop: StopSignal, on_demand: bool = False
    ) -> None:
        self.name = f"env-{rank}" if mode == "train" else f"eval-{rank}"
        self.report = Report(self.name, rank, incarnation=time.time_ns())
        self._policy = config.policies_of(mode)[rank]
        if self._policy and (on_demand or (mode == "train" and config.learns)):
            raise ConfigError("env.policies: a learner trains and evaluates the pool's own policy")
        self._stop = stop
        self._success_key = config.env.success_key
        self._delays = DelaySampler(config.env.delays_of(mode), rank)
        self._links = LinkEmulation(config.cluster.net_emulation, rank)
        self._seeds: list[Seeds] = []
        self._stages = self._make_stages(config, mode, rank)
        # After the simulators: some of them fork, which a ZeroMQ context must not live through.
        keys = config.security.keys_of("client")
        self.reporter = Reporter(config.runner.report, keys)
        self._client = PolicyClient(
            config.broker.frontend or sockets.local_endpoint("frontend"),
            timeout=config.env.request_timeout_s,
            name=self.name,
            mode=mode,
            rank=rank,
            world_size=config.env_workers(mode),
            max_message_mb=config.broker.max_message_mb,
            keys=config.security.keys,
        )
        for stage in self._stages:
            stage.shard.before_reset = self._say_that_it_resets
            stage.shard.goes_on = self._goes_on_with_a_chunk
        logger = config.runner.logger
        self._videos = Path(logger.log_path) / logger.experiment_name / "videos"
        self._lost_in_a_row = 0  # states, with no episode in between that came to its end
        self._version = 0  # that requests are pinned to; 0 for the newest
        self._orders: Orders | None = None
        self._recording: Recording | None = None
        self._rewards: RewardRequests | None = None
        learner = config.actor.endpoint or sockets.local_endpoint("learner")
        if on_demand:
            self._orders = Orders(learner, self.name, keys)
        elif mode == "train" and config.learns:
            self._recording = self._make_recording(config, learner)
            if config.reward.use_reward_model:
                self._rewards = RewardRequests(config.reward, self._client, self._recording)

    def run(self) -> bool:
        """Run to the end.

        Returns:
            Whether it got there; False if it was stopped.

        Raises:
            EnvironmentFailure: A simulator failed.
            ClientError: The pool gave no actions, with the reason.
        """
        try:
            if self._orders is None:
                self._film("evaluation.mp4")
                self._play()
            else:
                self._play_on_demand(self._orders)
            self._warn_of_a_success_key_that_never_came()
            return self.report.finished
        except (EnvironmentFailure, ClientError) as error:
            raise _with_name(error, self.name) from error.__cause__
        finally:
            self._close()

    def _play_on_demand(self, orders: Orders) -> None:
        while not self._stop():
            order = orders.next(_LOOK_EVERY)
            self._tell()
            if order is None:
                continue
            self._begin_evaluation(order)
            self._play()
            if self.report.finished:
                orders.done(order)

    def _begin_evaluation(self, order: Order) -> None:
        self._version = self.report.version = order.version
        self.report.evaluation = order.number
        self.report.env_steps_before = order.env_steps
        self.report.finished = False
        for stage in self._stages:
            stage.restart()
        for seeds in self._seeds:
            seeds.restart()
        self._film(f"evaluation_{order.number:04d}_version_{order.version}.mp4")
        self._tell(now=True)

    def _film(self, name: str) -> None:
        film = self._stages[0].shard.film
        if film is not None:
            film.next = self._videos / name

    def _play(self) -> None:
        """Reset the simulators and step them until every row has played its episodes."""
        active = list(self._stages)
        for stage in active:
            begin = time.perf_counter()
            self._delay()
            observation = stage.shard.reset()
            self.report.totals.count_reset(time.perf_counter() - begin)
            self._observe(stage, observation, np.ones(len(stage.shard.rows), bool))
        self._tell(now=True)
        while active and not self._stop():
            for stage in list(active):
                if stage.pending is None:
                    self._wait_to_begin(stage)
                else:
                    self._advance(stage)
                if stage.finished():
                    active.remove(stage)
                    self._client.rest(stage.index)
        self.report.finished = not active
        self._tell(now=True)

    def _close(self) -> None:
        self._tell(now=True)
        if self._recording is not None:
            self._recording.close()
            self._count_trajectories()
            self._tell(now=True)
        self._client.close()
        if self._orders is not None:
            self._orders.close()
        self.reporter.close()
        for stage in self._stages:
            stage.shard.close()

    # -- One step

    def _observe(self, stage: Stage, observation: Any, reset: Rows) -> None:
        """Take in what the simulators show, and ask for actions, if that is allowed now."""
        stage.observation, stage.reset = observation, reset
        problem = not_finite(observation, "observation", stage.shard.rows)
        if problem:
            self._note_problem(stage, problem)
        if self._recording is not None:
            self._recording.asked(stage.index, observation)
            self._check_dropped(stage)
            if not self._may_begin(stage):
                stage.held_since = time.monotonic()
                # In normal mode others must not wait at a barrier for what may not be asked.
                self._client.rest(stage.index)
                return
        self._ask(stage)

    def _may_begin(self, stage: Stage) -> bool:
        assert self._recording is not None
        try:
            return self._recording.may_begin(stage.index)
        except TrainingEnded:
            return False  # whoever started this worker stops it, too

    def _ask(self, stage: Stage) -> None:
        stage.sent = time.monotonic()
        # The shard owns the observation's memory and makes a new one at each step: no copy is needed.
        stage.pending = self._client.submit(
            _finite(stage.observation),
            copy=False,
            stage=stage.index,
            policy=self._policy,
            version=self._version,
            ids=stage.shard.rows if stage.shard.answers_in_parts else None,
            reset=stage.reset,
        )

    def _wait_to_begin(self, stage: Stage) -> None:
        """Wait a little for the learner to let the next trajectory begin."""
        assert self._recording is not None
        assert stage.held_since is not None
        others = any(other.pending is not None for other in self._stages)
        may_begin = self._may_begin(stage)
        if not may_begin:
            self._recording.wait(0.0 if others else _LOOK_EVERY)
        now = time.monotonic()
        self.report.totals.gate_s += now - stage.held_since
        stage.held_since = now
        if may_begin:
            self._ask(stage)
        else:
            self._tell()

    def _advance(self, stage: Stage) -> None:
        """Wait for the actions of `stage`, step its simulators, and ask for the next actions."""
        pending = stage.pending
        assert pending is not None
        while not pending.wait(_LOOK_EVERY):
            self._tell()
            if self._stop():
                return
        try:
            reply = pending.result()
        except StateLost as lost:
            self._begin_again(stage, lost)
            return
        self._count_request(stage)
        self._stop.sleep(self._links.seconds(*pending.sizes))
        delayed = self.report.totals.delay_s
        self._delay()
        step = stage.shard.step(reply["actions"])  # a chunk has delays between its steps, too
        if self._stop():
            return  # it may have left the rest of a chunk out
        self._count_step(step, self.report.totals.delay_s - delayed)
        self._check_rewards(stage, step)
        if self._recording is not None:
            self._recording.answered(stage.index, reply, pending.policy_version)
            self._record(stage, reply["actions"], step)
        stage.pending = None
        for episode in stage.account(step):
            self.reporter.add(episode)
            self._lost_in_a_row = 0
        if not stage.finished():
            self._observe(stage, step.observation, step.reset)
        self._tell()

    def _begin_again(self, stage: Stage, lost: StateLost) -> None:
        """The states of a policy with memory are lost: its episodes begin again.

        Raises:
            StateLost: That happens again and again, before any episode has come to its end.
        """
        self._lost_in_a_row += 1
        if self._lost_in_a_row > _MOST_LOST:
            raise lost
        log.warning("%s: its episodes begin again: %s", stage.shard.name, lost)
        self.report.totals.state_lost += stage.begin_again()
        if self._recording is not None:
            self._recording.abandon(stage.index)
        if self._seeds:
            self._seeds[stage.index].begin_again(stage.played)
        begin = time.perf_counter()
        observation = stage.shard.reset()
        self.report.totals.count_reset(time.perf_counter() - begin)
        stage.pending = None
        self._observe(stage, observation, np.ones(len(stage.shard.rows), bool))
        self._tell()

    def _record(self, stage: Stage, actions: Any, step: Step) -> None:
        assert self._recording is not None
        if self._rewards is not None:
            self._rewards.record(stage.index, _finite(stage.observation), actions, step)
            while not self._rewards.may_go_on(_LOOK_EVERY) and not self._stop():
                self._tell()
        else:
            self._recording.outcome(
                stage.index,
                step.reward,
                step.terminated,
                step.truncated,
                step.final_observation,
                step.valid,
            )

    def _count_request(self, stage: Stage) -> None:
        totals, pending = self.report.totals, stage.pending
        assert pending is not None
        if self.report.began is None:
            self.report.began = time.monotonic()
        if stage.sent >= self.report.began:
            totals.requests += 1
            totals.wait_s += time.monotonic() - stage.sent
            totals.queue_s += pending.queue_seconds or 0.0
            totals.predict_s += pending.predict_seconds or 0.0

    def _count_step(self, step: Step, delay: float) -> None:
        totals = self.report.totals
        totals.shard_steps += 1
        totals.env_steps += int(step.valid.sum())
        totals.step_s += step.step_seconds
        totals.step_times.add(step.step_seconds + delay)
        if step.reset_seconds > 0:
            totals.count_reset(step.reset_seconds)
        self.report.ended = time.monotonic()

    def _say_that_it_resets(self) -> None:
        """Say so before, because a simulator that hangs says nothing more (a step needs no word)."""
        self._client.phase("reset")

    def _goes_on_with_a_chunk(self) -> bool:
        self._tell()
        self._delay()
        return not self._stop()

    def _delay(self) -> None:
        seconds = self._delays.sample(self.report.totals.shard_steps)
        begin = time.perf_counter()
        self._stop.sleep(seconds)
        self.report.totals.delay_s += time.perf_counter() - begin

    # -- Numbers that are none

    def _check_rewards(self, stage: Stage, step: Step) -> None:
        problem = not_finite(step.reward, "reward", step.rows)
        if problem:
            self._note_problem(stage, problem)

    def _note_problem(self, stage: Stage, problem: str) -> None:
        self.report.totals.not_finite += 1
        count = self.report.totals.not_finite
        if (
            count & (count - 1) == 0
        ):  # the 1st, 2nd, 4th, 8th …: a broken simulator must not flood the log
            log.warning(
                "%s: %s at step %d (number %d of such steps)",
                stage.shard.name,
                problem,
                self.report.totals.shard_steps,
                count,
            )

    def _check_dropped(self, stage: Stage) -> None:
        """Give a simulator up that yields nothing but what has to be dropped.

        Raises:
            EnvironmentFailure: It is broken.
        """
        recording = self._count_trajectories()
        if recording.dropped_in_a_row >= _MOST_DROPPED:
            raise EnvironmentFailure(
                f"{stage.shard.name}: {recording.problem(stage.index)}; the last "
                f"{recording.dropped_in_a_row} trajectories had to be dropped for such numbers "
                f"(step {self.report.totals.shard_steps})"
            )

    def _count_trajectories(self) -> Recording:
        assert self._recording is not None
        totals, recording = self.report.totals, self._recording
        totals.trajectories_sent = recording.sent + recording.dropped
        totals.trajectories_unacknowledged = recording.unacknowledged
        totals.trajectories_dropped = recording.dropped
        return recording

    # -- What the runner reads

    def _tell(self, now: bool = False) -> None:
        if now or self.reporter.due():
            if self._rewards is not None:
                self._rewards.collect()
            self.report.delays = self._delays.metrics()
            self.reporter.send(self.report)
            if not self.reporter.has_runner and not now:
                steps, episodes = self.report.totals.env_steps, len(self.reporter.episodes)
                waiting = (
                    "" if self.report.began else f", waiting for actions from {self._client.endpoint}"
                )
                log.info("%d steps, %d episodes%s", steps, episodes, waiting)

    def _warn_of_a_success_key_that_never_came(self) -> None:
        key, episodes = self._success_key, self.reporter.episodes
        if key is not None and episodes and all(e.success_once is None for e in episodes):
            log.warning("env.success_key is %r, but the simulator never reported it", key)

    # -- Making

    def _make_stages(self, config: Config, mode: Mode, rank: int) -> list[Stage]:
        section = config.env.of_mode(mode)
        first = config.first_env_of(mode, rank)
        start, total = config.start_states_of(mode, rank)
        quota = section.rollout_epoch if mode == "eval" else None
        stages = []
        for index, rows in enumerate(config.stage_sizes(mode, rank)):
            seed_of: SeedOf = no_seed
            if section.use_fixed_reset_state_ids:
                seed_of = Seeds(section.seed, start, total)
                self._seeds.append(seed_of)
            filmed = mode == "eval" and section.save_video and rank == 0 and index == 0
            try:
                stage = index if config.env.pipeline_stages > 1 else None
                shard = make_shard(config.env, mode, rows, seed_of, filmed, stage)
            except EnvironmentFailure as error:
                raise _with_name(error, self.name) from error.__cause__
            if shard.answers_in_parts and mode == "train" and config.learns:
                raise ConfigError(
                    f"{shard.name} answers with the rows that are ready, and trajectories need all: "
                    "to train, let its batch_size be its num_envs"
                )
            stages.append(Stage(shard, index, first, quota))
            first += rows
            start += rows
        return stages

    def _make_recording(self, config: Config, endpoint: str) -> Recording:
        return Recording(
            endpoint,
            self.name,
            self.report.incarnation,
            steps=config.env.trajectory_steps,
            sub_steps=config.env.sub_steps,
            action_space=self._stages[0].shard.policy_action_space,
            copy=False,  # a shard makes new arrays at each step
            late=self._links.trajectory_seconds if config.cluster.net_emulation.enabled else None,
            keys=config.security.keys_of("client"),
        )


def _with_name(error: _Error, name: str) -> _Error:
    """The same error, whose words begin with the env worker that it happened to."""
    error.args = (f"{name}: {error}", *error.args[1:])
    return error


def _finite(tree: Any) -> Any:
    """The same tree with 0 in place of what is no finite number: a policy would spread it over a row."""
    if isinstance(tree, dict):
        return {key: _finite(child) for key, child in tree.items()}
    if isinstance(tree, np.ndarray) and tree.dtype.kind == "f" and not np.isfinite(tree).all():
        return np.nan_to_num(tree, nan=0.0, posinf=0.0, neginf=0.0)
    return tree
