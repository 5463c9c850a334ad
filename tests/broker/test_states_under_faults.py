"""No env ever acts on a wrong state, whatever becomes of workers, sockets and the broker.

The broker is the real one, under a fake clock; so are the books that clients keep of their envs, and the
banks of the workers. The policy adds each observation to a hash, its state: an output tells all that the
env has shown since its episode began.
"""

import random

import numpy as np
import pytest
from driver import EPOCH, Pool, plain

from zmqrl.broker.core import Broker
from zmqrl.client.asking import Request
from zmqrl.client.memory import Memory
from zmqrl.errors import ClientError, StateLost
from zmqrl.rollout import stateful
from zmqrl.transport.codec import decode, encode, encode_meta
from zmqrl.transport.header import (
    FLAG_KEPT,
    FLAG_MEMORY,
    HEADER_SIZE,
    Entry,
    Header,
    Op,
    join_batch,
)

ENVS = 3


def following(state, x):
    return (31 * state + x + 1) % 1_000_003


class Hashing:
    def initial_state(self, rows):
        return {"hash": np.zeros((rows, 1), np.int64)}


class Worker:
    """A rollout worker, whose results are sent when a test wants it."""

    def __init__(self, pool, name, sticky):
        self.fake = pool.worker(name, sticky=sticky)
        self.states = stateful.States(1 if sticky else None)
        self.done = 0
        self.is_stuck = False

    def has_work(self):
        return not self.is_stuck and self.done < len(self.fake.batches)

    def result(self, fails=False):
        """The RESULT of the next batch."""
        batch = self.fake.batches[self.done]
        self.done += 1
        replies, entries = [], []
        for (entry, message), header in zip(batch.shards, batch.headers, strict=True):
            observation, memory = stateful.split_off(decode(message[0][HEADER_SIZE:], message[1:]))
            memory = stateful.Memory.of(memory, header.rows)
            reply = self.reply(header, observation["x"], memory, fails)
            replies.append(reply)
            entries.append(
                Entry(entry.slot, len(reply[0]), len(reply) - 1, entry.attempt, 0, entry.queue_us)
            )
        return join_batch(batch.table._replace(entries=entries, origins=b""), Op.RESULT, replies)

    def reply(self, header, x, memory, fails):
        recall = self.states.recall([memory])
        fields = {"code": "policy", "message": "it fails"}
        if recall.lost.any():
            fields = {"code": "state", "message": "", "rows": np.flatnonzero(recall.lost).tolist()}
        if fails or recall.lost.any():
            return [Header(Op.ERROR, request_id=header.request_id).pack() + encode_meta(fields)]
        new = following(recall.state(Hashing(), 0)["hash"], x)
        encoded = encode(recall.answer({"actions": new[:, 0]}, 1, {"hash": new}))
        recall.commit()
        flags = FLAG_MEMORY if self.states.travel else FLAG_KEPT
        head = Header(Op.REPLY, flags, header.request_id, rows=header.rows, frames=len(encoded.buffers))
        return [head.pack() + encoded.meta, *encoded.buffers]


class Client:
    """Knows what each of its envs has shown, and so what its actions must be."""

    def __init__(self, pool, name, dice):
        self.fake = pool.client(name)
        self.pool, self.dice = pool, dice
        self.memory = Memory()
        self.requests = {}
        self.next_id, self.next_x = 1, 1
        self.states = ["none"] * ENVS
        self.shown = [0] * ENVS
        self.wanted = [0] * ENVS
        self.answered = 0

    def ask(self):
        free = [env for env in range(ENVS) if self.states[env] != "asked"]
        envs = sorted(self.dice.sample(free, self.dice.randint(min(1, len(free)), len(free))))
        if not envs:
            return
        reset = [self.states[env] == "none" or self.dice.random() < 0.1 for env in envs]
        for env, begins in zip(envs, reset, strict=True):
            if begins or self.states[env] != "unanswered":  # what is asked again shows the same
                self.shown[env] = self.next_x
                self.wanted[env] = following(0 if begins else self.wanted[env], self.next_x)
                self.next_x += 1
            self.states[env] = "asked"
        x = np.array([[self.shown[env]] for env in envs])
        ask = self.memory.ask({"x": x}, np.array(reset), np.array(envs), 0, "")
        encoded = encode(ask.tree)
        header = Header(
            Op.INFER,
            flags=ask.flags,
            request_id=self.next_id,
            frames=len(encoded.buffers),
            rows=len(envs),
            budget_ms=600_000,
            signature=encoded.signature,
        )
        request = Request(header, encoded.meta, [header.pack() + encoded.meta, *encoded.buffers], 0.0)
        ask.sent(request)
        self.requests[self.next_id] = (request, envs)
        self.next_id += 1
        self.fake.send(request.buffers)

    def send_again(self):
        for request, _ in self.requests.values():
            self.fake.send(request.buffers)

    def give_up(self):
        if self.requests:
            number = self.dice.choice(list(self.requests))
            self.fake.cancel(number)
            self.end(number, ClientError("given up"))

    def open_a_new_socket(self):
        name = self.fake.name
        self.fake.vanish()
        self.fake = self.pool.stranger(name)
        self.introduce()

    def introduce(self):
        self.fake.send(plain(Op.HELLO, name=self.fake.name))
        self.send_again()

    def end(self, number, error=None):
        request, envs = self.requests.pop(number)
        request.end(None if error else {}, error)
        lost = error.rows if isinstance(error, StateLost) else []
        for row, env in enumerate(envs):
            self.states[env] = "none" if row in lost else "unanswered" if error else "goes on"

    def read(self):
        for message in self.fake.take():
            number = message.request_id
            if number not in self.requests:
                continue
            request, envs = self.requests[number]
            if message.op is Op.REPLY:
                output = message.tree
                if message.header.flags & FLAG_MEMORY:
                    output, request.carried = output["output"], output["state"]
                request.reply = message.header
                assert output["actions"].tolist() == [self.wanted[env] for env in envs]
                self.answered += 1
                self.end(number)
            elif message.op is Op.ERROR:
                rows = message.fields.get("rows")
                text = message.code
                self.end(number, ClientError(text) if rows is None else StateLost(text, rows))


class Play:
    """A pool in which anything may happen next."""

    def __init__(self, seed, sticky):
        self.dice, self.sticky = random.Random(seed), sticky
        self.pool = Pool(attempt_timeout=4.0, max_wait=self.dice.choice([0.0, 0.3]))
        self.workers = [Worker(self.pool, f"w{i}", sticky) for i in range(self.dice.randint(1, 3))]
        self.clients = [Client(self.pool, f"c{i}", self.dice) for i in range(self.dice.randint(1, 4))]
        self.late = []

    def step(self):
        dice, client, worker = self.dice, self.dice.choice(self.clients), self.dice.choice(self.workers)
        (event,) = dice.choices(
            (
                *(client.ask, lambda: self.work(worker), lambda: self.replace(worker)),
                *(self.be_late, client.give_up, client.open_a_new_socket, client.send_again),
                *(lambda: self.pool.lose_batches_to.add(worker.fake.peer), self.restart_the_broker),
                lambda: self.pool.turn(dice.choice([0.0, 0.01, 0.25, 0.5, 0.9])),
            ),
            (35, 30, 3, 3, 3, 2, 2, 1, 0.5, 20),
        )
        event()
        self.pool.turn()
        for client in self.clients:
            client.read()

    def work(self, worker):
        if not worker.has_work():
            if not worker.is_stuck:
                worker.fake.ready()
            return
        if self.dice.random() < 0.1:
            worker.fake.ahead()
        result = worker.result(fails=self.dice.random() < 0.05)
        (fate,) = self.dice.choices(("sent", "late", "killed with it"), (85, 7, 8))
        if fate == "sent":
            worker.fake.send(result)
        elif fate == "late":
            worker.is_stuck = True
            self.late.append((worker, result))
        else:
            self.replace(worker)

    def replace(self, worker):
        """It is killed, and started again without its states."""
        self.dice.choice([worker.fake.lose, worker.fake.vanish])()
        self.workers.remove(worker)
        self.workers.append(Worker(self.pool, worker.fake.name, self.sticky))

    def be_late(self):
        if self.late:
            worker, result = self.late.pop()
            worker.is_stuck = False
            if worker in self.workers:
                worker.fake.send(result)

    def restart_the_broker(self):
        options, epoch = self.pool.broker._pool.options, EPOCH + self.dice.randrange(1, 10**9)
        self.pool.broker = Broker(options, epoch, self.pool.now, None, self.pool.send_now)
        for worker in self.workers:
            worker.fake.send(plain(Op.HELLO, name=worker.fake.name, sticky=self.sticky))
            worker.fake.ready(0)
        for client in self.clients:
            client.introduce()

    def end(self):
        """Everybody is well from now on, and everything is answered."""
        while self.late:
            self.be_late()
        for _ in range(200):
            self.pool.turn(0.25)
            for worker in self.workers:
                while worker.has_work():
                    worker.fake.send(worker.result())
                    self.pool.turn()
                worker.fake.ready()
            for client in self.clients:
                client.read()
        assert not any(client.requests for client in self.clients)
        assert self.pool.holds_nothing()


@pytest.mark.parametrize("sticky", [True, False], ids=["sticky", "none"])
@pytest.mark.parametrize("seed", range(10))
def test_every_action_follows_from_all_that_its_env_has_shown(seed, sticky):
    play = Play(seed, sticky)
    for _ in range(400):
        play.step()
    play.end()
    assert sum(client.answered for client in play.clients) > 0
