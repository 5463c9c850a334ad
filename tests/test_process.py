"""How a process heeds signals, whatever it is in the middle of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

STUCK = """
import threading, time
from zmqrl.process import StopSignal
stop = StopSignal(patience_s=1).install()
threading.Thread(target=threading.Event().wait, daemon=True).start()  # another that signals may find
print("ready", flush=True)
time.sleep(60)
"""

PATIENT = """
import os, signal, time
from zmqrl.process import StopSignal
stop = StopSignal().install()
child = os.fork()
if child == 0:
    print("ready", flush=True)
    while True:
        time.sleep(60)
time.sleep(0.5)
for number in signals:  # the child's own affair
    os.kill(child, getattr(signal, number))
    time.sleep(0.5)
print("stopped" if stop() else "goes on", flush=True)
done, status = os.waitpid(child, os.WNOHANG)
print("child", signal.Signals(os.WTERMSIG(status)).name if done else "lives", flush=True)
if not done:
    os.kill(child, signal.SIGKILL)
"""


@pytest.mark.parametrize("signals", ["TERM", "INT", "INT TERM", "TERM INT"])
def test_a_process_that_sleeps_in_foreign_code_ends_and_says_where_it_was(signals: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for name in signals.split():
        os.kill(process.pid, getattr(signal, f"SIG{name}"))
    _, errors = process.communicate(timeout=15)
    assert process.returncode != 0
    if signals.split()[-1] != "INT" or " " not in signals:  # else KeyboardInterrupt may end it
        assert process.returncode == -signal.SIGALRM
        assert "still in <module>" in errors


@pytest.mark.parametrize(
    ("signals", "end"), [(["SIGINT", "SIGINT"], "child lives"), (["SIGTERM"], "child SIGTERM")]
)
def test_a_forked_child_ends_at_sigterm_leaves_ctrl_c_to_its_parent_and_stops_it_at_neither(
    signals: list[str], end: str
) -> None:
    script = f"signals = {signals}\n{PATIENT}"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=20)
    assert done.stdout.splitlines() == ["ready", "goes on", end]
