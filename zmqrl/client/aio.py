"""The client for asyncio: many calls at once on one socket, on the loop's own thread."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Dict, Optional, Set, Union

from zmqrl.client.client import PolicyClient
from zmqrl.client.pending import Pending
from zmqrl.errors import ClientInUse
from zmqrl.transport.sockets import MAX_MESSAGE_MB
from zmqrl.transport.tree import with_axis, without_axis


class AsyncPolicyClient:
    """Asks the policy of a zmqrl pool for actions, from an asyncio program.

    The task that calls it, of which there may be many on one client:

        async with AsyncPolicyClient("tcp://127.0.0.1:5757") as policy:
            obs, info = env.reset()
            while True:
                result = await policy.infer(obs)
                obs, reward, terminated, truncated, info = await step(env, result["actions"])

    A client belongs to the event loop that uses it first. A task that is cancelled gives up its request,
    and the broker is told. It starts no thread and never blocks the loop.

    Args:
        endpoint, timeout, name, mode, rank, world_size, max_message_mb, keys: As for `PolicyClient`.

    Raises:
        EndpointError: The endpoint is malformed.
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
        max_message_mb: int = MAX_MESSAGE_MB,
        keys: Union[str, os.PathLike[str], None] = None,
    ) -> None:
        self._client = PolicyClient(
            endpoint,
            timeout=timeout,
            name=name,
            mode=mode,
            rank=rank,
            world_size=world_size,
            max_message_mb=max_message_mb,
            keys=keys,
        )
        self._pid = os.getpid()
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._file = -1
        self._timer: Optional[asyncio.TimerHandle] = None
        self._is_due = False  # whether the loop is to catch up as soon as it can
        self._waiting: Set[asyncio.Future[None]] = set()

    async def infer(
        self,
        observation: Any,
        mode: Optional[str] = None,
        timeout: Optional[float] = None,
        **options: Any,
    ) -> Dict[str, Any]:
        """Actions for a batch of observations.

        Args:
            observation: A tree; every array [N, ...], one row a simulator.
            mode: `train` for sampled actions, `eval` for deterministic ones; None for the client's own.
            timeout: Seconds; None for the client's own.
            options: The others of `PolicyClient.submit`, such as `policy`.

        Returns:
            The policy's output; `actions` [N, ...] and whatever else it returns.

        Raises:
            EncodeError, ClientError: As `PolicyClient.infer`.
            ClientInUse: The client belongs to another event loop, or to the parent process.
        """
        loop = self._own_loop()
        return await self._answer(loop, self._client.submit(observation, mode, timeout, **options))

    async def infer_one(
        self,
        observation: Any,
        mode: Optional[str] = None,
        timeout: Optional[float] = None,
        **options: Any,
    ) -> Dict[str, Any]:
        """Actions for a single observation that has no batch axis; otherwise as `infer`.

        Args:
            observation: A tree; arrays [...], scalars and str.
            mode: As in `infer`.
            timeout: As in `infer`.
            options: As in `infer`.

        Returns:
            The policy's output without its first axis; `actions` [...].

        Raises:
            ClientError, EncodeError: As `infer`.
        """
        result = await self.infer(with_axis(observation), mode, timeout, **options)
        return {key: without_axis(value) for key, value in result.items()}

    async def close(self) -> None:
        """Say goodbye and close the socket; calls that wait end in `ClientClosed`.

        Raises:
            ClientInUse: The client belongs to another event loop, which is not closed.
        """
        if self._pid == os.getpid() and self._loop is not None:
            # The selector of a forked loop is the parent's: nothing may be removed there.
            if not self._loop.is_closed():
                self._own_loop().remove_reader(self._file)
            self._loop = None
            if self._timer is not None:
                self._timer.cancel()
        self._client.close()

    async def __aenter__(self) -> AsyncPolicyClient:
        self._own_loop()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- Its place in the event loop

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop, which this client belongs to from now on."""
        if self._pid != os.getpid():
            raise ClientInUse("the client belongs to the parent process; make another after a fork")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._file = self._client.fileno()
            loop.add_reader(self._file, self._catch_up)
            self._loop = loop
        elif self._loop is not loop:
            raise ClientInUse("the client belongs to another event loop; make one in each")
        return loop

    async def _answer(self, loop: asyncio.AbstractEventLoop, pending: Pending) -> Dict[str, Any]:
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done() and not loop.is_closed():
                future.set_result(None)

        pending.call_when_ended(wake)
        self._waiting.add(future)
        try:
            self._catch_up_soon(loop)
            await future
        except BaseException:
            pending.cancel()  # nobody waits for it any more
            self._catch_up_soon(loop)
            raise
        finally:
            self._waiting.discard(future)
        return pending.result()

    def _catch_up_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Once for all that the tasks of now send: sending takes the sign of what has come away."""
        if not self._is_due and not loop.is_closed():
            self._is_due = True
            loop.call_soon(self._catch_up)

    def _catch_up(self) -> None:
        self._is_due = False
        if self._loop is None:
            return  # closed meanwhile
        try:
            due = self._loop.time() + self._client.catch_up()
        except Exception as error:  # no more files for a new socket, for instance
            for future in self._waiting:
                if not future.done():
                    future.set_exception(error)
            return
        # One that is too early costs a look; to make it anew for each request would cost more.
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._catch_up()
