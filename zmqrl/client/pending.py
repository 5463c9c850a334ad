"""A request in flight."""

from __future__ import annotations

import time
from typing import Any, Callable, ContextManager, Dict, Optional, Tuple

from zmqrl.client.asking import Request
from zmqrl.client.connection import Connection
from zmqrl.errors import ClientError


class Pending:
    """A request in flight; `PolicyClient.submit` returns it."""

    def __init__(
        self,
        exclusive: Callable[[], ContextManager[Connection]],
        connection: Connection,
        request: Request,
    ) -> None:
        self._exclusive = exclusive  # the client's connection, for one call
        self._connection = connection
        self._request = request
        self.single = False
        """Whether the observation had no batch axis of its own."""

    @property
    def stage(self) -> int:
        """The pipeline stage that it was submitted for."""
        return self._request.header.stage

    @property
    def sizes(self) -> Tuple[int, int]:
        """Bytes of the request and of its reply, without headers; the latter 0 before the reply."""
        return self._request.size, self._request.reply_size

    @property
    def policy_version(self) -> Optional[int]:
        """The version of the weights that made the reply; None before the reply."""
        reply = self._request.reply
        return None if reply is None else reply.policy_version

    @property
    def queue_seconds(self) -> Optional[float]:
        """Seconds that the request waited in the broker's queue; None before the reply."""
        reply = self._request.reply
        return None if reply is None else reply.queue_us / 1e6

    @property
    def predict_seconds(self) -> Optional[float]:
        """Seconds that the policy took for the batch it was in; None before the reply."""
        reply = self._request.reply
        return None if reply is None else reply.predict_us / 1e6

    def done(self) -> bool:
        """Whether the result, or an error, is here; reads what has arrived, without waiting."""
        return self.wait(0.0)

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Wait until the request has ended.

        Args:
            timeout: Seconds; None waits until the request's own deadline.

        Returns:
            Whether it has ended, be it in a result or an error.
        """
        if not self._request.done:
            until = float("inf") if timeout is None else time.monotonic() + timeout
            with self._exclusive() as connection:
                if self._is_on(connection):
                    connection.wait(self._request, until)
        return self._request.done

    def result(self) -> Dict[str, Any]:
        """Wait for the reply.

        Returns:
            The policy's output, arrays of shape [N, ...]; the actions under `actions`.

        Raises:
            ClientError: One of its named kinds, at the latest at the request's deadline.
        """
        self.wait()
        if self._request.error is not None:
            raise self._request.error
        result: Dict[str, Any] = self._request.result
        return result

    def call_when_ended(self, function: Callable[[], None]) -> None:
        """Have `function` called once the result, or an error, is here.

        That is within a call of the client, which the function must leave alone.
        """
        if self._request.done:
            function()
        else:
            self._request.ended = function

    def cancel(self) -> None:
        """Give the request up; the broker is told, so that no worker runs it in vain."""
        if not self._request.done:
            with self._exclusive() as connection:
                if self._is_on(connection):
                    connection.cancel(self._request)

    def _is_on(self, connection: Connection) -> bool:
        """Whether the request is this process's own; one made before a fork is the parent's."""
        if connection is not self._connection:
            self._request.end(error=ClientError("the request belongs to the parent process"))
        return not self._request.done
