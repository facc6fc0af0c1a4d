"""GET /openapi.json."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from inflight.door.gateway.problem import Problem

_BUSY = "the server has too many threads; retry later"


class OpenApi:
    """The route; the document is written at the first request.

    Args:
        has_keys: requests need an API key.
    """

    def __init__(self, has_keys: bool) -> None:
        self._has_keys = has_keys
        self._body = b""

    async def respond(self, request: Request) -> Response:
        """Raises Problem."""
        if not self._body:
            try:  # it takes some 0.1 s, which streams would wait for
                self._body = await asyncio.to_thread(self._write)
            except RuntimeError:  # no further thread can be started
                raise Problem(_BUSY, 503) from None
        return Response(self._body, media_type="application/json")

    def _write(self) -> bytes:
        from inflight.door.gateway.openapi.document import document

        return msgspec.json.encode(document(self._has_keys))
