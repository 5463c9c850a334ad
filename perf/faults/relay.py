"""A TCP relay that can fall silent, as a network does: nothing gets through, and nobody is told."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class Relay:
    """Forwards TCP connections to an ipc endpoint.

    While it is frozen, no byte goes either way and no connection is closed or refused; once thawed it
    goes on where it stopped, as TCP does when the network is back.

    Args:
        endpoint: `ipc://…`, where to forward to.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = ""
        """Where it listens."""
        self._path = endpoint.removeprefix("ipc://")
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._relay()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10.0)

    def freeze(self) -> None:
        """Let nothing through."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def thaw(self) -> None:
        """Let everything through again."""
        self._loop.call_soon_threadsafe(self._flows.set)

    def close(self) -> None:
        """Cut all connections, and listen no more."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10.0)

    async def _relay(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._flows, self._over = asyncio.Event(), asyncio.Event()
        self._flows.set()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._over.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        try:
            back, forth = await asyncio.open_unix_connection(self._path)
        except OSError:
            writer.close()
            return
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._pump(reader, forth), self._pump(back, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
            await self._flows.wait()
        finally:
            writer.close()
