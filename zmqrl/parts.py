"""The parts of a pool: what the commands `start-…` run.

Each loads its configuration, runs one part in this process until it is told to stop, and returns the
exit code. What a part needs is imported when it starts: each does with the packages of its own.
"""

from __future__ import annotations

import argparse
import logging
import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

from zmqrl.allocator import keep_freed
from zmqrl.errors import ConfigError
from zmqrl.process import StopSignal, allow_connections

if TYPE_CHECKING:
    from zmqrl.config import Config, Mode
    from zmqrl.rollout.policy import Policy
    from zmqrl.rollout.versions import PolicyVersions

log = logging.getLogger("zmqrl")


def start_broker(options: argparse.Namespace) -> int:
    """Bind the two sockets and serve."""
    from zmqrl import config
    from zmqrl.broker.pool import Options
    from zmqrl.broker.scheduling import Limits
    from zmqrl.broker.server import BrokerServer
    from zmqrl.transport import sockets

    loaded = config.load(options.config, options.overrides)
    memory = keep_freed()
    allow_connections()
    stop = StopSignal().install()
    broker, rollout = loaded.broker, loaded.rollout
    behaviour = Options(
        decoupled=loaded.runner.enable_decoupled_mode,
        limits=Limits(
            queue_size=rollout.rollout_queue_size,
            max_rows=rollout.most_rows,
            max_wait=None if rollout.max_wait_ms is None else rollout.max_wait_ms / 1000,
            max_attempts=rollout.max_attempts,
            max_joined=broker.max_message_mb << 20,
        ),
        attempt_timeout=rollout.attempt_timeout_s,
        max_open=broker.max_queue_messages,
        max_open_bytes=broker.max_queue_mb << 20,
        max_client_open=broker.max_client_messages,
        max_client_bytes=broker.max_client_bytes,
    )
    server = BrokerServer(
        broker.frontend or sockets.local_endpoint("frontend"),
        broker.backend or sockets.local_endpoint("backend"),
        behaviour,
        broker.max_message_mb,
        broker.heartbeat_timeout_s,
        loaded.security.keys_of("server"),
        loaded.security.insecure,
        broker.shared_memory,
        memory,
    )
    mode = "decoupled" if behaviour.decoupled else "normal"
    log.info("serving in %s mode: frontend %s, backend %s", mode, server.frontend, server.backend)
    server.run(stop)
    say_interrupted(stop)
    return 0


def start_rollout_worker(options: argparse.Namespace) -> int:
    """Serve a policy."""
    from zmqrl.rollout.loading import limit_torch_threads
    from zmqrl.runner.policies import make_policy

    serves = options.serves or ""
    loaded = _config_of_rollout_worker(options, serves)
    rollout = loaded.rollout
    workers = rollout.policies[serves].workers if serves else loaded.rollout_workers
    _check_rank(options.rank, workers, "rollout")
    memory = keep_freed()
    stop = StopSignal().install()
    name = options.name or _name(f"rollout-{serves}" if serves else "rollout", options.rank)
    policy = make_policy(loaded, name, stop, serves)
    if policy is None:
        say_interrupted(stop)
        return 0
    what = rollout.policies[serves].policy if serves else rollout.policy
    what = what or f"the actor of {loaded.algorithm.name or loaded.algorithm.factory}"
    what += f" as {serves}" if serves else ""
    threads = limit_torch_threads(rollout.torch_threads)
    where = f" on {policy.device}{threads}" if policy.device is not None else ""
    with closing(policy):
        return _serve(
            policy,
            f"{what} is loaded{where}",
            loaded,
            stop,
            memory=memory,
            name=name,
            serves=serves,
            rank=options.rank,
            world_size=None if options.rank is None else workers,
            static_sizes=rollout.static_batch_sizes,
            state_mb=rollout.state_mb if rollout.affinity == "sticky" else None,
        )


def start_reward_worker(options: argparse.Namespace) -> int:
    """Serve a reward model."""
    from zmqrl import config
    from zmqrl.rollout.loading import limit_torch_threads, load_policy
    from zmqrl.transport.header import REWARD

    overrides = config.for_policy(options.model, options.overrides, "reward", "model")
    loaded = config.load(options.config, overrides)
    reward, rollout = loaded.reward, loaded.rollout
    if reward.model is None:
        raise ConfigError("no reward model is named: give --model module:factory, or set reward.model")
    _check_rank(options.rank, loaded.cluster.component_placement.count("reward"), "reward")
    memory = keep_freed()
    stop = StopSignal().install()
    model = load_policy(
        reward.model, reward.model_kwargs, rollout.device, torch_threads=rollout.torch_threads
    )
    said = f"the reward model {reward.model} is loaded{limit_torch_threads(rollout.torch_threads)}"
    name = _name("reward", options.rank)
    return _serve(model, said, loaded, stop, memory=memory, name=name, serves=REWARD)


def start_learner(options: argparse.Namespace) -> int:
    """Learn from trajectories, and publish weights."""
    from zmqrl import config
    from zmqrl.learner.worker import LearnerWorker
    from zmqrl.rollout.loading import limit_torch_threads

    loaded = config.load(options.config, options.overrides)
    if not loaded.algorithm.is_set:
        raise ConfigError(
            "no algorithm is named: set algorithm.name to sac or ppo, or algorithm.factory"
        )
    allow_connections()
    stop = StopSignal().install()
    learner = LearnerWorker(loaded, stop)
    threads = limit_torch_threads(loaded.actor.torch_threads)
    log.info("the learner listens at %s%s", learner.endpoint, threads)
    learner.run()
    say_interrupted(stop)
    return 0


def start_env_worker(options: argparse.Namespace) -> int:
    """Step simulators."""
    from rich.console import Console

    from zmqrl import config
    from zmqrl.env.worker import EnvWorker
    from zmqrl.rollout.loading import limit_torch_threads
    from zmqrl.telemetry.metrics import EnvView, episode_metrics, run_metrics
    from zmqrl.telemetry.table import results

    loaded = config.load(options.config, options.overrides)
    if options.check_env:
        return check_env(loaded, options.mode)
    _check_env_is_named(loaded)
    _check_rank(options.rank, loaded.env_workers(options.mode), "env")
    stop = StopSignal().install()
    worker = EnvWorker(loaded, options.mode, options.rank, stop, options.on_demand)
    threads = limit_torch_threads(loaded.env.torch_threads)
    if threads:
        log.info("%s runs with%s", worker.name, threads.lstrip(","))
    finished = worker.run()
    if loaded.runner.report is None:
        group = "eval" if options.mode == "eval" else "env"
        view = EnvView(worker.name, 0, worker.report, worker.reporter.episodes)
        metrics = {**episode_metrics([view], group), **run_metrics([view], {}, 1)}
        own = {key: value for key, value in metrics.items() if not key.startswith(("broker", "rollout"))}
        Console().print(results(own, group))
    if not finished:
        say_interrupted(stop)
    return 0


def check_env(loaded: Config, mode: Mode) -> int:
    """Look at the simulator without a pool, print what is found, and return 1 if something is wrong."""
    from zmqrl.env.checks import EnvCheck

    _check_env_is_named(loaded)
    check = EnvCheck(loaded, mode, lambda words: print(words, flush=True))
    check.run()
    return 1 if check.errors else 0


def _check_env_is_named(loaded: Config) -> None:
    if loaded.env.id is None and loaded.env.factory is None:
        raise ConfigError("no simulator is named: set env.id to a Gymnasium id, or env.factory")


def _config_of_rollout_worker(options: argparse.Namespace, serves: str) -> Config:
    """The configuration; what it serves, of several policies, is checked.

    Raises:
        ConfigError: It serves none of them, or does not say which.
    """
    from zmqrl import config

    section = f"rollout.policies.{serves}" if serves else "rollout"
    overrides = config.for_policy(options.policy, options.overrides, section, "policy")
    if serves and options.policy is not None:
        # What the pool's own policy is, and who asks for which, is of no matter to this worker.
        overrides += ["rollout.policy=null", "rollout.policy_kwargs={}", "env.policies={}"]
    loaded = config.load(options.config, overrides)
    served = loaded.rollout.policies
    if served and not serves:
        raise ConfigError(f"which policy of several? give --serves {' or --serves '.join(served)}")
    if serves and serves not in served:
        raise ConfigError(
            f"rollout.policies has no {serves!r}: it is {', '.join(served) or 'empty'}; --policy "
            "module:factory says what to serve under that name"
        )
    return loaded


def _name(part: str, rank: int | None) -> str:
    return f"{part}-{os.getpid() if rank is None else rank}"


def _serve(
    policy: Policy | PolicyVersions, said: str, loaded: Config, stop: StopSignal, **more: Any
) -> int:
    """Run a worker of the configured pool until it is told to stop.

    Args:
        policy: What it runs.
        said: For the log, as soon as it is ready.
        loaded: The configuration.
        stop: Tells it to stop.
        more: As RolloutWorker takes it.
    """
    from zmqrl.rollout.worker import RolloutWorker
    from zmqrl.transport import sockets

    worker = RolloutWorker(
        policy,
        loaded.broker.backend or sockets.local_endpoint("backend"),
        max_message_mb=loaded.broker.max_message_mb,
        heartbeat_s=loaded.broker.heartbeat_timeout_s,
        prefetch=loaded.rollout.prefetch,
        keys=loaded.security.keys_of("worker"),
        **more,
    )
    log.info("%s", said)
    worker.run(stop)
    say_interrupted(stop)
    return 0


def say_interrupted(stop: StopSignal) -> None:
    """Say so after Ctrl-C; SIGTERM is how a launcher ends a run that is over."""
    if stop.reason == "SIGINT":
        log.info("stopped by Ctrl-C")


def _check_rank(rank: int | None, count: int, component: str) -> None:
    if rank is not None and not 0 <= rank < count:
        raise ConfigError(
            f"--rank {rank} is not one of the {count} {component} workers "
            f"(cluster.component_placement.{component})"
        )
