"""A TCP proxy that delays, resets or swallows what passes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

from waiting import PATIENCE_S

CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST


class TcpProxy:
    """Forwards connections to one address, on a thread of its own.

    Args:
        target: host:port.

    Attributes:
        address: host:port for clients.
        delay_s: of each chunk, in both directions.
        is_black_hole: nothing is read any more, and no connection is closed.
    """

    def __init__(self, target: str) -> None:
        self.delay_s = 0.0
        self.is_black_hole = False
        self.address = ""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        assert self._has_begun.wait(PATIENCE_S)

    def reset(self) -> None:
        """Reset all connections, on both sides."""
        self._loop.call_soon_threadsafe(self._reset)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._has_begun.set()
        await self._stop.wait()
        server.close()
        self._reset()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection(self._host, self._port, limit=CHUNK)
        self._writers |= {writer, onward[1]}
        pumps = (self._pump(reader, onward[1]), self._pump(onward[0], writer))
        with contextlib.suppress(asyncio.CancelledError):  # asyncio would log it
            await asyncio.gather(*pumps)
        self._writers -= {writer, onward[1]}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                while self.is_black_hole:
                    await asyncio.sleep(0.02)
                data = await reader.read(CHUNK)
                await asyncio.sleep(self.delay_s)
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    def _reset(self) -> None:
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


@contextlib.contextmanager
def proxied(target: str) -> Iterator[TcpProxy]:
    proxy = TcpProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
