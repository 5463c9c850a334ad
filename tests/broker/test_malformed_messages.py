import struct

import pytest
from driver import EPOCH, FakeClient, FakeWorker, Pool, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqrl.transport.header import HEADER_SIZE, VERSION, Header, Op, Table, join_batch

CLIENT_OPS = [Op.HELLO, Op.INFER, Op.KNOWN, Op.CANCEL, Op.STATUS, Op.REST, Op.BYE]
WORKER_OPS = [Op.HELLO, Op.READY, Op.RESULT, Op.AHEAD, Op.BYE]


class Scene:
    """An honest client and worker, and beside them one peer whose messages go wrong."""

    def __init__(self, leg, registered=True, decoupled=True):
        self.pool = Pool(queue_size=1, decoupled=decoupled)
        self.honest = self.pool.client("honest", rank=0, world_size=2)
        if leg == "client":
            self.rogue = self.pool.stranger("rogue")
        else:
            self.rogue = self.pool.strange_worker("rogue")
        self.victim = self.pool.client("victim", rank=1, world_size=2)
        self.registered = registered
        if registered:
            self.rogue.hello(rank=1, world_size=2)
        if registered and isinstance(self.rogue, FakeWorker):
            self.rogue.ready()
            self.victim.ask()
            self.pool.turn()  # the rogue worker holds it
        self.worker = self.pool.worker("worker", rank=0, world_size=2)
        self.pool.turn()

    def good(self, op):
        """A well-formed message of the peer that goes wrong."""
        if op == Op.HELLO:
            return plain(op, name="rogue", incarnation=3, host="there", pid=4)
        if op == Op.INFER:
            return FakeClient(self.pool, "rogue", self.rogue.peer).request(3, size=4096)
        if op == Op.RESULT and self.rogue.batches:
            return self.rogue.batch.result()
        if op == Op.RESULT:
            return join_batch(Table(EPOCH, 1, []), op, [])
        return [Header(op, request_id=1).pack()]

    def still_serves_the_honest(self):
        """Asserts that nobody else notices, whatever the one peer has sent."""
        pool = self.pool
        pool.turn()
        self.rogue.lose()
        self.honest.take()
        self.honest.ask()
        self.victim.ask()  # in normal mode the honest client waits for it
        pool.turn()
        for _ in range(5):
            if self.worker.batches:
                self.worker.answer()
                self.worker.batches.clear()
            pool.turn()
        assert [what for what, _ in self.honest.answers] == ["REPLY"]
        assert self.honest.inbox[0].tree["who"][0] == "honest"
        assert [m.op for m in self.worker.inbox] == []
        counters = pool.counters
        ended = counters["answered"] + counters["errors"] + counters["cancelled"]
        assert counters["requests"] == ended + pool.status["open_requests"]


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "stranger"])
@pytest.mark.parametrize(
    ("leg", "op"), [("client", op) for op in CLIENT_OPS] + [("worker", op) for op in WORKER_OPS]
)
def test_no_prefix_of_a_good_message_disturbs_anybody(leg, op, registered):
    first, *rest = Scene(leg, registered).good(op)
    for length in range(len(first)):
        scene = Scene(leg, registered)
        first, *rest = scene.good(op)
        scene.rogue.send([first[:length], *rest])
        if length < HEADER_SIZE:
            assert scene.pool.counters["malformed"] == 1
        scene.still_serves_the_honest()


@pytest.mark.parametrize(
    ("leg", "op"), [("client", op) for op in CLIENT_OPS] + [("worker", op) for op in WORKER_OPS]
)
@pytest.mark.parametrize("extra", [1, 2, 50])
def test_no_count_of_frames_disturbs_anybody(leg, op, extra):
    scene = Scene(leg)
    message = scene.good(op)
    for count in (1, 2, len(message) - 1):
        if 0 < count < len(message):
            scene.rogue.send(message[:count])
    scene.rogue.send([*message, *[b"more"] * extra])
    scene.still_serves_the_honest()


@pytest.mark.parametrize("count", [1, 3, 50])
def test_a_request_with_the_wrong_number_of_frames_is_refused_by_its_id(count):
    scene = Scene("client")
    (first, _) = scene.good(Op.INFER)
    scene.rogue.send([first, *[b"x"] * (0 if count == 1 else count)])
    scene.pool.turn()
    assert [m.code for m in scene.rogue.inbox if m.op is Op.ERROR] == ["refused"]
    assert scene.rogue.inbox[-1].request_id == 3
    assert scene.pool.counters["malformed"] == 1
    assert scene.pool.holds_nothing()


@pytest.mark.parametrize("leg", ["client", "worker"])
@pytest.mark.parametrize("field", ["name", "host", "policy"])
@pytest.mark.parametrize("text", ["\x1b[2J", "a\nbroker: all is lost", "\x9b2J", "\u202eabc", "\0"])
def test_a_terminal_that_shows_peers_has_nothing_to_obey(leg, field, text):
    scene = Scene(leg, registered=False)
    fields = {"name": "rogue", "role": leg, field: text}
    scene.rogue.send(plain(Op.HELLO, **fields))
    scene.pool.send()
    (error,) = scene.rogue.inbox
    assert error.code == "refused"
    assert f"HELLO: {field} must be" in error.fields["message"]
    scene.still_serves_the_honest()


@pytest.mark.parametrize("leg", ["client", "worker"])
def test_a_peer_of_another_version_gets_an_error_that_it_can_print(leg):
    scene = Scene(leg, registered=False)
    hello = scene.good(Op.HELLO)[0]
    scene.rogue.send([hello[:4] + bytes([VERSION + 1]) + hello[5:]])
    scene.pool.send()
    (error,) = scene.rogue.inbox
    assert error.code == "refused"
    assert f"version {VERSION + 1}" in error.fields["message"]
    scene.still_serves_the_honest()


def test_a_request_of_another_version_is_refused_by_its_id():
    scene = Scene("client")
    first = scene.good(Op.INFER)[0]
    scene.rogue.send([first[:4] + bytes([VERSION + 1]) + first[5:]])
    scene.pool.send()
    assert (scene.rogue.inbox[-1].code, scene.rogue.inbox[-1].request_id) == ("refused", 3)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": ""},
        {"name": "x" * 201},
        {"name": 3},
        {"name": None},
        {"name": b"bytes"},
        {"name": "a", "host": 3},
        {"name": "a", "host": "h" * 301},
        {"name": "a", "incarnation": -1},
        {"name": "a", "incarnation": True},
        {"name": "a", "incarnation": 2**63},
        {"name": "a", "incarnation": "1"},
        {"name": "a", "pid": 1.5},
        {"name": "a", "rank": 0},
        {"name": "a", "world_size": 2},
        {"name": "a", "rank": 2, "world_size": 2},
        {"name": "a", "rank": -1, "world_size": 2},
        {"name": "a", "rank": 0, "world_size": 0},
        {"name": "a", "rank": [], "world_size": {}},
        {"name": "a", "mode": "test"},
        {"name": "a", "mode": []},
        {"name": "a", "policy": "x" * 101},
        {"name": "a", "policy": None},
        {"name": "a", "policy": b"reward"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("leg", ["client", "worker"])
def test_a_hello_with_a_wrong_field_registers_nobody(leg, fields):
    scene = Scene(leg, registered=False)
    scene.rogue.send(plain(Op.HELLO, **fields))
    assert scene.pool.counters["malformed"] == 1
    assert [c["name"] for c in scene.pool.status["clients"]] == ["honest", "victim"]
    assert [w["name"] for w in scene.pool.status["workers"]] == ["worker"]
    scene.still_serves_the_honest()


@pytest.mark.parametrize(
    "op", sorted({*Op, 0, 7, 255} - {*CLIENT_OPS, Op.INFER}, key=int), ids=lambda op: str(int(op))
)
def test_an_op_that_clients_do_not_have_is_refused(op):
    scene = Scene("client")
    scene.rogue.send([Header(op, request_id=8).pack()])
    scene.pool.send()
    assert [(m.code, m.request_id) for m in scene.rogue.inbox if m.op is Op.ERROR] == [("refused", 8)]
    scene.still_serves_the_honest()


@pytest.mark.parametrize(
    "op", sorted({*Op, 0, 7, 255} - {*WORKER_OPS}, key=int), ids=lambda op: str(int(op))
)
def test_an_op_that_workers_do_not_have_is_counted_and_changes_nothing(op):
    scene = Scene("worker")
    scene.rogue.send([Header(op, request_id=8).pack()])
    assert scene.pool.counters["malformed"] == 1
    scene.rogue.answer()
    scene.pool.turn()
    assert scene.victim.answers == [("REPLY", 1)]
    scene.still_serves_the_honest()


def test_a_request_without_an_id_is_counted_and_dropped():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    client.send([Header(Op.INFER, request_id=0, rows=1, budget_ms=1000).pack()])
    pool.turn()
    assert worker.batches == []
    assert pool.counters["malformed"] == 1
    assert pool.counters["requests"] == 0


@pytest.mark.parametrize(
    "falsify",
    [
        lambda frames: frames[:1],
        lambda frames: [frames[0], frames[1] + b"x"],
        lambda frames: [frames[0], frames[1][:-1]],
        lambda frames: [frames[0], b""],
        lambda frames: [*frames, b"large"],
        lambda frames: [frames[0] + b"x", frames[1]],
        lambda frames: [frames[0][:-1], frames[1]],
        lambda frames: [frames[0][:HEADER_SIZE], frames[1]],
        lambda frames: [_with_count(frames[0], 2), frames[1]],
        lambda frames: [_with_count(frames[0], 2**32 - 1), frames[1]],
        lambda frames: [frames[0], memoryview(frames[1])],
    ],
    ids=[
        "no bodies",
        "bodies too long",
        "bodies too short",
        "bodies empty",
        "a large buffer too many",
        "table too long",
        "table too short",
        "no table",
        "an entry too many",
        "four billion entries",
        "bodies that are no bytes",
    ],
)
def test_a_result_that_is_malformed_sends_its_requests_back_to_the_queue(falsify):
    scene = Scene("worker")
    scene.rogue.send(falsify(scene.rogue.batch.result()))
    scene.pool.turn()
    assert scene.pool.counters["malformed"] == 1
    assert scene.pool.counters["requeued"] == 1
    assert scene.worker.who == [["victim1"]]
    scene.worker.answer()
    scene.worker.batches.clear()
    scene.pool.turn()
    assert scene.victim.answers == [("REPLY", 1)]
    scene.still_serves_the_honest()


def _with_count(first, count):
    at = HEADER_SIZE + 16
    return first[:at] + struct.pack("<I", count) + first[at + 4 :]


FRAMES = st.lists(st.binary(max_size=120), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None, database=None)
@given(leg=st.sampled_from(["client", "worker"]), registered=st.booleans(), frames=FRAMES)
def test_no_random_bytes_disturb_anybody(leg, registered, frames):
    scene = Scene(leg, registered)
    scene.rogue.send(frames)
    assert scene.pool.counters["malformed"] == 1
    scene.still_serves_the_honest()


@settings(max_examples=150, deadline=None, database=None)
@given(
    leg=st.sampled_from(["client", "worker"]),
    decoupled=st.booleans(),
    fields=st.tuples(
        st.sampled_from(sorted(map(int, Op))),
        *[st.integers(0, 2**bits - 1) for bits in (16, 64, 8, 8, 16, 32, 32, 32, 32, 32, 64, 64)],
    ),
    body=st.binary(max_size=60),
    frames=st.lists(st.binary(max_size=60), max_size=3),
)
def test_no_header_with_random_fields_disturbs_anybody(leg, decoupled, fields, body, frames):
    scene = Scene(leg, decoupled=decoupled)
    scene.rogue.send([Header(*fields)._replace(frames=len(frames)).pack() + body, *frames])
    scene.still_serves_the_honest()


@settings(max_examples=200, deadline=None, database=None)
@given(data=st.data())
def test_no_changed_byte_of_a_good_message_disturbs_anybody(data):
    leg, op = data.draw(
        st.sampled_from([("client", op) for op in CLIENT_OPS] + [("worker", op) for op in WORKER_OPS])
    )
    scene = Scene(leg)
    message = scene.good(op)
    index = data.draw(st.integers(0, min(1, len(message) - 1)))
    frame = bytearray(message[index])
    for at in data.draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=3)):
        frame[at] = data.draw(st.integers(0, 255))
    message[index] = bytes(frame)
    scene.rogue.send(message)
    scene.still_serves_the_honest()
