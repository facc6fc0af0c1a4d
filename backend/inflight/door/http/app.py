"""The HTTP door's routes: those of KServe and Triton that serve models; all others are closed."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.door.disconnect_watch import DisconnectWatch
from inflight.door.health_file import HealthFile
from inflight.door.http import generate, infer, metrics
from inflight.door.http.body import BodyReader, checked
from inflight.door.http.busy_poll import BusyPoll
from inflight.door.http.gate import Gate, check_model, plain_response, visit_of
from inflight.door.http.generate import Models
from inflight.door.http.middleware import Paths, RequestMiddleware, TruncatedResponse
from inflight.door.http.refusal import Refusal, from_triton, of_error, unavailable
from inflight.door.http.renamed import Renamed
from inflight.door.http.upstream import Exchange, Upstream, UpstreamLost
from inflight.door.limits import Limits
from inflight.door.tracing import Tracing
from inflight.door.versions import resolve
from inflight.errors import InflightError
from inflight.ipc.metrics.request_counts import RequestCounts
from inflight.ipc.metrics.usage import ACCOUNT
from inflight.ipc.sockets.disconnects import TICKET, DisconnectReporter, new_ticket

_JSON = "application/json"
_OCTETS = "application/octet-stream"
# `curl -d` sends JSON as a form.
_TYPES = ("", _JSON, _OCTETS, "application/x-www-form-urlencoded")
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
        self._bodies = BodyReader(limits, _TYPES)

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
        body = await self._bodies.read(request)
        if body:
            await checked(body, partial(generate.rebuild, body, {}, self.limits))
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
        await self._bodies.read(request)  # of no meaning, but it has to be out of the way
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
        return await metrics.relay(request, self.metrics_upstream)

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
        body, json_length = await checked(
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
        body = await checked(body, partial(generate.rebuild, body, inputs, self.limits, own))
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
        return await self._bodies.read(request)


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
        watch = DisconnectWatch(receive, exchange.close)
        is_complete = False
        try:
            with self._door.busy_poll.awaiting():
                async with asyncio.timeout(self._door.limits.first_byte_timeout_s):
                    await exchange.send(*self._request)
                await self._pass_on(exchange, scope, receive, send)
            is_complete = True
        except UpstreamLost:
            if not watch.has_left:
                raise self._lost() from None
        except TimeoutError:
            raise Refusal("the server did not answer in time; retry later", 504) from None
        finally:
            watch.end()
            if watch.has_left:
                exchange.close()
            else:
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
                raise TruncatedResponse from None
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
    return RequestMiddleware(
        app,
        Paths(_PATH, _nothing_here),
        gate,
        has_access_log=has_access_log,
        counts=counts,
        tracing=tracing,
    )


def _probe(is_well: bool, reason: str) -> Response:
    return Response(status_code=200) if is_well else plain_response(unavailable(reason))


def _own_parameters(request: Request) -> dict[str, str]:
    """Request parameters that only the door may set."""
    visit = visit_of(request)
    account = {} if visit is None else {ACCOUNT: visit.key.account}
    return {TICKET: new_ticket(), **account}


def _check_version(request: Request) -> None:
    version = request.path_params.get("version", "1")
    if not _VERSION.fullmatch(version):
        raise Refusal("version: is not a number; allowed: digits", 404)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, Refusal):
        response = plain_response(error)
    elif isinstance(error, InflightError):
        response = plain_response(of_error(error))
    elif isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = plain_response(Refusal(f"method: is not allowed here; allowed: {allowed}", 405))
        response.headers["Allow"] = allowed
    elif _CLOSED.match(request.scope["path"]):
        text = "path: this part of the server is closed; allowed: health, models, generate, infer"
        response = plain_response(Refusal(text, 403))
    else:
        response = plain_response(_NOT_FOUND)
    if "expect" in request.headers:  # whether the body comes is up to the client
        response.headers["Connection"] = "close"
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return plain_response(Refusal("the server failed to process the request", 500))


_NOT_FOUND = Refusal("path: there is nothing here; allowed: the routes of KServe's HTTP API", 404)


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    await plain_response(_NOT_FOUND)(scope, receive, send)
