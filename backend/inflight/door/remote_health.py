"""The health of a Triton server that another process supervises, by its HTTP port."""

from __future__ import annotations

import asyncio

import msgspec

from inflight.door.http.upstream import Upstream, UpstreamLost
from inflight.ipc.health import Health

INTERVAL_S = 1.0
TIMEOUT_S = 4.0
_DOWN = Health(is_live=True, is_ready=False, reason="the Triton server does not answer")


class _Entry(msgspec.Struct):
    name: str
    state: str = "READY"


class RemoteHealth:
    """Asks a server for its readiness and models, once a second while `watch` runs.

    Args:
        headers: of each request, such as a key.
    """

    def __init__(self, upstream: Upstream, headers: dict[str, str] | None = None) -> None:
        self._upstream = upstream
        self._headers = headers or {}
        self._health = _DOWN

    def read(self) -> Health:
        return self._health

    async def watch(self) -> None:
        while True:
            self._health = await self._ask()
            await asyncio.sleep(INTERVAL_S)

    async def _ask(self) -> Health:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, _ = await self._upstream.get("/v2/health/ready")
                if status != 200:
                    return msgspec.structs.replace(_DOWN, reason="the Triton server is not ready")
                status, body = await self._upstream.post("/v2/repository/index", b"", self._headers)
            entries = msgspec.json.decode(body, type=list[_Entry]) if status == 200 else []
        except (UpstreamLost, TimeoutError, msgspec.DecodeError):
            return _DOWN
        models = sorted({one.name for one in entries if one.state == "READY"})
        return Health(is_live=True, is_ready=True, models=models)
