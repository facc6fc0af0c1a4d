"""Routes about the server itself: probes, version, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from inflight.door.gateway.problem import Problem
from inflight.door.gateway.reply import json_response
from inflight.door.gateway.triton import Triton
from inflight.door.http import metrics
from inflight.door.http.upstream import Upstream
from inflight.ipc.health import Health

_NOT_SERVED = "path: metrics are not served here; allowed: the server's metrics port"


class ServerRoutes:
    """Args:
    tritons: the gateway is ready while one of them is.
    metrics: of the server; None if they are not served here.
    """

    def __init__(self, tritons: Sequence[Triton], metrics: Upstream | None = None) -> None:
        self._tritons = tritons
        self._metrics = metrics

    async def live(self, request: Request) -> Response:
        found = self._healths()
        if not any(one.is_live for one in found):
            raise Problem("the server is not live", 503)
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        found = self._healths()
        if not any(one.is_ready for one in found):
            raise Problem(found[0].reason or "the server is not ready; retry later", 503)
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return json_response({"version": version("inflight-triton")})

    async def metrics(self, request: Request) -> Response:
        """Raises Problem, Refusal, InflightError."""
        if self._metrics is None:
            raise Problem(_NOT_SERVED, 404)
        return await metrics.relay(request, self._metrics)

    def _healths(self) -> list[Health]:
        return [one.health.read() for one in self._tritons]
