"""Everything that may happen to a broker, in any order; a model holds what each client is owed."""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
from driver import STEP, FakeClient, FakeWorker, Pool, ReceivedBatch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zmqrl.transport.header import (
    FLAG_BEGINS,
    FLAG_EVAL,
    HEADER_SIZE,
    Header,
    Op,
    join_batch,
    policy_id_of,
)

MOST_CLIENTS = 5
MOST_WORKERS = 5
POLICIES = ["", "reward"]
POLICY = st.sampled_from(["", "", "reward"])
ATTEMPT_TIMEOUT = 2.0
DRAINED_WITHIN = 90.0
STALLED_AFTER = 8.0
"""Seconds that cover a stuck worker and a probe of a silent client."""


@dataclass
class Owed:
    """A request that its client waits for."""

    policy: str
    eval: bool
    stage: int
    deadline: float
    given: int = 0
    """Batches that it was in."""


@dataclass
class ModelClient:
    fake: FakeClient
    hello: dict
    owed: dict[int, Owed] = field(default_factory=dict)
    modes: dict[int, bool] = field(default_factory=dict)
    registered: bool = True


@dataclass
class ModelWorker:
    fake: FakeWorker
    policy: str = ""
    seen: int = 0
    """Batches looked at."""
    number: int = 0
    """Of the last batch that it received."""
    holding: ReceivedBatch | None = None
    parked: ReceivedBatch | None = None
    """Has come while it held another."""
    eager: bool = False
    """It asks for one batch more whenever it begins one."""
    asked: bool = False
    """It takes one more behind the one that it holds."""
    may_cross_until: float = 0.0
    free: bool = False
    """It has said that it is idle since it last held a batch."""


class PoolMachine(RuleBasedStateMachine):
    decoupled = True
    sticky = (False,)
    """What workers may say."""

    @initialize(
        queue_size=st.integers(0, 3),
        max_rows=st.sampled_from([0, 4]),
        max_wait=st.sampled_from([0.0, 0.5]),
        max_attempts=st.integers(1, 3),
    )
    def start(self, queue_size, max_rows, max_wait, max_attempts):
        self.queue_size, self.max_rows, self.max_attempts = queue_size, max_rows, max_attempts
        self.pool = Pool(
            decoupled=self.decoupled,
            queue_size=queue_size,
            max_rows=max_rows,
            max_wait=max_wait,
            max_attempts=max_attempts,
            attempt_timeout=ATTEMPT_TIMEOUT,
            max_client_open=6,
            max_open=20,
            max_open_bytes=60_000,
        )
        self.paused = 0.0
        self.all_clients = []
        self.workers = []
        self.served = {}
        """What each worker, those that are gone as well, serves."""
        self.homes = {}
        """By policy and client name: the worker that had its latest request, if it still should."""

    @property
    def now(self):
        """The time of the broker, which stands still while it is stopped."""
        return self.pool.now - self.paused

    @property
    def clients(self):
        """Those who can send."""
        gone = self.pool.gone
        return [c for c in self.all_clients if c.registered and c.fake.peer not in gone]

    def client(self, pick):
        return self.clients[pick % len(self.clients)]

    def some(self, pick, workers):
        workers = list(workers)
        return workers[pick % len(workers)] if workers else None

    # -- Clients

    @precondition(lambda self: len(self.clients) < MOST_CLIENTS)
    @rule(rank=st.integers(0, 3), mode=st.sampled_from(["train", "eval"]))
    def client_joins(self, rank, mode):
        hello = {"incarnation": 10, "rank": rank, "world_size": 4, "mode": mode}
        fake = self.pool.client(f"c{len(self.all_clients)}", **hello)
        self.all_clients.append(ModelClient(fake, hello))

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 99), newer=st.integers(0, 1))
    def client_takes_over(self, pick, newer):
        """A restart under the same name, or the same process with a new socket."""
        old = self.client(pick)
        hello = {**old.hello, "incarnation": old.hello["incarnation"] + newer}
        fake = self.pool.client(old.fake.name, **hello)
        self.forgotten(old)
        assert [m.code for m in old.fake.take()] == ["replaced"] * newer
        self.all_clients.append(ModelClient(fake, hello))

    @precondition(lambda self: self.clients)
    @rule(
        pick=st.integers(0, 99),
        count=st.integers(1, 3),
        rows=st.integers(1, 3),
        size=st.sampled_from([2, 4096]),
        is_eval=st.booleans(),
        begins=st.booleans(),
        stage=st.integers(0, 1),
        policy=POLICY,
        budget=st.sampled_from([600.0, 600.0, 600.0, 2.0, 0.25]),
    )
    def client_asks(self, pick, count, rows, size, is_eval, begins, stage, policy, budget):
        client = self.client(pick)
        if begins and not client.owed:
            self.homes.pop((policy, client.fake.name), None)  # it may move, or not
        flags = FLAG_BEGINS if begins else 0
        request = {
            "flags": flags,
            "rows": rows,
            "size": size,
            "eval": is_eval,
            "stage": stage,
            "policy": policy,
        }
        for _ in range(count):
            before = self.pool.counters["overloaded"]
            request_id = client.fake.ask(**request, budget=budget)
            if self.pool.counters["overloaded"] == before:
                client.owed[request_id] = Owed(policy, is_eval, stage, self.now + budget)
                if not policy:
                    client.modes[stage] = is_eval
            else:
                self.pool.send()
                assert client.fake.inbox.pop().code == "overloaded"

    @precondition(lambda self: any(c.owed for c in self.clients))
    @rule(pick=st.integers(0, 99))
    def client_asks_again(self, pick):
        client = self.some(pick, (c for c in self.clients if c.owed))
        request_id = self.some(pick, client.owed)
        before = self.pool.counters["duplicates"]
        client.fake.ask(request_id)
        assert self.pool.counters["duplicates"] == before + 1

    @precondition(lambda self: any(c.owed for c in self.clients))
    @rule(pick=st.integers(0, 99))
    def client_cancels(self, pick):
        client = self.some(pick, (c for c in self.clients if c.owed))
        request_id = self.some(pick, client.owed)
        client.fake.cancel(request_id)
        del client.owed[request_id]

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 99), way=st.sampled_from(["bye", "lose", "vanish"]))
    def client_leaves(self, pick, way):
        client = self.client(pick)
        getattr(client.fake, way)()
        if way != "vanish":  # the broker does not know of that yet
            self.forgotten(client)

    def forgotten(self, client):
        client.registered = False
        client.owed.clear()

    # -- Workers

    @precondition(lambda self: len(self.workers) < MOST_WORKERS)
    @rule(
        rank=st.integers(0, 2), policy=POLICY, ready=st.booleans(), eager=st.booleans(), data=st.data()
    )
    def worker_joins(self, rank, policy, ready, eager, data):
        sticky = data.draw(st.sampled_from(self.sticky))
        hello = {"policy": policy, "rank": rank, "world_size": 3, "sticky": sticky}
        fake = self.pool.worker(f"w{policy}{rank}", ready=ready, **hello)
        self.served[fake.peer] = policy
        self.workers.append(ModelWorker(fake, policy, free=ready, eager=eager))

    def says_ready(self, worker):
        worker.holding, worker.parked, worker.free = None, None, True
        worker.fake.ready(worker.number)

    def begin(self, worker, batch):
        """It has read a batch."""
        worker.number, worker.free, worker.holding = batch.number, False, batch
        worker.may_cross_until = self.now + 1.0
        worker.asked = worker.eager
        if worker.eager:
            worker.fake.ahead(batch.number)

    def end(self, worker):
        """It is done with the batch that it holds."""
        worker.holding, worker.free, worker.asked = None, True, False
        if worker.parked:
            self.begin(worker, worker.parked)
            worker.parked = None

    @precondition(lambda self: any(w.holding is None for w in self.workers))
    @rule(pick=st.integers(0, 99))
    def idle_worker_says_ready(self, pick):
        self.says_ready(self.some(pick, (w for w in self.workers if w.holding is None)))

    @precondition(lambda self: any(w.holding for w in self.workers))
    @rule(pick=st.integers(0, 99))
    def result_is_lost(self, pick):
        worker = self.some(pick, (w for w in self.workers if w.holding))
        self.end(worker)
        if not worker.holding:
            self.says_ready(worker)

    @precondition(lambda self: any(w.holding for w in self.workers))
    @rule(pick=st.integers(0, 99))
    def ready_crosses_the_batch(self, pick):
        worker = self.some(pick, (w for w in self.workers if w.holding))
        if self.now < worker.may_cross_until:
            worker.may_cross_until = 0.0  # it says so once a second
            worker.fake.ready(worker.holding.number - 1)

    @precondition(lambda self: any(w.holding for w in self.workers))
    @rule(pick=st.integers(0, 99), data=st.data())
    def worker_answers(self, pick, data):
        worker = self.some(pick, (w for w in self.workers if w.holding))
        batch = worker.holding
        indices = range(len(batch))
        kind = data.draw(st.sampled_from(["all", "all", "all", "error", "some", "reversed", "twice"]))
        if kind == "some":
            chosen = data.draw(st.lists(st.sampled_from(indices), unique=True))
        else:
            chosen = {"reversed": list(reversed(indices)), "twice": [*indices, *indices]}.get(kind)
        self.send_result(worker, batch.result(op=Op.ERROR if kind == "error" else Op.REPLY, only=chosen))

    @precondition(lambda self: any(w.holding for w in self.workers))
    @rule(
        pick=st.integers(0, 99),
        how=st.sampled_from(
            [
                "epoch",
                "number",
                "slots",
                "request id",
                "frames",
                "short table",
                "no bodies",
                "header only",
            ]
        ),
    )
    def worker_answers_badly(self, pick, how):
        worker = self.some(pick, (w for w in self.workers if w.holding))
        self.send_result(worker, bad_result(worker.holding, how))

    def send_result(self, worker, message):
        self.end(worker)
        worker.fake.send(message)

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 99), way=st.sampled_from(["bye", "lose", "vanish"]))
    def worker_leaves(self, pick, way):
        worker = self.some(pick, self.workers)
        getattr(worker.fake, way)()
        self.workers.remove(worker)

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 99))
    def worker_registers_again(self, pick):
        worker = self.some(pick, self.workers)
        worker.fake.hello(policy=worker.policy, rank=0, world_size=3)
        worker.number = 0
        self.says_ready(worker)

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 99))
    def the_next_batch_is_lost_on_the_way(self, pick):
        self.pool.lose_batches_to.add(self.some(pick, self.workers).fake.peer)

    # -- The broker's loop

    @rule()
    def broker_turns(self):
        self.turn(0.0)

    @rule(turns=st.sampled_from([1, 1, 2, 4, 9, 13]))
    def time_passes(self, turns):
        for _ in range(turns):
            self.turn(STEP)

    @rule()
    def broker_is_stopped_for_a_while(self):
        self.paused += 100.0
        self.turn(100.0)

    def turn(self, seconds):
        sharers = {policy: self.most_that_share(policy) for policy in POLICIES}
        self.pool.turn(seconds)
        live = [w["policy"] for w in self.pool.status["workers"] if w["state"] != "stuck"]
        self.caps = {
            policy: self.queue_size or max(1, -(-sharers[policy] // max(1, live.count(policy))))
            for policy in POLICIES
        }
        self.collect()

    def most_that_share(self, policy):
        """What the automatic cap divides by the workers, or more than that.

        A named policy counts only those clients who have asked for it, or the requests that wait.
        """
        status = self.pool.status
        if not policy:
            return len(status["clients"])
        owed = sum(o.policy == policy for client in self.all_clients for o in client.owed.values())
        return max(len(status["clients"]), status["queues"].get(policy, 0) + owed)

    def collect(self):
        """Check all that was sent against what is owed."""
        self.pool.send()
        names = {client.fake.name for client in self.clients}
        stuck = {row["name"] for row in self.pool.status["workers"] if row["state"] == "stuck"}
        here = [worker.fake for worker in self.workers if worker.fake.peer not in self.pool.gone]
        for key, home in list(self.homes.items()):
            if key[1] not in names or home not in here or home.name in stuck:
                del self.homes[key]  # it may move, or not
        for client in self.all_clients:
            for message in client.fake.take():
                self.check_answer(client, message)
        for fake, batch in self.pool.lost_batches:
            self.check_batch(fake, self.served[fake.peer], batch)
        self.pool.lost_batches.clear()
        for worker in self.workers:
            for batch in worker.fake.batches[worker.seen :]:
                worker.seen += 1
                if worker.holding:
                    assert worker.asked, "a batch for a worker that is busy and has not asked for it"
                    assert self.decoupled or worker.policy, "a batch ahead in normal mode"
                    worker.asked, worker.parked = False, batch
                else:
                    assert worker.free, "a batch for a worker that has not said that it is idle"
                    self.begin(worker, batch)
                self.check_batch(worker.fake, worker.policy, batch)
        names = {row["name"] for row in self.pool.status["clients"]}
        for client in self.all_clients:
            gone = client.fake.peer in self.pool.gone
            if client.registered and gone and client.fake.name not in names:
                self.forgotten(client)  # perhaps in the very turn in which its requests left

    def check_answer(self, client, message):
        if message.op is Op.WELCOME:
            return
        assert message.op in (Op.REPLY, Op.ERROR)
        assert message.request_id in client.owed, "an answer that nobody waits for"
        owed = client.owed.pop(message.request_id)
        if message.op is Op.REPLY:
            tree = message.tree
            assert tree["who"] == [client.fake.name, message.request_id]
            assert np.all(tree["actions"] == message.request_id + 1)
        elif message.code == "deadline":
            assert self.now >= owed.deadline
        elif message.code == "attempts":
            assert owed.given >= self.max_attempts
        else:
            assert message.code == "policy"

    def check_batch(self, worker, policy, batch):
        assert len(batch)
        assert {header.policy_id for header in batch.headers} == {policy_id_of(policy)}
        assert not self.max_rows or batch.rows <= self.max_rows or len(batch) == 1
        by_peer = {client.fake.peer: client for client in self.all_clients}
        seen = set()
        for (entry, _), header, origin in zip(batch.shards, batch.headers, batch.origins, strict=True):
            client = by_peer[origin]
            owed = client.owed.get(header.request_id)
            assert owed is not None, "a request that is over was given to a worker"
            assert self.now < owed.deadline
            owed.given += 1
            home = self.homes.setdefault((policy, client.fake.name), worker)
            if self.sticky == (True,) and (self.decoupled or policy):
                assert home is worker, "a request went past the home of its client"
            if entry.attempt and entry.attempt + 1 >= self.max_attempts:
                assert len(batch) == 1, "the last attempt did not go alone"
            seen.add((origin, header.request_id))
        assert len(seen) == len(batch)
        if self.decoupled or policy:
            assert len(batch) <= self.caps[policy]
        else:
            assert len({(h.flags & FLAG_EVAL, h.stage) for h in batch.headers}) == 1

    @invariant()
    def each_request_is_accounted_for(self):
        if not hasattr(self, "pool"):
            return
        self.collect()
        status, counters = self.pool.status, self.pool.counters
        ended = counters["answered"] + counters["errors"] + counters["cancelled"]
        assert counters["requests"] == ended + status["open_requests"]
        assert (status["open_requests"] == 0) == (status["open_bytes"] == 0)
        registered = [client for client in self.all_clients if client.registered]
        assert {row["name"]: row["open_requests"] for row in status["clients"]} == {
            client.fake.name: len(client.owed) for client in registered
        }
        places = sum(worker["homes"] for worker in status["workers"])
        assert places <= len(POLICIES) * len(registered)
        assert all(worker["homes"] >= 0 for worker in status["workers"])
        assert places == 0 or True in self.sticky
        owed = [owed.policy for client in registered for owed in client.owed.values()]
        assert status["open_requests"] == len(owed)
        unnamed = {str(policy_id_of(policy)): policy for policy in POLICIES}
        waiting = {unnamed.get(name, name): count for name, count in status["queues"].items()}
        assert waiting.keys() == {"", *owed, *(worker["policy"] for worker in status["workers"])}
        assert all(count <= owed.count(policy) for policy, count in waiting.items())

    # -- The end

    def teardown(self):
        """Those who hold a batch never answer it; everybody else does what it should."""
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.lose_batches_to.clear()
        stuck = [worker for worker in self.workers if worker.holding]
        for policy in POLICIES:
            fake = pool.worker(f"{policy} saviour", ready=False, policy=policy, sticky=self.sticky[0])
            self.workers.append(ModelWorker(fake, policy))
        begin = progress = self.now
        before = None
        while any(client.owed for client in self.all_clients):
            assert self.now < begin + DRAINED_WITHIN
            for worker in self.workers:
                if worker in stuck:
                    continue
                if worker.holding:
                    self.send_result(worker, worker.holding.result())
                else:
                    self.says_ready(worker)
            self.turn(STEP)
            state = [len(client.owed) for client in self.all_clients if client.registered]
            if state != before:
                before, progress = state, self.now
            elif self.now >= progress + STALLED_AFTER:
                self.somebody_leaves()
                progress = self.now
        self.each_request_is_accounted_for()
        assert pool.holds_nothing()
        for worker in self.workers:
            worker.fake.lose()
        pool.wait(4.0)  # for those who have vanished before
        assert pool.status["queues"] == {"": 0}

    def somebody_leaves(self):
        """Normal mode: a barrier may wait for an env that has no more to ask for."""
        assert not self.decoupled, "a request waits although a worker is idle"
        owed = [o for client in self.clients for o in client.owed.values()]
        assert not any(o.policy for o in owed), "a barrier holds up a named policy"
        missing = []
        for group in {(o.eval, o.stage) for o in owed}:
            missing.append([client for client in self.clients if _is_waited_for(client, *group)])
        assert all(missing), "an open barrier was passed over"
        self.forgotten(missing[0][0])
        missing[0][0].fake.bye()


def _is_waited_for(client, is_eval, stage):
    group = ("", is_eval, stage)
    asks = any((o.policy, o.eval, o.stage) == group for o in client.owed.values())
    announced = client.hello["mode"] == "eval" if stage == 0 else None
    return client.modes.get(stage, announced) is is_eval and not asks


def bad_result(batch, how):
    """A RESULT message that answers `batch` as it should not."""
    if how in ("epoch", "number"):
        return batch.result(**{how: getattr(batch.table, how) + 1})
    entries, replies = batch.replies()
    if how == "slots":
        entries = [entry._replace(slot=entry.slot + 1000) for entry in entries]
    elif how == "request id":
        for reply, header in zip(replies, batch.headers, strict=True):
            head = Header(Op.REPLY, request_id=header.request_id + 1000, frames=len(reply) - 1)
            reply[0] = head.pack() + reply[0][HEADER_SIZE:]
    elif how == "frames":
        entries[-1] = entries[-1]._replace(frames=entries[-1].frames + 1)
        replies[-1] = [*replies[-1], b"more"]
    message = join_batch(batch.table._replace(entries=entries, origins=b""), Op.RESULT, replies)
    if how == "short table":
        message[0] = message[0][:-1]
    elif how == "header only":
        message[0] = message[0][:HEADER_SIZE]
    elif how == "no bodies":
        message = message[:1]
    return message


class NormalModeMachine(PoolMachine):
    decoupled = False
    sticky = (False, True)


class StickyMachine(PoolMachine):
    sticky = (True,)


class MixedMachine(PoolMachine):
    sticky = (False, True)


@pytest.mark.parametrize(
    "machine",
    [PoolMachine, NormalModeMachine, StickyMachine, MixedMachine],
    ids=["shared", "ranks", "sticky", "mixed"],
)
def test_each_request_is_answered_once_whatever_happens(machine):
    test_case = machine.TestCase
    test_case.settings = settings(
        max_examples=int(os.environ.get("ZMQRL_FUZZ_EXAMPLES", "100")),
        stateful_step_count=50,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    test_case().runTest()
