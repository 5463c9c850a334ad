"""Keys on disk: who has which, who may read them, and that none is overwritten."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from conftest import wait_for

from zmqrl.cli import main
from zmqrl.errors import EndpointError, KeysError
from zmqrl.transport import sockets
from zmqrl.transport.bundles import add_bundle, make_bundles, revoke
from zmqrl.transport.refusal import Suspicion, refusal_of
from zmqrl.transport.security import (
    CLIENTS,
    WORKERS,
    Door,
    Keys,
    answer_handshakes,
    key_of,
    public_key_of,
)

ROLES = ["server", "client", "worker"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_bundles(str(tmp_path / "keys"))
    return tmp_path / "keys"


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# -- Bundles


def test_the_bundles_hold_what_each_part_needs_and_no_secret_of_another(keys: Path) -> None:
    assert files_of(keys) == {
        *("server/server.key", "server/server.key_secret"),
        *("server/clients/client.key", "server/workers/worker.key"),
        *("client/client.key", "client/client.key_secret", "client/server.key"),
        *("worker/worker.key", "worker/worker.key_secret", "worker/server.key"),
    }


def test_nobody_else_can_read_a_secret_or_look_into_a_bundle(keys: Path) -> None:
    for path in [keys, *keys.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        elif path.suffix == ".key_secret":
            assert mode == 0o600, path


@pytest.mark.parametrize("role", ROLES)
def test_a_role_finds_its_bundle_in_the_folder_and_as_a_copy_by_itself(keys: Path, role: str) -> None:
    whole, alone = Keys.load(keys, role), Keys.load(keys / role, role)
    assert (whole.public, whole.secret) == (alone.public, alone.secret)
    assert zmq.curve_public(whole.secret) == whole.public
    assert whole.server == public_key_of(str(keys / "server" / "server.key"))


def test_the_server_may_ask_for_the_status_like_a_client(keys: Path) -> None:
    assert Keys.load(keys / "server", "client").public == Keys.load(keys, "server").public


@pytest.mark.parametrize(
    ("bundle", "role"), [("client", "worker"), ("worker", "client"), ("x", "client")]
)
def test_a_bundle_of_another_role_is_refused_by_name(keys: Path, bundle: str, role: str) -> None:
    with pytest.raises(KeysError, match=f"{bundle} has no keys of a {role}"):
        Keys.load(keys / bundle, role)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_can_read_is_refused(keys: Path, mode: int) -> None:
    secret = keys / "client" / "client.key_secret"
    secret.chmod(mode)
    with pytest.raises(KeysError, match=f"others can read the secret key {secret}; chmod 600"):
        Keys.load(keys, "client")


@pytest.mark.parametrize("place", ["server/clients", "server/workers", "server", "client"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_folder_of_keys_that_others_can_add_to_is_refused(keys: Path, place: str, mode: int) -> None:
    (keys / place).chmod(mode)
    with pytest.raises(KeysError, match=f"others can add keys to {keys / place}, .*chmod 700"):
        Keys.load(keys, place.split("/")[0])


@pytest.mark.parametrize("file", ["client.key_secret", "server.key"])
@pytest.mark.parametrize("content", ["", "nonsense", 'curve\n    public-key = "short"\n', "\0\xff"])
def test_a_damaged_key_is_refused_by_its_path(keys: Path, file: str, content: str) -> None:
    path = keys / "client" / file
    path.write_text(content)
    with pytest.raises(KeysError, match=str(path)):
        Keys.load(keys, "client")


def test_a_secret_that_does_not_belong_to_its_public_key_is_refused(keys: Path) -> None:
    secret = keys / "client" / "client.key_secret"
    secret.write_text(secret.read_text().replace(Keys.load(keys, "client").public.decode(), "a" * 40))
    with pytest.raises(KeysError, match="do not belong together"):
        Keys.load(keys, "client")


def test_a_secret_shows_in_no_text(keys: Path) -> None:
    loaded = Keys.load(keys, "client")
    assert loaded.secret.decode() not in f"{loaded} {loaded!r}"


# -- Making, adding, revoking


def test_keys_are_never_overwritten(keys: Path) -> None:
    before = {path: (keys / path).read_bytes() for path in files_of(keys)}
    for again in (
        lambda: make_bundles(str(keys)),
        lambda: add_bundle(str(keys), "client", "client"),
        lambda: add_bundle(str(keys), "client", "worker"),
        lambda: add_bundle(str(keys), "worker", "server"),
    ):
        with pytest.raises(KeysError, match="never overwritten"):
            again()
    assert {path: (keys / path).read_bytes() for path in files_of(keys)} == before


def test_a_further_key_is_a_bundle_of_its_own_that_is_let_in(keys: Path) -> None:
    add_bundle(str(keys), "worker", "gpu-2")
    added = Keys.load(keys / "gpu-2", "worker")
    assert added.public == public_key_of(str(keys / "server" / "workers" / "gpu-2.key"))
    assert added.public != Keys.load(keys, "worker").public
    assert added.server == Keys.load(keys, "server").public


def test_a_revoked_key_is_gone_and_its_name_can_be_used_again(keys: Path) -> None:
    before = Keys.load(keys, "client")
    revoke(str(keys), "client")
    assert not (keys / "client").exists()
    assert not (keys / "server" / "clients" / "client.key").exists()
    add_bundle(str(keys), "client", "client")
    assert Keys.load(keys, "client").public != before.public


def test_a_revoked_name_is_gone_from_both_lists(keys: Path) -> None:
    lists = [keys / "server" / name / "client.key" for name in (CLIENTS, WORKERS)]
    lists[1].write_text(lists[0].read_text())
    revoke(str(keys), "client")
    assert not any(path.exists() for path in lists)


def test_what_is_not_let_in_cannot_be_revoked(keys: Path) -> None:
    with pytest.raises(KeysError, match="no key 'nobody' is let in"):
        revoke(str(keys), "nobody")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", "a b", "é", "x" * 101])
def test_a_name_that_could_leave_the_folder_is_refused(keys: Path, name: str) -> None:
    before = files_of(keys)
    for act in (
        lambda: add_bundle(str(keys), "client", name),
        lambda: revoke(str(keys), name),
    ):
        with pytest.raises(KeysError):
            act()
    assert files_of(keys) == before


def test_without_the_keys_of_a_server_there_is_nothing_to_add_to(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="make keys there first"):
        add_bundle(str(tmp_path), "client", "lab")


def test_the_command_makes_adds_and_revokes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["make-keys", "keys"]) == 0
    assert main(["make-keys", "keys", "--client", "lab"]) == 0
    assert "keys/server/clients/lab.key" in capsys.readouterr().out
    assert main(["make-keys", "keys", "--revoke", "lab"]) == 0
    assert "let in no longer" in capsys.readouterr().out
    assert main(["make-keys", "keys"]) == 2
    assert "never overwritten" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["make-keys", f"{tmp_path}/file/keys"]) == 2
    told = capsys.readouterr().err
    assert f"error: the keys cannot be written: [Errno 20] Not a directory: '{tmp_path}/file" in told


# -- Doors


def test_the_allow_list_is_what_lies_in_the_folder_now(keys: Path) -> None:
    door = Door(Keys.load(keys, "server"), [CLIENTS])
    mine = Keys.load(keys, "client").public
    assert door.lets_in(mine.decode())
    assert not door.callback("", Keys.load(keys, "worker").public)
    add_bundle(str(keys), "client", "lab")
    new = Keys.load(keys / "lab", "client").public
    assert door.callback("", new), "a new key is let in at its first handshake"
    assert not door.changed(), "nobody has to go because somebody came"
    revoke(str(keys), "client")
    assert not door.callback("", mine)
    assert door.changed()
    assert not door.changed(), "it says so once"
    assert not door.lets_in(mine.decode())
    assert door.lets_in(new.decode())


def test_a_key_that_is_gone_is_noticed_without_a_handshake(keys: Path) -> None:
    door = Door(Keys.load(keys, "server"), [CLIENTS, WORKERS])
    (keys / "server" / "workers" / "worker.key").unlink()
    wait_for(door.changed, "the door to notice", 5)
    assert not door.lets_in(Keys.load(keys, "worker").public.decode())


def test_a_key_that_is_replaced_in_its_file_is_out(keys: Path) -> None:
    door = Door(Keys.load(keys, "server"), [CLIENTS])
    old = Keys.load(keys, "client").public
    add_bundle(str(keys), "worker", "other")
    new = (keys / "other" / "worker.key").read_text()
    (keys / "server" / "clients" / "client.key").write_text(new)
    assert not door.callback("", old)
    assert door.callback("", Keys.load(keys / "other", "worker").public)


def test_a_key_file_that_was_moved_away_and_back_is_let_in_again(keys: Path) -> None:
    door = Door(Keys.load(keys, "server"), [CLIENTS])
    mine = Keys.load(keys, "client").public
    path, aside = keys / "server" / "clients" / "client.key", keys / "aside"
    path.rename(aside)  # it keeps its time, size and inode
    assert not door.callback("", mine)
    aside.rename(path)
    assert door.callback("", mine)


def test_a_key_file_that_is_just_being_written_does_not_turn_its_owner_out(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(Keys.load(keys, "server"), [CLIENTS])
    path = keys / "server" / "clients" / "client.key"
    whole = path.read_text()
    path.write_text("")
    mine = Keys.load(keys, "client").public
    assert door.callback("", mine)
    assert str(path) in caplog.text
    path.write_text(whole)
    assert door.callback("", mine)
    path.unlink()
    assert not door.callback("", mine)


def test_a_stranger_brings_about_no_look_at_all_keys_and_misses_no_change(keys: Path) -> None:
    allowed = keys / "server" / "clients"
    os.utime(allowed, ns=(0, 0))  # nothing has changed for a while
    door = Door(Keys.load(keys, "server"), [CLIENTS])
    (stranger, _), (later, _) = zmq.curve_keypair(), zmq.curve_keypair()
    for number in range(2, 1000):
        os.link(allowed / "client.key", allowed / f"client-{number}.key")
    door.callback("", stranger)
    os.utime(allowed, ns=(0, 0))
    door.callback("", stranger)
    begin = time.process_time()
    for _ in range(1000):
        assert not door.callback("", stranger)
    spent = time.process_time() - begin
    begin = time.process_time()
    for _ in range(10):
        door._lists[CLIENTS].look()
    assert spent / 1000 < (time.process_time() - begin) / 10 / 3
    mine = Keys.load(keys, "client").public
    text = (allowed / "client.key").read_text()
    (allowed / "later.key").write_text(text.replace(mine.decode(), later.decode()))
    assert door.callback("", later)
    (allowed / "later.key").unlink()
    assert not door.callback("", later)


def test_a_door_knows_who_is_on_which_list(keys: Path) -> None:
    door = Door(Keys.load(keys, "server"), [CLIENTS, WORKERS])
    client, worker = (Keys.load(keys, role).public.decode() for role in ("client", "worker"))
    assert door.lets_in(client, CLIENTS)
    assert not door.lets_in(client, WORKERS)
    assert door.lets_in(worker, WORKERS)
    assert door.lets_in(Keys.load(keys, "server").public.decode(), WORKERS), "the server's own"


def test_those_turned_away_are_logged_with_their_keys_but_not_each_time(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(Keys.load(keys, "server"), [CLIENTS])
    stranger, _ = zmq.curve_keypair()
    for _ in range(1000):
        door.callback("", stranger)
    assert len(caplog.records) == 10
    assert stranger.decode() in caplog.text


def test_a_key_that_cannot_be_looked_up_is_turned_away_and_the_next_one_is_not(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(Keys.load(keys, "server"), [CLIENTS])
    assert not door.callback("", b"\xff")
    assert "could not be looked up" in caplog.text
    assert door.callback("", Keys.load(keys, "client").public)


# -- Sockets


Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes sockets of one context, and answers for their doors; all is closed after the test."""
    context: zmq.Context[Any] = zmq.Context()
    opened: list[Any] = []
    authenticators: list[Any] = []

    def make(kind: Callable[..., Any], endpoint: str, **options: Any) -> Any:
        if "door" in options:
            authenticators.append(answer_handshakes(context, options["door"]))
        opened.append(kind(context, endpoint, **options))
        return opened[-1]

    yield make
    for authenticator in filter(None, authenticators):
        authenticator.stop()
    for opened_socket in opened:
        opened_socket.close(0)
    context.term()


@pytest.fixture
def serve(make: Make) -> Callable[..., tuple[Any, str, Door]]:
    """Binds a ROUTER for clients: the socket, its endpoint, its door."""

    def serve(keys: Path | None, endpoint: str = "tcp://127.0.0.1:*") -> tuple[Any, str, Door]:
        door = Door(None if keys is None else Keys.load(keys, "server"), [CLIENTS])
        router = make(sockets.router, endpoint, door=door)
        return router, sockets.bound_endpoint(router), door

    return serve


@pytest.mark.parametrize("endpoint", ["tcp://*:*", "tcp://0.0.0.0:0", "tcp://[::]:0"])
@pytest.mark.parametrize("kind", [sockets.router, sockets.pull])
def test_a_socket_that_others_can_reach_is_not_bound_without_keys(
    make: Make, kind: Callable[..., Any], endpoint: str
) -> None:
    with pytest.raises(EndpointError, match=r"security\.keys") as error:
        make(kind, endpoint)
    assert "bin/make-keys" in str(error.value)
    assert "security.insecure" in str(error.value)


def test_insecure_binds_it_and_says_so_each_time(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        make(sockets.router, "tcp://*:*", door=Door(insecure=True))
    assert caplog.text.count("by anyone, unencrypted (security.insecure)") == 2


def test_with_keys_it_is_bound_without_a_word(
    serve: Make, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(keys, "tcp://*:*")
    assert caplog.text == ""


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_message_crosses_encrypted_and_tells_the_key_of_its_sender(
    serve: Make, make: Make, keys: Path, folder: Path, transport: str
) -> None:
    endpoint = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{folder}/door"
    server, endpoint, door = serve(keys, endpoint)
    mine = Keys.load(keys, "client")
    client = make(sockets.dealer, endpoint, keys=mine)
    client.send(b"hello")
    assert server.poll(10_000)
    identity, frame = server.recv_multipart(copy=False)
    assert frame.bytes == b"hello"
    assert key_of(door, identity) == mine.public.decode()
    assert client.getsockopt(zmq.MECHANISM) == zmq.CURVE


def test_nothing_of_the_message_can_be_read_on_the_way(serve: Make, make: Make, keys: Path) -> None:
    server, endpoint, _ = serve(keys)
    seen = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def relay(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            seen.extend(data)
            target.sendall(data)

    def accept() -> None:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
        threads = [threading.Thread(target=relay, args=pair) for pair in ((near, far), (far, near))]
        for thread in threads:
            thread.start()
        threads[0].join()
        far.shutdown(socket.SHUT_RDWR)
        threads[1].join()
        near.close()
        far.close()

    thread = threading.Thread(target=accept)
    thread.start()
    through = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    client = make(sockets.dealer, through, keys=Keys.load(keys, "client"))
    client.send(b"the observation of a secret robot")
    assert server.poll(10_000)
    assert server.recv_multipart()[1] == b"the observation of a secret robot"
    client.close(0)
    thread.join(10)
    listener.close()
    assert len(seen) > 300
    assert b"secret robot" not in seen


def test_while_nobody_answers_for_the_door_it_stays_shut(make: Make, keys: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with sockets.router(context, "tcp://127.0.0.1:*", door=Door(Keys.load(keys, "server"))) as server:
        client = make(sockets.dealer, sockets.bound_endpoint(server), keys=Keys.load(keys, "client"))
        client.send(b"hello")
        assert not server.poll(500)
    context.term()


# -- Why nobody answers


def test_a_peer_of_the_right_key_is_not_refused(serve: Make, keys: Path) -> None:
    endpoint = serve(keys)[1]
    assert refusal_of(endpoint, Keys.load(keys, "client"), 10) is None
    assert refusal_of(endpoint, Keys.load(keys, "server"), 10) is None


def test_without_keys_on_either_side_nobody_is_refused(serve: Make) -> None:
    assert refusal_of(serve(None)[1], None, 10) is None


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_each_reason_is_told(
    serve: Make, keys: Path, tmp_path: Path, folder: Path, transport: str
) -> None:
    endpoint = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{folder}/door"
    make_bundles(str(tmp_path / "others"))
    endpoint = serve(keys, endpoint)[1]
    cases = {
        None: ("lets nobody in without a key", True),
        Keys.load(keys, "worker"): ("does not let the key of .*worker in: it is of another role", True),
        Keys.load(tmp_path / "others", "client"): ("its key is not the server.key of .*others", False),
    }
    for own, (reason, final) in cases.items():
        refusal = refusal_of(endpoint, own, 10.0 if final else 2.0)
        assert refusal is not None
        assert re.search(reason, refusal.reason), refusal
        assert refusal.final is final


def test_keys_where_none_are_used_are_told(serve: Make, keys: Path) -> None:
    refusal = refusal_of(serve(None)[1], Keys.load(keys, "client"), 10.0)
    assert refusal is not None
    assert refusal.final
    assert "uses no keys, but this part has some" in refusal.reason


def test_where_nobody_listens_keys_are_not_to_blame(keys: Path, folder: Path) -> None:
    for endpoint in ("tcp://127.0.0.1:1", f"ipc://{folder}/nobody"):
        assert refusal_of(endpoint, Keys.load(keys, "client"), 10) is None


def test_what_never_answers_a_handshake_is_left_after_the_time(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert refusal_of(endpoint, Keys.load(keys, "client"), 0.2) is None


def test_a_look_at_what_never_answers_leaves_the_next_one_undisturbed(serve: Make, keys: Path) -> None:
    endpoint, own = serve(keys)[1], Keys.load(keys, "client")
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            assert refusal_of(f"tcp://127.0.0.1:{silent.getsockname()[1]}", own, 0.1) is None
        assert refusal_of(endpoint, None, 10) is not None


def test_many_clients_whose_broker_is_silent_do_not_run_their_process_out_of_files() -> None:
    looks = (
        "import resource, socket, threading\n"
        "from zmqrl.transport.refusal import refusal_of\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "silent = socket.create_server(('127.0.0.1', 0), backlog=100)\n"
        "endpoint = f'tcp://127.0.0.1:{silent.getsockname()[1]}'\n"
        "found = []\n"
        "look = lambda: found.append(refusal_of(endpoint, None, 0.3))\n"
        "threads = [threading.Thread(target=look) for _ in range(40)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "print(found == [None] * 40)\n"
    )
    done = subprocess.run([sys.executable, "-c", looks], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True"], "")


def test_a_suspicion_is_looked_into_when_due_and_not_before(serve: Make, keys: Path) -> None:
    suspicion = Suspicion(serve(keys)[1], None)
    assert suspicion.look() is None
    suspicion.begin(after=0)
    refusal = suspicion.look(patience=10.0)
    assert refusal is not None
    assert suspicion.reason == refusal.reason
    assert suspicion.look() is None, "the next look is not due yet"
    suspicion.end()
    assert suspicion.reason == ""
    assert suspicion.due == float("inf")
    suspicion.rest()
    assert suspicion.due == float("inf")


def test_an_existing_folder_of_another_mode_is_used_but_bundles_in_it_are_closed(tmp_path: Path) -> None:
    open_to_all = tmp_path / "shared"
    open_to_all.mkdir(mode=0o755)
    os.chmod(open_to_all, 0o755)
    make_bundles(str(open_to_all))
    assert stat.S_IMODE((open_to_all / "server").stat().st_mode) == 0o700


def test_a_frame_of_the_largest_size_crosses_encrypted_too(serve: Make, make: Make, keys: Path) -> None:
    door = Door(Keys.load(keys, "server"), [CLIENTS])
    server = make(sockets.router, "tcp://127.0.0.1:*", door=door, max_message_mb=1)
    client = make(sockets.dealer, sockets.bound_endpoint(server), keys=Keys.load(keys, "client"))
    client.send(bytes(1 << 20))
    assert server.poll(10_000)
    assert len(server.recv_multipart()[1]) == 1 << 20
