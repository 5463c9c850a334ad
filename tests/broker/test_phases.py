"""What each client does, and since when, as the status tells it."""

import pytest
from driver import Pool

from zmqrl.broker.records import MAX_PHASE
from zmqrl.transport.codec import encode_meta
from zmqrl.transport.header import Header, Op


def says(client, phase):
    client.send([Header(Op.PHASE).pack() + encode_meta({"phase": phase})])


def doing(pool):
    (client,) = pool.status["clients"]
    return client["state"], client["state_s"]


def test_a_client_waits_while_a_request_is_open_and_steps_once_it_has_its_actions():
    pool = Pool()
    client = pool.client("a")
    assert doing(pool)[0] == "connected"
    client.ask()
    pool.turn(0.75)
    assert doing(pool) == ("wait", 0.75)
    worker = pool.worker("w")
    pool.turn()
    worker.answer()
    assert doing(pool) == ("step", 0.0)
    pool.turn(0.5)
    assert doing(pool) == ("step", 0.5)


def test_what_a_client_says_that_it_does_holds_until_its_next_request():
    pool = Pool()
    client = pool.client("a")
    pool.turn()
    says(client, "reset")
    pool.turn(1.0)
    assert doing(pool) == ("reset", 1.0)
    client.ask()
    assert doing(pool) == ("wait", 0.0)


def test_a_reset_of_one_stage_shows_although_another_stage_waits():
    pool = Pool()
    client = pool.client("a")
    client.ask()
    says(client, "reset")
    pool.turn(0.5)
    assert doing(pool) == ("reset", 0.5)


def test_a_client_that_rests_is_not_taken_to_step():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    pool.turn()
    worker.answer()
    client.send([Header(Op.REST).pack()])
    pool.turn()
    assert doing(pool)[0] == "rest"


def test_a_client_of_which_one_stage_rests_steps_the_other_one_with_its_actions():
    pool = Pool()
    client, worker = pool.client("a"), pool.worker("w")
    client.ask()
    client.send([Header(Op.REST, stage=1).pack()])
    pool.turn()
    assert doing(pool)[0] == "wait"
    worker.answer()
    pool.turn(0.5)
    assert doing(pool) == ("step", 0.5)


@pytest.mark.parametrize("phase", ["", "x" * (MAX_PHASE + 1), "\x1b[2J", 7, None, ["reset"]])
def test_a_phase_that_is_no_short_text_is_refused(phase):
    pool = Pool()
    client = pool.client("a")
    says(client, phase)
    assert pool.counters["malformed"] == 1
    assert doing(pool)[0] == "connected"


def test_the_status_names_those_who_are_in_one_state_for_longest():
    pool = Pool()
    for number in range(1005):
        pool.client(f"c{number}")
        if number == 10:
            pool.turn()
    status = pool.status
    assert status["clients_connected"] == 1005
    assert len(status["clients"]) == 1000
    assert {f"c{number}" for number in range(11)} <= {client["name"] for client in status["clients"]}


def test_the_status_tells_how_long_the_oldest_request_has_waited():
    pool = Pool()
    client = pool.client("a")
    assert pool.status["oldest_request_s"] == 0
    client.ask(1)
    pool.turn(0.5)
    client.ask(2)
    pool.turn(0.5)
    assert pool.status["oldest_request_s"] == 1.0
