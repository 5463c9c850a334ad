"""The allocator's settings are a process's: each test has a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Pool

_BATCHES = """
import resource
from zmqrl.allocator import keep_freed
if {keeps}:
    keep_freed()

def take():
    batch = [bytearray(600_000) for _ in range({images})]

for _ in range(50):
    take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_PAGES = 50 * 600_000 // 4096
"""For each image of all those batches."""

_GIVEN_BACK = """
import psutil
from zmqrl.allocator import keep_freed

MB = 1 << 20

def rss():
    return psutil.Process().memory_info().rss / MB

def made(megabytes):
    return [bytearray(MB) for _ in range(megabytes)]

memory = keep_freed()
weights, of_loading, later = made(50), made(100), made(1)
del of_loading  # not at the end of the heap: the C library keeps it
memory.begin()
before = rss()
queue, later_still = made(200), made(1)
told = [rss()]
memory.give_back(200 * MB, 10.0)  # they are open requests
del queue
told.append(rss())
memory.give_back(0, 11.0)  # too soon
told.append(rss())
memory.give_back(200 * MB, 16.0)  # as if as many came at this moment
told.append(rss())
memory.give_back(0, 22.0)
told.append(rss())
del made(20)[:]
memory.give_back(0, 30.0)  # it is not worth its while
told.append(rss())
print(*(round(size - before) for size in told))
"""


_IN_USE = """
from zmqrl.allocator import keep_freed

memory = keep_freed()
memory.begin()
trim, now, looks = memory._trim, 0.0, []
memory._trim = lambda pad: (looks.append(now), trim(pad))
connections = [bytearray(1 << 20) for _ in range(100)]
while now < 180.0:
    now += 5.0
    memory.give_back(0, now)
print(*map(round, looks))
"""


def _run(script, **environment):
    plain = {name: value for name, value in os.environ.items() if "MALLOC" not in name.upper()}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={**plain, **environment}, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return [int(word) for word in done.stdout.split()]


def _faults(images=16, keeps=True, **environment):
    """Page faults of batches of so many images, of the pages that they have."""
    return _run(_BATCHES.format(images=images, keeps=keeps), **environment)[0] / (images * _PAGES)


def test_a_batch_of_images_does_not_ask_for_its_memory_page_by_page_each_time():
    assert _faults() < 0.01
    assert _faults(keeps=False) > 0.5, "glibc keeps it by itself: keep_freed() can go"


@pytest.mark.slow
def test_of_a_large_batch_some_memory_is_kept_and_the_rest_is_not():
    assert _faults(images=40) < 0.5  # 24 MB
    assert _faults(images=200) > 0.5  # 120 MB, of which 16 stay


@pytest.mark.parametrize(
    "tuned", [{"MALLOC_TOP_PAD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0"}], ids=str
)
def test_who_tunes_malloc_is_left_alone(tuned):
    assert _faults(**tuned) > 0.5


def test_other_settings_of_malloc_change_nothing():
    assert _faults(MALLOC_ARENA_MAX="2") < 0.01


def test_memory_that_is_in_use_is_looked_for_less_and_less_often():
    assert _run(_IN_USE) == [5, 15, 35, 75, 135]


def test_what_was_freed_goes_back_once_little_is_in_use():
    full, freed, soon, in_use, given_back, little = _run(_GIVEN_BACK)
    assert full >= 190, "what loading had left behind was kept for ever"
    assert min(freed, soon, in_use) >= full - 2
    assert given_back <= 5
    assert little >= 15


def test_the_broker_and_the_worker_of_a_pool_do_not_ask_for_the_memory_of_images_each_time(pool: Pool):
    pool.start_broker("broker.shared_memory=false")
    pool.start_worker(0)
    pool.wait_for_workers(1)
    clients = [pool.client() for _ in range(16)]
    image = {"x": np.ones((1, 75_000))}

    def ask(rounds):
        for _ in range(rounds):
            for pending in [client.submit(image) for client in clients]:
                pending.result()
        stats = [Path(f"/proc/{pool.pid(name)}/stat").read_text() for name in ("broker", "rollout-0")]
        return np.array([int(stat.rpartition(")")[2].split()[7]) for stat in stats])

    before = ask(20)
    faults = (ask(20) - before) / (20 * len(clients))
    assert all(faults < 0.1 * image["x"].nbytes / 4096), f"{faults} page faults for a request"
