"""The broker's frontend: clients register, ask, and leave."""

from __future__ import annotations

from typing import Any

from zmqrl.broker import pool as words
from zmqrl.broker.pool import Pool
from zmqrl.broker.records import MAX_PHASE, REST, Client, Introduction
from zmqrl.errors import DecodeError, SharedMemoryLost
from zmqrl.transport.codec import MAX_REQUEST, decode_meta
from zmqrl.transport.header import FLAG_LANE, HEADER_SIZE, Header, Op

_INFER = int(Op.INFER)

_OPS = frozenset([Op.INFER, Op.KNOWN, Op.CANCEL, Op.REST, Op.PHASE, Op.BYE])
"""What a client may say after HELLO; STATUS is anybody's."""


class ClientLeg:
    """Acts on the messages of clients. STATUS is not among them: it is about the broker as a whole.

    Args:
        pool: The broker's tables.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        options = pool.options
        self._most_bytes = min(options.max_client_bytes, options.max_open_bytes)

    def receive(self, peer: bytes, header: Header, message: list[Any], key: str) -> None:
        """Act on one message; `key` is the peer's if it says HELLO.

        Raises:
            DecodeError: It is not valid, or not allowed; saying why.
        """
        pool, op = self._pool, header.op
        client = pool.clients.get(peer)
        if op == _INFER and client is not None:
            client.heard = pool.now
            self._infer(client, header, message)
            return
        request_id = header.request_id
        if op == Op.HELLO:
            self._hello(peer, client, decode_meta(message[0][HEADER_SIZE:], MAX_REQUEST), key)
            return
        if op not in _OPS:
            raise DecodeError(f"op {op} has no meaning from a client")
        if client is None:
            if op in (Op.INFER, Op.KNOWN):
                pool.counters.unknown += 1
                pool.to_clients.append((peer, words.plain(Op.UNKNOWN, {}, request_id)))
            return
        client.heard = pool.now
        if op == Op.BYE:
            self.forget(client, left=True)
        elif op == Op.REST:
            client.modes[header.stage] = None
            client.enters(REST, pool.now)
        elif op == Op.PHASE:
            client.enters(_phase_of(decode_meta(message[0][HEADER_SIZE:], MAX_REQUEST)), pool.now)
        elif op == Op.CANCEL:
            if request_id in client.requests:
                pool.cancel(client.requests[request_id])
        elif request_id in client.requests:
            state = {"state": pool.explain(client.requests[request_id])}
            pool.to_clients.append((peer, words.plain(Op.KNOWN, state, request_id)))
        else:
            pool.to_clients.append((peer, words.plain(Op.UNKNOWN, {}, request_id)))

    def forget(self, client: Client, left: bool = False) -> None:
        """A client has `left`, was lost, or was replaced: nobody waits for its replies."""
        pool = self._pool
        for request in list(client.requests.values()):
            pool.cancel(request)
        pool.policies.forget_client(client, left)
        del pool.clients[client.peer]
        if pool.names.get(client.name) is client:
            del pool.names[client.name]

    def _hello(self, peer: bytes, known: Client | None, fields: dict[str, Any], key: str) -> None:
        pool = self._pool
        hello = Introduction.of(fields, "client")
        if known is None:
            if not self._takes_the_name(peer, hello):
                return
            client = Client(
                peer,
                hello.name,
                hello.incarnation,
                hello.rank,
                hello.world_size,
                hello.host,
                hello.pid,
                since=pool.now,
                heard=pool.now,
                eval=hello.eval,
                key=key,
                phase_since=pool.now,
            )
            pool.clients[peer] = pool.names[hello.name] = client
            pool.policies.default.peers.add_client(client)
        pool.to_clients.append((peer, words.plain(Op.WELCOME, pool.welcome)))

    def _takes_the_name(self, peer: bytes, hello: Introduction) -> bool:
        """Settle who has a name: of two processes the later one, of one process its latest socket."""
        pool = self._pool
        namesake = pool.names.get(hello.name)
        if namesake is None:
            return True
        if namesake.incarnation > hello.incarnation:
            text = f"a newer process has the name {hello.name!r}"
            pool.to_clients.append((peer, words.error("replaced", text)))
            return False
        if namesake.incarnation < hello.incarnation:
            text = f"a new process took over the name {hello.name!r}"
            pool.to_clients.append((namesake.peer, words.error("replaced", text)))
        self.forget(namesake)
        return True

    def _infer(self, client: Client, header: Header, message: list[Any]) -> None:
        pool = self._pool
        if header.request_id == 0:
            raise DecodeError("a request needs an id above 0")
        if header.request_id in client.requests:
            pool.counters.duplicates += 1
            return
        if not pool.options.decoupled and header.policy_id == 0 and client.rank is None:
            raise DecodeError(
                "the pool runs in normal mode (runner.enable_decoupled_mode is false), which binds env "
                "ranks to rollout ranks: give PolicyClient a rank and world_size"
            )
        size, in_lane = sum(map(len, message)), 0
        if header.flags & FLAG_LANE:
            try:
                in_lane = self._in_lane(message)
            except SharedMemoryLost as lost:
                error = words.error("lane", str(lost), header.request_id)
                pool.to_clients.append((client.peer, error))
                return
            size += in_lane
        if size > self._most_bytes:
            raise DecodeError(
                f"the request has {size / 2**20:.1f} MiB; broker.max_client_mb and max_queue_mb let "
                f"{self._most_bytes / 2**20:.2f} MiB in"
            )
        if pool.is_full(client, size):
            pool.counters.overloaded += 1
            text = f"{len(pool.requests)} requests with {pool.open_bytes >> 20} MiB are open"
            error = words.error("overloaded", text, header.request_id, retry_after_ms=100)
            pool.to_clients.append((client.peer, error))
            return
        pool.open(client, header, message, size, in_lane)

    def _in_lane(self, message: list[Any]) -> int:
        """Bytes of shared memory that a request names: what it makes a worker, or this broker, read."""
        lane = self._pool.lane
        if lane is None:
            raise SharedMemoryLost("this broker shares no memory")
        return lane.size_of(message)


def _phase_of(fields: dict[str, Any]) -> str:
    phase = fields.get("phase")
    if not isinstance(phase, str) or not 0 < len(phase) <= MAX_PHASE or not phase.isprintable():
        raise DecodeError(f"PHASE: phase must be a str of 1 to {MAX_PHASE} printable characters")
    return phase
