import os
import re
import stat
import subprocess
import sys

import pytest
import zmq

from zmqrl.errors import EndpointError
from zmqrl.transport.sockets import (
    bound_endpoint,
    check_endpoint,
    dealer,
    is_exposed,
    local_endpoint,
    lock_endpoint,
    pull,
    push,
    router,
)


@pytest.fixture
def open_socket():
    """Opens a socket and closes it after the test."""
    context, opened = zmq.Context(), []

    def make(kind, endpoint):
        opened.append(kind(context, endpoint))
        return opened[-1]

    yield make
    for socket in opened:
        socket.close(0)
    context.term()


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5757",
        "tcp://localhost:1",
        "tcp://gpu-3.lab.example:65535",
        "tcp://*:5757",
        "tcp://127.0.0.1:*",
        "tcp://0.0.0.0:0",
        "tcp://[::1]:5757",
        "tcp://[fe80::1%eth0]:5757",
        "ipc:///tmp/broker.ipc",
        "ipc://relative.ipc",
        "ipc://@abstract",
        "ipc:///" + "a" * 106,
    ],
)
def test_a_good_endpoint_is_accepted(endpoint):
    check_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:5757",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://:5757",
        "tcp://host:port",
        "tcp://host:-1",
        "tcp://ho st:1",
        "tcp://::1:5757",
        "tcp://host:5757/path",
        "tcp://host:5757\n",
        "tcp:/host:5757",
        "http://host:80",
        "inproc://name",
        "udp://host:1",
        "ipc://",
        "ipc:/tmp/x",
    ],
)
def test_a_bad_endpoint_is_refused_with_what_one_looks_like(endpoint):
    with pytest.raises(EndpointError, match=r"expected tcp://HOST:PORT or ipc:///path/to/socket"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("port", [65_536, 99_999])
def test_a_port_that_does_not_exist_is_refused(port):
    with pytest.raises(EndpointError, match="at most 65535"):
        check_endpoint(f"tcp://host:{port}")


def test_an_ipc_path_too_long_for_the_system_is_refused_with_its_length():
    with pytest.raises(EndpointError, match="has 108 bytes; a Unix socket takes 107"):
        check_endpoint("ipc:///" + "a" * 107)
    with pytest.raises(EndpointError, match="has 109 bytes"):
        check_endpoint("ipc:///" + "ø" * 54)


@pytest.mark.parametrize("endpoint", [None, 5757, b"tcp://host:1"], ids=repr)
def test_an_endpoint_that_is_no_str_is_refused_by_its_type(endpoint):
    with pytest.raises(EndpointError, match=f"not a {type(endpoint).__name__}"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*"])
@pytest.mark.parametrize("kind", [dealer, push])
def test_a_socket_that_connects_needs_the_port(open_socket, kind, endpoint):
    with pytest.raises(EndpointError, match="the port that the broker got"):
        open_socket(kind, endpoint)


def test_a_second_collector_on_an_endpoint_is_refused(open_socket):
    taken = bound_endpoint(open_socket(pull, "tcp://127.0.0.1:*"))
    with pytest.raises(EndpointError, match=taken):
        open_socket(pull, taken)


@pytest.mark.parametrize("kind", [dealer, router, push, pull])
def test_no_socket_is_made_for_a_bad_endpoint(kind, open_socket):
    with pytest.raises(EndpointError):
        open_socket(kind, "tcp://nowhere")


def test_the_longest_ipc_path_that_is_accepted_can_be_bound(open_socket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_socket(router, "ipc://" + "a" * 107)


def test_a_message_crosses_from_dealer_to_router_and_back(open_socket):
    server = open_socket(router, "tcp://127.0.0.1:*")
    peer = open_socket(dealer, bound_endpoint(server))
    peer.send(b"hello")
    assert server.poll(10_000)
    identity, body = server.recv_multipart()
    assert body == b"hello"
    server.send_multipart([identity, b"welcome"])
    assert peer.poll(10_000)
    assert peer.recv() == b"welcome"


def test_every_dealer_has_an_identity_of_its_own(open_socket):
    identities = {open_socket(dealer, "tcp://127.0.0.1:1").getsockopt(zmq.IDENTITY) for _ in range(20)}
    assert len(identities) == 20
    assert not any(identity.startswith(b"\0") for identity in identities)


def test_a_router_says_that_a_peer_is_unknown(open_socket):
    server = open_socket(router, "tcp://127.0.0.1:*")
    with pytest.raises(zmq.ZMQError) as error:
        server.send_multipart([b"nobody", b"x"])
    assert error.value.errno == zmq.EHOSTUNREACH


def test_the_bound_endpoint_can_be_reached_by_a_plain_socket(open_socket):
    server = open_socket(router, "tcp://127.0.0.1:*")
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", bound_endpoint(server))
    plain = open_socket(lambda context, endpoint: context.socket(zmq.DEALER), None)
    plain.connect(bound_endpoint(server))
    plain.send(b"hello")
    assert server.poll(10_000)
    assert server.recv_multipart()[1] == b"hello"


def test_a_taken_port_is_refused_by_its_name(open_socket):
    taken = bound_endpoint(open_socket(router, "tcp://127.0.0.1:*"))
    words = f"cannot bind {re.escape(taken)}: Address already in use; .* choose another address$"
    with pytest.raises(EndpointError, match=words):
        open_socket(router, taken)


@pytest.mark.parametrize(
    ("endpoint", "exposed"),
    [
        ("tcp://127.0.0.1:5757", False),
        ("tcp://127.8.8.8:5757", False),
        ("tcp://localhost:5757", False),
        ("tcp://[::1]:5757", False),
        ("ipc:///tmp/broker.ipc", False),
        ("tcp://*:5757", True),
        ("tcp://0.0.0.0:5757", True),
        ("tcp://[::]:5757", True),
        ("tcp://192.168.0.7:5757", True),
        ("tcp://eth0:5757", True),
    ],
)
def test_only_what_other_machines_can_reach_is_exposed(endpoint, exposed):
    assert is_exposed(endpoint) is exposed


def test_an_ipc_path_is_locked_until_the_lock_is_closed(tmp_path):
    endpoint = f"ipc://{tmp_path}/broker.ipc"
    with lock_endpoint(endpoint):
        with pytest.raises(EndpointError, match="in use by a running process"):
            lock_endpoint(endpoint)
        lock_endpoint(f"ipc://{tmp_path}/another.ipc").close()
    lock_endpoint(endpoint).close()


def test_the_lock_of_a_process_that_ended_is_free(tmp_path):
    endpoint = f"ipc://{tmp_path}/broker.ipc"
    code = (
        "import os; from zmqrl.transport.sockets import lock_endpoint;"
        f"lock = lock_endpoint({endpoint!r}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    lock_endpoint(endpoint).close()


def test_a_path_in_a_folder_that_does_not_exist_is_refused_by_its_name(tmp_path):
    with pytest.raises(EndpointError, match=r"No such file or directory .*missing/broker\.ipc\.lock"):
        lock_endpoint(f"ipc://{tmp_path}/missing/broker.ipc")


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5757", "ipc://@abstract"])
def test_what_the_kernel_guards_itself_needs_no_lock(endpoint):
    assert lock_endpoint(endpoint) is None


def test_the_folder_of_local_sockets_is_open_to_its_user_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    endpoint = local_endpoint("broker")
    assert endpoint == f"ipc://{tmp_path}/zmqrl-{os.getuid()}/broker.ipc"
    folder = os.path.dirname(endpoint[6:])
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    os.chmod(folder, 0o755)
    with pytest.raises(EndpointError, match="must belong to you, with mode 0700"):
        local_endpoint("broker")
