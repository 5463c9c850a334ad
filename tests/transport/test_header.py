import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqrl.errors import DecodeError, VersionMismatch
from zmqrl.transport.header import (
    HEADER_SIZE,
    VERSION,
    Entry,
    Header,
    Op,
    Table,
    join_batch,
    request_id_of,
    split_batch,
    unpack,
    unpack_table,
)


def bits(count):
    return st.integers(0, 2**count - 1)


headers = st.builds(
    Header,
    op=bits(8),
    flags=bits(16),
    request_id=bits(64),
    attempt=bits(8),
    stage=bits(8),
    frames=bits(16),
    rows=bits(32),
    budget_ms=bits(32),
    policy_id=bits(32),
    queue_us=bits(32),
    predict_us=bits(32),
    signature=bits(64),
    policy_version=bits(64),
)
messages = st.lists(st.binary(max_size=20), min_size=1, max_size=4)
shards = st.lists(st.tuples(bits(64), bits(8), bits(32), st.binary(max_size=255), messages), max_size=5)


def other_version(message):
    return message[:4] + bytes([VERSION + 1]) + message[5:]


def batch_of(parts, epoch=7, number=3, predict_us=0, op=Op.BATCH):
    entries = [
        Entry(slot, len(message[0]), len(message) - 1, attempt, len(origin), queue_us)
        for slot, attempt, queue_us, origin, message in parts
    ]
    origins = b"".join(origin for _, _, _, origin, _ in parts)
    table = Table(epoch, number, entries, predict_us, origins)
    return table, join_batch(table, op, [part[-1] for part in parts])


@settings(deadline=None)
@given(header=headers, meta=st.binary(max_size=20))
def test_a_header_comes_back_whatever_follows_it(header, meta):
    packed = header.pack()
    assert len(packed) == HEADER_SIZE
    assert unpack(packed + meta) == header
    assert unpack(memoryview(packed + meta)) == header
    assert request_id_of(packed + meta) == header.request_id


def test_every_cut_of_a_header_is_refused():
    packed = Header(Op.INFER, request_id=2**64 - 1, rows=4).pack()
    for length in range(HEADER_SIZE):
        with pytest.raises(DecodeError):
            unpack(packed[:length])


@settings(deadline=None)
@given(header=headers, attempt=bits(8), budget_ms=bits(32))
def test_a_header_that_is_packed_again_has_the_new_attempt_and_budget(header, attempt, budget_ms):
    again = header.pack_again(attempt, budget_ms)
    assert unpack(again) == header._replace(attempt=attempt, budget_ms=budget_ms)


@settings(deadline=None)
@given(message=st.binary(max_size=2 * HEADER_SIZE))
def test_what_is_no_message_is_refused(message):
    with pytest.raises(DecodeError, match="not a zmqrl message"):
        unpack(message)
    assert request_id_of(message) == 0


def test_another_version_is_told_apart_from_rubbish():
    message = other_version(Header(Op.INFER).pack())
    with pytest.raises(VersionMismatch, match=f"version {VERSION + 1}, this is {VERSION}"):
        unpack(message)


def test_a_shorter_header_of_another_version_is_another_version():
    with pytest.raises(VersionMismatch):
        unpack(other_version(Header(Op.INFER).pack())[:16])


def test_the_request_id_is_found_in_a_message_of_another_version():
    message = other_version(Header(Op.INFER, request_id=1234567890123).pack())
    assert request_id_of(message) == 1234567890123
    assert request_id_of(message[:16]) == 1234567890123
    assert request_id_of(message[:15]) == 0


def test_every_op_fits_the_header():
    for op in Op:
        assert unpack(Header(op).pack()).op == op


@settings(deadline=None)
@given(parts=shards, epoch=bits(64), number=bits(64), predict_us=bits(32))
def test_a_batch_comes_back_as_the_messages_that_it_was_joined_from(parts, epoch, number, predict_us):
    table, frames = batch_of(parts, epoch, number, predict_us, Op.RESULT)
    assert unpack(frames[0]).op == Op.RESULT
    got = unpack_table(frames[0])
    assert got == table
    assert split_batch(got, frames) == [
        (entry, part[-1]) for entry, part in zip(table.entries, parts, strict=True)
    ]


SHARDS = [(1, 0, 9, b"identity-a", [b"one", b"large"]), (2, 1, 8, b"", [b"two2"])]


def test_every_cut_of_a_table_is_refused():
    _, frames = batch_of(SHARDS)
    for length in range(len(frames[0])):
        with pytest.raises(DecodeError):
            unpack_table(frames[0][:length])


def test_a_table_with_bytes_left_over_is_refused():
    _, frames = batch_of(SHARDS)
    with pytest.raises(DecodeError, match="does not fill its frame"):
        unpack_table(frames[0] + b"x")


def test_a_table_that_claims_more_shards_than_it_has_is_refused():
    head = Header(Op.BATCH).pack()
    claims = (7).to_bytes(8, "little") * 2 + (2**32 - 1).to_bytes(4, "little") + bytes(4)
    with pytest.raises(DecodeError, match="cut short"):
        unpack_table(head + claims)


@pytest.mark.parametrize(
    "change",
    [
        lambda frames: frames[:1],
        lambda frames: frames[:-1],
        lambda frames: [*frames, b"more"],
        lambda frames: [frames[0], frames[1] + b"x", *frames[2:]],
        lambda frames: [frames[0], frames[1][:-1], *frames[2:]],
        lambda frames: [frames[0], memoryview(frames[1]), *frames[2:]],
        lambda frames: [],
    ],
    ids=["no bodies", "buffer missing", "buffer too many", "long", "short", "not bytes", "nothing"],
)
def test_a_batch_that_does_not_add_up_is_refused(change):
    table, frames = batch_of(SHARDS)
    with pytest.raises(DecodeError):
        split_batch(table, change(frames))


@pytest.mark.parametrize(
    "change", [{"length": 4}, {"length": 2**32 - 1}, {"frames": 0}, {"frames": 65_535}]
)
def test_a_table_that_does_not_fit_its_batch_is_refused(change):
    table, frames = batch_of(SHARDS)
    lying = table._replace(entries=[table.entries[0]._replace(**change), table.entries[1]])
    with pytest.raises(DecodeError):
        split_batch(lying, frames)
