"""The HTTP door's routes: those of KServe and Triton that serve models; all others are closed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.door.http import generate, infer
from inflight.door.http.busy_poll import BusyPoll
from inflight.door.http.gate import Gate, check_model, visit_of
from inflight.door.http.generate import Models
from inflight.door.http.refusal import Refusal, from_triton, of_error, unavailable
from inflight.door.http.renamed import Renamed
from inflight.door.http.upstream import Exchange, Upstream, UpstreamLost
from inflight.door.limits import Limits
from inflight.door.tracing import RequestSpan, Tracing, Usage, model_of
from inflight.door.versions import resolve
from inflight.errors import InflightError
from inflight.ipc import health
from inflight.ipc.health import Health
from inflight.ipc.metrics.request_counts import RequestCounts
from inflight.ipc.metrics.usage import ACCOUNT
from inflight.ipc.sockets.disconnects import TICKET, DisconnectReporter, new_ticket

T = TypeVar("T")

# The supervisor writes it several times a second.
HEALTH_TTL_S = 0.1
METRICS_TIMEOUT_S = 10.0
_JSON = "application/json"
_METRICS = "text/plain; version=0.0.4"
_OCTETS = "application/octet-stream"
# `curl -d` sends JSON as a form.
_TYPES = ("", _JSON, _OCTETS, "application/x-www-form-urlencoded")
# A body of 4 MiB can take 0.4 s to check; this one takes some 10 ms at most. In bytes.
_LARGE_BODY = 128 << 10
_HEALTH = "/v2/health/"
_MODELS = "/v2/models/"
# As in nginx: the client left before it was answered.
_LEFT = 499
_HEADER_LENGTH = "inference-header-content-length"
_CLOSED = re.compile(
    r"/v2/(?:(?:system|cuda)sharedmemory|logging|trace|repository/models|models/[^/]+/trace)(?:/|$)"
)
# No names of dots alone, no percent-encoding, no empty segments.
_PATH = re.compile(rb"(?:/(?!\.+(?:/|$))[A-Za-z0-9_.-]{1,128})+")
_VERSION = re.compile(r"[0-9]{1,18}")
_DIGITS = re.compile(r"[0-9]{1,12}")
_ENDED = "the server stopped while it generated this response; send the request again"
_STALLED = "the server did not continue this response in time; send the request again"
_NO_ANSWER = "the server closed the connection before it answered; retry later"


class HealthFile:
    """The server's health as of at most `HEALTH_TTL_S` ago."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at = -HEALTH_TTL_S
        self._health = health.UNKNOWN

    def read(self) -> Health:
        now = time.monotonic()
        if now - self._read_at >= HEALTH_TTL_S:
            self._health, self._read_at = health.read(self._path), now
        return self._health


class Door:
    """The state that the routes share.

    Args:
        upstream: to Triton.
        health_file: written by the supervisor.
        metrics: to Triton's metrics; None if they are not served here.
        busy_poll_s: see `BusyPoll`.
    """

    def __init__(
        self,
        upstream: Upstream,
        health_file: Path,
        limits: Limits,
        metrics: Upstream | None = None,
        busy_poll_s: float = 0.0,
    ) -> None:
        self.upstream = upstream
        self.busy_poll = BusyPoll(busy_poll_s)
        self.metrics_upstream = metrics
        self.limits = limits
        self.health = HealthFile(health_file)
        self.disconnects = DisconnectReporter(health_file.parent)
        self.models = Models(upstream)
        self._num_buffered = 0

    # What the health file answers

    async def live(self, request: Request) -> Response:
        return _probe(self.health.read().is_live, "the server is not live")

    async def ready(self, request: Request) -> Response:
        found = self.health.read()
        return _probe(found.is_ready, found.reason or "the server is not ready")

    async def model_ready(self, request: Request) -> Response:
        check_model(request)
        found = self.health.read()
        if not found.is_ready:
            return _probe(False, found.reason or "the server is not ready")
        return await self.metadata(request)

    async def index(self, request: Request) -> Response:
        """From the health file: Triton's own route belongs to its control of models."""
        body = await self._body(request)
        if body:
            await _checked(body, partial(generate.rebuild, body, {}, self.limits))
        visit, found = visit_of(request), self.health.read()
        models = [
            {"name": name, "version": str(version), "state": "READY"}
            for name in found.models
            if visit is None or visit.key.allows(name)
            for version in found.versions.get(name, (1,))
        ]
        return Response(msgspec.json.encode(models), media_type=_JSON)

    # What Triton answers

    async def metadata(self, request: Request) -> Response:
        check_model(request)
        _check_version(request)
        await self._body(request)  # of no meaning, but it has to be out of the way
        path, renamed = self._target(request)
        versions = self.health.read().versions
        if versions and renamed is None:
            renamed = Renamed("")  # a response may be about all models
        is_whole = renamed is not None
        return Relay(self, "GET", path, b"", {}, is_whole=is_whole, renamed=renamed)

    async def metrics(self, request: Request) -> Response:
        """Of the whole server and by tenant, for admins."""
        visit = visit_of(request)
        if visit is None or self.metrics_upstream is None:
            raise _NOT_FOUND
        by_tenant = await visit.tenant_metrics()
        try:
            async with asyncio.timeout(METRICS_TIMEOUT_S):
                status, body = await self.metrics_upstream.get("/metrics")
        except (UpstreamLost, TimeoutError):
            raise unavailable(self.health.read().reason or _NO_ANSWER) from None
        if status != 200:
            raise from_triton(status, body)
        return Response(body + by_tenant.encode(), media_type=_METRICS)

    async def infer(self, request: Request) -> Response:
        body = await self._admitted_body(request)
        length = request.headers.get(_HEADER_LENGTH)
        if length is None:
            length = str(len(body))
        elif not _DIGITS.fullmatch(length) or not 0 < int(length) <= len(body):
            raise Refusal(
                "Inference-Header-Content-Length: is not valid; allowed: the number of bytes of "
                "JSON, within the body"
            )
        own = _own_parameters(request)
        body, json_length = await _checked(
            body, partial(infer.rebuild, body, int(length), self.limits, own)
        )
        headers = {"Content-Type": _JSON}
        if json_length < len(body):
            headers = {"Content-Type": _OCTETS, _HEADER_LENGTH: str(json_length)}
        path, renamed = self._target(request)
        is_whole = renamed is not None
        relay = Relay(self, "POST", path, body, headers, is_whole=is_whole, renamed=renamed)
        relay.ticket = own[TICKET]
        return relay

    async def generate(self, request: Request) -> Response:
        body = await self._admitted_body(request)
        path, renamed = self._target(request)
        model, _, route = path.rpartition("/")
        inputs = await self.models.inputs(model)
        own = _own_parameters(request)
        body = await _checked(body, partial(generate.rebuild, body, inputs, self.limits, own))
        headers, is_whole = {"Content-Type": _JSON}, route == "generate"
        relay = Relay(self, "POST", path, body, headers, is_whole=is_whole, renamed=renamed)
        relay.ticket = own[TICKET]
        return relay

    def _target(self, request: Request) -> tuple[str, Renamed | None]:
        """The path of a request in Triton; and what renames the response, if the model has several
        versions. Raises UnknownModel: the version is not loaded."""
        path: str = request.scope["path"]
        model = request.path_params.get("model", "")
        found = self.health.read()
        name = resolve(found, model, request.path_params.get("version", ""))
        if name == model:
            return path, None
        place = len(_MODELS)
        return _MODELS + name + path[place + len(model) :], Renamed(name, found.versions[model])

    async def _admitted_body(self, request: Request) -> bytes:
        _check_version(request)
        found = self.health.read()
        if not found.is_ready:
            raise unavailable(found.reason)
        visit = visit_of(request)
        if visit is not None:
            await visit.begin(request.path_params["model"])
        return await self._body(request)

    async def _body(self, request: Request) -> bytes:
        """The body, once its headers have been checked. Raises Refusal."""
        headers, limits = request.headers, self.limits
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in _TYPES:
            raise Refusal(f"Content-Type: is not supported; allowed: {_JSON} and {_OCTETS}", 415)
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise Refusal("Content-Encoding: is not supported; allowed: identity", 415)
        length = headers.get("content-length", "0")
        if not _DIGITS.fullmatch(length) or int(length) > limits.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                await self._receive(request, body)
        except TimeoutError:
            raise Refusal(f"body: took over {limits.body_timeout_s:g} s", 408) from None
        finally:
            self._num_buffered -= len(body)
        return bytes(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Append all of a body. Raises Refusal."""
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise Refusal("the client has closed the connection", 499)
            part = message.get("body", b"")
            body += part
            self._num_buffered += len(part)
            if len(body) > self.limits.max_body_bytes:
                raise self._too_large()
            if self._num_buffered > self.limits.max_buffered_bytes:
                raise unavailable("the server receives too many large requests; retry later")
            if not message.get("more_body", False):
                return

    def _too_large(self) -> Refusal:
        return Refusal(f"body: is too large; allowed: {self.limits.max_body_bytes} bytes", 413)


async def _checked(body: bytes, check: Callable[[], T]) -> T:
    """The result of a check of this body; a large one is checked beside the event loop."""
    if len(body) <= _LARGE_BODY:
        return check()
    try:
        return await asyncio.to_thread(check)
    except RuntimeError:  # no further thread can be started
        raise unavailable("the server has too many threads; retry later") from None


class Relay(Response):
    """Triton's response, relayed as it arrives.

    Args:
        is_whole: the answer is passed on once it is complete; its status may come too early.
        renamed: gives the response the name of the model that the client used.

    Attributes:
        ticket: of an inference request, reported if it does not get its whole response.
    """

    def __init__(
        self,
        door: Door,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        *,
        is_whole: bool = False,
        renamed: Renamed | None = None,
    ) -> None:
        self._door = door
        self._request = (method, path, headers, body)
        self._is_whole = is_whole
        self._renamed = renamed
        self.ticket = ""
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            exchange = await self._door.upstream.connect()
        except UpstreamLost:
            raise self._lost() from None
        # The body has been read: what comes next is that the client has left.
        leaving = asyncio.ensure_future(receive())

        def leave(left: object) -> None:
            exchange.close()

        leaving.add_done_callback(leave)
        is_complete = False
        try:
            with self._door.busy_poll.awaiting():
                async with asyncio.timeout(self._door.limits.first_byte_timeout_s):
                    await exchange.send(*self._request)
                await self._pass_on(exchange, scope, receive, send)
            is_complete = True
        except UpstreamLost:
            if not leaving.done():
                raise self._lost() from None
        except TimeoutError:
            raise Refusal("the server did not answer in time; retry later", 504) from None
        finally:
            leaving.remove_done_callback(leave)
            if leaving.done():
                exchange.close()
            else:
                leaving.cancel()
                exchange.finish()
            if self.ticket and not is_complete:
                self._door.disconnects.report(self.ticket)

    def _lost(self) -> Refusal:
        return unavailable(self._door.health.read().reason or _NO_ANSWER)

    async def _pass_on(
        self, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if exchange.status >= 400 or self._is_whole:
            response = await self._whole(exchange)
            await response(scope, receive, send)
            return
        await send(
            {
                "type": "http.response.start",
                "status": exchange.status,
                "headers": [
                    (name.encode(), exchange.headers[name].encode("latin-1"))
                    for name in ("content-type", "content-length", _HEADER_LENGTH)
                    if name in exchange.headers
                ],
            }
        )
        part, renamed = b"", self._renamed
        try:
            while part := await exchange.read(self._door.limits.first_byte_timeout_s):
                if renamed is not None and not (part := renamed.events(part)):
                    continue  # half an event
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except (UpstreamLost, TimeoutError) as error:
            exchange.close()
            if not exchange.headers.get("content-type", "").startswith("text/event-stream"):
                raise Cut from None
            # The event that was cut off ends first.
            rest = renamed.rest() if renamed is not None else b""
            gap = b"" if not rest and part.endswith(b"\n\n") else b"\n\n"
            text = _STALLED if isinstance(error, TimeoutError) else _ENDED
            event = rest + gap + b"data: " + Refusal(text).body + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, exchange: Exchange) -> Response:
        body = await exchange.read_all(self._door.limits.first_byte_timeout_s)
        if exchange.status >= 400 or body.startswith(b'{"error":'):
            raise from_triton(exchange.status, body)
        return self._response(exchange, body)

    def _response(self, exchange: Exchange, body: bytes) -> Response:
        headers, renamed = {}, self._renamed
        if renamed is not None:
            method, *_ = self._request
            before = len(body)
            body = renamed.description(body) if method == "GET" else renamed.inference(body)
            if _HEADER_LENGTH in exchange.headers:
                length = int(exchange.headers[_HEADER_LENGTH]) - before + len(body)
                headers[_HEADER_LENGTH] = str(length)
        kind = exchange.headers.get("content-type")
        return Response(body, exchange.status, headers, kind)


class Cut(Exception):
    """A response that cannot be completed: its connection is closed."""


class Framed:
    """Around the routes: paths that are plain, keys, an id for each request, counts and the access
    log.

    Args:
        gate: None if the server has no keys.
        log: prints one line for each request, or None.
        counts: of requests by status, health probes excluded; or None.
        tracing: of inference requests; or None.
    """

    def __init__(
        self,
        app: ASGIApp,
        log: Callable[[str], None] | None,
        gate: Gate | None,
        counts: RequestCounts | None,
        tracing: Tracing | None,
    ) -> None:
        self._app = app
        self._log = log
        self._gate = gate
        self._counts = counts
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = secrets.token_hex(8)
        status, num_bytes, started = 0, 0, time.monotonic()

        async def send_marked(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", request_id.encode()))
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        is_plain = bool(_PATH.fullmatch(scope["raw_path"]))
        app = self._app if is_plain else _nothing_here
        trace = self._trace(scope, request_id) if is_plain else None
        sender = send_marked if trace is None else trace.around(send_marked)
        try:
            with contextlib.suppress(Cut):
                if self._gate is None:
                    await app(scope, receive, sender)
                else:
                    await self._gate.enter(app, scope, receive, sender)
        finally:
            if trace is not None:
                trace.end(status or _LEFT)
            if self._counts is not None and not scope["path"].startswith(_HEALTH):
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


def make(
    door: Door,
    *,
    has_access_log: bool = False,
    gate: Gate | None = None,
    counts: RequestCounts | None = None,
    tracing: Tracing | None = None,
) -> ASGIApp:
    """The door as an ASGI application.

    Args:
        gate: None: no key is needed.
        counts: of requests by status.
        tracing: of inference requests.
    """
    routes = []  # tried in order: those of inference first
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes += [
            Route(f"{model}/generate_stream", door.generate, methods=["POST"]),
            Route(f"{model}/generate", door.generate, methods=["POST"]),
            Route(f"{model}/infer", door.infer, methods=["POST"]),
            Route(f"{model}/ready", door.model_ready),
            Route(f"{model}/config", door.metadata),
            Route(f"{model}/stats", door.metadata),
            Route(model, door.metadata),
        ]
    routes += [
        Route("/v2/health/live", door.live),
        Route("/v2/health/ready", door.ready),
        Route("/v2", door.metadata),
        Route("/v2/repository/index", door.index, methods=["POST"]),
    ]
    if door.metrics_upstream is not None:
        routes.append(Route("/metrics", door.metrics))
    app = Starlette(
        routes=routes,
        exception_handlers={
            Refusal: _refused,
            InflightError: _refused,
            HTTPException: _refused,
            Exception: _failed,
        },
    )
    app.router.redirect_slashes = False
    return Framed(app, _print if has_access_log else None, gate, counts, tracing)


def _probe(is_well: bool, reason: str) -> Response:
    return Response(status_code=200) if is_well else _answer(unavailable(reason))


def _own_parameters(request: Request) -> dict[str, str]:
    """Request parameters that only the door may set."""
    visit = visit_of(request)
    account = {} if visit is None else {ACCOUNT: visit.key.account}
    return {TICKET: new_ticket(), **account}


def _check_version(request: Request) -> None:
    version = request.path_params.get("version", "1")
    if not _VERSION.fullmatch(version):
        raise Refusal("version: is not a number; allowed: digits", 404)


def _answer(refusal: Refusal) -> Response:
    return Response(refusal.body, refusal.status, refusal.headers, _JSON)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, Refusal):
        response = _answer(error)
    elif isinstance(error, InflightError):
        response = _answer(of_error(error))
    elif isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = _answer(Refusal(f"method: is not allowed here; allowed: {allowed}", 405))
        response.headers["Allow"] = allowed
    elif _CLOSED.match(request.scope["path"]):
        text = "path: this part of the server is closed; allowed: health, models, generate, infer"
        response = _answer(Refusal(text, 403))
    else:
        response = _answer(_NOT_FOUND)
    if "expect" in request.headers:  # whether the body comes is up to the client
        response.headers["Connection"] = "close"
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return _answer(Refusal("the server failed to process the request", 500))


_NOT_FOUND = Refusal("path: there is nothing here; allowed: the routes of KServe's HTTP API", 404)


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    await _answer(_NOT_FOUND)(scope, receive, send)


def _print(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
