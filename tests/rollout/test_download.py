"""Weights as a rollout worker fetches them, from a real learner's port or from nonsense."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import wait_for

from zmqrl.errors import EndpointError, StartupFailed
from zmqrl.learner.port import Learner
from zmqrl.learner.snapshot import Snapshot
from zmqrl.rollout.download import WeightsDownload, weights_signature
from zmqrl.spaces import ActionSpace, Spaces
from zmqrl.transport import sockets
from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import Header, Op, unpack


def weights(value: float) -> dict[str, Any]:
    return {"bias": np.array(value), "large": np.full((100, 100), value)}


@pytest.fixture
def learner(folder: Path) -> Iterator[Learner]:
    with Learner(f"ipc://{folder}/learner") as port:
        yield port


@pytest.fixture
def download(learner: Learner) -> Iterator[WeightsDownload]:
    made = WeightsDownload(learner.endpoint, "rollout-0")
    yield made
    made.close()


class Strange:
    """Answers the questions of a download with what the test says, one message after the other."""

    def __init__(self, endpoint: str, answers: list[Callable[[Header], list[bytes]]]) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = sockets.router(self._context, endpoint)
        self.answers = answers
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            if self._socket.poll(10):
                peer, first = self._socket.recv_multipart()
                if self.answers:
                    self._socket.send_multipart([peer, *self.answers.pop(0)(unpack(first))])

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._context.destroy(0)


def good(version: int, epoch: int = 7) -> Callable[[Header], list[bytes]]:
    def answer(question: Header) -> list[bytes]:
        snapshot = Snapshot.of(version, weights(version), {"epoch": epoch})
        return [bytes(frame) for frame in snapshot.message(question.request_id, pinned=False)]

    return answer


def changed(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Header], list[bytes]]:
    return lambda question: change(good(3)(question))


def of_another_version(question: Header) -> list[bytes]:
    first, *others = good(3)(question)
    return [first[:4] + b"\x63" + first[5:], *others]


def test_the_newest_weights_arrive_as_they_were_published(
    learner: Learner, download: WeightsDownload
) -> None:
    assert download.newest() is None
    learner.publish(weights(5.0), 5)
    newest = wait_for(download.newest, "weights")
    assert (newest.version, newest.epoch, newest.spaces) == (5, learner.epoch, None)
    np.testing.assert_array_equal(newest.arrays["large"], np.full((100, 100), 5.0))
    assert newest.arrays["bias"].shape == ()


def test_the_weights_bring_the_spaces_that_their_actor_was_built_for(folder: Path) -> None:
    spaces = Spaces({"": ((3,), "float32")}, ActionSpace("discrete", n=2))
    with Learner(f"ipc://{folder}/learner", with_spaces=True) as learner:
        learner._shared.spaces = spaces
        learner.publish(weights(1.0))
        download = WeightsDownload(learner.endpoint, "rollout-0")
        assert wait_for(download.newest, "weights").spaces == spaces
        download.close()


def test_published_weights_are_those_of_the_moment_whatever_becomes_of_the_arrays(
    learner: Learner, download: WeightsDownload
) -> None:
    mine = weights(1.0)
    learner.publish(mine)
    mine["large"][:] = 9.0
    assert wait_for(download.newest, "weights").arrays["large"].max() == 1.0


def test_an_evaluations_version_stays_beside_newer_ones(
    learner: Learner, download: WeightsDownload
) -> None:
    learner.publish(weights(1.0))
    learner.evaluate(env_steps=0)
    for version in (2, 3, 4):
        learner.publish(weights(float(version)))
    newest = wait_for(lambda: (n := download.newest()) and n.version == 4 and n, "version 4")
    assert newest.arrays["bias"] == 4
    pinned = wait_for(lambda: download.of(1), "version 1")
    assert pinned.arrays["bias"] == 1
    assert download.of(4) is newest
    assert download.of(2) is None


def test_weights_of_an_earlier_life_of_the_learner_are_forgotten(
    learner: Learner, download: WeightsDownload
) -> None:
    learner.publish(weights(8.0), 8)
    learner.evaluate(env_steps=0)
    learner.publish(weights(9.0), 9)
    wait_for(lambda: download.of(8) and download.of(9), "both versions")
    learner.close()
    with Learner(learner.endpoint) as restarted:
        restarted.publish(weights(2.0), 2)
        wait_for(lambda: download.epoch == restarted.epoch, "the restarted learner's weights")
        assert [download.of(version) is None for version in (2, 8, 9)] == [False, True, True]
        assert download.newest() is download.of(2)


def test_the_wait_for_the_first_weights_ends_when_the_worker_is_stopped(
    download: WeightsDownload,
) -> None:
    begin = time.monotonic()
    assert download.wait(lambda: time.monotonic() > begin + 0.3) is None
    assert time.monotonic() < begin + 2


def test_a_malformed_endpoint_is_refused_at_once() -> None:
    with pytest.raises(EndpointError, match="not an endpoint"):
        WeightsDownload("learner:5759", "rollout-0")


@pytest.mark.parametrize(
    "change",
    [
        lambda frames: [b""],
        lambda frames: [b"x" * 100],
        lambda frames: frames[:1],
        lambda frames: frames[:-1],
        lambda frames: [*frames, b"more"],
        lambda frames: [frames[0][:-1], *frames[1:]],
        lambda frames: [frames[0] + b"\x00", *frames[1:]],
        lambda frames: [frames[0], frames[1], frames[2][:-8]],
        lambda frames: [frames[0], frames[2], frames[1]],
    ],
    ids=["empty", "noise", "no body", "one less", "one more", "cut", "longer", "short", "swapped"],
)
def test_damage_of_any_kind_is_counted_and_the_weights_are_asked_for_again(
    folder: Path, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    strange = Strange(f"ipc://{folder}/strange", [changed(change), good(4)])
    download = WeightsDownload(f"ipc://{folder}/strange", "rollout-0")
    try:
        assert wait_for(download.newest, "weights").version == 4
        assert download.failed == 1
    finally:
        download.close()
        strange.close()


@pytest.mark.parametrize("call", [lambda d: d.newest(), lambda d: d.of(1), lambda d: d.wait(bool)])
def test_a_download_that_fails_raises_its_cause_in_every_call(
    folder: Path, call: Callable[[WeightsDownload], Any]
) -> None:
    strange = Strange(f"ipc://{folder}/strange", [of_another_version])
    download = WeightsDownload(f"ipc://{folder}/strange", "rollout-0")
    try:
        download._thread.join(10)
        with pytest.raises(StartupFailed, match="protocol version 99"):
            call(download)
    finally:
        download.close()
        strange.close()


def test_what_a_peer_that_is_no_learner_says_is_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(question: Header) -> list[bytes]:
        fields = {"code": "refused", "message": "op 52 has no meaning from a client"}
        return [Header(Op.ERROR, request_id=question.request_id).pack() + encode_meta(fields)]

    strange = Strange(f"ipc://{folder}/strange", [refuses, refuses])
    download = WeightsDownload(f"ipc://{folder}/strange", "rollout-0")
    try:
        wait_for(lambda: not strange.answers, "two answers")
        wait_for(lambda: caplog.records, "the log")
        assert len(caplog.records) == 1
        assert "gives no weights, but says: op 52 has no meaning" in caplog.text
    finally:
        download.close()
        strange.close()


def test_the_signature_of_weights_depends_on_all_that_is_sent() -> None:
    signatures = {
        weights_signature(version, notes, checksum)
        for version in (1, 2, 2**63)
        for notes in (b"", b"a", b"b")
        for checksum in (0, 1, 2**32 - 1)
    }
    assert len(signatures) == 27
    assert max(signatures) < 2**64


@pytest.mark.parametrize("version", [0, -1, 2**63])
def test_a_version_that_no_header_can_tell_is_not_published(version: int) -> None:
    with pytest.raises(ValueError, match="a version is a number above 0"):
        Snapshot.of(version, weights(1.0), {})
