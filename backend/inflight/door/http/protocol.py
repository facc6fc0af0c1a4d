"""A client's connection, with the bounds that uvicorn lacks."""

from __future__ import annotations

import asyncio
import re
from asyncio import TimerHandle
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from inflight.door.http.refusal import Refusal, unavailable
from inflight.door.limits import Limits

# After an answer to a request whose body has not come yet. Closed at once, the client would see a
# reset instead of the answer.
LINGER_S = 2.0
_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


class BoundedProtocol(HttpToolsProtocol):
    """Refuses malformed, large and slow heads, and cuts off clients that do not read.

    Bodies are bounded where they are read. Class attribute `limits` holds for all connections.
    """

    limits = Limits()

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        self._linger_timer: TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._head_bytes = 0
        self._is_in_head = False
        self._is_refused = False

    # The transport's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(unavailable("the server has too many connections; retry later"))
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.limits.idle_timeout_s, self.timeout_keep_alive_handler
            )

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        # uvicorn only informs the connection's last request; with pipelining an earlier one runs.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.parser is None:
            return
        self._unset_keepalive_if_required()
        if self._head_timer is None and self._linger_timer is None and not self._is_busy():
            self._head_timer = self.loop.call_later(
                self.limits.header_timeout_s, self._refuse_slow_head
            )
        was_in_head = self._is_in_head
        try:
            self.parser.feed_data(data)
            if was_in_head and self._is_in_head:
                self._count_head(len(data))
        except Refusal as refusal:
            self._refuse(refusal)
        except httptools.HttpParserUpgrade:
            self._refuse(Refusal("Upgrade: is not supported; allowed: HTTP/1.1", 400))
        except httptools.HttpParserError as error:
            cause = error.__context__
            malformed = Refusal("request: is not valid HTTP/1.1", 400)
            self._refuse(cause if isinstance(cause, Refusal) else malformed)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(
                self.limits.write_timeout_s, self.transport.abort
            )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # The parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head(len(name) + len(value) + 4)
        if len(self.headers) > self.limits.max_headers:
            raise Refusal(f"headers: too many; allowed: {self.limits.max_headers}", 431)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        self._check_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        super().on_message_complete()

    # uvicorn's

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        done = self._running
        super().on_response_complete()
        if done is self.cycle and done is not None and done.more_body:
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Abort, not close: close would wait for a client that has not read the last response."""
        self.transport.abort()

    # Ours

    def body_of(self, refusal: Refusal) -> bytes:
        """JSON, of the response to a malformed request."""
        return refusal.body

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self.limits.max_header_bytes:
            raise Refusal(f"headers: too long; allowed: {self.limits.max_header_bytes} bytes", 431)

    def _check_head(self) -> None:
        """Refuse what proxies and servers parse differently (request smuggling)."""
        found: dict[bytes, list[bytes]] = {}
        for name, value in self.headers:
            found.setdefault(name, []).append(value)
        hosts = found.get(b"host", [])
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            raise Refusal(f"Host: occurs {len(hosts)} times; allowed: once")
        if hosts and not _HOST.fullmatch(hosts[0]):
            raise Refusal("Host: is not valid; allowed: a name or an address, and a port")
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise Refusal("version: is not supported; allowed: HTTP/1.1 and HTTP/1.0")
        codings = found.get(b"transfer-encoding", [])
        if codings and (b"content-length" in found or len(codings) > 1):
            raise Refusal("Transfer-Encoding: occurs with Content-Length, or twice; allowed: one")
        if codings and codings[0].strip().lower() != b"chunked":
            raise Refusal("Transfer-Encoding: is not supported; allowed: chunked")
        if len(found.get(b"content-length", [])) > 1:
            raise Refusal("Content-Length: occurs twice; allowed: once")
        if not self.url.startswith(b"/"):
            raise Refusal("path: is not valid; allowed: one that begins with a slash")

    def _is_busy(self) -> bool:
        """Whether the response to a received request is incomplete."""
        return self._running is not None and not self._running.response_complete

    def _refuse(self, refusal: Refusal) -> None:
        """Respond to a malformed request, and close the connection."""
        self._is_refused = True
        if self.transport.is_closing():
            return
        running = self._running
        if running is not None and self._is_busy():
            if running is not self.cycle or not running.more_body or running.response_started:
                running.keep_alive = False  # the answer in progress is the last one
                return
            running.disconnected = True
            running.message_event.set()
        body = self.body_of(refusal)
        lines = [
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in refusal.headers.items()),
        ]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop_head_timer()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _refuse_slow_head(self) -> None:
        self._refuse(Refusal(f"headers: took over {self.limits.header_timeout_s:g} s", 408))

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
