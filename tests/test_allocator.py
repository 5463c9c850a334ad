"""The allocator's settings are a process's: each test has a process of its own."""

import os
import subprocess
import sys

_BATCHES = """
import resource
from zmqrl.allocator import keep_freed
if {keeps}:
    keep_freed()
for _ in range(50):
    batch = [bytearray(600_000) for _ in range(16)]
    del batch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    batch = [bytearray(600_000) for _ in range(16)]
    del batch
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_FREED = """
import psutil
from zmqrl.allocator import Freed, keep_freed
keep_freed()
rss = lambda: psutil.Process().memory_info().rss >> 20
freed, used = Freed(), []
before = rss()
kept = [bytearray(1 << 20) for _ in range(60)]
queue = [bytearray(1 << 20) for _ in range(100)]
freed.look(100 << 20, 10.0)  # what stays in use is found out
del queue
full = rss()
freed.look(0, 12.0)  # too soon
soon = rss()
freed.look(100 << 20, 16.0)  # a request of that size is open, as it says
held = rss()
freed.look(0, 22.0)
print(before, full, soon, held, rss())
"""


def _run(script, **environment):
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    ).stdout.split()


def test_a_batch_of_images_does_not_ask_for_its_memory_page_by_page_each_time():
    faults, without = (int(_run(_BATCHES.format(keeps=keeps))[0]) for keeps in (True, False))
    assert faults < 100
    assert without > 50 * 16 * 100, "glibc keeps it by itself: keep_freed() can go"


def test_who_tunes_malloc_is_left_alone():
    tuned = int(_run(_BATCHES.format(keeps=True), MALLOC_TOP_PAD_="0")[0])
    assert tuned > 50 * 16 * 100


def test_what_was_freed_goes_back_once_little_is_in_use_and_what_is_in_use_is_no_reason():
    before, full, soon, held, after = map(int, _run(_FREED))
    assert full > before + 140
    assert soon == held == full
    assert after < before + 80
