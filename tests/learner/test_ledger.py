"""The learner's books: every trajectory once, through restarts of both sides."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zmqrl.learner import ledger as ledger_module
from zmqrl.learner.ledger import Ledger

pytestmark = pytest.mark.timeout(30)


def met(ledger, name="env-0", incarnation=1, first=1, peer=b"p", now=0.0):
    """A sender that has introduced itself."""
    sender, _ = ledger.hello(peer, name, incarnation, first, now)
    return sender


def bring(ledger, sender, *numbers, stage=0, env_steps=10, now=0.0):
    """Whether each of the trajectories is new."""
    return [ledger.arrived(sender, number, stage, env_steps, now) for number in numbers]


def use(sender):
    sender.used = sender.received


@pytest.mark.parametrize(
    ("numbers", "new", "received", "duplicates"),
    [
        ([1, 2, 3], [True, True, True], 3, 0),
        ([1, 1, 2, 1], [True, False, True, False], 2, 2),
        ([2, 1, 2], [False, True, True], 2, 0),
        ([1, 3, 2, 3], [True, False, True, True], 3, 0),
        ([0, 2**63], [False, False], 0, 1),
    ],
)
def test_only_the_number_that_follows_is_new(numbers, new, received, duplicates):
    ledger = Ledger()
    assert bring(ledger, met(ledger), *numbers) == new
    assert (ledger.received, ledger.duplicates) == (received, duplicates)
    assert ledger.env_steps == 10 * received


def test_a_sender_that_introduces_itself_again_goes_on_where_it_was():
    ledger = Ledger()
    bring(ledger, met(ledger), 1, 2)
    sender = met(ledger, first=2, peer=b"q")
    assert sender.received == 2
    assert bring(ledger, sender, 2, 3) == [False, True]
    assert list(ledger.senders) == [b"q"]
    assert ledger.rolled_back == 0


def test_what_a_lost_life_of_the_learner_had_acknowledged_is_rolled_back():
    ledger = Ledger()
    ledger.restore({"env-0/1": 6}, 6, 60, 2)
    sender = met(ledger, first=9)
    assert ledger.rolled_back == 2 + 2
    assert sender.received == 8
    assert bring(ledger, sender, 8, 9) == [False, True]


def test_what_the_checkpoint_has_used_is_a_duplicate_when_it_comes_again():
    ledger = Ledger()
    ledger.restore({"env-0/1": 6}, 6, 60, 0)
    sender = met(ledger, first=5)
    assert bring(ledger, sender, 5, 6, 7) == [False, False, True]
    assert (ledger.received, ledger.rolled_back) == (7, 0)


def test_marks_hold_what_was_used_only():
    ledger = Ledger()
    sender = met(ledger)
    bring(ledger, sender, 1, 2)
    use(sender)
    bring(ledger, sender, 3)
    assert ledger.marks() == {"env-0/1": 2}


def test_marks_of_senders_that_have_not_come_back_are_kept():
    ledger = Ledger()
    ledger.restore({"env-0/1": 6, "env-1/1": 3}, 9, 90, 0)
    sender = met(ledger, first=7)
    bring(ledger, sender, 7)
    use(sender)
    assert ledger.marks() == {"env-0/1": 7, "env-1/1": 3}


def test_a_later_process_takes_a_name_over_and_the_earlier_one_is_told():
    ledger = Ledger()
    old = met(ledger, incarnation=1, peer=b"old")
    ledger.begun(old, 0, 1, 10, 0, 0.0)
    new, replaced = ledger.hello(b"new", "env-0", 2, 1, 1.0)
    assert (new.received, replaced) == (0, b"old")
    assert ledger.under_way(1.0).count == 0
    assert ledger.hello(b"old", "env-0", 1, 1, 2.0) == (None, None)
    assert list(ledger.senders) == [b"new"]


def test_an_earlier_process_may_come_back_once_the_later_one_is_gone():
    ledger = Ledger()
    met(ledger, incarnation=2, peer=b"new")
    ledger.lost(b"new")
    assert met(ledger, incarnation=1, peer=b"old") is not None


def test_a_lost_sender_that_comes_back_goes_on_where_it_was():
    ledger = Ledger()
    bring(ledger, met(ledger), 1, 2)
    ledger.lost(b"p")
    ledger.lost(b"p")
    assert bring(ledger, met(ledger, first=3, peer=b"q"), 3) == [True]
    assert (ledger.received, ledger.rolled_back) == (3, 0)


# -- Trajectories under way


def test_a_trajectory_is_under_way_until_it_arrives():
    ledger = Ledger()
    sender = met(ledger)
    ledger.begun(sender, 0, 1, 10, 5, 0.0)
    ledger.begun(sender, 1, 2, 20, 3, 0.0)
    afoot = ledger.under_way(1.0)
    assert (afoot.count, afoot.env_steps, afoot.oldest_version) == (2, 30, 3)
    bring(ledger, sender, 1, stage=1)
    afoot = ledger.under_way(1.0)
    assert (afoot.count, afoot.env_steps, afoot.oldest_version) == (1, 10, 5)


def test_a_duplicate_does_not_end_what_is_under_way():
    ledger = Ledger()
    sender = met(ledger)
    bring(ledger, sender, 1)
    ledger.begun(sender, 0, 1, 10, 0, 0.0)
    bring(ledger, sender, 1)
    assert ledger.under_way(0.0).count == 1


def test_a_question_that_is_repeated_changes_nothing():
    ledger = Ledger()
    sender = met(ledger)
    assert ledger.asked(sender, 0, 7, 0.0)
    assert ledger.asked(sender, 0, 7, 0.0), "it has not been answered"
    ledger.begun(sender, 0, 7, 10, 0, 0.0)
    assert not ledger.asked(sender, 0, 7, 1.0)
    assert ledger.under_way(1.0).count == 1


def test_another_question_ends_what_was_under_way():
    ledger = Ledger()
    sender = met(ledger)
    ledger.begun(sender, 0, 7, 10, 0, 0.0)
    assert ledger.asked(sender, 0, 8, 1.0)
    assert ledger.under_way(1.0).count == 0


def test_nothing_of_a_lost_sender_is_under_way():
    ledger = Ledger()
    ledger.begun(met(ledger), 0, 1, 10, 0, 0.0)
    ledger.lost(b"p")
    assert ledger.under_way(0.0).count == 0


def test_a_straggler_no_longer_counts():
    ledger = Ledger()
    stuck, busy = met(ledger, "env-0", peer=b"p"), met(ledger, "env-1", peer=b"q")
    ledger.begun(stuck, 0, 1, 10, 0, 0.0)
    for number in range(1, 4):
        ledger.begun(busy, 0, number, 10, number, float(number))
        bring(ledger, busy, number, now=number + 1.0)
    assert ledger.under_way(7.9).count == 1
    assert ledger.under_way(8.0).count == 0, "3 times the longest of 1 s, and 5 s"


def test_before_the_first_arrival_a_trajectory_may_take_a_minute():
    ledger = Ledger()
    ledger.begun(met(ledger), 0, 1, 10, 0, 0.0)
    assert ledger.under_way(60.0).count == 1
    assert ledger.under_way(66.0).count == 0


def test_env_steps_are_corrected_when_a_trajectory_is_read():
    ledger = Ledger()
    sender = met(ledger)
    bring(ledger, sender, 1, env_steps=10**9)
    ledger.corrected(sender, 10**9, 12)
    assert ledger.env_steps == 12
    assert ledger.shares.env_steps == {sender.name: 12}


def test_names_without_end_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(ledger_module, "_MOST_KNOWN", 100)
    ledger = Ledger()
    ledger.restore({f"before-{i}/1": 1 for i in range(500)}, 500, 0, 0)
    here = met(ledger, "here", peer=b"here")
    bring(ledger, here, 1)
    use(here)
    for number in range(1000):
        met(ledger, f"fake-{number}", peer=b"%d" % number, now=1.0 + number)
        ledger.lost(b"%d" % number)
    assert len(ledger._known) <= 101
    assert len(ledger.marks()) <= 100
    assert ledger.marks()["here/1"] == 1, "one that is connected is never forgotten"
    assert bring(ledger, here, 2) == [True]


# -- Random histories


class Client:
    """One process that sends: it keeps what is not acknowledged, and says HELLO when in doubt."""

    def __init__(self, machine, name, incarnation):
        self.machine, self.name, self.incarnation = machine, name, incarnation
        self.key = f"{name}/{incarnation}"
        self.sent = 0
        self.unacknowledged = []
        self.connect()

    def connect(self):
        self.machine.peers += 1
        self.peer = b"%d" % self.machine.peers
        self.wire, self.back = deque(), deque()
        self.hello()

    def hello(self):
        first = self.unacknowledged[0] if self.unacknowledged else self.sent + 1
        self.wire.append((self.peer, "hello", first))

    def make(self):
        self.sent += 1
        self.unacknowledged.append(self.sent)
        self.wire.append((self.peer, "trajectory", self.sent))

    def hear(self):
        kind, number = self.back.popleft()
        if kind == "unknown":
            self.hello()
            return
        if kind == "ack":
            self.unacknowledged = [n for n in self.unacknowledged if n > number]
            return
        for n in self.unacknowledged:
            if n > number:
                self.wire.append((self.peer, "trajectory", n))


NAMES = st.sampled_from(["env-0", "env-1"])


class Books(RuleBasedStateMachine):
    """Two names, whose processes and connections come and go, and a learner that crashes."""

    def __init__(self):
        super().__init__()
        self.peers = self.processes = 0
        self.clock = 0.0
        self.ledger = Ledger()
        self.inbox, self.used, self.rolled = deque(), [], Counter()
        self.owed = set()
        self.old_wires = []
        self.checkpoint = self.snapshot()
        self.clients = {}
        for name in ("env-0", "env-1"):
            self.start(name)

    def start(self, name):
        self.processes += 1
        self.clients[name] = Client(self, name, self.processes)

    def snapshot(self):
        waiting = len(self.inbox)
        books = (self.ledger.received - waiting, 0, self.ledger.rolled_back)
        return self.ledger.marks(), books, list(self.used), Counter(self.rolled)

    # -- What happens

    @rule(name=NAMES)
    def make(self, name):
        if len(self.clients[name].unacknowledged) < 4:
            self.clients[name].make()

    @rule(name=NAMES)
    def deliver(self, name):
        client = self.clients[name]
        if client.wire:
            self.arrive(client, *client.wire.popleft())

    @precondition(lambda self: self.old_wires)
    @rule(data=st.data())
    def deliver_late(self, data):
        """What was sent on a connection that has been replaced comes after what was sent later."""
        client, wire = data.draw(st.sampled_from(self.old_wires))
        if wire:
            self.arrive(client, *wire.popleft())

    def arrive(self, client, peer, kind, number):
        self.clock += 0.1
        if kind == "hello":
            before = self.ledger.rolled_back
            sender, _ = self.ledger.hello(peer, client.name, client.incarnation, number, self.clock)
            if sender is not None:
                self.rolled[client.key] += self.ledger.rolled_back - before
                client.back.append(("welcome", sender.received))
            return
        sender = self.ledger.senders.get(peer)
        if sender is None:
            client.back.append(("unknown", 0))
        else:
            if self.ledger.arrived(sender, number, 0, 0, self.clock):
                self.inbox.append((sender, number))
            self.owed.add(client.name)

    @rule(name=NAMES)
    def acknowledge(self, name):
        client = self.clients[name]
        sender = self.ledger.senders.get(client.peer)
        if name in self.owed and sender is not None:
            sender.acknowledged = sender.received
            client.back.append(("ack", sender.received))
            self.owed.discard(name)

    @rule(name=NAMES)
    def hear(self, name):
        if self.clients[name].back:
            self.clients[name].hear()

    @rule(name=NAMES)
    def lose_a_word(self, name):
        if self.clients[name].back:
            self.clients[name].back.pop()

    @rule(name=NAMES)
    def cut(self, name):
        """The connection breaks: what was on its way is lost, and the socket makes another one."""
        client = self.clients[name]
        client.wire.clear()
        client.back.clear()
        client.hello()

    @rule(name=NAMES)
    def rebuild(self, name):
        client = self.clients[name]
        self.old_wires.append((client, client.wire))
        client.connect()

    @rule(name=NAMES)
    def send_everything_again(self, name):
        client = self.clients[name]
        for number in client.unacknowledged:
            client.wire.append((client.peer, "trajectory", number))

    @rule(name=NAMES)
    def restart(self, name):
        """A new process under the name; what the old one had in hand is gone with it."""
        old = self.clients[name]
        self.old_wires.append((old, old.wire))
        self.start(name)

    @rule(name=NAMES)
    def lose(self, name):
        self.ledger.lost(self.clients[name].peer)

    @rule(count=st.integers(1, 5))
    def learn(self, count):
        for _ in range(min(count, len(self.inbox))):
            sender, number = self.inbox.popleft()
            sender.used = number
            self.used.append((sender.key, number))

    @rule()
    def save(self):
        self.checkpoint = self.snapshot()

    @rule()
    def crash(self):
        marks, books, self.used, self.rolled = self.checkpoint
        self.used, self.rolled = list(self.used), Counter(self.rolled)
        self.ledger = Ledger()
        self.ledger.restore(marks, *books)
        self.inbox.clear()
        self.owed.clear()

    # -- What must hold

    @invariant()
    def nothing_is_used_twice(self):
        assert len(set(self.used)) == len(self.used)

    @invariant()
    def the_books_add_up(self):
        assert self.ledger.received == len(self.used) + len(self.inbox)
        assert self.ledger.rolled_back == sum(self.rolled.values())

    @invariant()
    def marks_hold_what_was_used_only(self):
        last = {}
        for key, number in self.used:
            last[key] = number
        for key, mark in self.ledger.marks().items():
            assert mark >= last.get(key, 0)
            gap = mark - sum(used == key for used, _ in self.used)
            assert gap == self.rolled[key], "a mark counts what was neither used nor rolled back"

    def teardown(self):
        for client in self.clients.values():
            client.connect()
            while client.unacknowledged or client.wire or client.back:
                while client.wire:
                    self.arrive(client, *client.wire.popleft())
                self.owed.add(client.name)
                self.acknowledge(client.name)
                while client.back:
                    client.hear()
        self.learn(len(self.inbox) or 1)
        for client in self.clients.values():
            used = [number for key, number in self.used if key == client.key]
            assert client.sent == len(used) + self.rolled[client.key]


Books.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestBooks = Books.TestCase
