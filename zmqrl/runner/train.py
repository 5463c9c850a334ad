"""Runs a training on this machine: starts all parts, watches them, shows and writes what they report."""

from __future__ import annotations

import difflib
import json
import logging
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from zmqrl import config as configuration
from zmqrl.broker.status import StatusClient
from zmqrl.config import Config
from zmqrl.errors import CheckpointError, ConfigError, RunFailed, StartupFailed
from zmqrl.process import StopSignal
from zmqrl.runner.endpoints import local_endpoints
from zmqrl.runner.folder import RunFolder
from zmqrl.runner.supervisor import Kind, Supervisor
from zmqrl.telemetry import curve
from zmqrl.telemetry.loggers import RunLog, finite
from zmqrl.telemetry.metrics import EVALUATION, Metrics
from zmqrl.telemetry.progress import TrainingProgress
from zmqrl.telemetry.report import Collector
from zmqrl.telemetry.training_view import TrainingView

log = logging.getLogger(__name__)

_LOG_EVERY = 2.0
"""Seconds between two records of the metrics of training."""

_DRAW_EVERY = 30.0
"""Seconds between two drawings of the learning curve, which takes a moment."""


def train(
    config: Config,
    console: Console,
    stop: StopSignal,
    json_file: Path | None = None,
    own_loop: bool = False,
) -> None:
    """Run a training from start to end.

    Args:
        config: Names the algorithm and the simulator.
        console: For the live table.
        stop: Ends the run early; the learner then writes a checkpoint.
        json_file: Where to write the last metrics, as one flat JSON object.
        own_loop: Start no env workers for training; simulators are stepped by a loop of the user's own.

    Raises:
        ConfigError: The algorithm or the simulator is not named, or they do not go together.
        StartupFailed: A part did not come up.
        RunFailed: The run broke off; what there is has been shown and written.
    """
    _check(config, own_loop)
    logger, resumed = config.runner.logger, config.runner.resume_dir is not None
    folder = RunFolder(Path(logger.log_path) / logger.experiment_name, resumed)
    try:
        _train_in(folder, config, console, stop, json_file, own_loop)
    finally:
        folder.close()


def _train_in(
    folder: RunFolder,
    config: Config,
    console: Console,
    stop: StopSignal,
    json_file: Path | None,
    own_loop: bool,
) -> None:
    logger, resumed = config.runner.logger, config.runner.resume_dir is not None
    files = RunLog(
        folder.path,
        logger.logger_backends,
        logger.project_name,
        logger.experiment_name,
        config.model_dump(mode="json"),
        resume=resumed,
    )
    earlier = folder.path / "metrics.jsonl"
    records = curve.read(earlier) if resumed and earlier.exists() else []
    failure: Exception | None = None
    try:
        if not resumed or not (folder.path / "config.yaml").exists():
            configuration.dump(config, folder.path / "config.yaml")
        with local_endpoints(config) as (complete, file):
            run = Training(complete, file, folder.path, console, stop, files, records, own_loop)
            try:
                run.run()
            except (ConfigError, StartupFailed, RunFailed) as error:
                failure = error
            finally:
                run.close()
    finally:
        files.close()
    if failure is None and stop():
        failure = RunFailed(f"stopped by {stop.reason}")
    if failure is None and run.learner_failure:
        failure = RunFailed(run.learner_failure)
    if not run.stepped:
        folder.give_back()
        if failure is not None:
            raise failure
    metrics = run.last_metrics()
    run.draw()
    if json_file is not None:
        json_file.write_text(json.dumps(finite(metrics), indent=2) + "\n", encoding="utf-8")
    console.print(f"{run.ending or 'broken off'}; written to {folder.path}", style="dim", markup=False)
    has_checkpoint = any(folder.path.glob("checkpoints/global_step_*/manifest.json"))
    if isinstance(failure, RunFailed) and has_checkpoint:
        raise RunFailed(f"{failure}; go on with runner.resume_dir={folder.path}")
    if failure is not None:
        raise failure


def _check(config: Config, own_loop: bool) -> None:
    if not config.algorithm.is_set:
        raise ConfigError("algorithm.name is not set: which algorithm learns? (sac, ppo, or a factory)")
    evaluates = config.runner.val_check_interval > 0
    if config.env.id is None and config.env.factory is None and (evaluates or not own_loop):
        raise ConfigError("env.id is not set: which simulator? (a Gymnasium id, or env.factory)")
    if config.policy_weights:
        raise ConfigError("rollout.policies and env.policies are for evaluations: one policy is trained")
    if config.runner.stop_at and config.runner.val_check_interval <= 0:
        raise ConfigError(
            "runner.stop_at ends training by evaluations, but there are none: set "
            "runner.val_check_interval"
        )
    for name in config.runner.stop_at:
        if name not in EVALUATION:
            near = difflib.get_close_matches(name, EVALUATION, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"they tell {', '.join(EVALUATION)}"
            raise ConfigError(f"runner.stop_at names {name!r}, which evaluations do not tell; {hint}")
    if config.runner.ckpt_path is not None:
        raise ConfigError(
            "runner.ckpt_path names the policy of an evaluation; to go on training, set "
            "runner.resume_dir"
        )
    if config.runner.resume_dir is not None:
        from zmqrl.learner import checkpoint

        try:
            checkpoint.find(Path(config.runner.resume_dir))
        except CheckpointError as error:
            raise ConfigError(f"runner.resume_dir: {error}") from None


class Training:
    """The processes of one training, and what is known of them.

    Args:
        config: With all endpoints.
        config_file: The same, for the parts to read.
        folder: Of the run.
        console: For the live table.
        stop: Ends the run early.
        files: Where metrics go.
        records: Of the part of the run before this one.
        own_loop: Start no env workers for training.
    """

    def __init__(
        self,
        config: Config,
        config_file: Path,
        folder: Path,
        console: Console,
        stop: StopSignal,
        files: RunLog,
        records: list[Metrics],
        own_loop: bool = False,
    ) -> None:
        assert config.runner.report is not None
        assert config.broker.frontend is not None
        self.records = records
        self.ending = ""
        """Why the run ended, in words."""
        self.learner_failure = ""
        """Why the learner did not end well when it was told to, which it does by a last checkpoint."""
        self._config = config
        self._folder = folder
        self._stop = stop
        self._files = files
        self._own_loop = own_loop
        self._earlier_s = _number(records[-1].get("wall_s")) if records else 0.0
        self._began = self._logged = self._drawn = self._sampled = time.monotonic()
        self._progress = TrainingProgress(config)
        self._warned = self._began
        self._first_share: float | None = None
        self._reached = 0
        self._has_complained = False
        security = config.security
        keys = security.keys_of("server")  # this process watches over the pool as part of the server
        self._collector = Collector(config.runner.report, keys, security.insecure)
        self._broker = StatusClient(config.broker.frontend, keys)
        self._view = TrainingView(console, config.runner.logger.experiment_name)
        self._parts = Supervisor(config, config_file, self._view.say, self._progress.stepping, stop)

    def run(self) -> None:
        """Start everything and watch until the run is over.

        Raises:
            ConfigError, StartupFailed, RunFailed: With the cause.
        """
        self._start()
        while not self._is_over():
            self._collect(0.2)
            for part in self._parts.look():
                self._collect(0.0)  # its last report may be here
                self._parts.lost(part)
            if not self._parts.paused():
                self._look_at_the_clock()
            self._show()

    def close(self) -> None:
        """End all processes, and free what this one holds."""
        self._progress.sample(self._broker.ask(0.5))
        # Env workers first: the learner is there for the last trajectories.
        failed = self._parts.close(first=[Kind.ENV, Kind.EVAL], meanwhile=lambda: self._collect(0.0))
        self.learner_failure = failed.get("learner", "")
        self._collect(0.1)
        self._log(self.last_metrics())
        self._view.update(self.last_metrics(), None, None)
        self._view.close()
        self._broker.close()
        self._collector.close()

    @property
    def stepped(self) -> bool:
        """Whether any simulator has made a step."""
        return self._progress.stepping()

    def draw(self) -> None:
        """Draw the learning curve; a run is not ended by a picture that cannot be written."""
        path = self._folder / "learning_curve.png"
        try:
            curve.draw(self.records, path, self._config.runner.logger.experiment_name)
        except Exception as error:  # a full disk, or whatever matplotlib meets
            if not self._has_complained:
                self._has_complained = True
                log.warning("%s cannot be written: %s; the run goes on", path, error)

    def last_metrics(self) -> Metrics:
        """All metrics, as they are now."""
        return {**self._progress.metrics(), "wall_s": self._wall_s()}

    # -- The processes

    def _start(self) -> None:
        config, start = self._config, self._parts.start
        start("broker", Kind.BROKER, "start-broker")
        start("learner", Kind.LEARNER, "start-learner")
        for rank in range(config.rollout_workers):
            start(f"rollout-{rank}", Kind.ROLLOUT, "start-rollout-worker", f"--rank={rank}")
        if config.reward.use_reward_model:
            for rank in range(config.cluster.component_placement.count("reward")):
                start(f"reward-{rank}", Kind.REWARD, "start-reward-worker", f"--rank={rank}")
        for rank in range(0 if self._own_loop else config.env_workers("train")):
            start(f"env-{rank}", Kind.ENV, "start-env-worker", "--mode=train", f"--rank={rank}")
        if config.runner.val_check_interval > 0:
            evaluates = ("start-env-worker", "--mode=eval", "--on-demand")
            for rank in range(config.env_workers("eval")):
                start(f"eval-{rank}", Kind.EVAL, *evaluates, f"--rank={rank}")

    def _look_at_the_clock(self) -> None:
        """Give up on what does not come up; start again what has stopped to move."""
        now, runner = time.monotonic(), self._config.runner
        for part, why in self._parts.hanging(self._progress.heard, self._progress.status):
            if not self._progress.stepping():
                raise StartupFailed(why)
            self._parts.kill(part, why)
        self._look_at_the_learner(now)
        if (
            not self._own_loop
            and not self._progress.stepping()
            and now >= self._began + runner.startup_timeout_s
        ):
            workers = len((self._broker.ask() or {}).get("workers", []))
            raise StartupFailed(
                f"nothing was stepped within runner.startup_timeout_s ({runner.startup_timeout_s:g} s); "
                f"{workers} rollout workers are connected"
            )

    def _look_at_the_learner(self, now: float) -> None:
        limit, heard = self._config.runner.stall_timeout_s, self._progress.learner_heard
        if heard is not None and now >= heard + limit:
            raise RunFailed(
                f"the learner was silent for {limit:g} s (runner.stall_timeout_s): an update or a "
                "checkpoint takes longer than that, or hangs"
            )
        if now >= max(self._progress.moved, self._warned) + limit:
            self._warned = now
            still, by = now - self._progress.moved, self._progress.metrics().get("bottleneck")
            log.warning("neither env steps nor updates went on for %.0f s; limited by: %s", still, by)

    # -- What they report

    def _collect(self, timeout: float) -> None:
        for report in self._collector.collect(timeout):
            self._progress.take(report)
        for evaluation in self._progress.evaluations.finished():
            self._progress.latest_evaluation = evaluation
            self._log_evaluation(evaluation)
            self._judge(evaluation)

    def _judge(self, evaluation: Metrics) -> None:
        """Count the evaluations in a row that reach `runner.stop_at`."""
        wanted = self._config.runner.stop_at
        missing = [name for name in wanted if name not in evaluation]
        if missing:
            raise ConfigError(
                f"runner.stop_at: this simulator does not tell {missing[0]} (env.success_key)"
            )
        reached = wanted and all(_number(evaluation[name]) >= least for name, least in wanted.items())
        self._reached = self._reached + 1 if reached else 0
        if self._reached >= self._config.runner.stop_patience:
            times = f" {self._reached} times in a row" if self._reached > 1 else ""
            goal = ", ".join(f"{name} >= {least:g}" for name, least in wanted.items())
            self.ending = f"reached {goal}{times}"

    def _is_over(self) -> bool:
        if self._stop():
            self.ending = f"stopped by {self._stop.reason}"
        elif not self.ending and self._progress.learner is not None and self._progress.learner.finished:
            runner = self._config.runner
            names = ("max_env_steps", "max_steps", "max_epochs")
            limits = {name: getattr(runner, name) for name in names if getattr(runner, name) >= 0}
            ends = ", ".join(f"runner.{name}={limit}" for name, limit in limits.items())
            self.ending = f"came to the end of the run ({ends})"
        return bool(self.ending)

    def _show(self) -> None:
        now = time.monotonic()
        if now < self._sampled + 0.5:
            return
        self._sampled = now
        self._progress.sample(self._broker.ask(0.2))
        metrics = self.last_metrics()
        share = self._share(metrics)
        elapsed = now - self._began
        if self._first_share is None and self._progress.learner is not None:
            self._first_share = share
        done = 0.0 if share is None else share - (self._first_share or 0.0)
        eta = elapsed * (1 - share) / done if share is not None and done > 0 else None
        self._view.update(metrics, share, eta)
        if now >= self._logged + _LOG_EVERY and self._progress.stepping():
            self._log(metrics)
        if now >= self._drawn + _DRAW_EVERY and self.records:
            self._drawn = now
            self.draw()

    def _log(self, metrics: Metrics) -> None:
        """Write a record of the moment; the results of evaluations stand in their own records."""
        self._logged = time.monotonic()
        self._write({key: value for key, value in metrics.items() if not key.startswith("eval/")})

    def _log_evaluation(self, evaluation: Metrics) -> None:
        """Write the results of an evaluation, at the env steps of the weights that it ran."""
        now = self._progress.metrics()
        times = {"wall_s": self._wall_s(), "policy_version": now.get("policy_version")}
        self._write({"env_steps": evaluation["eval/env_steps"], **times, **evaluation})

    def _write(self, record: Metrics) -> None:
        self.records.append(curve.part_of(record))
        self._files.log(record, int(_number(record["env_steps"])))

    def _share(self, metrics: Metrics) -> float | None:
        """How much of the run is done; None if it has no end that is known."""
        runner, last = self._config.runner, self._config.last_step
        if not self._config.has_an_end:
            return None
        shares = [0.0]
        if last:
            shares.append(_number(metrics.get("global_step")) / last)
        if runner.max_env_steps > 0:
            shares.append(_number(metrics.get("env_steps")) / runner.max_env_steps)
        return min(1.0, max(shares))

    def _wall_s(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self._earlier_s + time.monotonic() - self._began


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
