"""The gateway as an ASGI application: its routes, and errors in the form of their API."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.access.admission import Admission
from inflight.door.gateway.anthropic import errors as anthropic_errors
from inflight.door.gateway.anthropic.messages import Messages
from inflight.door.gateway.gateway import Gateway
from inflight.door.gateway.openai import errors
from inflight.door.gateway.openai.chat import Chat
from inflight.door.gateway.openai.closed import EMBEDDINGS, ClosedRoutes
from inflight.door.gateway.openai.completions import Completions
from inflight.door.gateway.openai.models import ModelRoutes
from inflight.door.gateway.openai.responses.routes import Responses
from inflight.door.gateway.openai.tokens import TokenRoutes
from inflight.door.gateway.openapi.route import OpenApi
from inflight.door.gateway.page.page import Page
from inflight.door.gateway.problem import TOO_DEEP, Problem, of_refusal, of_request
from inflight.door.gateway.server import ServerRoutes
from inflight.door.http.gate import Gate
from inflight.door.http.middleware import Paths, RequestMiddleware
from inflight.door.http.protocol import BoundedProtocol
from inflight.door.http.refusal import Refusal, of_error
from inflight.door.http.upstream import Upstream
from inflight.errors import InflightError, RequestError, UnknownModel
from inflight.ipc.metrics.request_counts import RequestCounts

PROBES = frozenset({b"/health", b"/ready", b"/v2/health/live", b"/v2/health/ready"})
_PROBE_PREFIXES = tuple(path.decode() for path in PROBES)
# Ids of models may have slashes, colons and, from clients that quote them, percent signs.
_PATH = re.compile(rb"(?:/(?!\.+(?:/|$))(?:[A-Za-z0-9_.:@+~-]|%[0-9A-Fa-f]{2}){1,256})+|/")
_NOTHING = "path: there is nothing here; allowed: the routes of OpenAI's API, such as /v1/models"
_ANTHROPIC = "/v1/messages"
_FAILED = "the server failed to process the request"


class GatewayProtocol(BoundedProtocol):
    """Malformed requests get errors in OpenAI's form, too."""

    def body_of(self, refusal: Refusal) -> bytes:
        return errors.body_of(of_refusal(refusal))


def make(
    gateway: Gateway,
    *,
    metrics: Upstream | None = None,
    control_socket: Path | None = None,
    admission: Admission | None = None,
    counts: RequestCounts | None = None,
    has_access_log: bool = False,
    page: Page | None = None,
) -> ASGIApp:
    """The gateway as an ASGI application.

    Args:
        metrics: of the server; None if they are not served here.
        control_socket: of model control; None if there is none.
        admission: None: no key is needed.
        counts: of requests by status.
        page: needs no key; None serves none.
    """
    page_routes = page.routes() if page is not None else []
    app = Starlette(
        routes=[
            *routes(gateway, metrics, control_socket, has_keys=admission is not None),
            *page_routes,
        ],
        exception_handlers={
            Problem: _refused,
            Refusal: _refused,
            InflightError: _refused,
            HTTPException: _refused,
            RecursionError: _refused,  # what is read of a body is written in another place
            Exception: _failed,
        },
    )
    app.router.redirect_slashes = False
    gate = None
    if admission is not None:
        public = PROBES | page.paths if page is not None else PROBES
        gate = Gate(admission, public, _unauthenticated)
    return RequestMiddleware(
        app,
        Paths(_PATH, _nothing_here, _PROBE_PREFIXES),
        gate,
        has_access_log=has_access_log,
        counts=counts,
    )


def routes(
    gateway: Gateway,
    metrics: Upstream | None = None,
    control_socket: Path | None = None,
    *,
    has_keys: bool = False,
) -> list[Route]:
    """All of them; `make` has the arguments."""
    return [
        *_model_routes(gateway, control_socket),
        *_server_routes(ServerRoutes(gateway.tritons, metrics)),
        Route("/openapi.json", OpenApi(has_keys).respond),
    ]


def _model_routes(gateway: Gateway, control_socket: Path | None) -> list[Route]:
    models, tokens = ModelRoutes(gateway, control_socket), TokenRoutes(gateway)
    responses, messages = Responses(gateway), Messages(gateway)
    return [
        Route("/v1/chat/completions", Chat(gateway).respond, methods=["POST"]),
        Route("/v1/completions", Completions(gateway).respond, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/{path:path}", responses.stored, methods=["GET", "DELETE", "POST"]),
        Route("/v1/messages", messages.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/v1/models", models.index),
        Route("/v1/models/{model:path}/load", models.load, methods=["POST"]),
        Route("/v1/models/{model:path}/unload", models.unload, methods=["POST"]),
        Route("/v1/models/{model:path}", models.find),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.info),
        *(Route(path, ClosedRoutes(gateway).embeddings, methods=["POST"]) for path in EMBEDDINGS),
    ]


def _server_routes(server: ServerRoutes) -> list[Route]:
    return [
        *(Route(path, server.live) for path in ("/health", "/v2/health/live")),
        *(Route(path, server.ready) for path in ("/ready", "/v2/health/ready")),
        Route("/version", server.version),
        Route("/metrics", server.metrics),
    ]


async def _refused(request: Request, error: Exception) -> Response:
    response = _respond(_problem(error), request.url.path)
    if isinstance(error, HTTPException) and error.status_code == 405:
        response.headers["Allow"] = (error.headers or {}).get("Allow", "")
    if "expect" in request.headers:  # whether the body comes is up to the client
        response.headers["Connection"] = "close"
    return response


def _problem(error: Exception) -> Problem:
    if isinstance(error, Problem):
        return error
    if isinstance(error, Refusal):
        return of_refusal(error)
    if isinstance(error, UnknownModel):
        return Problem(str(error), 404, param="model", code="model_not_found")
    if isinstance(error, RequestError):
        return of_request(error)
    if isinstance(error, RecursionError):
        return Problem(TOO_DEEP)
    if isinstance(error, InflightError):
        return of_refusal(of_error(error))
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return Problem(f"method: is not allowed here; allowed: {allowed}", 405)
    return Problem(_NOTHING, 404)


async def _failed(request: Request, error: Exception) -> Response:
    return _respond(Problem(_FAILED, 500), request.url.path)


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    await _respond(Problem(_NOTHING, 404), scope["path"])(scope, receive, send)


def _unauthenticated(refusal: Refusal, scope: Scope) -> Response:
    return _respond(of_refusal(refusal), scope["path"])


def _respond(problem: Problem, path: str) -> Response:
    is_anthropic = path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")
    return anthropic_errors.respond(problem) if is_anthropic else errors.respond(problem)
