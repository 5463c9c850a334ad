"""Peers with the right key, another one, a revoked one, and none, while good clients are served."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import TESTS, Load, Pool, wait_for
from gymnasium import spaces

from zmqrl import PolicyClient
from zmqrl.broker.status import StatusClient
from zmqrl.errors import (
    AuthenticationFailed,
    BrokerUnreachable,
    ClientError,
    EndpointError,
    StartupFailed,
)
from zmqrl.learner.port import Learner
from zmqrl.rollout.download import WeightsDownload
from zmqrl.transport import sockets
from zmqrl.transport.bundles import add_bundle, make_bundles, revoke
from zmqrl.transport.codec import decode_meta, encode, encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op, unpack
from zmqrl.transport.security import Keys

X = {"x": np.ones((1, 3))}
HELLO = Header(Op.HELLO).pack() + encode_meta({"name": "stranger", "incarnation": 1})


@pytest.fixture
def keys(tmp_path: Path) -> str:
    make_bundles(str(tmp_path / "keys"))
    return str(tmp_path / "keys")


@pytest.fixture
def others(tmp_path: Path) -> str:
    """Keys of another pool."""
    make_bundles(str(tmp_path / "others"))
    return str(tmp_path / "others")


@pytest.fixture
def secured(pool: Pool, keys: str, free_ports: list[int]) -> Pool:
    """A pool on TCP that has keys."""
    pool.frontend, pool.backend = (f"tcp://127.0.0.1:{port}" for port in free_ports)
    pool.overrides = [
        f"broker.frontend={pool.frontend}",
        f"broker.backend={pool.backend}",
        f"security.keys={keys}",
    ]
    pool.status_client.close()
    pool.status_client = StatusClient(pool.frontend, Keys.load(keys, "client"))
    return pool


@contextmanager
def undisturbed(pool: Pool, keys: str) -> Iterator[Load]:
    """Good clients are served all the while."""
    load = Load(pool, clients=3, keys=keys)
    load.wait_for(50)
    yield load
    load.wait_for(50)
    load.finish()
    counters = pool.counters()
    assert counters["answered"] >= load.answered.total()
    assert counters["errors"] == counters["dropped"] == 0


def disguised(keys: str, bundle: str, role: str) -> str:
    """A bundle under the file names of another role."""
    copy = f"{keys}/{bundle}-as-{role}"
    shutil.copytree(f"{keys}/{bundle}", copy)
    os.rename(f"{copy}/{bundle}.key_secret", f"{copy}/{role}.key_secret")
    return copy


def revoked(keys: str, role: str) -> str:
    """A bundle whose key was let in once."""
    add_bundle(keys, role, f"old-{role}")
    copy = shutil.copytree(f"{keys}/old-{role}", f"{keys}/copy-of-old-{role}")
    revoke(keys, f"old-{role}")
    return copy


def last_words(pool: Pool, name: str, code: int) -> str:
    child = pool.launcher.children[name]
    wait_for(lambda: child.process.poll() is not None, f"{name} to end: {pool.lines}", 40)
    child.reader.join()
    assert child.process.returncode == code, pool.lines
    return "\n".join(child.last_lines)


def said(pool: Pool, name: str, *words: str) -> bool:
    return any(line.startswith(f"[{name}]") and all(w in line for w in words) for line in pool.lines)


# -- The right keys


def test_with_the_right_keys_actions_weights_trajectories_and_status_go_through(
    secured: Pool, keys: str
) -> None:
    with Learner("tcp://127.0.0.1:*", keys=keys) as learner:
        learner.publish({"bias": np.array(1.0)})
        secured.overrides.append(f"actor.endpoint={learner.endpoint}")
        secured.start(policy="Biased")
        client = secured.client(
            keys=f"{keys}/client",
            learner=learner.endpoint,
            action_space=spaces.Discrete(2),
            trajectory_steps=2,
        )
        for _ in range(3):
            assert client.infer(X)["actions"].shape == (1,)
            client.record([1.0], [False], [False])
        (trajectory,) = wait_for(lambda: learner.receive(0.1), "a trajectory")
        assert trajectory.env_steps == 2
        learner.publish({"bias": np.array(2.0)})
        wait_for(lambda: (client.infer(X, mode="eval")["actions"] == 2).all(), "the new weights")
    status = subprocess.run(
        [sys.executable, "-m", "zmqrl", "status", "--json", *secured.overrides],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert [worker["name"] for worker in json.loads(status.stdout)["workers"]] == ["rollout-0"]


@pytest.mark.slow
def test_a_whole_evaluation_runs_with_keys(folder: Path, keys: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "zmqrl", "evaluate", f"--json={folder}/result.json"),
            *("runner.enable_decoupled_mode=true", f"runner.logger.log_path={folder}"),
            *(f"rollout.policy={TESTS}/policies.py:Balance", f"env.factory={TESTS}/sims.py:make"),
            "env.eval={total_num_envs: 4, rollout_epoch: 2}",
            "cluster.component_placement={env: 0-1, rollout: 0-1}",
            f"security.keys={keys}",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert (result["eval/num_trajectories"], result["eval/missing_trajectories"]) == (8, 0)
    assert result["broker/requests"] > 0, "the runner reads the status"


@pytest.mark.slow
def test_a_whole_training_runs_with_keys(folder: Path, keys: str) -> None:
    pytest.importorskip("torchrl")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "zmqrl", "train", f"--json={folder}/result.json"),
            "runner={enable_decoupled_mode: true, max_env_steps: 60, val_check_interval: 2}",
            f"runner.logger.log_path={folder}",
            f"algorithm.factory={TESTS}/algorithms.py:CountsUpdates",
            f"env.factory={TESTS}/training_sims.py:make",
            "cluster.component_placement={env: 0-1, eval: 0, rollout: 0}",
            "env.train={total_num_envs: 4, max_steps_per_rollout_epoch: 8}",
            "env.eval={total_num_envs: 2, rollout_epoch: 1}",
            f"security.keys={keys}",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["env_steps"] >= 60
    assert result["policy_version"] > 1
    assert result["eval/num_trajectories"] == 2


def test_a_key_that_is_added_while_the_broker_runs_is_let_in(secured: Pool, keys: str) -> None:
    secured.start()
    add_bundle(keys, "client", "lab")
    assert secured.client(keys=f"{keys}/lab").infer(X)["actions"].shape == (1, 3)
    add_bundle(keys, "worker", "gpu-2")
    secured.overrides.append(f"security.keys={keys}/gpu-2")
    secured.start_worker(1)
    secured.wait_for_workers(2)


def test_a_client_that_was_refused_is_served_once_its_key_is_let_in(secured: Pool, keys: str) -> None:
    secured.start()
    add_bundle(keys, "client", "lab")
    os.rename(f"{keys}/server/clients/lab.key", f"{keys}/lab.key")
    client = secured.client(keys=f"{keys}/lab")
    with pytest.raises(AuthenticationFailed):
        client.infer(X)
    os.rename(f"{keys}/lab.key", f"{keys}/server/clients/lab.key")
    assert client.infer(X)["actions"].shape == (1, 3)


# -- The wrong ones


def test_clients_without_the_right_key_are_refused_with_the_reason(
    secured: Pool, keys: str, others: str
) -> None:
    secured.start(workers=2, seconds=0.01)
    cases: list[tuple[str | None, str, float]] = [
        (None, "lets nobody in without a key", 20),
        (disguised(keys, "worker", "client"), "does not let the key of .* in", 20),
        (revoked(keys, "client"), "does not let the key of .* in: .* was revoked", 20),
        # The broker cannot say why it breaks a connection off, so this one is told at the timeout.
        (others, r"its key is not the server\.key of .*others", 2),
    ]
    with undisturbed(secured, keys) as load:
        for bundle, reason, timeout in cases:
            begin = time.monotonic()
            with (
                PolicyClient(secured.frontend, keys=bundle, timeout=timeout) as client,
                pytest.raises(AuthenticationFailed, match=f"{secured.frontend} .*{reason}"),
            ):
                client.infer(X)
            assert time.monotonic() - begin < timeout + 2
            load.wait_for(50)
    assert len(secured.status()["clients"]) == 0


def test_a_very_short_timeout_holds_for_a_client_without_a_key(secured: Pool) -> None:
    secured.start(workers=0)
    with PolicyClient(secured.frontend) as client:
        for timeout in (0.5, 0.01):
            begin = time.monotonic()
            with pytest.raises((AuthenticationFailed, BrokerUnreachable)):
                client.infer(X, timeout=timeout)
            assert time.monotonic() - begin < timeout + 3.0


def test_keys_where_none_are_wanted_are_told(pool: Pool, keys: str) -> None:
    pool.start()
    with (
        PolicyClient(pool.frontend, keys=keys) as client,
        pytest.raises(AuthenticationFailed, match="uses no keys, but this part has some"),
    ):
        client.infer(X)
    assert pool.client().infer(X)["actions"].shape == (1, 3)


def test_rollout_workers_without_the_right_key_get_no_work_and_say_why(
    secured: Pool, keys: str, others: str
) -> None:
    secured.start(seconds=0.01)
    cases = {
        "security.keys=null": (1, "lets nobody in without a key"),
        f"security.keys={disguised(keys, 'client', 'worker')}": (1, "does not let the key of"),
        f"security.keys={revoked(keys, 'worker')}": (1, "was revoked"),
        f"security.keys={keys}/client": (2, "has no keys of a worker"),
    }
    overrides = secured.overrides
    with undisturbed(secured, keys):
        for number, override in enumerate([*cases, f"security.keys={others}"], start=1):
            secured.overrides = [*overrides, override]
            secured.start_worker(number, world_size=9)
        for number, (code, reason) in enumerate(cases.values(), start=1):
            assert reason in last_words(secured, f"rollout-{number}", code)
        wait_for(lambda: said(secured, "rollout-5", "no broker answers", "is not the server.key"), "why")
    assert [worker["name"] for worker in secured.status()["workers"]] == ["rollout-0"]
    assert said(secured, "broker", "a peer is turned away", "/server/workers")


def test_the_status_is_for_those_with_a_key(secured: Pool, keys: str, others: str) -> None:
    secured.start()
    for bundle, reason in {
        "null": "without a key",
        others: "is not the server.key",
        disguised(keys, "worker", "client"): "does not let the key",
    }.items():
        asked = subprocess.run(
            [
                *(sys.executable, "-m", "zmqrl", "status", f"--broker={secured.frontend}"),
                f"security.keys={bundle}",
            ],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert asked.returncode == 1
        assert reason in asked.stderr
        assert asked.stdout == ""


def test_env_workers_without_the_right_key_end_with_the_reason(secured: Pool) -> None:
    secured.start_broker()
    secured.wait_for_workers(0)
    secured.launcher.start(
        "env-0",
        [
            *("start-env-worker", *secured.overrides, f"env.factory={TESTS}/sims.py:make"),
            *("security.keys=null", "runner.enable_decoupled_mode=true"),
        ],
    )
    assert "lets nobody in without a key" in last_words(secured, "env-0", 1)


# -- Keys that are revoked while their owners are connected


def test_a_client_whose_key_is_revoked_is_turned_out_and_the_others_stay(
    secured: Pool, keys: str
) -> None:
    secured.start(workers=2, seconds=0.01)
    add_bundle(keys, "client", "lab")
    client = secured.client(keys=f"{keys}/lab", name="lab")
    client.infer(X)
    with undisturbed(secured, keys):
        revoke(keys, "lab")

        def is_out() -> bool:
            try:
                client.infer(X)
            except AuthenticationFailed as error:
                return "has been revoked" in str(error)
            return False

        wait_for(is_out, "the end", 10)
        for _ in range(3):
            with pytest.raises(AuthenticationFailed, match="revoked"):
                client.infer(X)
    assert "lab" not in [client["name"] for client in secured.status()["clients"]]
    assert said(secured, "broker", "lab had its key revoked")


def test_a_request_that_waits_ends_when_the_key_of_its_client_is_revoked(
    secured: Pool, keys: str
) -> None:
    secured.start(workers=0)
    add_bundle(keys, "client", "lab")
    pending = secured.client(keys=f"{keys}/lab").submit(X, timeout=30)
    wait_for(lambda: secured.counters()["requests"] == 1, "the request")
    revoke(keys, "lab")
    with pytest.raises(AuthenticationFailed, match="revoked"):
        pending.result()
    counters = secured.counters()
    assert (counters["cancelled"], secured.status()["open_requests"]) == (1, 0)


def test_a_rollout_worker_whose_key_is_revoked_leaves_its_requests_to_others(
    secured: Pool, keys: str
) -> None:
    secured.start(seconds=0.01)
    add_bundle(keys, "worker", "gpu-2")
    overrides = secured.overrides
    secured.overrides = [*overrides, f"security.keys={keys}/gpu-2"]
    secured.start_worker(1, seconds=0.01)
    secured.overrides = overrides
    secured.wait_for_workers(2)
    with undisturbed(secured, keys):
        revoke(keys, "gpu-2")
        assert "has been revoked" in last_words(secured, "rollout-1", 1)
        secured.wait_for_workers(1)


def test_whatever_a_peer_of_a_revoked_key_says_it_learns_nothing(secured: Pool, keys: str) -> None:
    secured.start()
    add_bundle(keys, "client", "lab")
    add_bundle(keys, "worker", "gpu")
    context: zmq.Context[Any] = zmq.Context()
    peers = [
        sockets.dealer(context, secured.frontend, keys=Keys.load(f"{keys}/lab", "client")),
        sockets.dealer(context, secured.backend, keys=Keys.load(f"{keys}/gpu", "worker")),
    ]
    for peer in peers:
        peer.send(HELLO)
        assert peer.poll(10_000)
        assert unpack(peer.recv()).op == Op.WELCOME
    revoke(keys, "lab")
    revoke(keys, "gpu")
    for peer in peers:
        peer.poll(10_000)
        reply = peer.recv()
        while unpack(reply).op in (Op.PROBE, Op.BATCH):
            assert peer.poll(10_000)
            reply = peer.recv()
        assert decode_meta(reply[HEADER_SIZE:])["code"] == "revoked"
        request = Header(Op.INFER, request_id=7, rows=1, budget_ms=60_000).pack() + encode(X).meta
        for message in (HELLO, Header(Op.STATUS, request_id=3).pack(), request, HELLO):
            peer.send(message)
            assert peer.poll(10_000)
            reply = peer.recv()
            if unpack(reply).op != Op.UNKNOWN:
                assert decode_meta(reply[HEADER_SIZE:])["code"] == "revoked"
    context.destroy(0)
    assert secured.counters()["requests"] == 0


def test_a_client_finds_a_broker_that_was_restarted_without_its_key(secured: Pool, keys: str) -> None:
    secured.start()
    add_bundle(keys, "client", "lab")
    client = secured.client(keys=f"{keys}/lab")
    client.infer(X)
    os.kill(secured.pid("broker"), signal.SIGKILL)
    secured.launcher.children["broker"].process.wait()
    revoke(keys, "lab")
    secured.start_broker()
    with pytest.raises(AuthenticationFailed, match="was revoked"):
        client.infer(X)


def test_so_does_one_with_a_short_timeout_which_is_served_once_its_key_is_back(
    secured: Pool, keys: str
) -> None:
    secured.start()
    add_bundle(keys, "client", "lab")
    client = secured.client(keys=f"{keys}/lab")

    def ends_in(kind: type) -> bool:
        try:
            return isinstance(client.infer(X, timeout=0.5), kind)
        except ClientError as error:
            return isinstance(error, kind)

    wait_for(lambda: ends_in(dict), "the first answer")
    secured.kill("broker")
    secured.wait_for_exit("broker")
    os.rename(f"{keys}/server/clients/lab.key", f"{keys}/lab.key")
    secured.start_broker()
    wait_for(lambda: ends_in(AuthenticationFailed), "the reason")
    os.rename(f"{keys}/lab.key", f"{keys}/server/clients/lab.key")
    wait_for(lambda: ends_in(dict), "an answer")


# -- The learner


@pytest.fixture
def learner(keys: str) -> Iterator[Learner]:
    with Learner("tcp://127.0.0.1:*", keys=keys) as learner:
        learner.publish({"bias": np.array(1.0)})
        yield learner


def recording_client(learner: Learner, keys: str | None) -> PolicyClient:
    return PolicyClient(
        "tcp://127.0.0.1:1",
        learner=learner.endpoint,
        action_space=spaces.Discrete(2),
        keys=keys,
        timeout=5,
    )


def test_a_learner_takes_trajectories_of_clients_only(learner: Learner, keys: str, others: str) -> None:
    for bundle, reason in {
        None: "lets nobody in without a key",
        disguised(keys, "worker", "client"): "does not allow that",
        revoked(keys, "client"): "was revoked",
        others: r"is not the server\.key",
    }.items():
        with recording_client(learner, bundle) as client, pytest.raises(ClientError, match=reason):
            client.infer(X)
    assert learner.books()["received"] == 0


def test_a_learner_gives_weights_to_workers_only(
    learner: Learner, keys: str, others: str, caplog: pytest.LogCaptureFixture
) -> None:
    for bundle, reason in {
        None: "lets nobody in without a key",
        revoked(keys, "worker"): "was revoked",
        disguised(keys, "client", "worker"): "does not allow that",
        others: "is not the server.key",
    }.items():
        own = None if bundle is None else Keys.load(bundle, "worker")
        download = WeightsDownload(learner.endpoint, "stranger", own)
        try:

            def is_refused(download: Any = download, reason: str = reason) -> bool:
                try:
                    assert download.newest() is None
                    return reason in caplog.text
                except StartupFailed as error:
                    return reason in str(error)

            wait_for(is_refused, reason, 10)
        finally:
            download.close()
    assert learner.rollout_workers() == {}


def test_a_revoked_key_gets_no_more_weights_and_its_trajectories_are_refused(
    learner: Learner, keys: str
) -> None:
    add_bundle(keys, "worker", "gpu")
    add_bundle(keys, "client", "lab")
    context: zmq.Context[Any] = zmq.Context()
    worker = sockets.dealer(context, learner.endpoint, keys=Keys.load(f"{keys}/gpu", "worker"))
    client = sockets.dealer(context, learner.endpoint, keys=Keys.load(f"{keys}/lab", "client"))
    want = {"name": "gpu", "epoch": learner.epoch, "version": 1}
    worker.send(Header(Op.WANT, request_id=1).pack() + encode_meta(want))
    fields = {"name": "lab", "incarnation": 1, "first": 1, "spaces": None}
    wait_for(lambda: learner.rollout_workers(), "the worker to ask")
    client.send(Header(Op.EVALUATE).pack() + encode_meta({"name": "lab"}))
    assert client.poll(10_000)
    assert unpack(client.recv()).op == Op.WELCOME
    revoke(keys, "gpu")
    revoke(keys, "lab")
    assert worker.poll(10_000), "it is told at once"
    assert decode_meta(worker.recv()[HEADER_SIZE:])["code"] == "revoked"
    learner.publish({"bias": np.array(2.0)})
    worker.send(Header(Op.WANT, request_id=2).pack() + encode_meta(want))
    client.send(Header(Op.HELLO, request_id=1).pack() + encode_meta(fields))
    for peer in (worker, client):
        assert peer.poll(10_000)
        first = peer.recv_multipart()[0]
        assert unpack(first).op == Op.ERROR
        assert "revoked" in decode_meta(first[HEADER_SIZE:])["message"]
    context.destroy(0)


# -- What is bound where


@pytest.mark.parametrize(
    ("command", "override"),
    [
        ("start-broker", "broker.frontend=tcp://*:0"),
        ("start-broker", "broker.backend=tcp://0.0.0.0:0"),
        ("start-learner", "actor.endpoint=tcp://*:0"),
        ("evaluate", "runner.report=tcp://*:0"),
    ],
)
def test_without_keys_nothing_is_bound_that_other_machines_can_reach(
    pool: Pool, folder: Path, command: str, override: str
) -> None:
    if command == "start-learner":
        pytest.importorskip("torchrl")
    more = [
        f"algorithm.factory={TESTS}/algorithms.py:CountsUpdates",
        f"env.factory={TESTS}/sims.py:make",
        f"rollout.policy={TESTS}/policies.py:Balance",
        f"runner.logger.log_path={folder}",
    ]
    pool.launcher.start("part", [command, *pool.overrides, *more, override])
    words = last_words(pool, "part", 2)
    for word in ("security.keys", "bin/make-keys", "security.insecure"):
        assert word in words


def test_what_is_insecure_says_so_at_each_start(pool: Pool) -> None:
    for name in ("first", "second"):
        pool.launcher.start(
            name,
            [
                *("start-broker", "broker.frontend=tcp://*:0", "broker.backend=tcp://*:0"),
                "security.insecure=true",
            ],
        )
        wait_for(lambda name=name: said(pool, name, "serving"), "the broker")
        for kind in ("frontend", "backend"):
            assert said(pool, name, "by anyone, unencrypted (security.insecure)"), kind


def test_a_learner_of_ones_own_is_not_bound_for_strangers_either() -> None:
    with pytest.raises(EndpointError, match=r"security\.keys"):
        Learner("tcp://*:*")


# -- What nobody may do


@contextmanager
def peer_of(endpoint: str, keys: Keys) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[Any] = zmq.Context()
    socket = sockets.dealer(context, endpoint, keys=keys)
    try:
        yield socket
    finally:
        socket.close(0)
        context.term()


def nonsense(pool: Pool) -> int:
    counters = pool.counters()
    return int(counters["malformed"] + counters["unknown"])


@pytest.mark.parametrize("role", ["client", "worker"])
def test_no_message_stops_a_broker_or_a_learner(
    secured: Pool, keys: str, learner: Learner, role: str
) -> None:
    secured.start()
    own = Keys.load(keys, role)
    broker = secured.frontend if role == "client" else secured.backend
    epoch = secured.status()["epoch"]
    for endpoint in (broker, learner.endpoint):
        with peer_of(endpoint, own) as peer:
            for op in range(256):
                for meta in (b"", encode_meta({"command": "stop"})):
                    peer.send(HELLO)
                    peer.send(Header(op, request_id=op).pack() + meta)
                while peer.poll(0):
                    peer.recv_multipart()
            if endpoint == broker:
                wait_for(lambda: nonsense(secured) > 400, "all that to be read")
    assert secured.launcher.children["broker"].process.poll() is None
    assert secured.status()["epoch"] == epoch
    assert secured.client(keys=keys).infer(X)["actions"].shape == (1, 3)
    assert learner.publish({"bias": np.array(2.0)}) == 2
