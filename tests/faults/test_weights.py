"""Weights on their way from a learner to rollout workers: what a reply says made it, made it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import Pool, wait_for

from zmqrl.errors import PolicyError
from zmqrl.learner.port import Learner
from zmqrl.transport import sockets
from zmqrl.transport.header import Op, unpack

X = {"x": np.ones((2, 3))}


class Relay:
    """Stands between rollout workers and the learner, and does to WEIGHTS what the test says.

    Args:
        front: Where rollout workers connect.
        back: The learner's endpoint.
        change: Given the number of a WEIGHTS message, from 1, and its frames; returns those to send.
    """

    def __init__(self, front: str, back: str, change: Callable[[int, list[bytes]], list[bytes]]) -> None:
        self._change = change
        self._stopping = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._front = sockets.router(self._context, front)
        self._backs: dict[bytes, Any] = {}
        self._back = back
        self.weights = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            if self._front.poll(2):
                peer, *frames = self._front.recv_multipart()
                if peer not in self._backs:
                    self._backs[peer] = sockets.dealer(self._context, self._back)
                self._backs[peer].send_multipart(frames)
            for peer, learner in self._backs.items():
                while learner.poll(0):
                    frames = learner.recv_multipart()
                    if unpack(frames[0]).op == Op.WEIGHTS:
                        self.weights += 1
                        frames = self._change(self.weights, frames)
                    self._front.send_multipart([peer, *frames])

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._context.destroy(0)


class SlowLink:
    """A TCP link between rollout workers and the learner that passes so many bytes a second."""

    def __init__(self, to: int, rate: float) -> None:
        self._rate = rate
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(("127.0.0.1", self._to))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while chunk := one.recv(65536):
                time.sleep(len(chunk) / self._rate)
                other.sendall(chunk)
        except OSError:
            pass
        for end in (one, other):
            end.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def learner(folder: Path) -> Iterator[Learner]:
    with Learner(f"ipc://{folder}/learner") as port:
        yield port


def publish(learner: Learner, version: int | None = None) -> int:
    """Weights whose bias is their version."""
    number = learner.version + 1 if version is None else version
    return learner.publish({"bias": np.array(float(number)), "more": np.arange(5000.0)}, number)


def publish_module(learner: Learner, version: int, width: int = 3, **changes: Any) -> int:
    """Weights of `policies.biased_module`; None takes one out."""
    torch = pytest.importorskip("torch")
    import policies

    module = policies.biased_module(width)
    with torch.no_grad():
        module.bias.fill_(version)
        module.norm.num_batches_tracked.fill_(version)
        module.norm.running_mean.fill_(version)
    weights = {**module.state_dict(), **changes}
    return learner.publish({k: v for k, v in weights.items() if v is not None}, version)


def start_broker(pool: Pool, learner: Learner | str) -> None:
    endpoint = learner if isinstance(learner, str) else learner.endpoint
    pool.overrides.append(f"actor.endpoint={endpoint}")
    pool.start_broker()
    pool.wait_for_workers(0)


def start(
    pool: Pool, learner: Learner | str, policy: str = "Biased", workers: int = 1, **kwargs: Any
) -> None:
    start_broker(pool, learner)
    for rank in range(workers):
        pool.start_worker(rank, policy, **kwargs)
    pool.wait_for_workers(workers)


def asked(client: Any, **options: Any) -> int:
    """The version that answers now, by the reply's header and by the actions alike."""
    pending = client.submit(X, **options)
    actions = pending.result()["actions"]
    assert (actions == pending.policy_version).all(), (actions, pending.policy_version)
    return int(pending.policy_version)


def wait_for_version(client: Any, version: int) -> None:
    wait_for(lambda: asked(client) == version, f"version {version}")


def wait_for_end(pool: Pool, name: str) -> str:
    child = pool.launcher.children[name]
    wait_for(lambda: child.process.poll() is not None, f"{name} to end", 30)
    child.reader.join()
    assert child.process.returncode == 1
    return "\n".join(child.last_lines)


def flip_a_byte_of_message(number: int, frame: int, at: int) -> Callable[..., list[bytes]]:
    def change(count: int, frames: list[bytes]) -> list[bytes]:
        if count == number:
            damaged = bytearray(frames[frame])
            damaged[at] ^= 1
            frames[frame] = bytes(damaged)
        return frames

    return change


# -- The version in a reply is the version of the weights


def test_every_reply_tells_the_version_that_made_it_although_a_publication_is_damaged(
    pool: Pool, learner: Learner, folder: Path
) -> None:
    relay = Relay(f"ipc://{folder}/relay", learner.endpoint, flip_a_byte_of_message(3, 2, 100))
    try:
        publish(learner)
        start(pool, f"ipc://{folder}/relay")
        client = pool.client()
        seen = [asked(client)]
        for version in range(2, 26):
            publish(learner, version)
            until = time.monotonic() + 0.04
            while time.monotonic() < until:
                seen.append(asked(client))
        wait_for(lambda: seen.append(asked(client)) or seen[-1] == 25, "the newest version")
    finally:
        relay.close()
    assert seen == sorted(seen)
    assert len(set(seen)) > 5
    numbers = wait_for(lambda: (n := learner.rollout_workers())["rollout-0"]["failed"] and n, "a report")
    assert numbers["rollout-0"]["failed"] == 1
    assert any("does not have its checksum" in line for line in pool.lines)


@pytest.mark.parametrize(
    ("frame", "at"),
    [pytest.param(0, 8, marks=pytest.mark.slow), (0, 48), pytest.param(0, 60, marks=pytest.mark.slow)],
    ids=["request id", "version", "notes"],
)
def test_a_flipped_byte_anywhere_in_the_weights_changes_no_version(
    pool: Pool, learner: Learner, folder: Path, frame: int, at: int
) -> None:
    relay = Relay(f"ipc://{folder}/relay", learner.endpoint, flip_a_byte_of_message(2, frame, at))
    try:
        publish(learner)
        start(pool, f"ipc://{folder}/relay")
        client = pool.client()
        assert asked(client) == 1
        publish(learner, 2)
        wait_for_version(client, 2)
        publish(learner, 3)
        wait_for_version(client, 3)
    finally:
        relay.close()


def test_the_next_batch_uses_the_newest_of_the_versions_published_during_a_slow_one(
    pool: Pool, learner: Learner, folder: Path
) -> None:
    passing = []
    published = threading.Event()

    def hold_the_second(count: int, frames: list[bytes]) -> list[bytes]:
        if count == 2:
            assert published.wait(10)
        passing.append(unpack(frames[0]).policy_version)
        return frames

    relay = Relay(f"ipc://{folder}/relay", learner.endpoint, hold_the_second)
    try:
        publish(learner)
        start(pool, f"ipc://{folder}/relay", seconds=1.0)
        client = pool.client()
        slow = client.submit(X)
        wait_for(lambda: pool.status()["workers"][0]["state"] == "busy", "the worker to compute")
        for version in range(2, 22):
            publish(learner, version)
        published.set()
        assert slow.result()["actions"].tolist() == [1, 1]
        assert asked(client) == 21
    finally:
        published.set()
        relay.close()
    # The one that was on its way when they came too fast, and the last of them.
    assert len(set(passing)) <= 3, passing


def test_no_request_is_answered_by_weights_that_nobody_has_published(
    pool: Pool, learner: Learner
) -> None:
    start_broker(pool, learner)
    pool.start_worker(0, "Biased")
    wait_for(lambda: "rollout-0" in learner.rollout_workers(), "the worker to ask for weights")
    request = pool.client().submit(X)
    assert pool.status()["workers"] == []
    publish(learner, 9)
    assert request.result()["actions"].tolist() == [9, 9]


def test_a_worker_whose_first_weights_do_not_fit_ends_and_names_the_parameter(
    pool: Pool, learner: Learner
) -> None:
    publish_module(learner, 1, width=4)
    start_broker(pool, learner)
    pool.start_worker(0, "biased_module")
    words = wait_for_end(pool, "rollout-0")
    assert "version 1 does not fit the policy: 'bias' has shape [4]; the policy's has [3]" in words


# -- Workers come late, die, and see learners come and go


def test_a_late_worker_and_a_restarted_one_serve_the_newest_version_at_once(
    pool: Pool, learner: Learner
) -> None:
    publish(learner)
    start(pool, learner)
    client = pool.client()
    publish(learner, 2)
    wait_for_version(client, 2)
    for name, start_it in (
        ("rollout-0", lambda: pool.start_worker(1, "Biased")),
        ("rollout-1", lambda: pool.start_worker(0, "Biased")),
    ):
        publish(learner)
        start_it()
        pool.wait_for_workers(2)
        os.kill(pool.pid(name), signal.SIGKILL)
        pool.wait_for_workers(1)
        assert asked(client) == learner.version


def test_a_worker_that_comes_after_an_evaluation_was_ordered_serves_the_newest_version(
    pool: Pool, learner: Learner
) -> None:
    publish(learner)
    learner.evaluate(env_steps=0)
    publish(learner, 2)
    start(pool, learner)
    client = pool.client()
    assert asked(client) == 2
    assert asked(client, version=1) == 1


def test_workers_follow_a_restarted_learner_whose_versions_are_lower(
    pool: Pool, learner: Learner
) -> None:
    publish(learner, 30)
    start(pool, learner)
    client = pool.client()
    assert asked(client) == 30
    learner.close()
    with Learner(learner.endpoint) as restarted:
        publish(restarted, 4)
        wait_for_version(client, 4)


def test_the_pinned_version_of_a_restarted_learner_is_not_that_of_the_one_before(
    pool: Pool, learner: Learner
) -> None:
    publish(learner, 5)
    learner.evaluate(env_steps=0)
    publish(learner, 6)
    start(pool, learner)
    client = pool.client()
    assert asked(client, version=5) == 5
    learner.close()
    with Learner(learner.endpoint) as restarted:
        restarted.publish({"bias": np.array(500.0)}, 5)
        restarted.evaluate(env_steps=0)
        restarted.publish({"bias": np.array(700.0)}, 7)
        wait_for(lambda: client.infer(X)["actions"][0] == 700, "the restarted learner's weights")
        pending = client.submit(X, version=5)
        assert pending.result()["actions"].tolist() == [500, 500]
        assert pending.policy_version == 5


def test_workers_go_on_while_the_learner_is_away_and_take_its_weights_when_it_is_back(
    pool: Pool, learner: Learner
) -> None:
    publish(learner, 1)
    start(pool, learner)
    client = pool.client()
    learner.close()
    until = time.monotonic() + 2.0  # longer than the worker's question is repeated
    while time.monotonic() < until:
        assert asked(client) == 1
    with Learner(learner.endpoint) as restarted:
        publish(restarted, 2)
        wait_for_version(client, 2)


def test_a_worker_whose_download_fails_ends_with_the_cause_though_it_is_idle(
    pool: Pool, learner: Learner, folder: Path
) -> None:
    def of_another_protocol(number: int, frames: list[bytes]) -> list[bytes]:
        if number == 2:
            frames[0] = frames[0][:4] + bytes([99]) + frames[0][5:]
        return frames

    relay = Relay(f"ipc://{folder}/relay", learner.endpoint, of_another_protocol)
    try:
        publish(learner)
        start(pool, f"ipc://{folder}/relay")
        publish(learner)
        words = wait_for_end(pool, "rollout-0")
    finally:
        relay.close()
    assert "fetching weights failed" in words
    assert "the peer speaks protocol version 99" in words


# -- What does not fit


def test_weights_of_another_architecture_leave_the_version_that_is_served(
    pool: Pool, learner: Learner
) -> None:
    publish_module(learner, 1)
    start(pool, learner, "biased_module")
    client = pool.client()
    assert asked(client) == 1
    cases: list[tuple[dict[str, Any], str]] = [
        ({"bias": None}, "1 parameters are missing, such as 'bias'"),
        ({"bias": np.ones(7)}, "'bias' has shape [7]; the policy's has [3]"),
        ({"head.weight": np.ones(7)}, "the policy has no 'head.weight'"),
        ({"norm.weight": np.array(["a", "b", "c"])}, "'norm.weight' is not made of numbers"),
    ]
    for version, (changes, words) in enumerate(cases, start=2):
        publish_module(learner, version, **changes)
        stays = f"version 1 stays: version {version} does not fit the policy: {words}"
        wait_for(lambda text=stays: any(text in line for line in pool.lines), stays)
        reply = client.infer(X)
        assert {float(reply[key].max()) for key in ("actions", "batches", "mean")} == {1.0}
        assert asked(client) == 1
    wait_for(lambda: learner.rollout_workers()["rollout-0"]["failed"] == 4, "the count")
    assert learner.rollout_workers()["rollout-0"]["loaded"] == 1
    publish_module(learner, 9)
    wait_for_version(client, 9)


def test_bfloat16_parameters_and_counters_of_no_dimension_arrive_as_they_are(
    pool: Pool, learner: Learner
) -> None:
    publish_module(learner, 1)
    start(pool, learner, "biased_module")
    client = pool.client()
    publish_module(learner, 200)
    wait_for_version(client, 200)
    reply = client.infer(X)
    assert {float(reply[key].min()) for key in ("actions", "batches", "mean")} == {200.0}


# -- Large weights, slow links


def test_weights_of_eighty_megabytes_arrive_whole(pool: Pool, learner: Learner) -> None:
    more = np.random.default_rng(0).random((10, 1 << 20))
    learner.publish({"bias": np.array(1.0), "more": more})
    start(pool, learner)
    client = pool.client()
    assert asked(client) == 1
    learner.publish({"bias": np.array(2.0), "more": more})
    wait_for_version(client, 2)
    assert learner.rollout_workers()["rollout-0"]["failed"] == 0


def test_an_array_that_is_on_its_way_for_longer_than_a_heartbeat_arrives(pool: Pool) -> None:
    with Learner("tcp://127.0.0.1:0") as learner:
        link = SlowLink(int(learner.endpoint.rpartition(":")[2]), rate=2e6)
        publish(learner, 1)
        start(pool, f"tcp://127.0.0.1:{link.port}")
        client = pool.client()
        assert asked(client) == 1
        seconds = 1.4 * sockets.HEARTBEAT_S
        learner.publish({"bias": np.array(2.0), "more": np.zeros(int(seconds * 2e6), np.uint8)})
        wait_for(lambda: asked(client) == 2, "version 2", 2.5 * seconds)
        assert link.connections == 1
        link.close()


# -- Requests that are pinned to a version


def test_pinned_requests_are_answered_by_their_version_while_others_get_the_newest(
    pool: Pool, learner: Learner
) -> None:
    publish(learner, 1)
    learner.evaluate(env_steps=0)
    start(pool, learner, seconds=0.02)
    pinned, free = pool.client(mode="eval"), pool.client()
    seen = []
    for _ in range(30):
        publish(learner)
        both = [pinned.submit(X, version=1), free.submit(X)]
        for pending in both:
            assert (pending.result()["actions"] == pending.policy_version).all()
        assert both[0].policy_version == 1
        seen.append(both[1].policy_version)
    assert seen == sorted(seen)
    assert seen[-1] > 1
    wait_for_version(free, learner.version)
    assert asked(pinned, version=1) == 1
    assert pool.counters()["batches"] < pool.counters()["answered"], "they shared no batch"


def test_a_pinned_version_that_is_still_on_its_way_is_waited_for(pool: Pool, learner: Learner) -> None:
    publish(learner, 1)
    start(pool, learner)
    client = pool.client()
    early = client.submit(X, version=2)
    assert not early.wait(0.3)
    publish(learner, 2)
    learner.evaluate(env_steps=0)
    publish(learner, 3)
    assert early.result()["actions"].tolist() == [2, 2]
    assert early.policy_version == 2


def test_a_version_that_nobody_has_ends_in_an_error_in_time_and_holds_nobody_up(
    pool: Pool, learner: Learner
) -> None:
    publish(learner, 1)
    start(pool, learner)
    asks, other = pool.client(), pool.client()
    begin = time.monotonic()
    bad = asks.submit(X, version=99, timeout=3.0)
    longest = 0.0
    while not bad.done():
        since = time.monotonic()
        assert asked(other) == 1
        longest = max(longest, time.monotonic() - since)
    assert longest < 2.0
    with pytest.raises(
        PolicyError, match=r"weights of version 99.*not here; rollout-0 serves version 1"
    ):
        bad.result()
    assert time.monotonic() - begin < 3.0


def test_a_version_that_a_pool_without_a_learner_does_not_have_is_refused_at_once(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    assert client.submit(X, version=7).result()["rows"].tolist() == [2, 2]
    with pytest.raises(PolicyError, match=r"version 8.* cannot be had; this worker serves version 7"):
        client.submit(X, version=8, timeout=20).result()
