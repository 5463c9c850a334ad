"""Drills on a network of two network namespaces, which can be cut."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from faults import crowd, policies
from faults.drills import Skipped, Trial, drill
from faults.pool import wait_for
from zmqrl.runner.launcher import Launcher

_FAR, _NEAR = "10.77.0.1", "10.77.0.2"
_HOLD = ["sleep", "600"]


class Network:
    """Two network namespaces with a link between them, and nothing else in them.

    They are those of this user, so that no rights are needed where such are permitted.

    Args:
        launcher: Ends the processes that hold them.

    Raises:
        Skipped: They are not permitted here, or `unshare`, `nsenter` or `ip` is missing.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        try:
            words = [*_USER, "ip", "link"]
            subprocess.run(words, check=True, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.CalledProcessError) as error:
            words = str(getattr(error, "stderr", None) or error).strip()
            raise Skipped(f"network namespaces are not to be had here: {words}") from None
        self._far = self._hold("far", [*_USER, *_HOLD])
        self._near = self._hold("near", [*self._enter(self._far), "unshare", "--net", *_HOLD])
        self._do(f"ip link add wire type veth peer name wire netns {self._near}")
        for pid, address in ((self._far, _FAR), (self._near, _NEAR)):
            self._do(f"ip address add {address}/24 dev wire", pid)
            self._do("ip link set lo up", pid)
            self._do("ip link set wire up", pid)

    @property
    def far(self) -> list[str]:
        """What makes Python run a program in the namespace with the address `FAR`."""
        return self._within(self._far)

    @property
    def near(self) -> list[str]:
        """The same for the other one."""
        return self._within(self._near)

    def cut(self) -> None:
        """Let nothing through any more."""
        self._do("ip link set wire down")

    def heal(self) -> float:
        """Let everything through again; returns the moment."""
        self._do("ip link set wire up")
        return time.monotonic()

    def run(self, *command: str) -> str:
        """The output of a command that is run with the address `NEAR`."""
        words = [*self._enter(self._near), *command]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout

    def _hold(self, name: str, command: list[str]) -> int:
        """Start what makes a namespace and holds it; returns its process number."""
        self._launcher.start(name, command, program=["-c", _EXECUTE])
        pid = self._launcher.children[name].process.pid
        # It sleeps in its namespace once it has become the last program of its command.
        last = _HOLD[0].encode()
        wait_for(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(last), f"namespace {name}")
        return pid

    def _do(self, command: str, pid: int = 0) -> None:
        words = [*self._enter(pid or self._far), *command.split()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr.strip()}")

    def _within(self, pid: int) -> list[str]:
        return ["-c", _EXECUTE, *self._enter(pid), sys.executable]

    @staticmethod
    def _enter(pid: int) -> list[str]:
        return ["nsenter", "--preserve-credentials", "--user", "--net", "--target", str(pid), "--"]


_USER = ["unshare", "--user", "--map-root-user", "--net"]
_EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


@drill("network-cut")
def network_cut(trial: Trial) -> None:
    """The network between the broker and its clients and rollout worker is cut for longer than
    heartbeats allow, and healed: every request ends in its answer, none twice.
    """
    pool = trial.pool
    network = Network(pool.launcher)
    frontend, backend = f"tcp://{_FAR}:5757", f"tcp://{_FAR}:5758"
    overrides = [
        f"broker.frontend={frontend}",
        f"broker.backend={backend}",
        "broker.heartbeat_timeout_s=1",
        "security.insecure=true",
        "runner.enable_decoupled_mode=true",
    ]
    pool.launcher.start("broker", ["start-broker", *overrides], [*network.far, "-m", "zmqrl"])
    policy = [f"--policy={policies.__file__}:Tagged", f"rollout.policy_kwargs.folder={trial.folder}"]
    pool.launcher.start(
        "rollout-0",
        ["start-rollout-worker", "--rank=0", *overrides, *policy, "rollout.policy_kwargs.seconds=0.01"],
        [*network.near, "-m", "zmqrl"],
    )
    clients = 8
    trial.crowd("clients", clients, first=0, within=network.near, endpoint=frontend)

    def answered() -> list[int]:
        return [ledger.answered for ledger in crowd.ledgers(pool.lines, "clients")]

    def all_have_more_than(counts: list[int]) -> bool:
        now = answered()
        return len(now) == clients and all(new > old for new, old in zip(now, counts, strict=True))

    wait_for(lambda: all_have_more_than([10] * clients), f"the first answers: {pool.lines[-20:]}", 40.0)
    for seconds in trial.size([4, 12, 8], quick=[4]):
        network.cut()
        time.sleep(seconds)  # what has happened must be nothing
        before = answered()
        moment = network.heal()
        wait_for(lambda before=before: all_have_more_than(before), "an answer to each client", 40.0)
        trial.recovered(time.monotonic() - moment, within=10.0)
        more = [count + trial.size(200, quick=20) for count in before]
        wait_for(lambda more=more: all_have_more_than(more), "more answers", 60.0)
    pool.terminate("clients")
    pool.wait_for_exit("clients", 60.0)
    told = network.run(sys.executable, "-m", "zmqrl", "status", "--json", "--broker", frontend)
    names = [worker["name"] for worker in json.loads(told)["workers"]]
    trial.expect(names == ["rollout-0"], f"the rollout worker did not come back: {names}")
