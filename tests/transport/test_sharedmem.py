"""The slots of the shared-memory lane: what is read is what was written, or nothing is."""

from __future__ import annotations

import os
import pty
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zmqrl.errors import SharedMemoryLost
from zmqrl.transport.codec import decode, encode
from zmqrl.transport.sharedmem import LEAST, Lane, Reader, Slots, proof
from zmqrl.transport.sharedmem.slots import _MAX_LENT

SHRINK = 2  # F_SEAL_SHRINK
OWNER = """
import sys
from zmqrl.transport.sharedmem import Slots
slots = Slots()
slot = slots.lend([bytes([7]) * 100_000])
print(slot.descriptor.hex(), flush=True)
sys.stdin.read()
"""


def arrays(*sizes: int) -> list[memoryview]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, 256, size, np.uint8).data for size in sizes]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped(pid: int | str = "self") -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:zmqrl")


def test_a_reader_sees_the_arrays_and_cannot_write_to_them() -> None:
    slots, reader, sent = Slots(), Reader(), arrays(70_001, 1, 4096)
    slot = slots.lend(sent)
    assert slot is not None
    meta, views = reader.views(slot.descriptor + b"meta")
    assert meta == b"meta"
    assert [bytes(view) for view in views] == [bytes(array) for array in sent]
    assert all(view.readonly for view in views)
    assert all(np.frombuffer(view, np.uint8).ctypes.data % 64 == 0 for view in views)


def test_a_copy_is_the_readers_own_and_frees_the_slot() -> None:
    slots, reader, sent = Slots(), Reader(), arrays(70_001, 5000)
    slot = slots.lend(sent)
    assert slot is not None
    assert slots.collect(time.monotonic()) == 1
    meta, copies = reader.copies(slot.descriptor + b"meta")
    assert meta == b"meta"
    assert [bytes(copy) for copy in copies] == [bytes(array) for array in sent]
    assert slots.collect(time.monotonic()) == 0
    again = slots.lend(arrays(70_001, 5000)[::-1])
    assert again is slot
    assert [bytes(copy) for copy in copies] == [bytes(array) for array in sent]
    assert slots.collect(time.monotonic()) == 1, "nobody has copied the second message"


def test_the_memory_of_a_process_that_was_killed_lasts_for_its_readers_and_leaves_no_name() -> None:
    names, files, maps, reader = os.listdir("/dev/shm"), open_files(), mapped(), Reader()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        descriptor = bytes.fromhex(owner.stdout.readline())
        view = reader.views(descriptor)[1][0]
        assert os.listdir("/dev/shm") == names
        owner.kill()
        owner.wait()
    assert bytes(view) == bytes([7]) * 100_000
    with pytest.raises(SharedMemoryLost, match="cannot be read"):
        Reader().views(descriptor)
    del view
    reader.look(time.monotonic() + 11)
    assert (mapped(), open_files(), os.listdir("/dev/shm")) == (maps, files, names)


def place(file: int, pid: int = 0, token: bytes = bytes(16)) -> bytes:
    return struct.pack("<II16s", pid or os.getpid(), file, token)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda good: b"",
        lambda good: good[:24],
        lambda good: good[:-1],
        lambda good: b"\xff" * 4 + good[4:],
        lambda good: struct.pack("<I", 1) + good[4:],
        lambda good: good[:4] + b"\xff" * 4 + good[8:],
        lambda good: good[:4] + bytes(4) + good[8:],
        lambda good: good[:8] + os.urandom(16) + good[24:],
        lambda good: good[:24] + struct.pack("<Q", 0) + good[32:],
        lambda good: good[:24] + struct.pack("<Q", 2) + good[32:],
        lambda good: good[:32] + struct.pack("<I", 2) + good[36:],
        lambda good: good[:32] + b"\xff" * 4 + good[36:],
        lambda good: good[:32] + struct.pack("<I", 5000) + bytes(8 * 5000),
        lambda good: good[:36] + struct.pack("<Q", 200_000),
        lambda good: good[:36] + struct.pack("<Q", 2**64 - 1),
        lambda good: good[:32] + struct.pack("<I4Q", 4, *[2**62] * 4),
        lambda good: good[:32] + struct.pack("<I2Q", 2, 1, 2**63),
    ],
)
def test_a_descriptor_that_fits_no_slot_is_refused_and_the_slot_can_still_be_read(
    spoil: Callable[[bytes], bytes],
) -> None:
    slots, reader, sent = Slots(), Reader(), arrays(100_000)
    slot = slots.lend(sent)
    assert slot is not None
    assert reader.views(slot.descriptor)
    assert reader.copies(slot.descriptor)
    files = open_files()
    for read in (reader.views, reader.copies):
        with pytest.raises(SharedMemoryLost):
            read(spoil(slot.descriptor))
    assert open_files() == files
    assert bytes(reader.views(slot.descriptor)[1][0]) == bytes(sent[0])


def a_memfd(size: int, name: str = "zmqrl", seals: int = SHRINK, is_sparse: bool = False) -> int:
    import fcntl

    file = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    (os.ftruncate if is_sparse else lambda f, n: os.posix_fallocate(f, 0, n))(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def a_file(folder: str | None) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(200_000))
        file.flush()
        return os.dup(file.fileno())


def a_fifo() -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/fifo")
        return os.open(f"{folder}/fifo", os.O_RDONLY | os.O_NONBLOCK)


@pytest.mark.parametrize(
    "make",
    [
        lambda: os.pipe()[0],
        a_fifo,
        lambda: pty.openpty()[1],
        lambda: os.open("/dev/zero", os.O_RDONLY),
        lambda: os.open("/dev/shm", os.O_RDONLY),
        lambda: a_file(None),
        lambda: a_file("/dev/shm"),
        lambda: socket.socket().detach(),
        lambda: a_memfd(200_000, seals=0),
        lambda: a_memfd(200_000, name="another"),
        lambda: a_memfd(100),
        lambda: a_memfd(200_000, is_sparse=True),
        lambda: a_memfd(8 << 30, is_sparse=True),
        lambda: a_memfd(200_000),
    ],
    ids=[
        *("pipe", "fifo", "tty", "device", "folder", "file", "tmpfs", "socket"),
        *("unsealed", "name", "small", "sparse", "vast", "token"),
    ],
)
def test_what_is_no_slot_is_not_read(make: Callable[[], int]) -> None:
    file = make()
    try:
        files, reader = open_files(), Reader()
        begin = time.monotonic()
        for read in (reader.views, reader.copies):
            with pytest.raises(SharedMemoryLost):
                read(place(file, token=os.urandom(16)) + struct.pack("<QIQ", 0, 1, 100_000))
        assert time.monotonic() < begin + 5
        assert open_files() == files
    finally:
        os.close(file)


@pytest.mark.parametrize("size", [200_000, 1 << 40])
def test_a_slot_with_a_hole_is_not_read(size: int) -> None:
    token, file = os.urandom(16), a_memfd(size, is_sparse=True)
    os.pwrite(file, token + struct.pack("<QQ", 1, 0), 0)
    with pytest.raises(SharedMemoryLost, match="hole"):
        Reader().views(place(file, token=token) + struct.pack("<QIQ", 1, 1, 100_000))
    os.close(file)


def test_a_reply_that_nobody_wants_frees_its_slot() -> None:
    slots, reader = Slots(), Reader()
    slot = slots.lend(arrays(100_000))
    assert slot is not None
    for spoilt in (b"", slot.descriptor[:-1], struct.pack("<I", 1) + slot.descriptor[4:]):
        reader.dismiss(spoilt)
    assert slots.collect(time.monotonic()) == 1
    reader.dismiss(slot.descriptor + b"meta")
    assert slots.collect(time.monotonic()) == 0
    assert slots.lend(arrays(100_000)) is slot


def test_text_that_was_checked_does_not_change_with_its_slot() -> None:
    slots, reader = Slots(), Reader()
    encoded = encode({"words": np.array(["word"] * 10_000)})
    slot = slots.lend(encoded.buffers)
    assert slot is not None
    meta, views = reader.views(slot.descriptor + encoded.meta)
    for _ in range(2):  # with a layout too
        words = decode(meta, views, writable=False)["words"]
        slot.parts[0][:] = b"\xff" * len(slot.parts[0])
        assert (words == "word").all()
        slot.fill(encoded.buffers)


def test_the_owner_cannot_cut_a_slot_off_under_its_reader() -> None:
    slots = Slots()
    slot = slots.lend(arrays(100_000))
    assert slot is not None
    with pytest.raises(PermissionError):
        os.ftruncate(struct.unpack_from("<I", slot.descriptor, 4)[0], 4096)


def test_a_slot_that_may_still_be_read_is_let_go_of_and_never_changes() -> None:
    slots, reader, sent = Slots(), Reader(), arrays(100_000)
    slot = slots.lend(sent)
    assert slot is not None
    view = reader.views(slot.descriptor)[1][0]
    slots.give_back(slot, is_unread=False)
    for value in range(10):
        other = slots.lend([bytes([value]) * 100_000])
        assert other is not None
        slots.give_back(other, is_unread=True)
    assert bytes(view) == bytes(sent[0])


def test_a_reply_that_is_never_read_is_let_go_of_in_the_end() -> None:
    files, maps, slots = open_files(), mapped(), Slots()
    assert slots.lend(arrays(100_000)) is not None
    assert slots.collect(time.monotonic() + 500) == 1
    assert slots.collect(time.monotonic() + 601) == 0
    assert (open_files(), mapped()) == (files, maps)


def test_slots_are_bounded_and_kept_for_no_longer_than_they_are_of_use() -> None:
    files, maps, slots = open_files(), mapped(), Slots()
    lent = [slots.lend(arrays(LEAST)) for _ in range(_MAX_LENT)]
    assert all(lent)
    assert slots.lend(arrays(LEAST)) is None
    for slot in lent:
        assert slot is not None
        slots.give_back(slot, is_unread=True)
    assert slots.lend(arrays(LEAST)) is not None
    slots.look(time.monotonic() + 11)
    assert mapped() == maps + 1
    del slot
    lent.clear()
    slots.close()
    assert (open_files(), mapped()) == (files, maps)


def test_a_small_message_is_no_matter_for_the_lane() -> None:
    slots = Slots()
    assert slots.lend(arrays(LEAST // 2, LEAST // 2 - 1)) is None
    assert slots.lend([]) is None


@pytest.mark.parametrize(
    "limit",
    ["RLIMIT_FSIZE, (1 << 20, 1 << 20)", "RLIMIT_NOFILE, (3, 3)", "RLIMIT_AS, (1 << 20, 1 << 20)"],
)
def test_without_memory_or_files_there_is_no_slot(limit: str) -> None:
    check = f"""
import resource
from zmqrl.transport.sharedmem import Slots, proof
data = bytes(2 << 20)
resource.setrlimit(resource.{limit})
assert Slots().lend([data]) is None
"""
    ended = subprocess.run([sys.executable, "-c", check], capture_output=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_python_that_was_built_for_an_older_system_has_slots_too() -> None:
    check = """
import os
del os.memfd_create, os.MFD_CLOEXEC, os.MFD_ALLOW_SEALING, os.O_PATH
from zmqrl.transport.sharedmem import Reader, Slots
slots = Slots()
slot = slots.lend([b"7" * 100_000])
assert bytes(Reader().views(slot.descriptor)[1][0]) == b"7" * 100_000
assert not os.get_inheritable(slot._file)
"""
    subprocess.run([sys.executable, "-c", check], check=True, timeout=20)


def test_the_lane_opens_only_where_the_brokers_slot_can_be_read() -> None:
    slot, lane = proof(), Lane()
    assert slot is not None
    for fields in ({}, {"lane": 5}, {"lane": b""}, {"lane": slot.descriptor[:8] + bytes(28)}):
        lane.welcome({"epoch": 1, **fields})
        assert not lane.is_open
    lane.welcome({"epoch": 1, "lane": slot.descriptor})
    assert lane.is_open
    lane.welcome({"epoch": 2})
    assert not lane.is_open


def test_a_lane_that_does_not_work_is_tried_again_seldom_or_with_another_broker() -> None:
    slot, lane = proof(), Lane()
    assert slot is not None
    lane.welcome({"epoch": 1, "lane": slot.descriptor})
    for pause in (60, 120, 240):
        lane.give_up()
        lane.give_up()  # by another request that was under way
        lane.welcome({"epoch": 1, "lane": slot.descriptor})
        lane.look(time.monotonic() + pause - 5)
        assert not lane.is_open
        lane.look(time.monotonic() + pause)
        assert lane.is_open
    lane.give_up()
    lane.welcome({"epoch": 2, "lane": slot.descriptor})
    assert lane.is_open
