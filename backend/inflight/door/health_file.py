"""The health of a supervised server, as its doors read it."""

from __future__ import annotations

import time
from pathlib import Path

from inflight.ipc import health
from inflight.ipc.health import Health

# The supervisor writes it several times a second.
HEALTH_TTL_S = 0.1


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
