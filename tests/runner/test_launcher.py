"""No process outlives its launcher, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from conftest import wait_for

from zmqrl.runner.launcher import Launcher

STUCK = """
import ctypes, multiprocessing, sys, time
from pathlib import Path

def grandchild(folder):
    Path(folder, "grandchild").touch()
    time.sleep(600)

def policy(folder, how="sleep"):
    if how == "grandchild":
        multiprocessing.get_context("fork").Process(target=grandchild, args=(folder,)).start()
    Path(folder, "started").touch()
    if how == "gil":
        ctypes.PyDLL(None).sleep(600)  # holds the GIL: no Python code runs in this process
    time.sleep(600)
"""


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.parametrize("how", ["sleep", "gil", "grandchild"])
def test_nothing_is_left_two_seconds_after_the_launcher_is_killed(folder: Path, how: str) -> None:
    (folder / "stuck.py").write_text(STUCK)
    script = textwrap.dedent(f"""
        import time
        from zmqrl.runner.launcher import Launcher
        launcher = Launcher(lambda name, line: print(name, line, flush=True))
        launcher.start("worker", ["start-rollout-worker", "--policy={folder}/stuck.py:policy",
            "rollout.policy_kwargs.folder={folder}", "rollout.policy_kwargs.how={how}"])
        time.sleep(600)
    """)
    launcher = subprocess.Popen([sys.executable, "-c", script])
    try:
        marker = "grandchild" if how == "grandchild" else "started"
        wait_for((folder / marker).exists, "the worker to be stuck")
        left = descendants(launcher.pid)
        assert left
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(lambda: not any(_runs(process) for process in left), "all processes to end", 2.0)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(folder: Path) -> None:
    (folder / "stuck.py").write_text(STUCK)
    with Launcher(lambda name, line: None) as launcher:
        launcher.start(
            "worker",
            [
                "start-rollout-worker",
                f"--policy={folder}/stuck.py:policy",
                f"rollout.policy_kwargs.folder={folder}",
                "rollout.policy_kwargs.how=gil",
            ],
        )
        wait_for((folder / "started").exists, "the worker to be stuck")
        begin = time.monotonic()
        launcher.stop()
        assert 4.0 <= time.monotonic() - begin < 10.0
        assert launcher.children["worker"].process.returncode == -signal.SIGKILL
        assert "killed by SIGKILL" in launcher.children["worker"].cause()


def test_a_child_that_fails_tells_its_cause(folder: Path) -> None:
    lines: list[str] = []
    with Launcher(lambda name, line: lines.append(f"[{name}] {line}")) as launcher:
        launcher.start("worker", ["start-rollout-worker", "--policy=no_such_module:policy"])
        child = wait_for(launcher.exits, "the child to end")[0]
        assert "exited with code 2" in child.cause()
        assert "no_such_module" in child.cause()
        assert any(line.startswith("[worker] error: ") for line in lines)


def test_a_child_that_asks_a_question_gets_an_end_of_file(folder: Path) -> None:
    (folder / "asks.py").write_text("def policy():\n    input('proceed? ')\n")
    with Launcher(lambda name, line: None) as launcher:
        launcher.start("worker", ["start-rollout-worker", f"--policy={folder}/asks.py:policy"])
        child = wait_for(launcher.exits, "the child to end")[0]
        assert "EOFError" in child.cause()


def test_a_worker_that_is_told_to_stop_while_it_loads_ends_within_ten_seconds(folder: Path) -> None:
    (folder / "stuck.py").write_text(STUCK)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "zmqrl", "start-rollout-worker"),
            f"--policy={folder}/stuck.py:policy",
            f"rollout.policy_kwargs.folder={folder}",
            "rollout.policy_kwargs.how=gil",
        ]
    )
    wait_for((folder / "started").exists, "the worker to load")
    process.terminate()
    begin = time.monotonic()
    process.wait(15)
    assert time.monotonic() - begin < 10


def test_output_held_open_by_a_daemon_delays_the_stop_of_many_children_by_a_second_in_all(
    folder: Path,
) -> None:
    (folder / "daemon.py").write_text(
        "import subprocess, time\n"
        "def policy():\n"
        "    subprocess.Popen(['sleep', '5'], start_new_session=True)\n"
        "    print('started', flush=True)\n"
        "    time.sleep(600)\n"
    )
    lines: list[str] = []
    with Launcher(lambda name, line: lines.append(line)) as launcher:
        for number in range(5):
            launcher.start(f"w{number}", ["start-rollout-worker", f"--policy={folder}/daemon.py:policy"])
        wait_for(lambda: lines.count("started") == 5, "the children")
        for number in range(5):
            launcher.kill(f"w{number}")
        begin = time.monotonic()
        launcher.stop()
        assert time.monotonic() - begin < 3.0


def test_what_prints_a_line_may_fail_without_stopping_the_child(folder: Path) -> None:
    def fails(name: str, line: str) -> None:
        raise OSError("the terminal is gone")

    (folder / "talks.py").write_text(
        "def policy():\n    print('x' * 1000 * 1000)\n    raise ValueError\n"
    )
    with Launcher(fails) as launcher:
        launcher.start("worker", ["start-rollout-worker", f"--policy={folder}/talks.py:policy"])
        wait_for(launcher.exits, "the child to end")


def test_a_name_can_be_started_again(folder: Path) -> None:
    with Launcher(lambda name, line: None) as launcher:
        for _ in range(2):
            launcher.start("broker", ["start-broker", f"broker.frontend=ipc://{folder}/f"])
        assert len(launcher.running()) == 1
        assert os.path.exists(f"/proc/{launcher.children['broker'].process.pid}")
