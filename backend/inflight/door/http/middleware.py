"""Around the routes of a door: keys, ids of requests, counts, spans and the access log."""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import time
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.door.http.gate import Gate
from inflight.door.tracing import RequestSpan, Tracing, Usage, model_of
from inflight.ipc.metrics.request_counts import RequestCounts

REQUEST_ID = "inflight.request_id"
"""Of a request, in its scope."""

PROBES = ("/v2/health/",)
"""Prefixes of paths."""

# As in nginx: the client left before it was answered.
_LEFT = 499


class TruncatedResponse(Exception):
    """A response that cannot be completed: its connection is closed."""


class Paths(NamedTuple):
    """The paths of a door.

    Attributes:
        pattern: of those, as they stand in a request line, that are passed on to the routes.
        refused: the application for all others.
        probes: prefixes of those of health probes, which are not counted.
    """

    pattern: re.Pattern[bytes]
    refused: ASGIApp
    probes: tuple[str, ...] = PROBES


class RequestMiddleware:
    """Around the routes: paths that are plain, keys, an id for each request, counts and the access
    log.

    Args:
        paths: which of them are passed on.
        gate: None if the server has no keys.
        has_access_log: prints one line for each request.
        counts: of requests by status, health probes excluded; or None.
        tracing: of inference requests; or None.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Paths,
        gate: Gate | None = None,
        *,
        has_access_log: bool = False,
        counts: RequestCounts | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._paths = paths
        self._log = _print if has_access_log else None
        self._gate = gate
        self._counts = counts
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope[REQUEST_ID] = secrets.token_hex(8)
        status, num_bytes, started = 0, 0, time.monotonic()

        async def send_marked(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", request_id.encode()))
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        is_plain = bool(self._paths.pattern.fullmatch(scope["raw_path"]))
        app = self._app if is_plain else self._paths.refused
        trace = self._trace(scope, request_id) if is_plain else None
        sender = send_marked if trace is None else trace.around(send_marked)
        try:
            with contextlib.suppress(TruncatedResponse):
                if self._gate is None:
                    await app(scope, receive, sender)
                else:
                    await self._gate.enter(app, scope, receive, sender)
        finally:
            if trace is not None:
                trace.end(status or _LEFT)
            if self._counts is not None and not scope["path"].startswith(self._paths.probes):
                self._counts.count(status or _LEFT)
        if self._log is not None:
            record = {
                "time": round(time.time(), 3),
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["raw_path"][:200].decode("ascii", "replace"),
                "status": status,
                "bytes": num_bytes,
                "ms": round((time.monotonic() - started) * 1e3, 1),
            }
            self._log(msgspec.json.encode(record).decode())

    def _trace(self, scope: Scope, request_id: str) -> _Trace | None:
        model = model_of(scope["path"]) if self._tracing is not None else None
        if self._tracing is None or model is None:
            return None
        headers = (
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        )
        return _Trace(self._tracing.begin(headers, request_id), model)


class _Trace:
    """The span of a request, from the messages of its response."""

    def __init__(self, span: RequestSpan, model: str) -> None:
        self._span = span
        self._usage = Usage()
        span.requested(model)

    def around(self, send: Send) -> Send:
        """Send, and read along."""

        async def send_traced(message: Message) -> None:
            part = message.get("body", b"")
            if part:
                self._span.responded()
                self._usage.feed(part)
            await send(message)

        return send_traced

    def end(self, status: int) -> None:
        self._usage.finish()
        self._span.used(self._usage)
        self._span.end(str(status), is_error=status >= 400)


def _print(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
