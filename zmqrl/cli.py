"""The command line: `zmqrl NAME …`, and `bin/NAME …`."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from zmqrl import parts
from zmqrl.errors import ConfigError, EndpointError, KeysError, ZmqrlError
from zmqrl.process import StopSignal, log_to_stderr, tie_to_launcher

_EXTRAS = {
    "torch": "torch",
    "torchrl": "train",
    "tensordict": "train",
    "matplotlib": "train",
    "tensorboard": "train",
    "stable_baselines3": "sb3",
}
"""What brings a module that is missing."""

_STATUS_TIMEOUT = 4.0
"""Seconds that a broker has to answer, after the first one."""

_POLICY = "or file.py:factory; a key=value that is not of the configuration is for the factory"

_OVERRIDES = "configuration keys to override, such as broker.shared_memory=false"

_CHECK_ENV = "only look at the simulator, and say what is found; exits with 1 if something is wrong"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; None takes the process's own.

    Returns:
        0 on success, 2 on a bad configuration or command line, 1 on any other failure.
    """
    tie_to_launcher()
    log_to_stderr()
    options = _parse(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except ImportError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0], "env")
        return _fail(f"{error}; this command needs pip install 'zmqrl[{extra}]'", 1)
    except (ConfigError, EndpointError, KeysError) as error:
        _show_cause(error)
        return _fail(str(error), 2)
    except ZmqrlError as error:
        _show_cause(error)
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; overrides may stand before, between and after the options."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    for word in rest:
        if word.startswith("-") or "=" not in word:
            parser.error(f"unrecognized argument: {word}; see zmqrl {options.command} --help")
    options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zmqrl", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--config", metavar="FILE", help="a YAML file, such as those in config/")
        command.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)
        command.set_defaults(run=run)
        return command

    add("start-broker", parts.start_broker, "Run the broker that env and rollout workers connect to.")

    rollout = add("start-rollout-worker", parts.start_rollout_worker, "Run a policy for the pool.")
    rollout.add_argument("--policy", metavar="MODULE:FACTORY", help=_POLICY)
    rollout.add_argument("--serves", metavar="NAME", help="the name of the policy, of several")
    rollout.add_argument("--rank", type=int, help="its number, from 0; normal mode binds envs by it")
    rollout.add_argument("--name", help="its name in status and messages")

    env = add("start-env-worker", parts.start_env_worker, "Step simulators with actions from the pool.")
    env.add_argument("--rank", type=int, default=0, help="its number, from 0 (default 0)")
    env.add_argument("--mode", choices=["train", "eval"], default="eval", help="default: eval")

    env.add_argument(
        "--on-demand", action="store_true", help="eval: whenever the learner asks, not at once"
    )

    env.add_argument("--check-env", action="store_true", help=_CHECK_ENV)

    reward = add("start-reward-worker", parts.start_reward_worker, "Run a reward model for the pool.")
    reward.add_argument("--model", metavar="MODULE:FACTORY", help=_POLICY)
    reward.add_argument("--rank", type=int, help="its number, from 0")

    add("start-learner", parts.start_learner, "Learn from trajectories, and publish weights.")

    train = add("train", _train, "Run all parts of a training here.")
    train.add_argument(
        "--own-loop", action="store_true", help="start no env workers: a PolicyClient steps simulators"
    )
    train.add_argument("--json", metavar="FILE", type=Path, help="write the last metrics to FILE")

    evaluate = add("evaluate", _evaluate, "Run broker, rollout and env workers here, and evaluate.")
    evaluate.add_argument("--policy", metavar="MODULE:FACTORY", help=_POLICY)
    evaluate.add_argument("--check-env", action="store_true", help=_CHECK_ENV)
    evaluate.add_argument("--json", metavar="FILE", type=Path, help="write the metrics to FILE")

    status = add("status", _status, "Show who is connected to a broker, what each does, and what waits.")
    status.add_argument(
        "--broker", metavar="ADDRESS", help="its frontend, in place of the configured one"
    )
    status.add_argument("--json", action="store_true", help="print JSON")

    text = "Make keys for a pool that spans machines, add further ones, or revoke some."
    keys = commands.add_parser("make-keys", help=text, description=text)
    keys.add_argument("folder", metavar="FOLDER", help="for the bundles server, client and worker")
    what = keys.add_mutually_exclusive_group()
    what.add_argument("--client", metavar="NAME", help="only add a bundle for a client or env worker")
    what.add_argument("--worker", metavar="NAME", help="only add a bundle for a rollout worker")
    what.add_argument(
        "--revoke", metavar="NAME", help="let its key in no longer, and delete its bundle here"
    )
    keys.set_defaults(run=_make_keys, overrides=[])
    return parser


def _train(options: argparse.Namespace) -> int:
    from rich.console import Console

    from zmqrl import config
    from zmqrl.runner.evaluate import evaluate
    from zmqrl.runner.train import train

    loaded = config.load(options.config, options.overrides)
    _check_json_file(options.json)
    stop = StopSignal(patience_s=30).install()
    if loaded.runner.only_eval:
        evaluate(loaded, Console(), stop, options.json)
    else:
        train(loaded, Console(), stop, options.json, own_loop=options.own_loop)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from zmqrl import config
    from zmqrl.runner.evaluate import evaluate

    overrides = config.for_policy(options.policy, options.overrides, "rollout", "policy")
    loaded = config.load(options.config, overrides)
    if options.check_env:
        return parts.check_env(loaded, "eval")
    _check_json_file(options.json)
    stop = StopSignal(patience_s=30)  # the launcher itself bounds its children's end
    evaluate(loaded, Console(), stop.install(), options.json)
    return 0


def _status(options: argparse.Namespace) -> int:
    from rich.console import Console

    from zmqrl import config
    from zmqrl.broker.status import StatusClient
    from zmqrl.runner.endpoints import running
    from zmqrl.telemetry.pool_view import pool_view, problems_of
    from zmqrl.transport import sockets

    loaded = config.load(options.config, options.overrides)
    run = running(loaded) if options.broker is None and loaded.broker.frontend is None else None
    loaded = run or loaded
    endpoint = options.broker or loaded.broker.frontend or sockets.local_endpoint("frontend")
    client = StatusClient(endpoint, loaded.security.keys_of("client"))
    try:
        status = client.ask(1.0)
        if status is None:
            client.raise_refusal()
            status = client.ask(_STATUS_TIMEOUT)
    finally:
        client.close()
    if status is None:
        problem = f"no broker answers at {endpoint}; is one running there (bin/start-broker)?"
        if options.broker is None and loaded.broker.frontend is None:
            name = loaded.runner.logger.experiment_name
            problem = f"no run of the name {name} lives on this machine, and {problem}"
        if options.json:
            print(json.dumps({"broker": endpoint, "problems": [problem]}, indent=2))
        return _fail(problem, 1)
    problems = problems_of(status)
    if options.json:
        print(json.dumps({"broker": endpoint, "problems": problems, **status}, indent=2))
    else:
        Console().print(pool_view(endpoint, status, problems))
    return 0 if any(worker["state"] != "stuck" for worker in status["workers"]) else 1


def _make_keys(options: argparse.Namespace) -> int:
    try:
        _make_or_revoke(options)
    except OSError as error:
        raise KeysError(f"the keys cannot be written: {error}") from None
    return 0


def _make_or_revoke(options: argparse.Namespace) -> None:
    from zmqrl.transport import bundles

    folder = options.folder
    if options.revoke is not None:
        bundles.revoke(folder, options.revoke)
        print(
            f"{options.revoke} is let in no longer: its key is gone from {folder}/server, its bundle too"
        )
        print(f"If broker or learner use a copy of {folder}/server, delete {options.revoke}.key there.")
    elif options.client is not None or options.worker is not None:
        role, name = ("client", options.client) if options.client else ("worker", options.worker)
        bundles.add_bundle(folder, role, name)
        print(f"made {folder}/{name}; its public key is in {folder}/server/{role}s/{name}.key")
    else:
        bundles.make_bundles(folder)
        print(f"made {folder}/server (broker, learner), {folder}/client (env workers, PolicyClient)")
        print(f"and {folder}/worker (rollout workers). Here, set security.keys to {folder}; to another")
        print("machine copy only the bundle of the part that runs there, over a safe channel.")


def _check_json_file(file: Path | None) -> None:
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"--json {file}: there is no such folder")
    if file is not None and file.is_dir():
        raise ConfigError(f"--json {file} is a folder; name a file")


def _show_cause(error: BaseException) -> None:
    """Print the traceback of what the user's own code raised."""
    if error.__cause__ is not None:
        cause = error.__cause__
        traceback.print_exception(type(cause), cause, cause.__traceback__)


def _fail(message: str, code: int) -> int:
    # The last line is what a launcher passes on: a traceback that came along stands before it.
    words, _, trace = message.partition("\n\n")
    if trace:
        print(trace.rstrip(), file=sys.stderr)
    print(f"error: {words}", file=sys.stderr)
    return code
