"""A learner's access to the pool: trajectories in, weights out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from zmqrl.errors import DecodeError, RunFailed
from zmqrl.learner.gate import Gate
from zmqrl.learner.service import Arrival, Order, Service, Shared
from zmqrl.learner.snapshot import Snapshot
from zmqrl.spaces import Spaces
from zmqrl.trajectory import Trajectory
from zmqrl.transport import sockets
from zmqrl.transport.codec import decode
from zmqrl.transport.header import HEADER_SIZE, unpack


class Learner:
    """A learner's port, for an update loop of one's own:

        with Learner("tcp://127.0.0.1:5759") as port:
            port.publish(agent.state_dict())
            for trajectory in port:
                update(agent, trajectory)
                port.publish(agent.state_dict())

    Trajectories are received, acknowledged and kept by a thread of its own, so that nothing waits while
    the agent is updated. It belongs to the thread that made it.

    Args:
        endpoint: Where to listen; None for the local default.
        gate: When env workers may begin a trajectory; None for always.
        max_message_mb: Mebibytes; a client that sends a larger array is cut off.
        with_spaces: Send the spaces of the simulators with the weights, for rollout workers that build
            the actor from them.

    Raises:
        EndpointError: The endpoint is malformed, in use, or cannot be bound.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        gate: Gate | None = None,
        max_message_mb: int = sockets.MAX_MESSAGE_MB,
        with_spaces: bool = False,
    ) -> None:
        self.epoch = int.from_bytes(os.urandom(7), "little")
        self.version = 0
        """Of the weights that were published last; 0 before."""
        self.invalid = 0
        """Trajectories that could not be read."""
        self.last_invalid = ""
        """Which, and why; of the latest one."""
        self._with_spaces = with_spaces
        self._shared = Shared()
        self._service = Service(
            endpoint or sockets.local_endpoint("learner"),
            self.epoch,
            gate or Gate(),
            self._shared,
            max_message_mb,
        )
        self.endpoint = self._service.endpoint
        self._closed = False

    # -- Trajectories

    def receive(self, timeout: float) -> list[Trajectory]:
        """The trajectories that have arrived.

        Args:
            timeout: Seconds to wait for the first one.

        Raises:
            RunFailed: The thread that receives has failed.
        """
        with self._shared.lock:
            if not self._shared.inbox and timeout > 0:
                self._shared.lock.wait(timeout)
            self._raise_failure()
            arrivals = list(self._shared.inbox)
            self._shared.inbox.clear()
            self._shared.inbox_bytes = 0
            for arrival in arrivals:
                arrival.sender.used = arrival.number
        if arrivals:
            self._service.wake()  # there is room for more
        return [t for arrival in arrivals if (t := self._read(arrival)) is not None]

    def __iter__(self) -> Iterator[Trajectory]:
        """Every trajectory, as it arrives; ends when the port is closed."""
        while not self._closed:
            yield from self.receive(0.25)

    def drop(self, trajectory: Trajectory) -> None:
        """Count a trajectory that the learner cannot use."""
        with self._shared.lock:
            self._shared.dropped += 1

    def wait_for_spaces(self, timeout: float) -> Spaces | None:
        """The spaces of the simulators, once an env worker has told them.

        Args:
            timeout: Seconds to wait.
        """
        with self._shared.lock:
            if self._shared.spaces is None:
                self._shared.lock.wait(timeout)
            self._raise_failure()
            return self._shared.spaces

    # -- Weights

    def publish(self, weights: Mapping[str, Any], version: int | None = None) -> int:
        """Make weights the newest version; rollout workers fetch it when they can.

        Args:
            weights: Arrays or tensors by name, such as a `state_dict`; they are copied.
            version: Their number; None for the next one.

        Returns:
            The number.

        Raises:
            EncodeError: Something in them is no array.
        """
        number = self.version + 1 if version is None else version
        notes: dict[str, Any] = {"epoch": self.epoch}
        if self._with_spaces and self._shared.spaces is not None:
            notes["spaces"] = self._shared.spaces.fields()
        snapshot = Snapshot.of(number, weights, notes)
        with self._shared.lock:
            self._shared.newest = snapshot
            self._shared.versions = number - 1
        self.version = number
        self._service.wake()
        return number

    # -- Evaluations

    def evaluate(self, env_steps: int, step: int) -> int:
        """Have the eval workers evaluate the newest version, whatever is published meanwhile.

        Args:
            env_steps: Of training, so far.
            step: Global steps so far.

        Returns:
            The number of the evaluation.
        """
        with self._shared.lock:
            assert self._shared.newest is not None
            number = 1 if self._shared.order is None else self._shared.order.number + 1
            self._shared.pinned = self._shared.newest
            self._shared.order = Order(number, self.version, env_steps, step)
            self._shared.finished.clear()
        self._service.wake()
        return number

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

    def rollout_workers(self) -> dict[str, dict[str, int]]:
        """By rollout worker: `version` served, and how often it has `loaded`, or `failed` to."""
        with self._shared.lock:
            return {name: dict(numbers) for name, numbers in self._shared.workers.items()}

    def state_dict(self) -> dict[str, Any]:
        """The books, for a checkpoint; only what was used counts."""
        with self._shared.lock:
            ledger, waiting = self._shared.ledger, self._shared.inbox
            return {
                "version": self.version,
                "marks": ledger.marks(),
                "received": ledger.received - len(waiting),
                "env_steps": ledger.env_steps - sum(_env_steps(arrival) for arrival in waiting),
                "rolled_back": ledger.rolled_back,
                "dropped": self._shared.dropped,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; before the first `receive`."""
        with self._shared.lock:
            ledger = self._shared.ledger
            ledger.restore(state["marks"], state["received"], state["env_steps"], state["rolled_back"])
            self._shared.dropped = state["dropped"]
        self.version = state["version"]

    # -- The end

    def close(self) -> None:
        """Stop receiving; what was acknowledged but not used is lost to this learner."""
        if not self._closed:
            self._closed = True
            self._service.close()

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, arrival: Arrival) -> Trajectory | None:
        try:
            first, *buffers = arrival.frames
            return Trajectory.of_tree(decode(first[HEADER_SIZE:], buffers))
        except DecodeError as error:
            with self._shared.lock:
                self._shared.dropped += 1
            self.invalid += 1
            self.last_invalid = f"{arrival.sender.name}: {error}"
            return None

    def _raise_failure(self) -> None:
        if self._shared.failure is not None:
            raise RunFailed("the learner's receiving thread failed") from self._shared.failure


def _env_steps(arrival: Arrival) -> int:
    return unpack(arrival.frames[0]).rows
