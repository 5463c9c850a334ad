"""The learner's port and those who send to it, on real sockets."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import zmq
from conftest import Pool, no_more_files, wait_for
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from test_trajectory import Counting

from zmqrl import PolicyClient
from zmqrl.env.orders import Orders
from zmqrl.errors import (
    EncodeError,
    EndpointError,
    LearnerRefused,
    LearnerTimeout,
    LearnerUnreachable,
    RunFailed,
    StateLost,
    TrainingEnded,
)
from zmqrl.learner import env_leg, shared
from zmqrl.learner.gate import Gate
from zmqrl.learner.port import Learner
from zmqrl.recording import Recording, recording, uplink
from zmqrl.recording.builder import TrajectoryBuilder
from zmqrl.spaces import Spaces
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode_meta, encode, encode_meta
from zmqrl.transport.header import HEADER_SIZE, Header, Op, unpack

pytestmark = pytest.mark.timeout(40)

ACTIONS = spaces.Discrete(3)
NOTHING = np.zeros(2, bool)


def observation(value):
    return {"state": np.full((2, 3), value, np.float32), "task": ["open", "close"]}


class Env:
    """Two rows whose observations count up, so that every trajectory is told from every other."""

    def __init__(self, endpoint, name="env-0", incarnation=1, steps=2, first=0, **options):
        self.steps = steps
        self.value = first
        self.recording = Recording(
            endpoint, name, incarnation, steps=steps, action_space=ACTIONS, **options
        )

    def show(self):
        self.recording.asked(0, observation(self.value))

    def play(self, trajectories, timeout=15.0):
        """So many trajectories, each of them sent."""
        self.show()
        for _ in range(trajectories * self.steps):
            self.recording.wait_to_begin(0, time.monotonic() + timeout)
            self.recording.answered(0, {"actions": np.array([0, 1])}, 1)
            self.recording.outcome(0, [self.value, 0], NOTHING, NOTHING)
            self.value += 1
            self.show()
        return self

    def wait_until_acknowledged(self):
        def acknowledged():
            self.recording.wait(0.05)
            return not self.recording.unacknowledged

        wait_for(acknowledged, "the acknowledgements")
        return self


def values(trajectories):
    """What tells trajectories apart: the first reward of each."""
    return [int(trajectory.reward[0, 0]) for trajectory in trajectories]


def take(port, count):
    """So many trajectories, and no more."""
    found = []
    wait_for(lambda: found.extend(port.receive(0.05)) or len(found) >= count, f"{count} trajectories")
    found += port.receive(0.0)
    assert len(found) == count
    return values(found)


@pytest.fixture
def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/learner"


@pytest.fixture
def made() -> Iterator[list]:
    """What is closed in the end."""
    made: list = []
    yield made
    for thing in reversed(made):
        thing.close()


@pytest.fixture
def learner(endpoint, made):
    """Makes learners on one endpoint."""

    def make(publish=True, **options):
        port = Learner(endpoint, **options)
        made.append(port)
        if publish:
            port.publish({"w": np.zeros(3)})
        return port

    return make


@pytest.fixture
def env(endpoint, made):
    """Makes env workers."""

    def make(name="env-0", incarnation=1, **options):
        env = Env(endpoint, name, incarnation, **options)
        made.append(env.recording)
        return env

    return make


@pytest.fixture
def impatient(monkeypatch):
    """Silence counts sooner."""
    monkeypatch.setattr(uplink, "_REBUILD_AFTER", 0.3)
    monkeypatch.setattr(uplink, "_ASK_EVERY", 0.1)


class Shut(Gate):
    """Lets nothing begin."""

    def may_begin(self, progress, env_steps):
        return False


class Switch(Gate):
    """Lets everything begin from the moment on at which it is opened."""

    is_open = threading.Event()

    def may_begin(self, progress, env_steps):
        return self.is_open.is_set()


class Stranger:
    """A raw socket that says what it likes."""

    def __init__(self, endpoint):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(endpoint)

    def say(self, op, request_id=0, fields=None, stage=0, rows=0, frames=()):
        header = Header(op, request_id=request_id, stage=stage, rows=rows, frames=len(frames))
        body = b"" if fields is None else encode_meta(fields)
        self.socket.send_multipart([header.pack() + body, *frames])

    def hello(self, name="stranger", first=1, **fields):
        made = Spaces.of(observation(0), ACTIONS).fields()
        self.say(Op.HELLO, 1, {"name": name, "incarnation": 1, "first": first, "spaces": made, **fields})
        return self.hear(Op.WELCOME)

    def hear(self, op, *others, timeout=5.0):
        """The next message `op`; only PROBE and `others` may come before it."""
        until = time.monotonic() + timeout
        while self.socket.poll(max(0, (until - time.monotonic()) * 1000)):
            first = self.socket.recv_multipart()[0]
            header = unpack(first)
            if header.op not in (Op.PROBE, *others):
                assert header.op == op, f"{Op(header.op).name} {first[HEADER_SIZE:]!r}"
                return header, decode_meta(first[HEADER_SIZE:]) if first[HEADER_SIZE:] else {}
        raise AssertionError(f"no {op.name} came")

    def close(self):
        self.socket.close(0)


@pytest.fixture
def stranger(endpoint, made):
    def make():
        made.append(Stranger(endpoint))
        return made[-1]

    return make


def frames_of_a_trajectory(number=1, rows=None):
    """The frames of a good message."""
    builder = TrajectoryBuilder(2, "stranger")
    for step in range(3):
        builder.observe(observation(step) | {"image": np.zeros((2, 64, 64), np.uint8)})
        if step < 2:
            builder.act({"actions": np.array([0, 1])}, 1)
            builder.outcome([step, 0], NOTHING, NOTHING)
    (trajectory,) = builder.take()
    encoded = encode(trajectory.tree())
    header = Header(
        Op.TRAJECTORY, request_id=number, frames=len(encoded.buffers), rows=4 if rows is None else rows
    )
    return [header.pack() + encoded.meta, *encoded.buffers]


# -- Trajectories and acknowledgements


def test_a_trajectory_arrives_as_it_was_recorded(learner, env):
    port = learner()
    env().play(1)
    (trajectory,) = wait_for(lambda: port.receive(0.1), "a trajectory")
    assert trajectory.origin == "env-0"
    assert trajectory.observation["state"][:, 0, 0].tolist() == [0, 1]
    assert trajectory.observation["task"] == [["open", "close"]] * 2
    assert trajectory.bootstrap["state"][0, 0] == 2
    assert trajectory.reward[:, 0].tolist() == [0, 1]


def test_every_trajectory_is_acknowledged_before_the_learner_takes_it(learner, env):
    port = learner()
    env().play(10).wait_until_acknowledged()
    assert port.books() == {
        "received": 10, "env_steps": 40, "duplicates": 0, "rolled_back": 0, "dropped": 0, "waiting": 10
    }  # fmt: skip


def test_a_sender_pauses_at_four_unacknowledged_while_the_learner_does_not_take(
    learner, env, monkeypatch
):
    monkeypatch.setattr(shared, "_MOST_WAITING", 8)
    port = learner()
    sender = env()
    with pytest.raises(LearnerTimeout, match="4 trajectories are not acknowledged"):
        sender.play(20, timeout=1.0)
    assert sender.recording.unacknowledged == uplink.MOST_UNACKNOWLEDGED
    assert sender.recording.sent == 7 + uplink.MOST_UNACKNOWLEDGED
    port.receive(0.0)
    sender.wait_until_acknowledged().play(1)


def test_a_learner_that_has_caught_up_gets_everything_once(learner, env, monkeypatch, impatient):
    monkeypatch.setattr(shared, "_MOST_WAITING", 2)
    monkeypatch.setattr(env_leg, "_REFUSED_FROM", 2)
    port = learner()
    sender = env()
    with pytest.raises(LearnerTimeout):
        sender.play(20, timeout=0.5)
    found = values(port.receive(0.0))
    wait_for(
        lambda: (
            found.extend(values(port.receive(0.05))) or sender.recording.wait(0.0) or len(found) == 5
        ),
        "the rest",
    )
    assert found == [0, 2, 4, 6, 8]


def test_what_is_sent_without_end_and_without_asking_does_not_fill_the_memory(
    learner, stranger, monkeypatch
):
    monkeypatch.setattr(shared, "_MOST_WAITING", 4)
    port = learner()
    greedy = stranger()
    greedy.hello()
    for number in range(1, 301):
        greedy.socket.send_multipart(frames_of_a_trajectory(number))
    greedy.say(Op.BEGIN, 1, rows=4)
    greedy.hear(Op.GO, Op.ACK)  # all of them have been read
    assert port.books()["waiting"] == 32


def test_several_senders_deliver_at_once(learner, env):
    port = learner()
    senders = [env(f"env-{i}", first=1000 * i) for i in range(4)]
    threads = [threading.Thread(target=sender.play, args=(20,)) for sender in senders]
    for thread in threads:
        thread.start()
    found = take(port, 80)
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(1000 * i + 2 * j for i in range(4) for j in range(20))


def test_a_goodbye_delivers_what_is_complete(learner, env):
    port = learner()
    sender = env().play(3)
    sender.recording.close(5.0)
    assert take(port, 3) == [0, 2, 4]
    wait_for(lambda: not port._shared.ledger.senders, "the goodbye")


# -- Lives of the learner


def test_a_restarted_learner_goes_on_from_its_checkpoint(learner, env):
    port = learner()
    sender = env().play(6).wait_until_acknowledged()
    used = [values([trajectory])[0] for _, trajectory in zip(range(4), port, strict=False)]
    state = port.state_dict()
    lost = take(port, 2)
    sender.play(1).wait_until_acknowledged()
    port.close()

    port = learner(publish=False)
    port.load_state_dict(state)
    port.publish({"w": np.zeros(3)})
    sender.play(3).wait_until_acknowledged()
    used += take(port, 3)
    assert (used, lost) == ([0, 2, 4, 6, 14, 16, 18], [8, 10])
    books = port.books()
    assert (sender.recording.sent, books["received"], books["rolled_back"]) == (10, 7, 3)
    assert port.version == 2


def test_shares_go_on_over_a_resume_and_a_cap_begins_anew(learner, env):
    port = learner(gate=Gate(max_env_share=0.6))
    fast, slow = env("fast"), env("slow")
    slow.play(1).wait_until_acknowledged()
    fast.play(1).wait_until_acknowledged()
    slow.play(1).wait_until_acknowledged()
    fast.play(1).wait_until_acknowledged()
    take(port, 4)
    state = port.state_dict()
    state["shares"] = {"fast": 300, "slow": 100}  # of a long run
    port.close()

    port = learner(publish=False, gate=Gate(max_env_share=0.6))
    port.load_state_dict(state)
    assert port.shares() == {
        "train/share/fast": 0.75,
        "train/share/slow": 0.25,
        "train/share_min": 0.25,
        "train/share_max": 0.75,
    }
    port.publish({})
    slow.play(1).wait_until_acknowledged()
    fast.play(1).wait_until_acknowledged()  # it need not wait until the slow one has caught up
    assert port.shares()["train/share/fast"] == pytest.approx(304 / 408)
    assert port.state_dict()["shares"] == {"fast": 300, "slow": 100}, "what is used counts"
    take(port, 2)
    assert port.state_dict()["shares"] == {"fast": 304, "slow": 104}


def test_a_restarted_learner_without_a_checkpoint_counts_what_is_gone(learner, env):
    port = learner()
    sender = env().play(6).wait_until_acknowledged()
    port.close()
    port = learner()
    sender.play(2).wait_until_acknowledged()
    assert take(port, 2) == [12, 14]
    books = port.books()
    assert (sender.recording.sent, books["received"], books["rolled_back"]) == (8, 2, 6)


def test_what_was_not_acknowledged_is_sent_again_to_the_next_learner(learner, env, monkeypatch):
    monkeypatch.setattr(shared, "_MOST_WAITING", 2)
    port = learner()
    sender = env()
    with pytest.raises(LearnerTimeout):
        sender.play(20, timeout=0.3)
    state = port.state_dict()
    port.close()
    monkeypatch.setattr(shared, "_MOST_WAITING", 64)
    port = learner(publish=False)
    port.load_state_dict(state)
    port.publish({})
    sender.wait_until_acknowledged()
    assert take(port, 4) == [2, 4, 6, 8]
    books = port.books()
    assert (sender.recording.sent, books["received"], books["rolled_back"]) == (5, 4, 1)


def test_a_learner_that_knows_a_trajectory_already_does_not_use_it_again(learner, env):
    port = learner()
    sender = env().play(2)
    used = take(port, 2)
    state = port.state_dict()
    port.close()
    sender.recording._uplink._socket.close(0)  # the acknowledgement is lost with its connection
    sender.recording._uplink._connect()
    assert sender.recording.unacknowledged >= 1
    port = learner(publish=False)
    port.load_state_dict(state)
    port.publish({})
    sender.wait_until_acknowledged().play(1)
    used += take(port, 1)
    assert used == [0, 2, 4]
    books = port.books()
    assert (books["received"], books["rolled_back"]) == (3, 0)


def test_a_learner_may_start_after_the_env_worker(learner, env):
    sender = env()
    thread = threading.Thread(target=sender.play, args=(2,))
    thread.start()
    with pytest.raises(LearnerUnreachable):
        env("env-1").play(1, timeout=0.2)
    port = learner()
    assert take(port, 2) == [0, 2]
    thread.join()


def test_a_learner_that_is_gone_is_not_said_to_be_busy(learner, env, monkeypatch):
    monkeypatch.setattr(recording, "_GONE_AFTER", 0.3)
    port = learner()
    sender = env().play(1).wait_until_acknowledged()
    port.close()
    with pytest.raises(LearnerTimeout, match=r"has said nothing for .* s; is it still running"):
        sender.play(1, timeout=0.6)


def test_a_checkpoint_may_be_loaded_after_env_workers_have_come(learner, env):
    port = learner(publish=False)
    sender = env()
    sender.show()
    assert port.wait_for_spaces(5.0) is not None
    with pytest.raises(LearnerTimeout, match="not ready"):
        sender.play(1, timeout=0.5)
    port.load_state_dict(
        {
            "version": 5, "versions": 4, "marks": {"env-0/1": 2}, "received": 2, "env_steps": 8,
            "rolled_back": 1, "dropped": 0, "evaluations": 0,
        }
    )  # fmt: skip
    assert port.publish({}) == 6
    sender.play(1)
    wait_for(lambda: port.books()["duplicates"] == 1, "number 1, which the checkpoint knows")


def test_a_checkpoint_is_refused_once_env_workers_have_been_let_in(learner):
    port = learner()
    with pytest.raises(ValueError, match="before"):
        port.load_state_dict(port.state_dict())


def test_a_checkpoint_within_the_loop_holds_only_what_the_loop_has_had(learner, env):
    port = learner()
    env().play(5).wait_until_acknowledged()
    for trajectory in port:
        state = port.state_dict()
        assert state["received"] == 1 + values([trajectory])[0] // 2
        assert state["marks"] == {"env-0/1": state["received"]}
        assert state["env_steps"] == 4 * state["received"]
        if state["received"] == 5:
            break


def test_a_goodbye_tells_a_restarted_learner_what_it_has_lost(learner, env):
    port = learner()
    sender = env().play(3).wait_until_acknowledged()
    port.close()
    port = learner()
    sender.recording.close(2.0)
    wait_for(lambda: port.books()["rolled_back"] == 3, "the books to be complete")


def test_publications_of_all_lives_count_for_the_gate(learner):
    port = learner()
    for _ in range(3):
        port.publish({})
    state = port.state_dict()
    port.close()
    port = learner(publish=False)
    port.load_state_dict(state)
    assert port.publish({}) == 5
    assert port._shared.versions == 3, "the first publication only repeats the weights"
    port.publish({})
    assert port._shared.versions == 4


# -- Silence


SERVE = """
import sys, numpy as np
from zmqrl.learner.port import Learner
with Learner(sys.argv[1]) as port:
    port.publish({})
    print("ready", flush=True)
    for trajectory in port:
        print(int(trajectory.reward[0, 0]), flush=True)
"""


@pytest.fixture
def serving(endpoint):
    """A learner as a process of its own, which prints what it gets."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, endpoint], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_learner_that_was_stopped_for_a_while_gets_everything_once(serving, env, impatient):
    sender = env().play(1).wait_until_acknowledged()
    serving.send_signal(signal.SIGSTOP)
    socket = sender.recording._uplink._socket
    with pytest.raises(LearnerTimeout):
        sender.play(20, timeout=1.5)
    assert sender.recording._uplink._socket is not socket, "the socket was not made anew"
    serving.send_signal(signal.SIGCONT)
    sender.wait_until_acknowledged().play(3).wait_until_acknowledged()
    count = sender.recording.sent
    found = [int(serving.stdout.readline()) for _ in range(count)]
    assert found == [2 * i for i in range(count)]


def test_an_acknowledgement_owed_to_a_socket_that_is_gone_goes_to_the_next_one(
    learner, env, monkeypatch, impatient
):
    monkeypatch.setattr(shared, "_MOST_WAITING", 1)
    port = learner()
    sender = env().play(1)
    wait_for(lambda: port.books()["waiting"] == 1, "the trajectory")
    uplink_ = sender.recording._uplink
    uplink_._socket.close(0)
    uplink_._connect()
    wait_for(lambda: (sender.recording.wait(0.02), uplink_._welcomed == uplink_._hellos)[1], "a welcome")
    assert sender.recording.unacknowledged == 1, "the learner was not full"
    assert take(port, 1) == [0]
    sender.wait_until_acknowledged()


def test_an_env_worker_that_got_no_file_for_a_new_socket_goes_on_when_there_is_one(learner, env):
    port = learner()
    sender = env().play(1).wait_until_acknowledged()
    uplink_ = sender.recording._uplink
    uplink_._asked[0] = (99, 2)  # what is open
    uplink_._heard -= 1000.0
    with no_more_files(), pytest.raises(zmq.ZMQError):
        uplink_.service()
    sender.play(1).wait_until_acknowledged()
    assert take(port, 2) == [0, 2]


def test_a_learner_that_was_killed_is_followed_by_the_next(serving, learner, env, impatient):
    sender = env().play(2).wait_until_acknowledged()
    serving.kill()
    serving.wait()
    port = learner()
    sender.play(2).wait_until_acknowledged()
    assert take(port, 2) == [4, 6]
    assert port.books()["rolled_back"] == 2


def test_what_gets_lost_in_a_connection_is_sent_again(env, endpoint, made, impatient):
    """A learner made by hand forgets the first of everything."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)
    sender = env()
    thread = threading.Thread(target=lambda: sender.play(1).wait_until_acknowledged())
    thread.start()
    forgotten, numbers = set(), []
    while not numbers or router.poll(500):
        assert router.poll(5000), f"silence after {forgotten}"
        peer, first, *_ = router.recv_multipart()
        header = unpack(first)
        if header.op not in forgotten:
            forgotten.add(header.op)
            continue
        answer = {
            Op.HELLO: Header(Op.WELCOME, request_id=header.request_id).pack()
            + encode_meta({"received": len(numbers), "acknowledged": len(numbers)}),
            Op.BEGIN: Header(Op.GO, request_id=header.request_id).pack(),
            Op.TRAJECTORY: Header(Op.ACK, request_id=header.request_id).pack(),
        }[header.op]
        if header.op == Op.TRAJECTORY:
            numbers.append(header.request_id)
        router.send_multipart([peer, answer])
        if header.op == Op.TRAJECTORY:
            thread.join(5)
    router.close(0)
    assert set(numbers) == {1}
    assert forgotten == {Op.HELLO, Op.BEGIN, Op.TRAJECTORY}


def test_a_late_welcome_does_not_bring_everything_again(env, endpoint, impatient):
    """Only the answer to the last HELLO tells what is missing, and only of what was sent before it."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)
    sender = env()
    uplink_ = sender.recording._uplink
    sender.show()
    peer, _ = router.recv_multipart()
    uplink_._may.add(0)
    sender.play(1)
    router.send_multipart([peer, Header(Op.WELCOME, request_id=1).pack() + encode_meta({})])
    seen = []
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        sender.recording.wait(0.02)
        while router.poll(0):
            _, first, *_ = router.recv_multipart()
            seen.append(Op(unpack(first).op))
    assert seen.count(Op.TRAJECTORY) == 1, "it was on its way already"
    assert Op.HELLO in seen
    router.close(0)


# -- Gates


def test_a_repeated_question_is_answered_again_and_counts_once(learner, stranger):
    port = learner(gate=Gate(staleness_threshold=0, trajectories_per_version=1))
    asking = stranger()
    asking.hello()
    for _ in range(3):
        asking.say(Op.BEGIN, 7, stage=2, rows=10)
        header, _ = asking.hear(Op.GO)
        assert (header.request_id, header.stage) == (7, 2)
    assert port._shared.ledger.under_way(time.monotonic()).count == 1


def test_a_closed_gate_holds_the_next_trajectory_until_the_learner_publishes(learner, env):
    port = learner(gate=Gate(staleness_threshold=0, trajectories_per_version=1))
    sender = env().play(1)
    with pytest.raises(LearnerTimeout, match="catch up"):
        sender.play(1, timeout=0.3)
    port.publish({})
    sender.play(1)
    assert take(port, 2) == [0, 2]


def test_a_worker_that_dies_in_mid_trajectory_does_not_hold_the_others_up(learner, env):
    port = learner(gate=Gate(staleness_threshold=0, trajectories_per_version=1))
    dying = env("env-0")
    dying.show()
    dying.recording.wait_to_begin(0, time.monotonic() + 5)
    dying.recording._uplink._socket.close(0)
    env("env-1").play(1)
    assert take(port, 1) == [0]
    dying.recording._uplink._connect()


def test_a_question_of_absurd_size_does_not_hold_the_others_up(learner, stranger, env):
    port = learner(gate=Gate(1.0, slack_steps=8))
    port.note(0, hungry=False)
    liar = stranger()
    liar.hello()
    liar.say(Op.BEGIN, 1, rows=2**32 - 1)
    liar.hear(Op.GO)
    liar.say(Op.BYE)
    env().play(1)
    assert take(port, 1) == [0]


# -- Refusals


def test_an_env_worker_with_another_simulator_is_refused_and_told_the_difference(learner, env):
    learner()
    env("env-0").play(1)
    other = env("env-1").recording
    other.asked(0, observation(0) | {"state": np.zeros((2, 5), np.float32)})
    words = r"env-1.*'state' is float32 \[5\] in place of float32 \[3\]"
    with pytest.raises(LearnerRefused, match=words):
        other.wait_to_begin(0, time.monotonic() + 5)


def test_a_name_that_a_later_process_has_taken_over_is_refused_to_the_earlier_one(learner, env):
    port = learner()
    old = env(incarnation=1).play(1).wait_until_acknowledged()
    new = env(incarnation=2, first=100).play(1)
    with pytest.raises(LearnerRefused, match="took over the name 'env-0'"):
        old.play(5)
    new.play(1)
    assert take(port, 3) == [0, 100, 102]


def test_a_learner_of_another_protocol_is_named(env, endpoint):
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)
    sender = env()
    sender.show()
    peer, _ = router.recv_multipart()
    message = bytearray(Header(Op.WELCOME).pack())
    message[4] += 1
    router.send_multipart([peer, bytes(message)])
    with pytest.raises(LearnerRefused, match="version"):
        sender.play(1)
    router.close(0)


def test_a_trajectory_above_the_learners_limit_is_refused_before_it_is_sent(learner, env):
    learner(max_message_mb=1)
    recording = env().recording
    large = {"image": np.zeros((2, 300_000), np.uint8)}
    for step in range(2):
        recording.asked(0, large)
        recording.wait_to_begin(0, time.monotonic() + 5)
        recording.answered(0, {"actions": NOTHING}, step)
        recording.outcome(0, [0, 0], NOTHING, NOTHING)
    with pytest.raises(EncodeError, match=r"1\.\d MiB.*takes 1 MiB"):
        recording.asked(0, large)


def malformed():
    good = frames_of_a_trajectory()
    hello = Header(Op.HELLO).pack()
    plain = good[0]
    yield from ([plain[:length]] for length in range(0, len(plain), 7))
    yield from (good[:count] for count in range(1, len(good)))
    yield [*good, b"one more"]
    yield [b""] * 5000
    yield [plain[:4] + bytes([plain[4] + 1]) + plain[5:], *good[1:]]
    yield from ([Header(op).pack()] for op in range(256) if op not in (Op.BEGIN, Op.BYE))
    yield from ([Header(op).pack() + b"\xc1" * 10] for op in (Op.HELLO, Op.WANT, Op.EVALUATE))
    fields = {"name": "x", "incarnation": 1, "first": 1, "spaces": None}
    for wrong in (
        {"name": 1}, {"name": ""}, {"name": "x" * 300}, {"name": "x\n"}, {"incarnation": -1},
        {"incarnation": "1"}, {"incarnation": 2**63},
        {"first": 0}, {"first": None}, {"first": 1.5}, {"first": 2**63},
        {"spaces": {}}, {"spaces": [1]},
        {"spaces": {"observation": {"x": [[float("inf")], "f"]}, "action": {}}},
    ):  # fmt: skip
        yield [hello + encode_meta({**fields, **wrong})]
    for wrong in (
        {"version": "1"}, {"loaded": None}, {"failed": [1]}, {"serving": -1}, {"loaded": 2**48},
        {"version": 2**63}, {"name": "x" * (1 << 15)},
    ):  # fmt: skip
        yield [Header(Op.WANT).pack() + encode_meta(wrong)]
    rng = random.Random(0)
    for _ in range(100):
        yield [rng.randbytes(rng.randint(0, 200)) for _ in range(rng.randint(1, 5))]
        first = bytearray(plain)
        for _ in range(rng.randint(1, 5)):
            first[rng.randrange(6, len(first))] = rng.randrange(256)
        yield [bytes(first), *good[1:]]


def test_malformed_messages_harm_nobody_else(learner, env, stranger):
    port = learner()
    sender = env().play(1)
    hostile, known = stranger(), stranger()
    known.hello("known")
    for frames in malformed():
        for each in (hostile, known):
            each.socket.send_multipart(frames)
            while each.socket.poll(0):
                each.socket.recv_multipart()
    sender.play(5).wait_until_acknowledged()
    asking = stranger()
    asking.hello("last")
    found = []
    wait_for(
        lambda: found.extend(t for t in port.receive(0.05) if t.origin == "env-0") or len(found) == 6,
        "the good trajectories",
    )
    assert values(found) == [0, 2, 4, 6, 8, 10]
    port._raise_failure()


@pytest.mark.parametrize("rows", [0, 5, 2**32 - 1])
def test_a_trajectory_whose_header_lies_about_its_env_steps_is_dropped(learner, stranger, rows):
    port = learner()
    liar = stranger()
    liar.hello()
    liar.socket.send_multipart(frames_of_a_trajectory(1, rows))
    liar.socket.send_multipart(frames_of_a_trajectory(2))
    (trajectory,) = wait_for(lambda: port.receive(0.1), "the second one")
    assert trajectory.origin == "stranger"
    books = port.books()
    assert (books["env_steps"], books["received"], books["dropped"]) == (4, 2, 1)
    assert (port.invalid, port.last_invalid[:8]) == (1, "stranger")


def test_the_numbers_of_rollout_workers_can_be_summed_and_sent_whatever_they_say(learner, stranger):
    port = learner()
    for number in range(3):
        hostile = stranger()
        most = {"serving": 2**63 - 1, "loaded": 2**48 - 1, "failed": 2**48 - 1}
        hostile.say(Op.WANT, 1, {"name": str(number), **most})
        hostile.say(Op.WANT, 2, {"name": "more", **most, "loaded": 2**64 - 1})
        hostile.hear(Op.ERROR, Op.WEIGHTS)
    workers = port.rollout_workers()
    assert len(workers) == 3
    encode_meta({"loaded": sum(worker["loaded"] for worker in workers.values())})


def test_what_early_senders_say_is_not_kept_beyond_a_few_words(learner, stranger):
    port = learner(publish=False)
    early = stranger()
    made = Spaces.of(observation(0), ACTIONS).fields()
    fields = {"name": "early", "incarnation": 1, "first": 1, "spaces": made, "more": "x" * (1 << 20)}
    early.say(Op.HELLO, 1, fields, frames=[bytes(1 << 20)] * 8)
    wait_for(lambda: port._service._envs._early, "the introduction")
    (kept,) = port._service._envs._early.values()
    assert len(repr(kept)) < 1000
    port.publish({"w": np.zeros(3)})
    early.hear(Op.WELCOME)


def test_what_is_no_trajectory_is_dropped_and_named(learner, stranger):
    port = learner()
    hostile = stranger()
    hostile.hello()
    hostile.say(Op.TRAJECTORY, 1, {"reward": 1})
    wait_for(lambda: port.receive(0.05) or port.invalid, "the trajectory")
    assert "stranger: not a trajectory" in port.last_invalid


# -- The port itself


def test_a_loop_over_the_port_ends_when_it_is_closed_within(learner, env):
    port = learner()
    env().play(3).wait_until_acknowledged()
    found = []
    for trajectory in port:
        found.append(trajectory)
        port.close()
    assert values(found) == [0]


def test_a_loop_over_the_port_ends_when_another_thread_closes_it(learner):
    port = learner()
    thread = threading.Thread(target=lambda: list(port))
    thread.start()
    port.close()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("wrong", [object(), "text", None, 1.0, {"nested": np.zeros(2)}, [np.zeros(2)]])
def test_weights_that_are_no_arrays_are_refused_by_name(learner, wrong):
    port = learner()
    with pytest.raises(EncodeError, match=r"layer\.bias"):
        port.publish({"layer.weight": np.zeros(2), "layer.bias": wrong})
    assert port.version == 1


def test_weights_of_object_dtype_are_refused_by_name(learner):
    with pytest.raises(EncodeError, match=r"layer\.bias"):
        learner().publish({"layer.bias": np.array([None])})


@pytest.mark.parametrize("version", [0, -1, 1])
def test_a_version_that_nobody_would_fetch_is_refused(learner, version):
    with pytest.raises(ValueError, match="version"):
        learner().publish({}, version=version)


def test_an_endpoint_in_use_is_refused_and_the_learner_there_goes_on(learner, env, endpoint):
    port = learner()
    with pytest.raises(EndpointError, match="in use"):
        Learner(endpoint)
    env().play(1)
    assert take(port, 1) == [0]


def test_a_tcp_port_in_use_is_refused(made):
    made.append(Learner("tcp://127.0.0.1:*"))
    with pytest.raises(EndpointError, match="in use"):
        Learner(made[0].endpoint)


@pytest.mark.parametrize("endpoint", ["learner", "tcp://localhost", "ipc:///no/such/folder/learner"])
def test_an_impossible_endpoint_is_refused(endpoint):
    with pytest.raises(EndpointError):
        Learner(endpoint)


def test_a_thread_that_fails_is_not_silent_and_the_port_can_be_closed(learner):
    port = learner()
    port._service._envs._probed = None  # what a bug would do
    with pytest.raises(RunFailed, match="TypeError"):
        port.receive(5.0)
    with pytest.raises(RunFailed):
        next(iter(port))
    with pytest.raises(RunFailed):
        port.wait_for_spaces(5.0)
    for _ in range(5000):
        port.note(1, False)  # nobody reads it any more, and nobody waits for that
    port.close()
    port.close()


def test_receiving_ends_at_its_time_limit(learner):
    port = learner()
    begin = time.monotonic()
    assert port.receive(0.2) == []
    assert 0.2 <= time.monotonic() - begin < 2.0


# -- Evaluations


def test_an_evaluation_is_ordered_done_and_over(learner, endpoint, made):
    port = learner()
    orders = [Orders(endpoint, f"eval-{rank}") for rank in range(2)]
    made += orders
    assert orders[0].next(0.05) is None
    assert port.evaluation_is_over(2)
    assert port.evaluate(env_steps=70) == 1
    for number, worker in enumerate(orders):
        assert not port.evaluation_is_over(2)
        order = worker.next(5.0)
        assert (order.number, order.version, order.env_steps) == (1, 1, 70)
        worker.done(order)
        wait_for(lambda n=number: len(port._shared.finished) == n + 1, "the end of the evaluation")
    assert port.evaluation_is_over(2)
    assert orders[0].next(0.6) is None, "it is done"


def test_a_restarted_learner_orders_evaluations_from_the_same_workers(learner, endpoint, made):
    port = learner()
    orders = Orders(endpoint, "eval-0")
    made.append(orders)
    for number in (1, 2):
        assert port.evaluate(0) == number
        orders.done(orders.next(5.0))
        wait_for(lambda p=port: p.evaluation_is_over(1), "the evaluation")
    port.close()
    port = learner()
    assert port.evaluate(0) == 1
    orders.done(wait_for(lambda: orders.next(0.5), "the order of the next learner"))
    wait_for(lambda: port.evaluation_is_over(1), "the evaluation")


def test_an_order_that_is_none_is_skipped(endpoint, made):
    context = zmq.Context()
    strange = sockets.router(context, endpoint)
    orders = Orders(endpoint, "eval-0")
    made.append(orders)
    answers = [{"epoch": "7"}, {"epoch": 7, "env_steps": None}, {"epoch": [], "env_steps": {}}, {}]
    answers += [{"epoch": 7, "env_steps": 70}]
    thread = threading.Thread(target=lambda: found.append(orders.next(10.0)))
    found: list = []
    thread.start()
    peer, _ = strange.recv_multipart()
    for junk in ([b""], [b"x" * 80], [Header(Op.EVALUATE, request_id=3).pack() + b"\xc1"]):
        strange.send_multipart([peer, *junk])
    for number, fields in enumerate(answers):
        answer = Header(Op.EVALUATE, request_id=number if fields else 0, policy_version=2)
        strange.send_multipart([peer, answer.pack() + encode_meta(fields)])
    thread.join()
    assert [(order.number, order.env_steps, order.epoch) for order in found] == [(4, 70, 7)]
    context.destroy(0)


def test_an_evaluation_before_any_weights_is_refused(learner):
    with pytest.raises(ValueError, match="publish"):
        learner(publish=False).evaluate(0)


# -- A loop of one's own, with a real pool


def action_of(state):
    """What the policy of the tests, `Balance`, chooses."""
    return int(state[-2] + 0.5 * state[-1] > 0)


def reference(number, steps, skip_resets):
    """What a single simulator does under that policy; None for a step that is spent on a reset."""
    env, found, over = Counting(number), [], False
    state, _ = env.reset()
    for _ in range(steps):
        if over and skip_resets:
            state, over = env.reset()[0], False
            found.append(None)
            continue
        action = action_of(state)
        following, reward, ends, cut, _ = env.step(action)
        found.append((state.tolist(), action, reward, ends, cut, following.tolist()))
        state, over = following, ends or cut
        if over and not skip_resets:
            state, _ = env.reset()
    return found


def as_told(trajectories, row):
    """The same of trajectories."""
    found = []
    for t in trajectories:
        following = t.next_observation()
        for i, valid in enumerate(t.valid[:, row]):
            found.append(
                (
                    t.observation[i, row].tolist(), int(t.actions[i, row]), float(t.reward[i, row]),
                    bool(t.terminated[i, row]), bool(t.truncated[i, row]), following[i, row].tolist(),
                )
                if valid
                else None
            )  # fmt: skip
    return found


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_loop_with_a_vector_env_delivers_what_its_simulators_did(pool: Pool, learner, endpoint, mode):
    port = learner()
    envs = SyncVectorEnv([lambda n=n: Counting(n) for n in range(3)], autoreset_mode=mode, copy=False)
    policy = pool.start(policy="Balance").client(learner=endpoint, envs=envs, trajectory_steps=5)
    obs, _ = envs.reset()
    for _ in range(20):
        result = policy.infer(obs)
        obs, reward, terminated, truncated, info = envs.step(result["actions"])
        final, done = info.get("final_obs"), terminated | truncated
        if mode is AutoresetMode.DISABLED and done.any():
            final = obs.copy()
            obs, _ = envs.reset(options={"reset_mask": done})
        policy.record(reward, terminated, truncated, final)
    policy.infer(obs)
    trajectories = []
    wait_for(lambda: trajectories.extend(port.receive(0.1)) or len(trajectories) == 4, "4 trajectories")
    for row in range(3):
        expected = reference(row, 20, skip_resets=mode is AutoresetMode.NEXT_STEP)
        assert as_told(trajectories, row) == expected
    assert port.wait_for_spaces(0.0).action.n == 7


def test_a_loop_with_a_single_env_delivers_its_transitions(pool: Pool, learner, endpoint):
    port = learner()
    env = Counting(1)
    policy = pool.start(policy="Balance").client(learner=endpoint, envs=env, trajectory_steps=4)
    obs, _ = env.reset()
    for step in range(12):
        result = policy.infer_one(obs)
        assert result["actions"].shape == ()
        obs, reward, terminated, truncated, _ = env.step(result["actions"])
        final = obs
        if terminated or truncated:
            obs, _ = env.reset()
        policy.record(reward, terminated, truncated, final)
        if step == 5:
            policy.infer_one(obs, mode="eval")  # is no part of it
    policy.infer_one(obs)
    trajectories = []
    wait_for(lambda: trajectories.extend(port.receive(0.1)) or len(trajectories) == 3, "3 trajectories")
    assert as_told(trajectories, 0) == reference(1, 12, skip_resets=False)


def test_pipeline_stages_are_recorded_apart(pool: Pool, learner, endpoint):
    port = learner()
    policy = pool.start(policy="Balance").client(
        learner=endpoint, action_space=ACTIONS, trajectory_steps=2
    )
    for step in range(3):
        pending = [policy.submit(np.full((1, 2), 10.0 * stage + step), stage=stage) for stage in (0, 1)]
        if step < 2:
            for stage in (0, 1):
                pending[stage].result()
                policy.record([100 * stage + step], [False], [False], stage=stage)
    found = {}
    wait_for(
        lambda: found.update({t.reward[0, 0]: t for t in port.receive(0.1)}) or len(found) == 2, "both"
    )
    assert found[0.0].observation[:, 0, 0].tolist() == [0, 1]
    assert found[100.0].observation[:, 0, 0].tolist() == [10, 11]


def test_a_record_that_was_refused_can_be_made_again(pool: Pool, learner, endpoint):
    port = learner()
    policy = pool.start(policy="Balance").client(
        learner=endpoint, action_space=ACTIONS, trajectory_steps=1
    )
    policy.infer(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="final_obs"):
        policy.record([0, 0], [True, False], [False, False])
    policy.record([0, 0], [True, False], [False, False], np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"nothing to record at stage 0: .* infer\(\)"):
        policy.record([0, 0], NOTHING, NOTHING)
    policy.infer(np.zeros((2, 2)))
    (trajectory,) = wait_for(lambda: port.receive(0.1), "the trajectory")
    assert trajectory.final_observation.tolist() == [[1, 1]]


def test_a_loop_whose_states_are_lost_records_nothing_of_those_episodes(pool: Pool, learner, endpoint):
    port = learner()
    sticky = "rollout.affinity=sticky"
    pool.start_broker(sticky)
    pool.start_worker(0, "Remembers", overrides=(sticky,))
    policy = pool.client(learner=endpoint, action_space=ACTIONS, trajectory_steps=4)

    def step(value, reset=False):
        policy.infer(np.full((2, 3), value, np.float32), reset=reset)
        policy.record([value] * 2, NOTHING, NOTHING)

    for value in range(6):  # a trajectory, and half of the next one
        step(value, reset=value == 0)
    pool.kill("rollout-0")
    pool.start_worker(0, "Remembers", overrides=(sticky,))
    with pytest.raises(StateLost):
        step(6)
    for value in range(5):
        step(value, reset=value == 0)
    trajectories = []
    wait_for(lambda: trajectories.extend(port.receive(0.1)) or len(trajectories) == 2, "2 trajectories")
    assert [t.reward[:, 0].tolist() for t in trajectories] == [[0, 1, 2, 3]] * 2


def test_record_needs_a_learner_and_an_inference_before_it(endpoint, learner):
    learner()
    for options, words in (({}, "learner="), ({"learner": endpoint}, r"a call of infer\(\) before it")):
        with (
            PolicyClient("tcp://127.0.0.1:1", **options) as policy,
            pytest.raises(ValueError, match=words),
        ):
            policy.record([0], [False], [False])


def test_without_a_learner_the_error_names_its_address_within_the_timeout(endpoint):
    with PolicyClient("tcp://127.0.0.1:1", learner=endpoint, action_space=ACTIONS) as policy:
        begin = time.monotonic()
        with pytest.raises(LearnerUnreachable, match=f"{endpoint}.*start-learner"):
            policy.infer(np.zeros((1, 2)), timeout=0.3)
        assert 0.3 <= time.monotonic() - begin < 3.0


def test_the_end_of_a_training_is_told_at_once_and_what_is_under_way_still_arrives(learner, env):
    port = learner()
    sender = env()
    sender.play(1).wait_until_acknowledged()
    port.close_gate()
    with pytest.raises(TrainingEnded, match="come to its end"):
        sender.play(3, timeout=10.0)
    sender.wait_until_acknowledged()
    assert len(take(port, sender.recording.sent)) == sender.recording.sent


def test_a_batch_that_is_not_that_of_the_envs_is_refused_before_anything_is_sent(endpoint):
    single = gymnasium.make("CartPole-v1")
    observation, _ = single.reset(seed=0)
    with (
        PolicyClient("tcp://127.0.0.1:1", learner=endpoint, envs=single) as policy,
        pytest.raises(ValueError, match=r"4 rows, but envs has 1.*infer_one"),
    ):
        policy.infer(observation)


def test_a_sender_that_is_gone_when_several_of_its_stages_may_begin_ends_nothing(learner, stranger):
    gate = Switch()
    port = learner(gate=gate)
    port.receive(0.0)
    gone = stranger()
    gone.hello("gone")
    for stage in (0, 1):
        gone.say(Op.BEGIN, stage + 1, stage=stage, rows=4)
    asked = port._service._questions._open
    wait_for(lambda: len(asked) == 2, "both questions")
    gone.close()
    gate.is_open.set()
    wait_for(lambda: not asked, "the gate to open")
    other = stranger()
    other.hello("other")
    other.say(Op.BEGIN, 1, rows=4)
    other.hear(Op.GO)
    port.receive(0.0)


def test_a_learner_that_lets_nothing_begin_is_named_at_the_timeout(learner, endpoint):
    learner(gate=Shut())
    with PolicyClient("tcp://127.0.0.1:1", learner=endpoint, action_space=ACTIONS) as policy:
        begin = time.monotonic()
        with pytest.raises(LearnerTimeout, match=f"{endpoint}.*catch up"):
            policy.infer(np.zeros((1, 2)), timeout=0.5)
        assert 0.5 <= time.monotonic() - begin < 3.0


@pytest.mark.parametrize("wrong", ["learner", "tcp://localhost"])
def test_a_malformed_address_of_the_learner_is_refused_at_once(wrong):
    with pytest.raises(EndpointError):
        PolicyClient("tcp://127.0.0.1:1", learner=wrong)


def test_inference_in_mode_eval_asks_no_learner(pool: Pool):
    policy = pool.start(policy="Balance").client(learner="tcp://127.0.0.1:1", action_space=ACTIONS)
    assert policy.infer(np.zeros((1, 2)), mode="eval")["actions"].tolist() == [0]


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_after_a_fork_the_child_records_under_a_name_of_its_own(pool: Pool, learner, endpoint):
    port = learner()
    policy = pool.start(policy="Balance").client(
        name="parent", learner=endpoint, action_space=ACTIONS, trajectory_steps=1
    )
    policy.infer(np.zeros((1, 2)))
    child = os.fork()
    if child == 0:
        try:
            for _ in range(2):
                policy.infer(np.ones((1, 2)))
                policy.record([1.0], [False], [False])
            policy.infer(np.ones((1, 2)))
            policy.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    policy.record([5.0], [False], [False])
    policy.infer(np.zeros((1, 2)))
    found = []
    wait_for(lambda: found.extend(port.receive(0.1)) or len(found) == 3, "3 trajectories")
    origins = sorted((t.origin, t.reward.item()) for t in found)
    assert origins == [("parent", 5.0), (f"parent-{child}", 1.0), (f"parent-{child}", 1.0)]


def test_in_normal_mode_a_client_that_has_to_wait_for_the_learner_holds_nobody_up(
    pool: Pool, learner, endpoint
):
    learner(gate=Shut())
    pool.start_broker(decoupled=False)
    pool.start_worker(0, "Balance", world_size=1)
    pool.wait_for_workers(1)
    waiting = pool.client(
        name="env-0", rank=0, world_size=2, learner=endpoint, action_space=ACTIONS, timeout=3.0
    )
    other = pool.client(name="env-1", rank=1, world_size=2)

    def wait():
        with pytest.raises(LearnerTimeout):
            waiting.infer(np.zeros((1, 2)))

    thread = threading.Thread(target=wait)
    thread.start()
    assert other.infer(np.zeros((1, 2)), timeout=2.5)["actions"].tolist() == [0]
    thread.join()
