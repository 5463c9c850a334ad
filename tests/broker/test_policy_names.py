"""What a policy is called, who may call it so, and how long the broker knows it."""

import gc

import pytest
from driver import Pool
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqrl.broker.policies import Policy
from zmqrl.transport.header import Op, policy_id_of

TWINS = ("plumless", "buckeroo")
"""Two names with the same CRC."""


# -- The number of a policy


@settings(deadline=None, database=None)
@given(st.text(min_size=1))
def test_no_name_has_the_number_of_the_default_policy(name):
    assert 0 < policy_id_of(name) < 2**32


@pytest.mark.parametrize(
    ("name", "number"), [("", 0), ("reward", 1322349139), ("reward-196-nzpa", 1), ("é", 235179326)]
)
def test_a_policys_number_is_the_crc_of_its_name_unless_that_is_0(name, number):
    assert policy_id_of(name) == number


# -- What a waiting client is told


@pytest.mark.parametrize(
    ("workers", "asked", "words"),
    [
        ([], "", "0 rollout workers connected"),
        (["", ""], "", "2 rollout workers connected"),
        (
            ["", "reward"],
            "",
            "1 rollout worker serves the default policy (1 serves others: the policy 'reward')",
        ),
        (["reward"], "", "serves the default policy (1 serves others: the policy 'reward')"),
        ([], "reward", f"no rollout worker serves the policy with the id {policy_id_of('reward')}"),
        (
            ["", "x"],
            "reward",
            f"id {policy_id_of('reward')} (2 serve others: the default policy, the policy 'x')",
        ),
        (["reward"], "reward", "1 rollout worker serves the policy 'reward' (0 serve others)"),
        (["reward", "", "reward"], "reward", "2 rollout workers serve the policy 'reward' (1 serves"),
    ],
)
def test_a_client_is_told_who_serves_the_policy_that_it_waits_for(workers, asked, words):
    pool = Pool()
    client = pool.client("a")
    for number, policy in enumerate(workers):
        pool.worker(f"w{number}", policy=policy, ready=False)
    client.ask(policy=asked, budget=3.0)
    client.known(1)
    pool.send()
    assert words in client.take()[0].fields["state"]
    pool.wait(3.0)
    (error,) = client.inbox
    assert error.code == "deadline"
    assert error.fields["message"].startswith("queued for 3.0 s, ")
    assert words in error.fields["message"]


@pytest.mark.parametrize("waiting", [False, True], ids=["asked after", "asked before"])
def test_the_name_of_a_policy_is_known_after_its_last_worker_has_left(waiting):
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w", policy="reward", ready=False)
    if waiting:
        client.ask(policy="reward")
    worker.bye()
    for number in range(2):
        pool.worker(f"w{number}", ready=False)
    client.ask(1, policy="reward")
    client.known(1)
    pool.turn()
    state = client.inbox[0].fields["state"]
    words = "no rollout worker serves the policy 'reward' (2 serve others: the default policy)"
    assert state == f"queued for 0.0 s, {words}"


# -- What is kept


def kept():
    gc.collect()
    return sum(type(o) is Policy for o in gc.get_objects())


def test_a_client_that_invents_policies_does_not_grow_the_broker():
    before = kept()
    pool = Pool(max_client_open=8, max_open=12)
    clients = [pool.client("a"), pool.client("b")]
    for number in range(500):
        for client in clients:
            client.ask(policy=f"policy {number}", budget=600.0)
    pool.send()
    assert pool.counters["overloaded"] == 1000 - 12
    assert sum(pool.status["queues"].values()) == 12
    for number in range(500):
        clients[0].cancel(number + 1)
        clients[0].ask(policy=f"another {number}", budget=0.25)
    clients[1].lose()
    pool.wait(0.5)
    assert pool.holds_nothing()
    assert pool.status["queues"] == {"": 0}
    assert kept() == before + 1


def test_the_status_shows_at_most_a_hundred_policies():
    pool = Pool()
    client = pool.client("a")
    for number in range(120):
        client.ask(policy=f"policy {number}")
    assert len(pool.status["queues"]) == 100


def test_a_policy_is_kept_while_a_worker_serves_it_or_a_request_waits_for_it():
    pool = Pool()
    client = pool.client("a")
    number = str(policy_id_of("reward"))
    client.ask(policy="reward")
    assert pool.status["queues"] == {"": 0, number: 1}
    worker = pool.worker("w", policy="reward")
    assert pool.status["queues"] == {"": 0, "reward": 1}
    pool.turn()
    assert pool.status["queues"] == {"": 0, "reward": 0}
    worker.lose()
    assert pool.status["queues"] == {"": 0, "reward": 1}
    client.cancel(1)
    assert pool.status["queues"] == {"": 0}
    other = pool.worker("w", policy="reward")
    assert pool.status["queues"] == {"": 0, "reward": 0}
    other.bye()
    assert pool.status["queues"] == {"": 0}


@pytest.mark.parametrize("decoupled", [True, False], ids=["shared", "ranks"])
def test_the_default_policy_stays_though_nobody_serves_it(decoupled):
    pool = Pool(decoupled=decoupled)
    clients = [pool.client(name, rank=rank, world_size=2) for rank, name in enumerate("ab")]
    clients[0].cancel(clients[0].ask())
    pool.worker("w").bye()
    assert pool.status["queues"] == {"": 0}
    worker = pool.worker("w", rank=0, world_size=1)
    clients[0].ask()
    pool.turn()
    assert worker.who == ([["a2"]] if decoupled else [])


def test_the_names_of_a_thousand_policies_are_remembered_and_no_more():
    pool = Pool()
    client = pool.client("a")
    for number in range(1001):
        pool.worker(f"w{number}", policy=f"policy {number}", ready=False).bye()
    client.ask(policy="policy 0")
    client.ask(policy="policy 1000")
    assert list(pool.status["queues"]) == ["", str(policy_id_of("policy 0")), "policy 1000"]


def test_the_status_names_the_policy_of_each_worker():
    pool = Pool()
    pool.worker("w0", ready=False)
    pool.worker("r0", policy="reward", ready=False)
    assert {w["name"]: w["policy"] for w in pool.status["workers"]} == {"w0": "", "r0": "reward"}


# -- HELLO


def test_a_worker_whose_policy_has_the_number_of_another_is_refused():
    pool = Pool()
    client, first = pool.client("a"), pool.worker("first", policy=TWINS[0])
    second = pool.strange_worker("second")
    second.hello(policy=TWINS[1])
    second.ready()
    client.ask(policy=TWINS[0])
    pool.turn()
    assert second.inbox[0].code == "refused"
    for name in TWINS:
        assert repr(name) in second.inbox[0].fields["message"]
    assert second.inbox[1].op is Op.UNKNOWN
    assert (first.who, second.who) == ([["a1"]], [])
    assert [w["name"] for w in pool.status["workers"]] == ["first"]


def test_a_name_gives_its_number_free_when_nobody_uses_it_any_more():
    pool = Pool()
    pool.worker("first", policy=TWINS[0]).bye()
    pool.worker("second", policy=TWINS[1])
    assert pool.status["queues"] == {"": 0, TWINS[1]: 0}


def test_a_rank_is_doubtful_only_beside_the_same_one_of_the_same_policy():
    pool = Pool()
    pool.worker("w0", rank=0, world_size=1, pid=1)
    welcomes = []
    for name, policy in [("r0", "reward"), ("r1", "reward")]:
        worker = pool.strange_worker(name)
        worker.hello(policy=policy, rank=0, world_size=1, pid=2 + len(welcomes))
        pool.send()
        welcomes.append(worker.inbox[0].fields.get("warning"))
    assert welcomes[0] is None
    assert "rank 0" in welcomes[1]
    assert "r0" in welcomes[1]


def test_a_worker_cannot_change_its_policy_without_a_new_socket():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w", policy="reward")
    client.ask(policy="reward")
    client.ask()
    pool.turn()
    worker.hello()
    pool.send()
    (error,) = worker.inbox
    assert error.code == "refused"
    assert "'reward'" in error.fields["message"]
    assert pool.status["queues"] == {"": 1, "reward": 0}
    worker.answer()
    pool.turn()
    assert client.answers == [("REPLY", 1)]
    assert worker.who == [["a1"]]


def test_what_is_said_to_a_default_worker_that_wants_to_change_names_no_policy():
    pool = Pool()
    worker = pool.worker("w")
    worker.hello(policy="reward")
    pool.send()
    assert "the default policy" in worker.inbox[0].fields["message"]
    assert pool.status["queues"] == {"": 0}
