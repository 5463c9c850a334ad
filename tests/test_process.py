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
os.kill(child, signal.SIGTERM)  # the child's own affair
stop.sleep(1.0)
print("stopped" if stop() else "goes on", flush=True)
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


def test_a_signal_to_a_forked_child_does_not_stop_its_parent() -> None:
    process = subprocess.Popen([sys.executable, "-c", PATIENT], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=20)
    assert output.split() == ["ready", "goes", "on"]
