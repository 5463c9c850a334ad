"""Drills on whole runs, of which a part, or the launcher itself, is killed, stuck or told to stop.

What is counted: `requests`, `answered` and `errors` are the broker's, as the run's result tells them
(over all lives of the broker), or its last status where the run itself is killed; without requests
that were given up because who asked was stopped or killed. *Lost* are requests that ended in nothing,
episodes that are neither counted nor said to be missing, and trajectories that were sent but are in
none of the learner's books; *duplicated* are episodes beyond those that were asked for, and
trajectories that were counted or used twice; *crossed* are actions that answer another observation
than that of their simulator, and trajectories whose actions were made by other weights than their
version says.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from faults import learning, policies, sims
from faults.drills import Skipped, Trial, drill
from faults.load import Ledger
from faults.pool import Pool, wait_for
from zmqrl.telemetry.report import Collector, LearnerReport

_MARK = "ZMQRL_DRILL"
"""Environment variable that every process of a run inherits."""


class Run:
    """`bin/evaluate` or `bin/train`, as a child of the trial's pool.

    Args:
        trial: Whose simulators and policies are used.
        name: Of the child.
        command: `evaluate` or `train`.
        overrides: Of the configuration.
        decoupled: The mode.
        simulator: Arguments of `faults.sims.Asking`.
    """

    def __init__(
        self,
        trial: Trial,
        name: str,
        command: str,
        *overrides: str,
        decoupled: bool = True,
        **simulator: Any,
    ) -> None:
        folder = trial.folder
        self.name = name
        self._trial, self._pool = trial, trial.pool
        self._json = folder / f"{name}.json"
        self._mark = f"{folder}/{name}"
        self._sessions: set[int] = set()
        policy = "Weighted" if command == "train" else "Tagged"
        os.environ[_MARK] = self._mark
        try:
            self._pool.launcher.start(
                name,
                [
                    *(command, f"--json={self._json}", *self._pool.overrides),
                    f"runner.enable_decoupled_mode={str(decoupled).lower()}",
                    f"runner.logger={{log_path: {folder}/runs, experiment_name: {name}}}",
                    f"rollout.policy={policies.__file__}:{policy}",
                    f"rollout.policy_kwargs.folder={folder}",
                    *_simulator(folder, **simulator),
                    *overrides,
                ],
            )
        finally:
            del os.environ[_MARK]

    # -- Look

    def text(self) -> str:
        """What it has said."""
        return "\n".join(line for line in self._pool.lines if line.startswith(f"[{self.name}]"))

    def is_running(self) -> bool:
        """Whether its launcher lives."""
        return self._pool.launcher.children[self.name].process.poll() is None

    def wait_for_answers(self, count: int) -> dict[str, Any]:
        """Wait until the broker has answered so many requests; returns its status."""

        def status() -> dict[str, Any] | None:
            if not self.is_running():
                raise AssertionError(f"{self.name} has ended: {self.text()}")
            status = self._pool.status_client.ask(0.5)
            return status if status and status["counters"]["answered"] >= count else None

        found: dict[str, Any] = wait_for(status, f"{count} answers; so far: {self.text()}", 60.0)
        return found

    def parts(self, command: str) -> list[psutil.Process]:
        """Its child processes that run a command, by rank."""
        children = psutil.Process(self._pool.pid(self.name)).children()
        return sorted((p for p in children if command in p.cmdline()), key=lambda p: p.cmdline())

    def note_processes(self) -> int:
        """Note the sessions of all its processes, for `left`; how many processes there are."""
        family = psutil.Process(self._pool.pid(self.name)).children(recursive=True)
        self._sessions |= {os.getsid(process.pid) for process in family}
        return len(family)

    def left(self) -> list[int]:
        """The processes that live, of all that it has started, by whatever name, in whatever session."""
        return [process.pid for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error, ProcessLookupError):
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            marked = process.environ().get(_MARK) == self._mark
            return marked or os.getsid(process.pid) in self._sessions
        return False

    # -- End

    def wait(self, timeout: float = 60.0) -> int:
        """Wait until it has ended; returns its exit status."""
        return self._pool.wait_for_exit(self.name, timeout)

    def result(self) -> dict[str, Any]:
        """What it has written."""
        result: dict[str, Any] = json.loads(self._json.read_text(encoding="utf-8"))
        return result

    def count(self, episodes: int) -> dict[str, Any]:
        """Add what its result says to the trial's ledger; returns the result.

        Args:
            episodes: How many were asked for.
        """
        result = self.result()
        names = ("requests", "answered", "errors", "cancelled")
        counters = {name: result[f"broker/{name}"] for name in names}
        _count(self._trial, counters)
        known = result["eval/num_trajectories"] + result["eval/missing_trajectories"]
        self._trial.ledger.lost += max(0, episodes - known)
        self._trial.ledger.duplicated += max(0, known - episodes)
        return result


def _simulator(folder: Path, **kwargs: Any) -> list[str]:
    words = ", ".join(f"{key}: {value}" for key, value in {"folder": folder, **kwargs}.items())
    return [f"env.factory={sims.__file__}:make", f"env.kwargs={{{words}}}"]


def _count(trial: Trial, counters: dict[str, Any]) -> None:
    """Add the counters of a broker that has nothing open any more to the ledger."""
    # Who is stopped or killed gives up what it has asked.
    requests = int(counters["requests"] - counters["cancelled"])
    answered, errors = int(counters["answered"]), int(counters["errors"])
    left = requests - answered - errors
    trial.ledger.add(
        Ledger(requests=requests, answered=answered, lost=max(0, left), duplicated=max(0, -left))
    )
    trial.expect(errors == 0, f"{errors} requests ended in an error")


def _count_crossed(trial: Trial) -> None:
    trial.ledger.crossed += sims.crossed(trial.folder)


# -- The launcher


@drill("launcher-killed", in_suite=False)
def launcher_killed(trial: Trial) -> None:
    """`bin/evaluate`, then `bin/train`, is killed: within 2 s none of its processes is left."""
    for command in ("evaluate", "train"):
        run = Run(
            trial,
            command,
            command,
            "cluster.component_placement={env: 0-1, rollout: 0-1}",
            "env.vectorization=async",
            "env.eval={total_num_envs: 4, rollout_epoch: 1000}",
            "env.train.total_num_envs=4",
            *([f"algorithm={_checks(trial.folder)}"] if command == "train" else []),
            seconds=0.005,
        )
        counters = run.wait_for_answers(trial.size(500, quick=20))["counters"]
        processes = run.note_processes()
        trial.expect(processes >= 9, f"{command} has only {processes} processes")
        moment = trial.pool.kill(run.name)
        wait_for(lambda run=run: not run.left(), f"the end of all processes of {command}")
        trial.recovered(time.monotonic() - moment, within=2.0)
        # What was open then is nobody's any more.
        ended = sum(counters[key] for key in ("answered", "errors", "cancelled"))
        _count(trial, {**counters, "requests": ended})
    _count_crossed(trial)


@drill("stopped-in-a-step", in_suite=False)
def stopped_in_a_step(trial: Trial) -> None:
    """SIGTERM, while every simulator sleeps 5 s in a step: the run ends within 10 s, with nobody
    left.
    """
    run = Run(
        trial,
        "run",
        "evaluate",
        "cluster.component_placement={env: 0-3, rollout: 0}",
        "env.eval={total_num_envs: 4, rollout_epoch: 3}",
        seconds=5,
    )
    run.wait_for_answers(4)
    run.note_processes()
    moment = trial.pool.terminate("run")
    code = run.wait()
    wait_for(lambda: not run.left(), "the end of all processes")
    trial.recovered(time.monotonic() - moment, within=10.0)
    trial.expect(code == 1, f"the run exited with {code}")
    trial.expect("stopped by SIGTERM" in run.text(), f"the run does not say why: {run.text()}")
    run.count(episodes=12)
    _count_crossed(trial)


# -- Env workers


@drill("env-worker-stuck-in-reset", in_suite=False)
def env_worker_stuck_in_reset(trial: Trial) -> None:
    """One env worker of four never returns from a reset: the others keep their pace, the status
    names it, and the evaluation ends and says what is missing.
    """
    epochs = trial.size(40, quick=12)
    run = Run(
        trial,
        "run",
        "evaluate",
        "cluster.component_placement={env: 0-3, rollout: 0-1}",
        f"env.eval={{total_num_envs: 4, rollout_epoch: {epochs}}}",
        f"runner.stall_timeout_s={trial.size(8, quick=3)}",
        seconds=0.02,
        hangs=True,
    )

    def stuck() -> str:
        clients = (trial.pool.status_client.ask(0.5) or {}).get("clients", [])
        return next((c["name"] for c in clients if c["state"] == "reset" and c["state_s"] > 1), "")

    name = wait_for(stuck, f"the status to name it: {run.text()}", 40.0)
    pace = []
    for _ in range(2):  # over a second each: once beside the stuck one, once without it
        before, begin = run.wait_for_answers(0)["counters"]["answered"], time.monotonic()
        after = run.wait_for_answers(before + 60)["counters"]["answered"]
        pace.append((after - before) / (time.monotonic() - begin))
    # Three simulators of 50 steps a second at most.
    trial.expect(min(pace) > 40, f"the others made {pace} steps a second")
    code = run.wait()
    result = run.count(episodes=4 * epochs)
    _count_crossed(trial)
    trial.expect(code == 1, f"the run exited with {code}")
    trial.expect(result["missing"] == name, f"{result['missing']} is said to be missing, not {name}")
    counted = result["eval/num_trajectories"]
    trial.expect(counted >= 3 * epochs, f"{counted} episodes are counted, of {3 * epochs} of the others")
    silent = f"{name} was silent for"
    trial.expect(silent in run.text(), f"the run does not say {silent!r}: {run.text()[-500:]}")


@drill("half-of-the-env-workers-killed", in_suite=False)
def half_of_the_env_workers_killed(trial: Trial) -> None:
    """Half of the env workers of an evaluation are killed, in either mode: started again, the run
    is complete; if nothing is to be started again, the others go on, and the run says who is
    missing.
    """
    for decoupled, restart in trial.size(
        list(itertools.product((True, False), ("on_failure", "never"))), quick=[(False, "on_failure")]
    ):
        name = f"{'decoupled' if decoupled else 'normal'}-{restart}"
        run = Run(
            trial,
            name,
            "evaluate",
            "cluster.component_placement={env: 0-3, rollout: 0-1}",
            f"cluster.restart={restart}",
            "env.eval={total_num_envs: 8, rollout_epoch: 3}",
            decoupled=decoupled,
            length=40,
            seconds=0.005,
        )
        run.wait_for_answers(40)
        for env_worker in run.parts("start-env-worker")[1:3]:
            env_worker.kill()
        code = run.wait()
        result = run.count(episodes=24)
        if restart == "never":
            trial.expect(code == 1, f"{name}: the run exited with {code}")
            trial.expect(result["missing"] == "eval-1, eval-2", f"{name}: missing: {result['missing']}")
            trial.expect(result["eval/num_trajectories"] >= 12, f"{name}: the others did not go on")
        else:
            trial.expect(code == 0, f"{name}: the run exited with {code}: {run.text()[-500:]}")
            trial.expect(result["eval/num_trajectories"] == 24, f"{name}: it is not complete")
    _count_crossed(trial)


# -- The broker and the learner


@drill("broker-killed-under-an-evaluation", in_suite=False)
def broker_killed_under_an_evaluation(trial: Trial) -> None:
    """The broker of an evaluation is killed again and again. It is started again, the first time within
    3 s (before others there is a pause), and the run is complete.
    """
    kills = trial.size(3, quick=1)
    run = Run(
        trial,
        "run",
        "evaluate",
        "cluster.component_placement={env: 0-3, rollout: 0-1}",
        f"env.eval={{total_num_envs: 4, rollout_epoch: {trial.size(60, quick=10)}}}",
        seconds=0.005,
    )
    for kill in range(kills):
        run.wait_for_answers(100)
        moment = time.monotonic()
        run.parts("start-broker")[0].kill()
        epoch = wait_for(lambda: trial.pool.status_client.ask(0.5), "the next broker")["epoch"]
        status = run.wait_for_answers(1)
        if kill == 0:
            trial.recovered(time.monotonic() - moment, within=3.0)
        trial.expect(status["epoch"] == epoch, "the broker was started more than once")
    code = run.wait()
    result = run.count(episodes=4 * trial.size(60, quick=10))
    _count_crossed(trial)
    trial.expect(code == 0, f"the run exited with {code}: {run.text()[-500:]}")
    trial.expect(result["eval/missing_trajectories"] == 0, "the run is not complete")


class Training:
    """The parts of a training as processes of a pool, without a launcher, and what they report.

    Args:
        pool: Not started yet.
        folder: For the sockets and files.
        env_workers: How many.

    Raises:
        Skipped: There is no torch.
    """

    def __init__(self, pool: Pool, folder: Path, env_workers: int = 1) -> None:
        if find_spec("torch") is None:
            raise Skipped("a learner needs torch, which is not installed")
        self.learned: dict[str, Any] = {}
        """The learner's metrics, as it told them last."""
        self._sent: dict[str, int] = {}  # by env worker: trajectories
        self._pool, self._folder = pool, folder
        report = f"ipc://{folder}/report"
        self._collector = Collector(report)
        pool.overrides += [
            f"actor.endpoint=ipc://{folder}/learner",
            f"runner.report={report}",
            f"runner.logger={{log_path: {folder}, experiment_name: run}}",
            f"algorithm={_checks(folder)}",
            "runner.save_interval=20",
            f"cluster.component_placement={{env: 0-{env_workers - 1}, rollout: 0-1}}",
            f"env.train={{total_num_envs: {2 * env_workers}, max_steps_per_rollout_epoch: 8}}",
        ]

    def start(self, part: str, *overrides: str) -> None:
        """Start `broker`, `learner`, `rollout-RANK` or `env-RANK`."""
        kind, _, rank = part.partition("-")
        if kind == "broker":
            self._pool.start_broker()
        elif kind == "rollout":
            self._pool.start_worker(int(rank), "Weighted", seconds=0.005)
        else:
            simulator = _simulator(self._folder, seconds=0.005)
            mode = [f"--rank={rank}", "--mode=train", *simulator] if kind == "env" else []
            command = f"start-{kind}-worker" if kind == "env" else "start-learner"
            self._pool.launcher.start(part, [command, *self._pool.overrides, *mode, *overrides])

    def wait_for(self, key: str, at_least: float, timeout: float = 40.0) -> None:
        """Wait until the learner tells that a metric has come so far."""

        def is_there() -> bool:
            self._look(0.02)
            return float(self.learned.get(key, 0)) >= at_least

        wait_for(is_there, f"{key} >= {at_least}: {self.learned}; {self._pool.lines[-20:]}", timeout)

    def end(self, trial: Trial) -> None:
        """End env workers and learner, and count what became of the trajectories."""
        parts = self._pool.launcher.children
        for kind in ("env", "learner"):
            names = [name for name in parts if name.startswith(kind)]
            for name in names:
                self._pool.terminate(name)
            for name in names:
                code = self._pool.wait_for_exit(name, 15.0)
                # On a busy machine its time limit may cut it off; the books say whether all was done.
                ended = code in (0, -signal.SIGALRM)
                trial.expect(ended, f"{name} exited with {code}: {list(parts[name].last_lines)}")
        while self._look(0.5):
            pass
        names = ("received", "dropped", "rolled_back")
        books = {name: int(self.learned[f"trajectories_{name}"]) for name in names}
        left = sum(self._sent.values()) - sum(books.values())
        file = (self._folder / learning.FILE).read_text(encoding="utf-8")
        used = learning.Trajectories.of(json.loads(file))
        trial.ledger.lost += max(0, left) + max(0, books["received"] - used.count)
        trial.ledger.duplicated += max(0, -left) + used.duplicated
        trial.ledger.crossed += used.crossed + sims.crossed(self._folder)
        trial.expect(used.count > 0, "nothing was learned from")

    def close(self) -> None:
        """Free the socket."""
        self._collector.close()

    def _look(self, timeout: float) -> bool:
        reports = self._collector.collect(timeout)
        for report in reports:
            if isinstance(report, LearnerReport):
                self.learned = report.metrics
            else:
                self._sent[report.name] = report.totals.trajectories_sent
        return bool(reports)


def _checks(folder: Path) -> str:
    return f"{{factory: {learning.__file__}:Checks, kwargs: {{folder: {folder}}}}}"


@drill("learner-killed")
def learner_killed(trial: Trial) -> None:
    """The learner is killed and goes on from its checkpoint, while all others live on: inference
    goes on without it, and no trajectory is lost or counted twice.
    """
    training = Training(trial.pool, trial.folder, env_workers=2)
    try:
        for part in ("broker", "learner", "rollout-0", "rollout-1", "env-0", "env-1"):
            training.start(part)
        training.wait_for("global_step", 25)
        load = trial.load(clients=8)
        load.wait_for(50)
        for _ in range(trial.size(3, quick=1)):
            arrived = training.learned["trajectories_arrived"]
            training.wait_for("trajectories_arrived", arrived + 10)
            moment = trial.pool.kill("learner")
            trial.recovers(moment, within=1.0)
            load.wait_for(trial.size(1000, quick=100))
            training.learned = {}
            training.start("learner", f"runner.resume_dir={trial.folder}/run")
            training.wait_for("trajectories_arrived", 1)
            training.wait_for("trajectories_arrived", training.learned["trajectories_arrived"] + 10)
            load.wait_for(50)
        trial.finish(load)
        training.end(trial)
        _goes_on_from_checkpoints(trial, len(load.ended))
    finally:
        training.close()


def _goes_on_from_checkpoints(trial: Trial, asked_by_clients: int) -> None:
    """Check that the learner did go on, and count what the env workers asked the broker."""
    said = [line for line in trial.pool.lines if "goes on from" in line]
    kills = trial.size(3, quick=1)
    trial.expect(len(said) == kills, f"the learner went on from {len(said)} checkpoints, not {kills}")
    counters = trial.pool.wait_for_quiet()["counters"]
    own = {key: counters[key] - asked_by_clients for key in ("requests", "answered")}
    _count(trial, {**counters, **own})


# -- The start


@drill("start-orders")
def start_orders(trial: Trial) -> None:
    """Broker, env worker, rollout worker and learner come up in every order, 0.3 s after each
    other, and all of them work.
    """
    parts = ("broker", "env-0", "rollout-0", "learner")
    every = list(itertools.permutations(parts))
    orders = trial.size(every, quick=[order for order in every if order[1:] == _after(order[0], parts)])
    for begin in range(0, len(orders), 4):  # four pools at a time, each on sockets of its own
        _start_in(trial, orders[begin : begin + 4], begin)


def _after(first: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    at = parts.index(first)
    return parts[at + 1 :] + parts[:at]


def _start_in(trial: Trial, orders: Sequence[tuple[str, ...]], number: int) -> None:
    with ExitStack() as stack:
        pools, trainings = [], []
        for index in range(len(orders)):
            folder = trial.folder / str(number + index)
            folder.mkdir()
            pool = Pool(folder, Path(policies.__file__), "Weighted", folder=trial.folder)
            stack.callback(pool.close, grace=False)
            pools.append(pool)
            trainings.append(Training(pool, folder))
            stack.callback(trainings[-1].close)
        for parts in zip(*orders, strict=True):
            for training, part in zip(trainings, parts, strict=True):
                training.start(part)
            time.sleep(0.3)  # the point of the drill is that the parts come one after the other
        for order, training in zip(orders, trainings, strict=True):
            try:
                training.wait_for("trajectories_arrived", 3)
                training.wait_for("policy_version", 3)
            except AssertionError as error:
                raise AssertionError(f"started in the order {', '.join(order)}: {error}") from None
        for pool, training in zip(pools, trainings, strict=True):
            training.end(trial)
            _count(trial, pool.wait_for_quiet()["counters"])
