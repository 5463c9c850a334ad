"""A broker under a fake clock, and peers that speak to it with real messages."""

import numpy as np

from zmqrl.broker.core import Broker
from zmqrl.broker.pool import Options
from zmqrl.broker.scheduling import Limits
from zmqrl.errors import DecodeError
from zmqrl.transport.codec import decode, decode_meta, encode, encode_meta
from zmqrl.transport.header import (
    FLAG_AHEAD,
    FLAG_EVAL,
    FLAG_LANE,
    HEADER_SIZE,
    Header,
    Op,
    join_batch,
    policy_id_of,
    split_batch,
    unpack,
    unpack_table,
)

EPOCH = 2026
STEP = 0.25
"""Seconds of one turn of the loop; a gap of more than one second counts as a pause of the broker."""


def plain(op, request_id=0, **fields):
    """A message without arrays."""
    return [Header(op, request_id=request_id).pack() + encode_meta(fields)]


UNREADABLE = {"who": ["?", 0]}
"""In place of a body that is no tree: the broker passes bodies on unread."""


def _read(message):
    body = message[0][HEADER_SIZE:]
    if unpack(message[0]).flags & FLAG_LANE:
        body = body[36:]  # behind the descriptor of no arrays
    try:
        tree = decode(body, message[1:])
    except DecodeError:
        return UNREADABLE
    readable = isinstance(tree, dict) and isinstance(tree.get("who"), list)
    return tree if readable and isinstance(tree.get("obs"), np.ndarray) else UNREADABLE


class Received:
    """A message that the broker sent to a client or, its batches aside, to a worker."""

    def __init__(self, frames):
        self.frames = frames
        self.header = unpack(frames[0])
        self.op = Op(self.header.op)
        self.request_id = self.header.request_id

    @property
    def fields(self):
        return decode_meta(self.frames[0][HEADER_SIZE:])

    @property
    def code(self):
        return self.fields["code"] if self.op is Op.ERROR else None

    @property
    def tree(self):
        return decode(self.frames[0][HEADER_SIZE:], self.frames[1:])

    def __repr__(self):
        return f"<{self.op.name} {self.request_id} {self.fields if self.op is Op.ERROR else ''}>"


class ReceivedBatch:
    """A BATCH message, and the shards in it."""

    def __init__(self, frames):
        self.table = unpack_table(frames[0])
        self.ahead = unpack(frames[0]).flags == FLAG_AHEAD
        self.shards = split_batch(self.table, frames)
        self.number = self.table.number
        self.headers = [unpack(message[0]) for _, message in self.shards]
        self.trees = [_read(message) for _, message in self.shards]
        self.who = [tree["who"] for tree in self.trees]
        self.rows = sum(header.rows for header in self.headers)

    def __len__(self):
        return len(self.shards)

    def replies(self, op=Op.REPLY):
        """What an honest worker answers: the entries, and for each the frames of its reply."""
        entries, replies = [], []
        for (entry, _), header, tree in zip(self.shards, self.headers, self.trees, strict=True):
            if op is Op.ERROR or tree is UNREADABLE:
                encoded = encode({"code": "policy", "message": "ValueError: no"})
            else:
                encoded = encode({"who": tree["who"], "actions": tree["obs"] + 1})
            head = Header(
                Op.ERROR if tree is UNREADABLE else op,
                request_id=header.request_id,
                frames=len(encoded.buffers),
                rows=header.rows,
                queue_us=entry.queue_us,
                policy_version=7,
            )
            reply = [head.pack() + encoded.meta, *encoded.buffers]
            replies.append(reply)
            entries.append(entry._replace(length=len(reply[0]), frames=len(reply) - 1, origin_length=0))
        return entries, replies

    @property
    def origins(self):
        """The identity of the client of each shard."""
        joined, found = self.table.origins, []
        for entry, _ in self.shards:
            found.append(joined[: entry.origin_length])
            joined = joined[entry.origin_length :]
        return found

    def result(self, op=Op.REPLY, only=None, **table):
        """The RESULT message of an honest worker.

        Args:
            op: REPLY, or ERROR for a policy that fails.
            only: The indices of the shards that it answers; all by default.
            table: Fields of the table to falsify.
        """
        entries, replies = self.replies(op)
        chosen = range(len(self)) if only is None else only
        entries = [entries[i] for i in chosen]
        fields = {"entries": entries, "predict_us": 1000, **table}
        table = self.table._replace(origins=b"", **fields)
        return join_batch(table, Op.RESULT, [replies[i] for i in chosen])


class FakeClient:
    """An env worker. Its requests carry its name and their id, so that a crossed reply shows."""

    def __init__(self, pool, name, peer):
        self.pool = pool
        self.name = name
        self.peer = peer
        self.inbox = []
        self.next_id = 1

    def send(self, frames):
        self.pool.broker.from_client(self.peer, frames)

    def hello(self, **fields):
        self.send(plain(Op.HELLO, name=self.name, **fields))

    def request(self, request_id, rows=1, size=2, budget=600.0, policy="", place=b"", **header):
        """The frames of an INFER message; 1024 float32 or more become a frame of their own.

        `place` says where arrays are in shared memory.
        """
        obs = np.full((rows, size), request_id, np.float32)
        encoded = encode({"who": [self.name, request_id], "obs": obs})
        if header.pop("eval", False):
            header["flags"] = header.get("flags", 0) | FLAG_EVAL
        head = Header(
            Op.INFER,
            request_id=request_id,
            frames=len(encoded.buffers),
            rows=rows,
            budget_ms=round(budget * 1000),
            policy_id=policy_id_of(policy),
            signature=encoded.signature,
        )
        return [head._replace(**header).pack() + place + encoded.meta, *encoded.buffers]

    def ask(self, request_id=None, **request):
        """Send one request; returns its id."""
        if request_id is None:
            request_id = self.next_id
            self.next_id += 1
        self.send(self.request(request_id, **request))
        return request_id

    def cancel(self, request_id):
        self.send(plain(Op.CANCEL, request_id))

    def known(self, request_id):
        self.send(plain(Op.KNOWN, request_id))

    def bye(self):
        self.send(plain(Op.BYE))

    def vanish(self):
        """Its socket is gone; the broker learns of it when it sends something there."""
        self.pool.gone.add(self.peer)

    def lose(self):
        """Its socket is gone, and the broker has just learned of it."""
        self.vanish()
        self.pool.broker.client_unreachable(self.peer)

    def take(self):
        """The messages that came since the last call."""
        messages, self.inbox = self.inbox, []
        return messages

    @property
    def answers(self):
        """What came for its requests: (op, request id), with the code in place of the op for errors."""
        return [(m.code or m.op.name, m.request_id) for m in self.inbox if m.op in (Op.REPLY, Op.ERROR)]


class FakeWorker:
    """A rollout worker that answers only when a test says so."""

    def __init__(self, pool, name, peer):
        self.pool = pool
        self.name = name
        self.peer = peer
        self.inbox = []
        self.batches = []

    def send(self, frames):
        self.pool.broker.from_worker(self.peer, frames)

    def hello(self, **fields):
        self.send(plain(Op.HELLO, name=self.name, **fields))

    @property
    def batch(self):
        """The last batch that came."""
        return self.batches[-1]

    @property
    def who(self):
        """Whose requests came, by batch: NAME and request id."""
        return [[f"{name}{number}" for name, number in batch.who] for batch in self.batches]

    def ready(self, number=None, flags=0):
        if number is None:
            number = self.batches[-1].number if self.batches else 0
        self.send([Header(Op.READY, flags, number).pack()])

    def ahead(self, number=None):
        """It begins its last batch, and takes the next one already."""
        self.send([Header(Op.AHEAD, request_id=number or self.batch.number).pack()])

    def answer(self, batch=None, **result):
        self.send((batch or self.batch).result(**result))

    def bye(self):
        number = self.batches[-1].table.number if self.batches else 0
        self.send([Header(Op.BYE, request_id=number).pack()])

    def vanish(self):
        self.pool.gone.add(self.peer)

    def lose(self):
        self.vanish()
        self.pool.broker.worker_unreachable(self.peer)


class Pool:
    """Does what the server does around a broker, without its sockets.

    Args:
        lane: Shared memory.
        options: Fields of `Options` and `Limits`.
    """

    def __init__(self, lane=None, **options):
        limits = {k: options.pop(k) for k in list(options) if k in Limits.__dataclass_fields__}
        self.now = 1000.0
        options = Options(limits=Limits(**limits), **options)
        self.broker = Broker(options, EPOCH, self.now, lane, self.send_now)
        self.peers = {}
        self.gone = set()
        self.lose_batches_to = set()
        """Workers whose next batch gets lost on the way."""
        self.lost_batches = []
        """Those batches, each with the worker that it was for."""

    def _new(self, kind, name, leg):
        peer = f"{leg}{len(self.peers)}-{name}".encode()
        self.peers[peer] = kind(self, name, peer)
        return self.peers[peer]

    def stranger(self, name="stranger"):
        """A client that has not said HELLO."""
        return self._new(FakeClient, name, "c")

    def client(self, name, **hello):
        client = self.stranger(name)
        client.hello(**hello)
        self.send()
        client.inbox.clear()
        return client

    def strange_worker(self, name="stranger"):
        """A worker that has not said HELLO."""
        return self._new(FakeWorker, name, "w")

    def worker(self, name, ready=True, **hello):
        worker = self.strange_worker(name)
        worker.hello(**hello)
        self.send()
        worker.inbox.clear()
        if ready:
            worker.ready()
        return worker

    def turn(self, seconds=0.0):
        """One turn of the server's loop, `seconds` later."""
        self.now += seconds
        self.broker.advance(self.now)
        self.broker.tick()
        self.broker.dispatch()
        while self.send():
            self.broker.dispatch()

    def wait(self, seconds):
        """Turns of the loop for so long."""
        for _ in range(round(seconds / STEP)):
            self.turn(STEP)

    def send_now(self, peer, frames):
        """Deliver a reply unless its client is gone, which `send` will find out."""
        if peer in self.gone:
            return False
        self.peers[peer].inbox.append(Received(frames))
        return True

    def send(self):
        """Empty the outboxes; returns whether a peer turned out to be gone."""
        broker, lost, lost_workers = self.broker, False, []
        to_clients, to_workers = broker.take_outbox()
        for peer, frames in to_clients:
            if peer in self.gone:
                broker.client_unreachable(peer)
                lost = True
            else:
                message = Received(frames)
                if message.op is not Op.PROBE:
                    self.peers[peer].inbox.append(message)
        for peer, frames in to_workers:
            is_batch = unpack(frames[0]).op == Op.BATCH
            if peer in self.gone:
                if is_batch:
                    broker.undelivered(peer)
                lost_workers.append(peer)
            elif is_batch and peer in self.lose_batches_to:
                self.lose_batches_to.discard(peer)
                self.lost_batches.append((self.peers[peer], ReceivedBatch(frames)))
            elif is_batch:
                self.peers[peer].batches.append(ReceivedBatch(frames))
            elif unpack(frames[0]).op != Op.PROBE:
                self.peers[peer].inbox.append(Received(frames))
        for peer in lost_workers:
            broker.worker_unreachable(peer)
        return lost or bool(lost_workers)

    @property
    def status(self):
        return self.broker.status()

    @property
    def counters(self):
        return self.status["counters"]

    def holds_nothing(self):
        """Whether no request, and no byte of one, is left."""
        status = self.status
        return (status["open_requests"], status["open_bytes"]) == (0, 0)
