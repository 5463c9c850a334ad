"""What zmqrl is compared with: the middles and workers that one writes with libzmq alone.

    python perf/references.py echo-server FRONTEND
    python perf/references.py echo-worker BACKEND
    python perf/references.py multipart-worker BACKEND
    python perf/references.py proxy FRONTEND BACKEND
    python perf/references.py textbook-broker FRONTEND BACKEND
    python perf/references.py textbook-worker BACKEND

Each serves until SIGTERM, which ends it as it ends any program.
"""

from __future__ import annotations

import sys
from collections import deque

import zmq

_SNDMORE = int(zmq.SNDMORE)
_LARGE = 65_536
"""Bytes from which on handing a frame over is cheaper than copying it."""


def echo_server(frontend: str) -> None:
    """A ROUTER that answers its clients itself."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(frontend)
    _echo(socket)


def echo_worker(backend: str) -> None:
    """A DEALER behind a proxy."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(backend)
    _echo(socket)


def multipart_worker(backend: str) -> None:
    """The same with the calls that one finds in pyzmq's guide."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(backend)
    while True:
        socket.send_multipart(socket.recv_multipart())


def _echo(socket: zmq.Socket[bytes]) -> None:
    # The least that Python can do: it waits in recv, without a poll, and nothing is raised.
    copy = True
    while True:
        client = socket.recv()
        body = socket.recv(copy=copy)
        socket.send(client, _SNDMORE)
        socket.send(body, copy=copy)
        copy = len(body) < _LARGE


def proxy(frontend: str, backend: str) -> None:
    """libzmq's own proxy, in C; it deals to its workers in turn."""
    context = zmq.Context.instance()
    clients, workers = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    clients.bind(frontend)
    workers.bind(backend)
    zmq.proxy(clients, workers)


def textbook_broker(frontend: str, backend: str) -> None:
    """The queue of the ZeroMQ guide that gives work to the worker which was idle for longest."""
    context = zmq.Context.instance()
    clients, workers = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    clients.bind(frontend)
    workers.bind(backend)
    poller = zmq.Poller()
    poller.register(workers, zmq.POLLIN)
    idle: deque[bytes] = deque()
    while True:
        events = dict(poller.poll())
        if workers in events:
            worker, client, *reply = workers.recv_multipart()
            if not idle:
                poller.register(clients, zmq.POLLIN)
            idle.append(worker)
            if client != b"READY":
                clients.send_multipart([client, *reply])
        if clients in events:
            workers.send_multipart([idle.popleft(), *clients.recv_multipart()])
            if not idle:
                poller.unregister(clients)


def textbook_worker(backend: str) -> None:
    """Says that it is ready, then answers; each answer says it again."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(backend)
    socket.send(b"READY")
    while True:
        socket.send_multipart(socket.recv_multipart())


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")](*sys.argv[2:])
