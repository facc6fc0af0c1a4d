"""Whose request it is, and what its key allows: around all routes, whatever they are."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.access.accounts_client import Lease
from inflight.access.admission import Admission
from inflight.access.key import Key
from inflight.door.http.refusal import Refusal, of_error
from inflight.errors import Unauthenticated

PROBES = frozenset({b"/v2/health/live", b"/v2/health/ready"})
_VISIT = "inflight.visit"


def plain_response(refusal: Refusal, scope: Scope | None = None) -> Response:
    """In the form of Triton's errors, for each path."""
    return Response(refusal.body, refusal.status, refusal.headers, "application/json")


class Visit:
    """A request with a key.

    Attributes:
        lease: of an inference request that was admitted.
    """

    def __init__(self, admission: Admission, key: Key, scope: Scope) -> None:
        self.key = key
        self.lease: Lease | None = None
        self._admission = admission
        self._what = _what(scope)
        self._peer = _peer(scope)

    async def begin(self, model: str) -> None:
        """Admit an inference request, until the response is complete. Raises InflightError."""
        self.lease = await self._admission.begin(self.key, model, peer=self._peer, what=self._what)

    def check_admin(self) -> None:
        """Raises NotPermitted."""
        self._admission.check_admin(self.key, peer=self._peer, what=self._what)

    async def tenant_metrics(self) -> str:
        """For an admin. Raises InflightError."""
        self.check_admin()
        return await self._admission.metrics()


class Gate:
    """Requests other than probes need a key: 401 before the path and the body are looked at.

    Args:
        probes: paths, as they stand in a request line.
        respond: the response to a request without a key, which has this scope.
    """

    def __init__(
        self,
        admission: Admission,
        probes: frozenset[bytes] = PROBES,
        respond: Callable[[Refusal, Scope], Response] = plain_response,
    ) -> None:
        self._admission = admission
        self._probes = probes
        self._respond = respond

    async def enter(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a request that may enter."""
        if scope["raw_path"] in self._probes and scope["method"] in ("GET", "HEAD"):
            await app(scope, receive, send)
            return
        try:
            key = self._admission.identify(scope["headers"], peer=_peer(scope), what=_what(scope))
        except Unauthenticated as error:
            response = self._respond(of_error(error), scope)
            response.headers["Connection"] = "close"  # its body is not read
            await response(scope, receive, send)
            return
        visit = scope[_VISIT] = Visit(self._admission, key, scope)
        try:
            await app(scope, receive, send)
        finally:
            if visit.lease is not None:
                visit.lease.end()


def visit_of(request: Request) -> Visit | None:
    """None if the server has no keys."""
    found: Visit | None = request.scope.get(_VISIT)
    return found


def check_model(request: Request) -> None:
    """Whether the key allows the model in the path. Raises UnknownModel."""
    visit = visit_of(request)
    model = request.path_params.get("model")
    if visit is not None and model is not None:
        visit.key.check_model(model)


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else ""


def _what(scope: Scope) -> str:
    return f"{scope['method']} {scope['raw_path'].decode('latin-1')}"
