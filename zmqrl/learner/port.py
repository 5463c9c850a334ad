"""A learner's access to the pool: trajectories in, weights out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zmqrl.errors import DecodeError, RunFailed
from zmqrl.learner.gate import Gate
from zmqrl.learner.service import Service
from zmqrl.learner.shared import Arrival, Order, Shared
from zmqrl.learner.snapshot import Snapshot
from zmqrl.spaces import Spaces
from zmqrl.trajectory import Trajectory
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode
from zmqrl.transport.header import HEADER_SIZE
from zmqrl.transport.security import Keys


class Learner:
    """A learner's port, for an update loop of one's own:

        with Learner("tcp://127.0.0.1:5759") as port:
            port.publish(agent.state_dict())
            for trajectory in port:
                update(agent, trajectory)
                port.publish(agent.state_dict())

    Trajectories are received, acknowledged and kept by a thread of its own, so that nothing waits while
    the agent is updated. Env workers are let in with the first `publish` or `receive`: before, a
    checkpoint can be loaded. It belongs to the thread that made it; another one may close it.

    Args:
        endpoint: Where to listen; None for the local default.
        gate: When env workers may begin a trajectory; None for always.
        max_message_mb: Mebibytes; a client that sends a larger array is cut off.
        with_spaces: Send the spaces of the simulators with the weights, for rollout workers that build
            the actor from them.
        keys: The folder of keys (see `bin/make-keys`), or its `server` within; None for no encryption.
        insecure: Without keys: whether to listen where other machines can reach the learner.

    Raises:
        EndpointError: The endpoint is malformed, in use, cannot be bound, or is open to strangers.
        KeysError: There are no keys of a server, or others can read them.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        gate: Gate | None = None,
        max_message_mb: int = sockets.MAX_MESSAGE_MB,
        with_spaces: bool = False,
        keys: str | Path | None = None,
        insecure: bool = False,
    ) -> None:
        self.version = 0
        """Of the weights that were published last; 0 before."""
        self.invalid = 0
        """Trajectories that could not be read."""
        self.last_invalid = ""
        """Which, and why; of the latest one."""
        self._evaluations = 0
        self._with_spaces = with_spaces
        self._shared = Shared()
        self._service = Service(
            endpoint or sockets.local_endpoint("learner"),
            gate or Gate(),
            self._shared,
            max_message_mb,
            None if keys is None else Keys.load(keys, "server"),
            insecure,
        )
        self.endpoint = self._service.endpoint
        self._closed = False

    @property
    def epoch(self) -> int:
        """The number of this life of the learner; it has another one after each start."""
        return self._shared.epoch

    # -- Trajectories

    def receive(self, timeout: float) -> list[Trajectory]:
        """The trajectories that have arrived.

        Args:
            timeout: Seconds to wait for the first one.

        Raises:
            RunFailed: The thread that receives has failed.
        """
        return [t for arrival in self._take(timeout) if (t := self._read(arrival)) is not None]

    def __iter__(self) -> Iterator[Trajectory]:
        """Every trajectory, as it arrives; ends when the port is closed.

        Raises:
            RunFailed: The thread that receives has failed.
        """
        # One at a time: what is taken counts as used, in a checkpoint that the loop may write.
        while not self._closed:
            for arrival in self._take(0.25, most=1):
                trajectory = self._read(arrival)
                if trajectory is not None:
                    yield trajectory

    def _take(self, timeout: float, most: int | None = None) -> list[Arrival]:
        self._open()
        shared = self._shared
        with shared.lock:
            shared.lock.wait_for(lambda: shared.inbox or self._is_at_its_end(), max(0.0, timeout))
            self._raise_failure()
            count = len(shared.inbox) if most is None else min(most, len(shared.inbox))
            was_full = shared.is_full()
            arrivals = [shared.inbox.popleft() for _ in range(count)]
            for arrival in arrivals:
                arrival.sender.used = arrival.number
                shared.inbox_bytes -= arrival.size
            if arrivals:
                shared.hungry = False  # until it is seen what the algorithm can do with them
        if was_full:
            self._service.wake()  # there is room for more
        return arrivals

    def drop(self, trajectory: Trajectory) -> None:
        """Count a trajectory that the learner cannot use."""
        with self._shared.lock:
            self._shared.dropped += 1

    def wait_for_spaces(self, timeout: float) -> Spaces | None:
        """The spaces of the simulators, once an env worker has told them.

        Args:
            timeout: Seconds to wait.
        """
        shared = self._shared
        with shared.lock:
            shared.lock.wait_for(lambda: shared.spaces is not None or self._is_at_its_end(), timeout)
            self._raise_failure()
            return shared.spaces

    # -- Weights

    def publish(self, weights: Mapping[str, Any], version: int | None = None) -> int:
        """Make weights the newest version; rollout workers fetch it when they can.

        Args:
            weights: Arrays or tensors by name, such as a `state_dict`; they are copied.
            version: Their number, larger than the one before; None for the next one.

        Returns:
            The number.

        Raises:
            EncodeError: Something in them is no array.
            ValueError: Nobody would fetch a version of this number.
        """
        number = self.version + 1 if version is None else version
        newest = self._shared.newest
        if number <= (0 if newest is None else newest.version):
            raise ValueError(f"version {number} does not come after version {self.version}")
        notes: dict[str, Any] = {"epoch": self.epoch}
        if self._with_spaces and self._shared.spaces is not None:
            notes["spaces"] = self._shared.spaces.fields()
        snapshot = Snapshot.of(number, weights, notes)
        with self._shared.lock:
            # The first one of a life only repeats what the life before had published.
            self._shared.versions += newest is not None
            self._shared.newest = snapshot
        self._open()
        self.version = number
        self._service.wake()
        return number

    # -- Evaluations

    def evaluate(self, env_steps: int) -> int:
        """Have the eval workers evaluate the newest version, whatever is published meanwhile.

        Args:
            env_steps: Of training, when these weights were published.

        Returns:
            The number of the evaluation.
        """
        with self._shared.lock:
            if self._shared.newest is None:
                raise ValueError("there is nothing to evaluate: publish weights first")
            self._evaluations += 1
            self._shared.pinned = self._shared.newest
            self._shared.order = Order(self._evaluations, self.version, env_steps)
            self._shared.finished.clear()
        self._service.wake()
        return self._evaluations

    def evaluation_is_over(self, workers: int) -> bool:
        """Whether so many eval workers have finished the evaluation that was ordered last."""
        with self._shared.lock:
            return self._shared.order is None or len(self._shared.finished) >= workers

    # -- Pace and books

    def note(self, updates: int, hungry: bool) -> None:
        """Tell the gate how far the learner is.

        Args:
            updates: Gradient updates done.
            hungry: Whether the algorithm needs more data before it can do anything.
        """
        with self._shared.lock:
            self._shared.updates, self._shared.hungry = updates, hungry
        self._service.wake()

    def close_gate(self) -> None:
        """Let no trajectory begin any more; what is under way still arrives."""
        with self._shared.lock:
            self._shared.closed = True

    def books(self) -> dict[str, int]:
        """Trajectories received, dropped, rolled back, sent twice, and waiting; and env steps."""
        with self._shared.lock:
            ledger = self._shared.ledger
            return {
                "received": ledger.received,
                "env_steps": ledger.env_steps,
                "duplicates": ledger.duplicates,
                "rolled_back": ledger.rolled_back,
                "dropped": self._shared.dropped,
                "waiting": len(self._shared.inbox),
            }

    def shares(self) -> dict[str, float]:
        """Metrics: the share of each env worker in the env steps that have arrived."""
        with self._shared.lock:
            return self._shared.ledger.shares.metrics()

    def rollout_workers(self) -> dict[str, dict[str, int]]:
        """By rollout worker: the version that it is `serving`, how often it `loaded` or `failed` to."""
        with self._shared.lock:
            return {name: dict(numbers) for name, numbers in self._shared.workers.items()}

    def state_dict(self) -> dict[str, Any]:
        """The books, for a checkpoint; only what was used counts."""
        with self._shared.lock:
            ledger, waiting = self._shared.ledger, self._shared.inbox
            return {
                "version": self.version,
                "shares": ledger.shares.without((a.sender.name, a.env_steps) for a in waiting),
                "versions": self._shared.versions,
                "marks": ledger.marks(),
                "received": ledger.received - len(waiting),
                "env_steps": ledger.env_steps - sum(arrival.env_steps for arrival in waiting),
                "rolled_back": ledger.rolled_back,
                "dropped": self._shared.dropped,
                "evaluations": self._evaluations,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: There has been a `publish` or `receive`: env workers have been let in.
        """
        with self._shared.lock:
            if self._shared.is_open:
                raise ValueError("load the state of a port before its first publish() or receive()")
            ledger = self._shared.ledger
            ledger.restore(state["marks"], state["received"], state["env_steps"], state["rolled_back"])
            ledger.shares.env_steps = dict(state.get("shares", {}))  # which earlier checkpoints lack
            self._shared.dropped, self._shared.versions = state["dropped"], state["versions"]
        self.version, self._evaluations = state["version"], state["evaluations"]

    # -- The end

    def close(self) -> None:
        """Stop receiving; what was acknowledged but not used is lost to this learner."""
        with self._shared.lock:
            already, self._closed = self._closed, True
            self._shared.lock.notify_all()
        if not already:
            self._service.close()

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> None:
        """Open the books: env workers are let in, and no checkpoint can be loaded any more."""
        if not self._shared.is_open:
            with self._shared.lock:
                self._shared.is_open = True
            self._service.wake()

    def _is_at_its_end(self) -> bool:
        return self._closed or self._shared.failure is not None

    def _read(self, arrival: Arrival) -> Trajectory | None:
        first, *buffers = arrival.frames
        try:
            trajectory = Trajectory.of_tree(decode(first[HEADER_SIZE:], buffers))
            if trajectory.env_steps != arrival.env_steps:
                raise DecodeError(
                    f"it has {trajectory.env_steps} env steps, its header says {arrival.env_steps}"
                )
            return trajectory
        except DecodeError as error:
            with self._shared.lock:
                self._shared.dropped += 1
                self._shared.ledger.corrected(arrival.sender, arrival.env_steps, 0)
            self.invalid += 1
            self.last_invalid = f"{arrival.sender.name}: {error}"
            return None

    def _raise_failure(self) -> None:
        if self._shared.failure is not None:
            failure = self._shared.failure
            raise RunFailed(f"the learner's receiving thread failed: {failure!r}") from failure
