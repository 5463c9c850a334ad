"""The learner's loop: trajectories to updates, updates to weights."""

from __future__ import annotations

import logging
import operator
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zmqrl.config import Config
from zmqrl.errors import CheckpointError, ConfigError, DataError, RunFailed
from zmqrl.learner import checkpoint
from zmqrl.learner.algorithm import Algorithm, Update, make_algorithm
from zmqrl.learner.gate import Progress, gate_of
from zmqrl.learner.port import Learner
from zmqrl.learner.staleness import Staleness
from zmqrl.process import StopSignal
from zmqrl.spaces import Spaces
from zmqrl.telemetry.report import LearnerReport, Reporter
from zmqrl.trajectory import Trajectory

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.1
"""Seconds after which a wait looks whether it should go on."""

_LAST_WORDS = 1.0
"""Seconds, at most, in which a stopped learner takes what env workers still deliver."""

_MOST_DROPPED = 50
"""Trajectories in a row that may be dropped before something must be wrong with all of them."""


class LearnerWorker:
    """Learns from trajectories, publishes weights, orders evaluations, writes checkpoints.

    Args:
        config: The whole configuration.
        stop: Ends the loop between two updates.

    Raises:
        EndpointError: The endpoint is in use, or cannot be bound.
        CheckpointError: There is no checkpoint to go on from.
    """

    def __init__(self, config: Config, stop: StopSignal) -> None:
        self._config = config
        self._stop = stop
        torch.manual_seed(config.actor.seed)
        torch.set_num_threads(config.actor.torch_threads)
        resume = config.runner.resume_dir
        self._resume_from = None if resume is None else checkpoint.find(Path(resume))
        logger = config.runner.logger
        self._folder = Path(logger.log_path) / logger.experiment_name / "checkpoints"
        self._gate = gate_of(config)
        self._port = Learner(
            config.actor.endpoint,
            gate=self._gate,
            max_message_mb=config.broker.max_message_mb,
            with_spaces=config.rollout.policy is None,
            keys=config.security.keys,
            insecure=config.security.insecure,
        )
        self._spaces: Spaces
        self._reporter = Reporter(config.runner.report, config.security.keys_of("server"))
        self._report = LearnerReport()
        self._staleness = Staleness()
        self._before = 0
        """Trajectories of the lives before this one, as far as the checkpoint knows of them."""
        self._step = 0
        self._updates = 0
        self._env_steps = 0
        self._dropped_in_a_row = 0
        self._published_at = self._evaluated_at = -1
        self._published_env_steps = 0
        self._saved: tuple[int, int, int] | None = None
        self._evaluation_due = False
        self._hungry = True
        self._update_s = self._gate_s = 0.0
        self._metrics: dict[str, float] = {}

    @property
    def endpoint(self) -> str:
        """Where the learner listens."""
        return self._port.endpoint

    def run(self) -> None:
        """Learn until the end of the run, and serve until stopped.

        Raises:
            ConfigError: The algorithm cannot do with the simulators.
            RunFailed: A loss is not finite, receiving failed, or the last checkpoint cannot be written.
        """
        try:
            spaces = self._wait_for_spaces()
            if spaces is None:
                return
            algorithm = make_algorithm(spaces, self._config)
            self._check(algorithm)
            self._restore(algorithm)
            self._publish(algorithm)
            while not self._stop() and not self._is_over():
                self._turn(algorithm)
            if self._is_over():
                self._finish(algorithm)
            self._take_the_last(algorithm)
            self._save(algorithm, is_last=True)
        finally:
            try:
                self._tell(now=True)
            finally:
                self._reporter.close()
                self._port.close()

    # -- The loop

    def _turn(self, algorithm: Algorithm) -> None:
        """Take what has arrived, and make one update if the gate allows."""
        allowed = self._gate.may_update(Progress(updates=self._updates, env_steps=self._env_steps))
        begin = time.perf_counter()
        self._take(algorithm, 0.0 if allowed and not self._hungry else _LOOK_EVERY)
        self._gate_s += time.perf_counter() - begin
        if self._gate.may_update(Progress(updates=self._updates, env_steps=self._env_steps)):
            begin = time.perf_counter()
            update = algorithm.update(self._progress())
            self._update_s += time.perf_counter() - begin
            self._hungry = update is None
            if update is not None:
                self._count(algorithm, update)
        self._port.note(self._updates, self._hungry)
        if self._evaluation_due:
            self._evaluate()
        self._tell()

    def _take(self, algorithm: Algorithm, timeout: float) -> int:
        invalid = self._port.invalid
        arrived = self._port.receive(timeout)
        for _ in range(self._port.invalid - invalid):
            self._drop(f"it cannot be read: {self._port.last_invalid}")
        for trajectory in arrived:
            self._env_steps += trajectory.env_steps
            self._add(algorithm, trajectory)
        return len(arrived)

    def _add(self, algorithm: Algorithm, trajectory: Trajectory) -> None:
        lag = self._port.version - int(trajectory.versions.min())
        threshold = self._config.algorithm.staleness_threshold
        stale = algorithm.on_policy and threshold is not None and lag > threshold
        self._staleness.note(lag, stale)
        if stale:
            self._port.drop(trajectory)
            return
        try:
            algorithm.add(trajectory)
            self._dropped_in_a_row = 0
        except DataError as error:
            self._port.drop(trajectory)
            self._drop(f"{trajectory.origin}: {error}")

    def _drop(self, why: str) -> None:
        """Tell of a trajectory that is of no use.

        Raises:
            RunFailed: None of many was.
        """
        self._dropped_in_a_row += 1
        count = self._dropped_in_a_row
        if count >= _MOST_DROPPED:
            raise RunFailed(f"the last {count} trajectories had to be dropped; the latest: {why}")
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th …
            log.warning("a trajectory is dropped: %s", why)

    def _count(self, algorithm: Algorithm, update: Update) -> None:
        try:
            self._updates += operator.index(update.updates)
        except (AttributeError, TypeError):
            raise RunFailed(
                f"the algorithm's update() returned {update!r:.200}; it must return None, or an Update "
                "whose updates are an int"
            ) from None
        self._metrics.update(_numbers(update.metrics))
        if not update.ends_step:
            return
        self._step += 1
        self._metrics.update(_numbers(algorithm.metrics()))
        runner = self._config.runner
        if self._step % runner.weight_sync_interval == 0:
            self._publish(algorithm)
        if runner.val_check_interval > 0 and self._step % runner.val_check_interval == 0:
            self._evaluation_due = True
        if runner.save_interval > 0 and self._step % runner.save_interval == 0:
            self._save(algorithm)

    def _publish(self, algorithm: Algorithm) -> None:
        if self._published_at != self._step:
            self._port.publish(algorithm.actor.state_dict())
            self._published_at, self._published_env_steps = self._step, self._env_steps

    def _evaluate(self) -> None:
        """Order the evaluation that is due, unless one is under way, or these weights had theirs."""
        if self._evaluated_at == self._published_at:
            self._evaluation_due = False
        elif self._port.evaluation_is_over(self._config.env_workers("eval")):
            self._evaluation_due = False
            self._evaluated_at = self._published_at
            self._port.evaluate(self._published_env_steps)

    def _progress(self) -> float:
        """The share of the run that is done; 0 if it has no end."""
        runner, last = self._config.runner, self._config.last_step
        shares = [0.0]
        if last is not None:
            shares.append(self._step / last if last else 1.0)
        if runner.max_env_steps >= 0:
            shares.append(self._env_steps / runner.max_env_steps if runner.max_env_steps else 1.0)
        return min(1.0, max(shares))

    def _is_over(self) -> bool:
        return self._config.has_an_end and self._progress() >= 1.0

    # -- Begin and end

    def _wait_for_spaces(self) -> Spaces | None:
        """The spaces that the first env worker tells; None if the learner is stopped first."""
        while not self._stop():
            spaces = self._port.wait_for_spaces(0.25)
            self._tell()
            if spaces is not None:
                self._spaces = spaces
                return spaces
        return None

    def _finish(self, algorithm: Algorithm) -> None:
        """Evaluate the last weights, and wait to be stopped."""
        self._port.close_gate()
        self._catch_up(algorithm)
        self._publish(algorithm)
        evaluates = self._config.runner.val_check_interval > 0
        self._evaluation_due = evaluates and self._evaluated_at != self._published_at
        log.info("learned for %d env steps, %d updates", self._env_steps, self._updates)
        while not self._stop():
            self._take(algorithm, _LOOK_EVERY)
            if self._evaluation_due:
                self._evaluate()
            elif not self._report.finished:
                workers = self._config.env_workers("eval")
                self._report.finished = not evaluates or self._port.evaluation_is_over(workers)
                self._tell(now=self._report.finished)
            self._tell()

    def _catch_up(self, algorithm: Algorithm) -> None:
        """Make the updates that the last env steps are still owed (`algorithm.updates_per_env_step`)."""
        last = self._config.last_step
        if last is not None and self._step >= last:
            return
        at_the_end = Progress(updates=self._updates, env_steps=self._env_steps)
        while self._gate.updates_per_env_step is not None and self._gate.may_update(at_the_end):
            update = None if self._stop() else algorithm.update(1.0)
            if update is None:
                return
            self._count(algorithm, update)
            self._tell()
            at_the_end = replace(at_the_end, updates=self._updates)

    def _take_the_last(self, algorithm: Algorithm) -> None:
        """Take what env workers delivered before they ended: they were told to end first."""
        until = time.monotonic() + _LAST_WORDS
        while self._take(algorithm, 0.2) and time.monotonic() < until:
            pass

    def _save(self, algorithm: Algorithm, is_last: bool = False) -> None:
        now = (self._step, self._updates, self._env_steps)
        if self._saved == now:
            return
        actor = {
            "version": self._port.version,
            "spaces": self._spaces.fields(),
            "weights": dict(algorithm.actor.state_dict()),
        }
        state = {
            "algorithm": algorithm.state_dict(),
            "port": self._port.state_dict(),
            "step": self._step,
            "updates": self._updates,
            "env_steps": self._env_steps,
            "random": torch.get_rng_state(),
        }
        begin = time.perf_counter()
        try:
            path = checkpoint.save(self._folder, self._step, actor, state)
        except CheckpointError as error:
            if is_last:
                raise RunFailed(f"{error}; what was learned since the one before it is lost") from error
            log.error("%s; training goes on", error)
            return
        self._saved = now
        self._metrics["time/actor/checkpoint"] = time.perf_counter() - begin
        log.info("checkpoint %s", path)

    def _check(self, algorithm: Algorithm) -> None:
        """Find out now what would show with the first trajectory, or with the first checkpoint.

        Raises:
            ConfigError: The algorithm lacks something, or its state cannot be saved.
        """
        chosen = self._config.algorithm
        try:
            bool(algorithm.on_policy)
            checkpoint.check("actor.state_dict()", dict(algorithm.actor.state_dict()))
            checkpoint.check("state_dict()", algorithm.state_dict())
        except AttributeError as error:
            raise ConfigError(f"the algorithm {chosen.factory or chosen.name}: {error}") from error
        except CheckpointError as error:
            raise ConfigError(
                f"the algorithm {chosen.factory or chosen.name} cannot be saved: {error}"
            ) from None

    def _restore(self, algorithm: Algorithm) -> None:
        """Go on from the checkpoint, if there is one.

        Raises:
            CheckpointError: It is damaged, or of another architecture.
        """
        if self._resume_from is None:
            return
        state = checkpoint.load(self._resume_from, checkpoint.STATE)
        try:
            algorithm.load_state_dict(state["algorithm"])
            self._port.load_state_dict(state["port"])
            self._step, self._updates = state["step"], state["updates"]
            self._env_steps = state["env_steps"]
            torch.set_rng_state(state["random"])
        except CheckpointError as error:
            raise CheckpointError(f"the checkpoint {self._resume_from}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint {self._resume_from} lacks {error}") from error
        books = self._port.books()
        self._before = books["received"] + books["rolled_back"]
        self._saved = (self._step, self._updates, self._env_steps)
        log.info("goes on from %s at %d env steps", self._resume_from, self._env_steps)

    # -- What the runner reads

    def _tell(self, now: bool = False) -> None:
        if now or self._reporter.due():
            self._report.metrics = self._all_metrics()
            self._reporter.send_learner(self._report)

    def _all_metrics(self) -> dict[str, Any]:
        books = self._port.books()
        workers = self._port.rollout_workers().values()
        versions = [worker["serving"] for worker in workers]
        return {
            "env_steps": self._env_steps,
            "learner_updates": self._updates,
            "achieved_updates_per_env_step": self._updates / max(1, self._env_steps),
            "global_step": self._step,
            "policy_version": self._port.version,
            "trajectories_received": books["received"] - books["dropped"],
            "trajectories_dropped": books["dropped"],
            "trajectories_rolled_back": books["rolled_back"],
            "trajectories_duplicate": books["duplicates"],
            "trajectories_before": self._before,
            "trajectories_arrived": books["received"] + books["rolled_back"],
            "rollout/policy_version": min(versions, default=self._port.version),
            "rollout/weights_loaded": sum(worker["loaded"] for worker in workers),
            "rollout/weights_failed": sum(worker["failed"] for worker in workers),
            "time/actor/update": self._update_s / max(1, self._updates),
            "time/actor/gate_wait_total": self._gate_s,
            "time/actor/update_total": self._update_s,
            **self._staleness.metrics(),
            **self._port.shares(),
            **self._metrics,
        }


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics of an algorithm as plain numbers.

    Raises:
        RunFailed: One of them is none; names it.
    """
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value)
        except (TypeError, ValueError):
            raise RunFailed(f"the algorithm's metric {name!r} is no number: {value!r}") from None
    return plain
