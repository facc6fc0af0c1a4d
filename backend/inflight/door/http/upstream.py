"""The door's HTTP client: kept connections to one tritonserver, on the same machine. The load
generator of `inflight bench serve` uses it for other servers, too."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

# Of a response that its client does not take as fast as Triton sends it: reading pauses above.
HIGH_WATER_BYTES = 64 << 10
MAX_IDLE = 256
# On loopback it takes microseconds, unless Triton's queue of connections is full.
CONNECT_TIMEOUT_S = 5.0
# Triton's heads have some 200 bytes; the parser has no limit of its own.
MAX_HEAD_BYTES = 64 << 10
MAX_STATUS = 599


class UpstreamLost(Exception):
    """Triton closed the connection, or never accepted it, before its response was complete."""


class Upstream:
    """Connections to the tritonserver at host:port; one request at a time on each.

    Requests are never sent twice: one that took Triton down would take down the next one as well.

    Args:
        tls: connect with TLS; None for plain HTTP.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle: deque[Exchange] = deque()

    async def connect(self) -> Exchange:
        """A kept connection, or a new one. Raises UpstreamLost."""
        while self._idle:
            exchange = self._idle.pop()
            if not exchange.is_closed:
                return exchange
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, exchange = await asyncio.get_running_loop().create_connection(
                    lambda: Exchange(f"{self._host}:{self._port}", self._release),
                    self._host,
                    self._port,
                    ssl=self._tls,
                )
        except OSError:  # TimeoutError is one
            raise UpstreamLost from None
        return exchange

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and whole body. Raises UpstreamLost."""
        return await self._whole("GET", path, b"")

    async def post(
        self, path: str, body: bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and whole body. Raises UpstreamLost."""
        return await self._whole("POST", path, body, headers)

    async def _whole(
        self, method: str, path: str, body: bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        exchange = await self.connect()
        try:
            await exchange.send(method, path, headers or {}, body)
            return exchange.status, await exchange.read_all()
        finally:
            exchange.finish()

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()

    def _release(self, exchange: Exchange) -> None:
        if len(self._idle) < MAX_IDLE:
            self._idle.append(exchange)
        else:
            exchange.close()


class Exchange(asyncio.Protocol):
    """A connection, and the response to its present request.

    Attributes:
        status: of the response.
        headers: of the response, with names in lower case.
    """

    def __init__(self, host: str, release: Callable[[Exchange], None]) -> None:
        self._host = host
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_closed = False
        self._release = release
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._num_head_bytes = 0
        self._has_head = False
        self._is_complete = True
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since = 0.0
        self._is_stalled = False
        # One timer for a response: one for each part of a stream would cost more than the part.
        self._watch: asyncio.TimerHandle | None = None

    async def send(
        self, method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> None:
        """Send a request and wait for the head of its response.

        Args:
            path: raw, as it stands in a request line.

        Raises:
            UpstreamLost: it is not known whether Triton saw the request.
        """
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if method == "POST":
            lines.append(f"Content-Length: {len(body)}")
        self.status, self.headers = 0, {}
        self._num_head_bytes = 0
        self._has_head = self._is_complete = False
        self._parts.clear()
        self._parser = httptools.HttpResponseParser(self)
        if self._transport is not None and not self.is_closed:
            self._transport.write("\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + body)
        while not self._has_head:
            await self._wait()

    async def read(self, timeout_s: float | None = None) -> bytes:
        """What has arrived of the body since the last call, at least one byte; b"" at its end.

        Raises:
            UpstreamLost: the body is not complete.
            TimeoutError: nothing has arrived for so long.
        """
        if timeout_s is not None and self._watch is None:
            self._watch_silence(timeout_s)
        while not self._parts:
            if self._is_complete:
                return b""
            await self._wait()
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return part

    async def read_all(self, timeout_s: float | None = None) -> bytes:
        """The whole body. Raises as `read` does."""
        parts = []
        while part := await self.read(timeout_s):
            parts.append(part)
        return b"".join(parts)

    def finish(self) -> None:
        """Keep the connection for another request, if the response was complete."""
        self._end_watch()
        if self._is_complete and not self.is_closed:
            self._release(self)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection at once; Triton cancels a request in flight. `read` then raises."""
        self._end_watch()
        if not self.is_closed:
            self.is_closed = True
            if self._transport is not None:
                self._transport.abort()
        self._wake()

    async def _wait(self) -> None:
        if self.is_closed:
            raise UpstreamLost
        if self._is_stalled:
            raise TimeoutError
        loop = asyncio.get_running_loop()
        self._waits_since = loop.time()
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _watch_silence(self, timeout_s: float) -> None:
        """Have `read` raise TimeoutError once it has waited for so long."""
        loop = asyncio.get_running_loop()

        def check() -> None:
            waited = loop.time() - self._waits_since if self._waiter is not None else 0.0
            if waited < timeout_s:
                self._watch = loop.call_later(timeout_s - waited, check)
            else:
                self._is_stalled = True
                self._wake()

        self._watch = loop.call_later(timeout_s, check)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._is_complete:
            self.close()  # no request is in flight
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            return
        if not self._has_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.close()
                return
        if self._num_bytes > HIGH_WATER_BYTES and not self._is_paused:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._parser = None
        self._wake()

    # The parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status > MAX_STATUS:
            self.close()
        elif status >= 200:  # after an interim response, the one that counts follows
            self.status = status
            self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._num_bytes += len(body)

    def on_message_complete(self) -> None:
        if not self._has_head:
            self.headers = {}
            return
        assert self._parser is not None
        self._is_complete = True
        if not self._parser.should_keep_alive() and self._transport is not None:
            self.is_closed = True
            self._transport.close()
