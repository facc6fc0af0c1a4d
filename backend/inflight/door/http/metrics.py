"""GET /metrics: the server's metrics; with keys, for admins alone."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from inflight.door.http.gate import visit_of
from inflight.door.http.refusal import from_triton, unavailable
from inflight.door.http.upstream import Upstream, UpstreamLost

TIMEOUT_S = 10.0
_TYPE = "text/plain; version=0.0.4"
_NO_ANSWER = "the metrics are not available now; retry later"


async def relay(request: Request, upstream: Upstream) -> Response:
    """What the metrics endpoint has; with keys, for admins alone, and by tenant as well.

    Raises:
        Refusal: the endpoint does not respond.
        InflightError: the key is not an admin's.
    """
    visit = visit_of(request)
    by_tenant = "" if visit is None else await visit.tenant_metrics()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            status, body = await upstream.get("/metrics")
    except (UpstreamLost, TimeoutError):
        raise unavailable(_NO_ANSWER) from None
    if status != 200:
        raise from_triton(status, body)
    return Response(body + by_tenant.encode(), media_type=_TYPE)
