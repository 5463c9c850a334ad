"""An env worker: its parts, and when it plays."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TypeVar

from zmqrl.client import PolicyClient
from zmqrl.config import Config, Mode
from zmqrl.env.delays import DelaySampler
from zmqrl.env.links import LinkEmulation
from zmqrl.env.loop import EnvLoop
from zmqrl.env.making import make_stages
from zmqrl.env.orders import Order, Orders
from zmqrl.env.rewards import RewardRequests
from zmqrl.env.tally import Tally
from zmqrl.env.trajectories import Trajectories
from zmqrl.errors import ClientError, ConfigError, EnvironmentFailure, ZmqrlError
from zmqrl.process import StopSignal
from zmqrl.recording import Recording
from zmqrl.telemetry.report import Report, Reporter
from zmqrl.transport import sockets

log = logging.getLogger(__name__)

_Error = TypeVar("_Error", bound=ZmqrlError)

_KEPT = 10_000
"""Episodes that a worker without an end of its own keeps for its summary."""

_ORDER_WITHIN = 0.25
"""Seconds to wait for an order before it is looked whether to go on."""


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

    Attributes:
        name: What others call it.
        report: What it has done.
        reporter: Sends that; it has all episodes.

    Raises:
        ConfigError: It is to ask a named policy, and a learner.
        EnvironmentFailure: The simulator cannot be made.
    """

    def __init__(
        self, config: Config, mode: Mode, rank: int, stop: StopSignal, on_demand: bool = False
    ) -> None:
        self.name = f"env-{rank}" if mode == "train" else f"eval-{rank}"
        self.report = Report(self.name, rank, incarnation=time.time_ns())
        self._stop = stop
        self._success_key = config.env.success_key
        logger = config.runner.logger
        self._videos = Path(logger.log_path) / logger.experiment_name / "videos"
        policy = config.policies_of(mode)[rank]
        records = mode == "train" and config.learns
        if policy and (on_demand or records):
            raise ConfigError("env.policies: a learner trains and evaluates the pool's own policy")
        try:
            self._stages = make_stages(config, mode, rank)
        except EnvironmentFailure as error:
            raise _with_name(error, self.name) from error.__cause__
        # After the simulators: some of them fork, which a ZeroMQ context must not live through.
        keys = config.security.keys_of("client")
        has_an_end = mode == "eval" and not on_demand
        self.reporter = Reporter(config.runner.report, keys, None if has_an_end else _KEPT)
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
        learner = config.actor.endpoint or sockets.local_endpoint("learner")
        delays = DelaySampler(config.env.delays_of(mode), rank)
        links = LinkEmulation(config.cluster.net_emulation, rank)
        self._orders = Orders(learner, self.name, keys) if on_demand else None
        self._trajectories = self._make_trajectories(config, learner, links) if records else None
        self._tally = Tally(self.report, self.reporter, delays, self._client.endpoint)
        self._loop = EnvLoop(
            self._stages,
            self._client,
            policy,
            self._tally,
            self._trajectories,
            delays=delays,
            links=links,
            stop=stop,
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
            if self._orders is None:
                self._play("evaluation.mp4")
            else:
                self._play_on_demand(self._orders)
            self._warn_of_a_success_key_that_never_came()
            return self.report.finished
        except (EnvironmentFailure, ClientError) as error:
            if isinstance(error, EnvironmentFailure) and self._stop():
                # A signal to the whole process group, as of systemd, ends the simulators' processes too.
                log.info("%s was stopped in the middle of a step: %s", self.name, error)
                return False
            raise _with_name(error, self.name) from error.__cause__
        finally:
            self._close()

    def _play_on_demand(self, orders: Orders) -> None:
        while not self._stop():
            order = orders.next(_ORDER_WITHIN)
            self._tally.tell()
            if order is None:
                continue
            self._begin_evaluation(order)
            self._play(f"evaluation_{order.number:04d}_version_{order.version}.mp4")
            if self.report.finished:
                orders.done(order)

    def _begin_evaluation(self, order: Order) -> None:
        self.report.version = order.version
        self.report.evaluation = order.number
        self.report.env_steps_before = order.env_steps
        self.report.finished = False
        self._loop.restart(order.version)
        self._tally.tell(now=True)

    def _play(self, video: str) -> None:
        film = self._stages[0].shard.film
        if film is not None:
            film.next = self._videos / video
        self.report.finished = self._loop.run()
        self._tally.tell(now=True)

    def _close(self) -> None:
        self._tally.tell(now=True)
        if self._trajectories is not None:
            self._trajectories.close()
            self._tally.tell(now=True)
        self._client.close()
        if self._orders is not None:
            self._orders.close()
        self.reporter.close()
        for stage in self._stages:
            stage.shard.close()

    def _warn_of_a_success_key_that_never_came(self) -> None:
        key = self._success_key
        if key is not None and self.reporter.count and not self.reporter.told_success:
            log.warning("env.success_key is %r, but the simulator never reported it", key)

    def _make_trajectories(self, config: Config, learner: str, links: LinkEmulation) -> Trajectories:
        recording = Recording(
            learner,
            self.name,
            self.report.incarnation,
            steps=config.env.trajectory_steps,
            sub_steps=config.env.sub_steps,
            action_space=self._stages[0].shard.policy_action_space,
            copy=False,  # a shard makes new arrays at each step
            late=links.trajectory_seconds if config.cluster.net_emulation.enabled else None,
            keys=config.security.keys_of("client"),
        )
        rewards = None
        if config.reward.use_reward_model:
            rewards = RewardRequests(config.reward, self._client, recording)
        return Trajectories(recording, rewards, self.report.totals)


def _with_name(error: _Error, name: str) -> _Error:
    """The same error, whose words begin with the env worker that it happened to."""
    error.args = (f"{name}: {error}", *error.args[1:])
    return error
