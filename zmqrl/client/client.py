"""The thin client: observations out, actions back."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Dict, Optional, Union

from zmqrl.client.asking import (
    checked_mode,
    checked_name,
    checked_place,
    checked_timeout,
    encoded_observation,
    request_of,
)
from zmqrl.client.connection import Connection
from zmqrl.client.memory import Memory
from zmqrl.client.pending import Pending
from zmqrl.errors import ClientClosed, ClientInUse
from zmqrl.transport import sockets
from zmqrl.transport.security import Keys
from zmqrl.transport.tree import with_axis, without_axis

if TYPE_CHECKING:
    from zmqrl.recording.recorder import Recorder


class PolicyClient:
    """Asks the policy of a zmqrl pool for actions.

    The loop that calls it:

        with PolicyClient("tcp://127.0.0.1:5757") as policy:
            obs, info = envs.reset()
            while True:
                result = policy.infer(obs)
                obs, reward, terminated, truncated, info = envs.step(result["actions"])

    A client belongs to one thread at a time. After a fork the child's first call opens a socket of its
    own.

    Args:
        endpoint: The broker's frontend, such as `tcp://127.0.0.1:5757`; None for the local default.
        timeout: Seconds that a call may take when it names no timeout itself.
        name: Names this client in the broker's status, and makes a restart under the same name take
            over from the old process. None makes a name up.
        mode: `train` for sampled actions, `eval` for deterministic ones; a call may choose another.
        rank: This env worker's number; normal mode binds requests by it.
        world_size: The number of env workers; normal mode needs it with `rank`.
        max_message_mb: Mebibytes; larger observations are refused before they are sent.
        learner: Where a learner listens, such as `tcp://127.0.0.1:5759`: what `record` is told goes
            there.
        envs: With a learner: the Gymnasium env or vector env; its action space and the way in which it
            begins the next episode are read from it.
        action_space: With a learner, in place of `envs`: of one simulator. Episodes are then begun by
            the caller, who steps no simulator past its end.
        trajectory_steps: With a learner: steps in a trajectory.
        keys: A folder with the keys of a client (see `bin/make-keys`), for a broker and learner that
            have keys; None for those that have none.

    Raises:
        EndpointError: An endpoint is malformed.
        KeysError: There are no keys of a client in the folder, or others can read them.
    """

    def __init__(
        self,
        endpoint: Optional[str] = None,
        *,
        timeout: float = 30.0,
        name: Optional[str] = None,
        mode: str = "train",
        rank: Optional[int] = None,
        world_size: Optional[int] = None,
        max_message_mb: int = sockets.MAX_MESSAGE_MB,
        learner: Optional[str] = None,
        envs: Any = None,
        action_space: Any = None,
        trajectory_steps: int = 16,
        keys: Union[str, os.PathLike[str], None] = None,
    ) -> None:
        self.endpoint = endpoint or sockets.local_endpoint("frontend")
        self.timeout = checked_timeout(timeout)
        self._place = checked_place(rank, world_size)
        self.name = checked_name(name) or f"client-{os.urandom(4).hex()}"
        self.mode = checked_mode(mode)
        self._max_message_mb = max_message_mb
        self._keys = None if keys is None else Keys.load(keys, "client")
        # Later processes of one name have larger numbers; a fork and a rebuilt socket keep theirs.
        self._incarnation = time.time_ns()
        self._next_id = 1
        self._closed = False
        self._pid = os.getpid()
        self._rows = None if envs is None else int(getattr(envs, "num_envs", 1))
        self._recorder: Optional[Recorder] = None
        self._learner: Optional[Dict[str, Any]] = None
        if learner is not None:
            self._learner = {
                "learner": learner,
                "steps": trajectory_steps,
                "envs": envs,
                "action_space": action_space,
            }
        self._open()

    # -- What a user calls

    def infer(
        self,
        observation: Any,
        mode: Optional[str] = None,
        timeout: Optional[float] = None,
        copy: bool = True,
        reset: Any = None,
        ids: Any = None,
        *,
        policy: str = "",
        version: int = 0,
    ) -> Dict[str, Any]:
        """Actions for a batch of observations.

        Args:
            observation: A tree; every array [N, ...], one row a simulator.
            mode: `train` for sampled actions, `eval` for deterministic ones; None for the client's own.
            timeout: Seconds; None for the client's own.
            copy: False promises that the arrays do not change until this returns.
            reset: For a policy with memory: truth values [N], or one for all; True in rows whose
                observation begins an episode.
            ids: With `reset`: int [N], which env of this client each row is; None for 0 … N - 1.
            policy: The name of the policy that is asked, of several; empty for the pool's own.
            version: Of the weights that must answer; 0 for the newest.

        Returns:
            The policy's output; `actions` [N, ...] and whatever else it returns.

        Raises:
            EncodeError: The observation holds what cannot be sent, or rows that differ; names the path.
            BrokerUnreachable: No broker answered within the timeout.
            AuthenticationFailed: It does not let this client's key in, or the other way round.
            PolicyTimeout: The broker did, but no reply came within the timeout.
            PolicyError: The policy failed on this observation; has the remote traceback.
            StateLost: The pool has lost the state of some rows, which must begin an episode.
            ClientError: Another of its kinds, see `zmqrl.errors`.
        """
        return _waited_for(
            self.submit(
                observation,
                mode,
                timeout,
                copy,
                policy=policy,
                version=version,
                reset=reset,
                ids=ids,
            )
        )

    def infer_one(
        self,
        observation: Any,
        mode: Optional[str] = None,
        timeout: Optional[float] = None,
        reset: Optional[bool] = None,
        ids: Any = None,
        *,
        policy: str = "",
        version: int = 0,
    ) -> Dict[str, Any]:
        """Actions for a single observation that has no batch axis.

        Args:
            observation: A tree; arrays [...], scalars and str.
            mode: As in `infer`.
            timeout, policy, version: As in `infer`.
            reset: For a policy with memory: whether the observation begins an episode.
            ids: With `reset`: the number of the env of this client; None for 0.

        Returns:
            The policy's output without its first axis; `actions` [...].

        Raises:
            ClientError, EncodeError: As `infer`.
        """
        pending = self.submit(
            with_axis(observation),
            mode,
            timeout,
            policy=policy,
            version=version,
            reset=reset,
            ids=ids,
        )
        pending.single = True
        return {key: without_axis(value) for key, value in _waited_for(pending).items()}

    def submit(
        self,
        observation: Any,
        mode: Optional[str] = None,
        timeout: Optional[float] = None,
        copy: bool = True,
        stage: int = 0,
        policy: str = "",
        version: int = 0,
        reset: Any = None,
        ids: Any = None,
    ) -> Pending:
        """Send a batch of observations without waiting; arguments as for `infer`.

        Args:
            observation: A tree; every array [N, ...].
            mode: `train` or `eval`; None for the client's own.
            timeout: Seconds until the request ends in an error; None for the client's own.
            copy: False promises that the arrays do not change until the result is here.
            stage: The pipeline stage, for an env worker that steps several groups of envs in turn.
            policy: The name of the policy that is asked; empty for the pool's own.
            version: Of the weights that must answer; 0 for the newest.
            reset: As in `infer`; of an env only one request can be under way.
            ids: As in `infer`; each stage has envs of its own.

        Raises:
            EncodeError, ClientInUse, ClientClosed: At once.
            LearnerUnreachable, LearnerTimeout, LearnerRefused: With a learner, which lets trajectories
                begin when it wants more: at the latest after `timeout`.
            TrainingEnded: It wants no more.
            ValueError: The rows are not those of `envs`, or `reset` or `ids` cannot be.
        """
        chosen = self.mode if mode is None else checked_mode(mode)
        seconds = self.timeout if timeout is None else checked_timeout(timeout)
        # Copied once: here, or into shared memory.
        borrowed = copy and self._connection.shares_memory
        simulators = None if policy else self._rows
        if not 0 <= stage < 256:
            raise ValueError(f"stage must be in 0 … 255, not {stage!r}")
        ask, tree, what = None, observation, "the observation"
        if reset is not None:
            with self._exclusive():
                ask = self._memory.ask(observation, reset, ids, stage, policy)
            tree, what = ask.tree, ask.what
        parts, rows = encoded_observation(
            tree, copy and not borrowed, simulators, self._max_message_mb, what
        )
        deadline = time.monotonic() + seconds
        with self._exclusive() as connection:
            recorder = self._recorder if chosen == "train" and not policy else None
            if recorder is not None:
                lost = ask is not None and ask.lost
                # In normal mode others must not wait at a barrier for what may not be asked.
                recorder.asks(stage, observation, lost, deadline, rest=connection.rest)
            request = request_of(
                parts,
                rows,
                deadline,
                borrowed,
                self._next_id,
                chosen,
                connection.flags | (0 if ask is None else ask.flags),
                stage,
                policy,
                version,
            )
            self._next_id += 1
            request.policy = policy
            connection.start(request)
            if ask is not None:
                ask.sent(request)  # not before: what was never sent would stay under way
            pending = Pending(self._exclusive, connection, request)
            if recorder is not None:
                recorder.asked(stage, pending)
            return pending

    def record(
        self,
        reward: Any,
        terminated: Any,
        truncated: Any,
        final_obs: Any = None,
        valid: Any = None,
        stage: int = 0,
    ) -> None:
        """Tell the learner what the step with the latest actions gave, for training.

        The loop that calls it:

            obs, info = envs.reset()
            while True:
                result = policy.infer(obs)
                obs, reward, terminated, truncated, info = envs.step(result["actions"])
                policy.record(reward, terminated, truncated, info.get("final_obs"))

        Args:
            reward: Numbers `[N]` or `[N, 1]`.
            terminated: Truth values `[N]` or `[N, 1]`.
            truncated: The same.
            final_obs: A tree of `[N, ...]`, or N trees `[...]`: in the rows that are done, the
                observation in which the episode ended. A vector env that resets in its next step
                returns it as the next observation, so that None will do.
            valid: Truth values; False in rows where the step was a reset and no transition. Known
                without it if `envs` was given.
            stage: The pipeline stage, as in `submit`.

        Raises:
            ValueError: A shape is wrong, no learner was named, or `infer` did not come first.
            ClientError: The latest actions did not come.
        """
        if self._recorder is None:
            raise ValueError("record() needs PolicyClient(learner=…)")
        self._recorder.tell(reward, terminated, truncated, final_obs, valid, stage)

    def rest(self, stage: int = 0) -> None:
        """Say that this pipeline stage asks no more for now.

        In normal mode a rollout worker waits for all its env workers; from now on not for this one,
        until it asks again. In decoupled mode nobody waits anyway.
        """
        with self._exclusive() as connection:
            connection.rest(stage)

    def phase(self, name: str) -> None:
        """Tell the status of the pool what this client does from now on, until its next request.

        A client that says nothing is taken to `step` its simulators once it has its actions. What takes
        long, or may get stuck, deserves a name: `reset`, for instance.

        Args:
            name: 1 to 50 printable characters.
        """
        if not (0 < len(name) <= 50 and name.isprintable()):
            raise ValueError(f"a phase has a name of 1 to 50 printable characters, not {name!r}")
        with self._exclusive() as connection:
            connection.phase(name)

    def fileno(self) -> int:
        """A file descriptor for a loop that waits for this client and for others.

        It is for reading, in `select`, a selector, or a poller, and stays the same until `close`; a
        forked process gets one of its own. The loop that calls it:

            selector.register(policy, selectors.EVENT_READ)
            pending = policy.submit(obs)
            while not pending.done():
                selector.select(policy.catch_up())

        It tells of what comes after the last call of the client: any call may take in what has come
        before, and the sign of it. So call `catch_up` last before each wait.
        """
        with self._exclusive() as connection:
            return connection.fileno()

    def catch_up(self) -> float:
        """Take in what has arrived, and do what is due, such as to ask after what stays silent.

        It does not wait. Afterwards `Pending.done()` tells of each request whether it has ended.

        Returns:
            Seconds that may be waited; 0 if a request has ended since the last call, so that nobody
            waits before having looked.
        """
        with self._exclusive() as connection:
            return connection.catch_up()

    def close(self) -> None:
        """Say goodbye and close the socket; pending requests end in `ClientClosed`.

        Raises:
            ClientInUse: Another thread is in a call.
        """
        if self._closed:
            return
        if self._pid != os.getpid():
            self._closed = True
            return  # the socket is the parent's
        with self._exclusive() as connection:
            self._closed = True
            if self._recorder is not None:
                self._recorder.close()
            connection.close(ClientClosed("the client was closed"))

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- One process, and one caller at a time

    def _exclusive(self) -> _Turn:
        """The connection, for one call; a second thread is refused instead of made to wait."""
        if self._closed:
            raise ClientClosed("the client is closed")
        if self._pid != os.getpid():
            # A fork copied the socket's memory but not its I/O thread; never touch it here.
            self._open()
        return self._turn

    def _open(self) -> None:
        pid = os.getpid()
        name = self.name if pid == self._pid else f"{self.name}-{pid}"
        introduction: Dict[str, Any] = {
            "role": "client",
            "name": name,
            "incarnation": self._incarnation,
            "host": os.uname().nodename,
            "pid": pid,
            "mode": self.mode,
        }
        connection = Connection(self.endpoint, {**introduction, **self._place}, self._keys)
        if self._learner is not None:
            from zmqrl.recording.recorder import Recorder  # most clients record nothing

            try:
                self._recorder = Recorder(
                    name=name, incarnation=self._incarnation, keys=self._keys, **self._learner
                )
            except BaseException:
                connection.close(ClientClosed("the client was not opened"))
                raise
        self._connection, self._turn, self._memory = connection, _Turn(connection), Memory()
        # Last: if it fails, in a fork, what is here still belongs to the parent.
        self.name, self._pid = name, pid


class _Turn:
    """Gives a connection to one call at a time.

    A class, because a generator costs more than most of what a call does.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.lock = threading.Lock()
        self.owner: Optional[int] = None  # the thread that is in a call

    def __enter__(self) -> Connection:
        thread = threading.get_ident()
        # Held by this very thread: Ctrl-C ended its last call before it could let go.
        if not self.lock.acquire(blocking=False) and self.owner != thread:
            raise ClientInUse("the client is in use by another thread; give each thread its own")
        self.owner = thread
        return self._connection

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


def _waited_for(pending: Pending) -> Dict[str, Any]:
    """Its result; it is cancelled if the wait is broken off, by Ctrl-C for instance."""
    try:
        return pending.result()
    except BaseException:
        pending.cancel()  # nobody waits for it any more
        raise
