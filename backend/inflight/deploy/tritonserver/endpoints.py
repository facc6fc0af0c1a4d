"""Addresses of a server."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORTS = (8000, 8001, 8002)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a server, each as host:port.

    Attributes:
        metrics: of tritonserver's own, which shows the engines as well.
        engine_metrics: of the supervisor's; empty without one.
        gateway: of OpenAI's API; empty without one.
    """

    http: str
    grpc: str
    metrics: str
    engine_metrics: str = ""
    gateway: str = ""
