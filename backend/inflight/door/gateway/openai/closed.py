"""Routes of OpenAI's API that the served models cannot answer."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from inflight.door.gateway.gateway import Gateway
from inflight.door.gateway.problem import Problem

EMBEDDINGS = ("/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score")


class _Named(msgspec.Struct):
    model: str | None = None


class ClosedRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def embeddings(self, request: Request) -> Response:
        """Raises Problem, always."""
        try:
            fields = await self._gateway.read(
                request, lambda body: msgspec.json.decode(body, type=_Named)
            )
        except msgspec.DecodeError:
            fields = _Named()
        if fields.model is None:
            raise Problem("model: is missing", param="model")
        served = await self._gateway.find(request, fields.model)
        raise Problem(
            f"model: {served.id} generates text and has no embeddings; use /v1/chat/completions or "
            "/v1/completions",
            param="model",
            code="not_supported",
        )
