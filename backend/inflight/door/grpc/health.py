"""Probes, answered from the health that the supervisor writes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from inflight.door.grpc import checks, messages
from inflight.door.grpc.calls import DRAINING, Call, Calls
from inflight.door.grpc.status import Code, Refused
from inflight.ipc import health
from inflight.ipc.health import Health

# Reading the file takes 30 us.
CACHED_S = 0.1
WATCH_S = 0.25
SERVICE = "inference.GRPCInferenceService"
# grpc.health.v1.HealthCheckResponse.ServingStatus
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


class Probes:
    """The server's health, and the calls that return it.

    Args:
        path: the file that the supervisor writes.
    """

    def __init__(self, path: Path, calls: Calls) -> None:
        self._path = path
        self._calls = calls
        self._read_at = 0.0
        self._health = health.UNKNOWN

    def current(self) -> Health:
        """The health as of the last tenth of a second."""
        now = time.monotonic()
        if now - self._read_at > CACHED_S:
            self._health = health.read(self._path)
            self._read_at = now
        return self._health

    def check_ready(self) -> None:
        """Whether new requests are accepted.

        Raises:
            Refused: they are not, with the reason.
        """
        if self._calls.is_draining:
            raise Refused(DRAINING.code, DRAINING.text)
        now = self.current()
        if not now.is_ready:
            raise Refused(
                Code.UNAVAILABLE,
                f"the server is not ready: {now.reason or 'it starts'}; try again later",
            )

    def is_ready(self) -> bool:
        return self.current().is_ready and not self._calls.is_draining

    async def server_live(self, call: Call, data: bytes) -> bytes:
        checks.empty_request(data)
        return _ready(self.current().is_live)

    async def server_ready(self, call: Call, data: bytes) -> bytes:
        checks.empty_request(data)
        return _ready(self.is_ready())

    async def index(self, call: Call, data: bytes) -> bytes:
        """RepositoryIndex: the models that are ready. Triton's own is restricted with the rest of
        model control."""
        checks.index_request(data)
        found = self.current()
        response = messages.IndexResponse()
        for name in found.models if self.is_ready() else []:
            if call.key is not None and not call.key.allows(name):
                continue
            for version in found.versions.get(name, ("",)):
                response.models.add(name=name, version=str(version), state="READY")
        written: bytes = response.SerializeToString()
        return written

    async def check(self, call: Call, data: bytes) -> bytes:
        """grpc.health.v1.Health/Check of the server, the service or a model."""
        status = self._status(checks.parse(messages.HealthRequest, data).service)
        if status == SERVICE_UNKNOWN:
            raise Refused(
                Code.NOT_FOUND, f"service: is unknown; allowed: nothing, {SERVICE} or a model"
            )
        return _serving(status)

    async def watch(self, call: Call) -> None:
        """grpc.health.v1.Health/Watch: the status now, and whenever it changes."""
        call.reading_since = time.monotonic()
        data = await call.read()
        call.reading_since = float("inf")
        service = checks.parse(messages.HealthRequest, data or b"").service
        sent = None
        while True:
            status = self._status(service)
            if status != sent:
                await call.write(_serving(status))
                sent = status
            if self._calls.is_draining:
                raise Refused(DRAINING.code, DRAINING.text)
            await asyncio.sleep(WATCH_S)

    def _status(self, service: str) -> int:
        models = self.current().models
        if service not in ("", SERVICE, *models):
            return SERVICE_UNKNOWN
        return SERVING if self.is_ready() else NOT_SERVING


def not_ready_model() -> bytes:
    """The response of ModelReady while the server is not ready."""
    return _ready(False)


def _ready(is_ready: bool) -> bytes:
    data: bytes = messages.ReadyResponse(ready=is_ready).SerializeToString()
    return data


def _serving(status: int) -> bytes:
    data: bytes = messages.HealthResponse(status=status).SerializeToString()
    return data
