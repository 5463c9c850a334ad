"""Runs an evaluation on this machine: starts all parts, watches them, and sums up."""

from __future__ import annotations

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
from zmqrl.runner.supervisor import Kind, Part, Supervisor
from zmqrl.telemetry.epochs import BrokerEpochs
from zmqrl.telemetry.jsonl import JsonLines
from zmqrl.telemetry.live import LiveLine
from zmqrl.telemetry.metrics import EnvView, Metrics, episode_metrics, policy_metrics, run_metrics
from zmqrl.telemetry.report import Collector, Report
from zmqrl.telemetry.table import summary

log = logging.getLogger(__name__)

_ASK_EVERY = 0.5
"""Seconds between two looks at the broker's counters, which are gone when it is killed."""

_LAST_WORDS = 1.0
"""Seconds that the last report of a process may take that has ended."""


def evaluate(config: Config, console: Console, stop: StopSignal, json_file: Path | None = None) -> None:
    """Run an evaluation from start to end.

    Args:
        config: Names the policy and the simulator.
        console: For the live line and the tables.
        stop: Ends the run early.
        json_file: Where to write the metrics, as one flat JSON object.

    Raises:
        ConfigError: The policy or the simulator is not named.
        StartupFailed: A part did not come up.
        RunFailed: The run broke off, or episodes are missing; what there is has been shown and written.
    """
    if not config.rollout.policies:
        if config.rollout.policy is None and config.runner.ckpt_path is None:
            raise ConfigError(
                "rollout.policy is not set: which policy acts? (module:factory, or runner.ckpt_path)"
            )
        _check_checkpoint(config.runner.ckpt_path, "runner")
    for name, policy in config.rollout.policies.items():
        _check_checkpoint(policy.ckpt_path, f"rollout.policies.{name}")
    if config.env.id is None and config.env.factory is None:
        raise ConfigError("env.id is not set: which simulator? (a Gymnasium id, or env.factory)")
    began = time.monotonic()
    folder = Path(config.runner.logger.log_path) / config.runner.logger.experiment_name
    if config.runner.ckpt_path is not None:
        folder /= "evaluation"  # beside the files of the training that the configuration is of
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lines = JsonLines(folder / "metrics.jsonl")
    except OSError as error:
        raise ConfigError(f"runner.logger: cannot write to {folder}: {error.strerror}") from None
    configuration.dump(config, folder / "config.yaml")
    with local_endpoints(config) as (complete, file):
        run = _Evaluation(complete, file, console, stop)
        failure: Exception | None = None
        try:
            run.run()
        except (ConfigError, StartupFailed, RunFailed) as error:
            failure = error
        finally:
            run.close()
    if failure is not None and not run.stepped:
        raise failure
    metrics: Metrics = {**run.metrics(), "wall_s": time.monotonic() - began}
    lines.write(metrics)
    lines.close()
    if json_file is not None:
        json_file.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    if metrics["env_steps"]:
        console.print(summary(metrics, run.envs, run.status, cut_short=failure is not None))
    console.print(f"written to {folder}", style="dim", markup=False)
    if failure is not None:
        raise failure
    run.raise_if_incomplete()


def _check_checkpoint(path: str | None, section: str) -> None:
    if path is None:
        return
    from zmqrl.learner import checkpoint

    try:
        checkpoint.find(Path(path))
    except CheckpointError as error:
        raise ConfigError(f"{section}.ckpt_path: {error}") from None


class _Evaluation:
    """The processes of one evaluation, and what is known of them."""

    def __init__(self, config: Config, config_file: Path, console: Console, stop: StopSignal) -> None:
        assert config.runner.report is not None
        assert config.broker.frontend is not None
        self.problems: list[str] = []
        self._config = config
        self._stop = stop
        per_env = config.env.eval.rollout_epoch
        self.envs = [
            EnvView(f"eval-{rank}", config.envs_of("eval", rank) * per_env, policy=policy)
            for rank, policy in enumerate(config.policies_of("eval"))
        ]
        security = config.security
        keys = security.keys_of("server")  # this process watches over the pool as part of the server
        self._collector = Collector(config.runner.report, keys, security.insecure)
        self._broker = StatusClient(config.broker.frontend, keys)
        self._epochs = BrokerEpochs()
        self._live = LiveLine(console, sum(env.expected_episodes for env in self.envs))
        self._parts = Supervisor(config, config_file, self._live.say, lambda: self.stepped, stop)
        self._began = self._asked = time.monotonic()

    def run(self) -> None:
        """Start everything and watch until every env worker has ended."""
        self._start()
        try:
            while not all(env.ended() for env in self.envs):
                if self._stop():
                    self.problems.append(f"stopped by {self._stop.reason}")
                    break
                self._collect(0.2)
                for part in self._parts.look():
                    self._exited(part)
                if not self._parts.paused():
                    self._look_at_the_clock()
                self._live.update(self.envs)
        finally:
            self._epochs.take(self._broker.ask())
            self._collect(0.0)

    def close(self) -> None:
        """End all processes and free what this one holds."""
        self._live.close()
        self._parts.close(first=[Kind.EVAL])
        self._broker.close()
        self._collector.close()

    @property
    def stepped(self) -> bool:
        """Whether any simulator has made a step."""
        return any(env.stepped() for env in self.envs)

    @property
    def status(self) -> dict[str, Any]:
        """Of the broker, over all its restarts."""
        return self._epochs.status()

    def metrics(self) -> Metrics:
        """All metrics of the run."""
        return {
            **episode_metrics(self.envs),
            **policy_metrics(self.envs, self.status, self._config.rollout_names()),
            **run_metrics(self.envs, self.status, self._config.rollout_workers),
            "missing": ", ".join(env.name for env in self.envs if env.missing()),
        }

    def raise_if_incomplete(self) -> None:
        """End in an error if episodes are missing.

        Raises:
            RunFailed: Naming who is missing, and why.
        """
        missing = [env for env in self.envs if env.missing()]
        if not missing and not self._stop():
            return
        whose = ", ".join(f"{env.name} ({env.missing()})" for env in missing)
        why = "; ".join(dict.fromkeys(self.problems)) or "for no known reason"
        raise RunFailed(f"{sum(e.missing() for e in missing)} episodes are missing, of {whose}: {why}")

    def _start(self) -> None:
        self._parts.start("broker", Kind.BROKER, "start-broker")
        for name, policy in self._config.rollout_names().items():
            words = ["--rank", name.rpartition("-")[2], *(["--serves", policy] if policy else [])]
            self._parts.start(name, Kind.ROLLOUT, "start-rollout-worker", *words, serves=policy)
        for rank, env in enumerate(self.envs):
            self._parts.start(
                env.name, Kind.EVAL, "start-env-worker", "--rank", str(rank), "--mode", "eval"
            )

    def _collect(self, timeout: float) -> None:
        for report in self._collector.collect(timeout):
            if isinstance(report, Report) and report.rank < len(self.envs):
                self.envs[report.rank].take(report, time.monotonic())

    def _exited(self, part: Part) -> None:
        """A process has ended: go on, give up on its episodes, or give up."""
        self._collect(0.0)  # its last report may be here
        env = self._env_of(part)
        if env is not None and self._parts.ended_well(part):
            # It is on its way at least. Without it the worker would play all its episodes anew.
            until = time.monotonic() + _LAST_WORDS
            while not env.ended() and time.monotonic() < until:
                self._collect(0.1)
        if env is not None and env.ended():
            return
        try:
            self._parts.lost(part)
        except RunFailed as error:
            if env is not None:
                self._give_up(env, part, str(error))
            elif any(other.policy != part.serves for other in self.envs):
                self._give_up_policy(part, str(error))
            else:
                raise

    def _look_at_the_clock(self) -> None:
        """Give up on what does not come up, or has stopped to move."""
        now = time.monotonic()
        if now >= self._asked + _ASK_EVERY:
            self._asked = now
            self._epochs.take(self._broker.ask(0.2))
        heard = {env.name: env.heard for env in self.envs}
        for part, why in self._parts.hanging(heard, self._epochs.status()):
            env = self._env_of(part)
            if env is None:
                self._parts.kill(part, why)
            elif not env.ended():
                # Not started again: it will most likely hang again, and each time takes so many seconds.
                self._give_up(env, part, why)
        limit = self._config.runner.startup_timeout_s
        if not self.stepped and now >= self._began + limit:
            idle = self._broker.ask() or {}
            workers = len(idle.get("workers", []))
            raise StartupFailed(
                f"nothing was stepped within runner.startup_timeout_s ({limit:g} s); {workers} of "
                f"{self._config.rollout_workers} rollout workers are connected"
            )

    def _env_of(self, part: Part) -> EnvView | None:
        return next((env for env in self.envs if env.name == part.name), None)

    def _give_up_policy(self, part: Part, why: str) -> None:
        """Nobody serves one of several policies any more: only the env workers of the others go on."""
        self.problems.append(why)
        log.warning("%s; the env workers of the other policies go on", why)
        for env in self.envs:
            if env.policy == part.serves and not env.ended():
                env.gave_up = why
                self._parts.give_up(self._parts.named(env.name))

    def _give_up(self, env: EnvView, part: Part, why: str) -> None:
        env.gave_up = why
        self.problems.append(why)
        self._parts.give_up(part)
        others = "" if all(other.ended() for other in self.envs) else "; the others go on"
        log.warning("%s%s", why, others)
