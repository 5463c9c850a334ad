"""Drills in which peers come with the wrong key to a pool that has keys."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

from faults.drills import Trial, drill
from faults.pool import wait_for
from zmqrl.broker.status import StatusClient
from zmqrl.errors import AuthenticationFailed
from zmqrl.transport.bundles import add_bundle, make_bundles, revoke
from zmqrl.transport.security import Keys

_NO_KEY = "without a key|needs a key"
"""What a peer without a key is told; the second if its connection broke off whenever it looked."""


@drill("wrong-keys", in_suite=False)
def wrong_keys(trial: Trial) -> None:
    """Clients without a key, with a worker's, a revoked one and one of another pool, and a worker
    without one: each is refused with the reason, while the others are served. With the right key, a
    client is served then.
    """
    keys, others = trial.folder / "keys", trial.folder / "others"
    for folder in (keys, others):
        make_bundles(str(folder))
    _secure(trial, keys)
    trial.pool.start(workers=2)
    good = trial.load(clients=8, keys=str(keys))
    good.wait_for(50)
    calls = trial.size(20, quick=2)
    cases: list[tuple[Path | None, str, int, float]] = [
        (None, _NO_KEY, calls, 20.0),
        (_disguised(keys), "does not let the key of", calls, 20.0),
        (_revoked(keys), "was revoked", calls, 20.0),
        # A broker that breaks a connection off cannot say why: this one is told at its time-out.
        (others, r"is not the server\.key of", 2, 2.0),
    ]
    for bundle, reason, count, timeout in cases:
        stranger = trial.load(
            clients=2,
            requests=count,
            timeout=timeout,
            keys=None if bundle is None else str(bundle),
            expects=(AuthenticationFailed,),
        )
        ledger = trial.finish(stranger)
        said = [str(failure.error) for failure in stranger.failures]
        wrong = [words for words in said if not re.search(reason, words)]
        trial.expect(not wrong, f"{len(wrong)} of {count} were not told {reason!r}, but {wrong[:1]}")
        trial.expect(ledger.answered == 0, f"{ledger.answered} were answered with the key {bundle}")
        good.wait_for(50)
    _is_refused_as_a_worker(trial)
    _is_turned_out(trial, keys)
    add_bundle(str(keys), "client", "new")
    trial.load(clients=2, keys=str(keys / "new")).wait_for(50)
    good.wait_for(50)


def _secure(trial: Trial, keys: Path) -> None:
    """Let the pool listen on TCP, with keys."""
    pool = trial.pool
    with socket.socket() as one, socket.socket() as other:
        for listener in (one, other):
            listener.bind(("127.0.0.1", 0))
        ports = [listener.getsockname()[1] for listener in (one, other)]
    pool.frontend, pool.backend = (f"tcp://127.0.0.1:{port}" for port in ports)
    pool.overrides = [
        f"broker.frontend={pool.frontend}",
        f"broker.backend={pool.backend}",
        f"security.keys={keys}",
    ]
    pool.status_client.close()
    pool.status_client = StatusClient(pool.frontend, Keys.load(keys, "client"))


def _disguised(keys: Path) -> Path:
    """The key of a worker under the name of a client's."""
    copy = keys / "worker-as-client"
    shutil.copytree(keys / "worker", copy)
    (copy / "worker.key_secret").rename(copy / "client.key_secret")
    return copy


def _revoked(keys: Path) -> Path:
    """A key that was let in once."""
    add_bundle(str(keys), "client", "old")
    copy = keys / "copy-of-old"
    shutil.copytree(keys / "old", copy)
    revoke(str(keys), "old")
    return copy


def _is_refused_as_a_worker(trial: Trial) -> None:
    trial.pool.start_worker(2, overrides=("security.keys=null",))
    words = trial.pool.launcher.children["rollout-2"].last_lines
    wait_for(lambda: re.search(_NO_KEY, " ".join(words)), f"the reason of a worker: {words}", 40.0)
    trial.expect(not trial.pool.worker("rollout-2"), "a rollout worker without a key was let in")
    trial.pool.kill("rollout-2")


def _is_turned_out(trial: Trial, keys: Path) -> None:
    """Revoke the key of a client that is in."""
    add_bundle(str(keys), "client", "lab")
    client = trial.load(clients=1, keys=str(keys / "lab"), expects=(AuthenticationFailed,))
    client.wait_for(20)
    revoke(str(keys), "lab")
    wait_for(lambda: client.failures, "the end of a client whose key was revoked")
    trial.finish(client)
    trial.expect("revoked" in str(client.failures[0].error), f"it was told: {client.failures[0]}")
