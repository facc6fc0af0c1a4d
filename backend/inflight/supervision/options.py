"""Options of a supervised server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inflight.access.options import AccessOptions
from inflight.deploy.ports import is_loopback
from inflight.deploy.tritonserver.endpoints import DEFAULT_HOST
from inflight.deploy.tritonserver.server import DEFAULT_DRAIN_S
from inflight.engine.metrics.families import parse_compat
from inflight.errors import ConfigError

DEFAULT_PORTS = (8000, 8001, 8002, 8003)
DEFAULT_GATEWAY_PORT = 9000
# A step of an engine and the answers under way; an idle server grows by less.
DEFAULT_MIN_FREE_MEMORY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `inflight serve` can set.

    Attributes:
        host: address to listen on.
        ports: of HTTP, gRPC, Triton's metrics and the engines' metrics; 0 picks a free one.
        gateway_port: of OpenAI's API; 0 picks a free one, None serves it not at all.
        gateway_workers: processes that serve it, of which one is the HTTP door's.
        strict_params: whether the gateway refuses fields that it does not know.
        page: whether the gateway serves the chat page; None: if the server listens on loopback.
        log_file: for the output of all processes; None for one in ~/.local/state.
        drain_s: how long to wait for requests in flight at the end.
        grpc_guard: whether gRPC passes a door; None: if the server listens beyond loopback, has
            keys or TLS, or serves several versions of a model.
        busy_poll_ms: how long the HTTP door polls for an answer; None for the machine's default.
        metrics_compat: other names for the metrics, as for `parse_compat`.
        controlled: with model control (`inflight model`), the names of the models to load at the
            start, or `ALL_MODELS`; None without it: all models, for good.
        access: keys and TLS; both imply a door for gRPC.
        min_free_memory: MiB of host memory; with less available, new requests are refused.
        otlp_endpoint: URL that the doors send spans to; empty for none.
    """

    host: str = DEFAULT_HOST
    ports: tuple[int, int, int, int] = DEFAULT_PORTS
    gateway_port: int | None = DEFAULT_GATEWAY_PORT
    gateway_workers: int = 1
    strict_params: bool = False
    page: bool | None = None
    log_file: Path | None = None
    drain_s: float = DEFAULT_DRAIN_S
    grpc_guard: bool | None = None
    busy_poll_ms: float | None = None
    metrics_compat: str = ""
    controlled: Sequence[str] | None = None
    access: AccessOptions = field(default_factory=AccessOptions)
    min_free_memory: int = DEFAULT_MIN_FREE_MEMORY
    otlp_endpoint: str = ""

    @property
    def all_ports(self) -> tuple[int, ...]:
        """`ports`, and the gateway's if there is one."""
        return self.ports if self.gateway_port is None else (*self.ports, self.gateway_port)

    def guards_grpc(self, *, has_versions: bool = False) -> bool:
        """Whether gRPC passes a door.

        Args:
            has_versions: the server has several versions of a model, which the doors find.

        Raises:
            ConfigError: it must not, but has to.
        """
        if has_versions and self.grpc_guard is False:
            raise ConfigError(
                "--no-grpc-guard: cannot be combined with a version_policy for several versions, "
                "which only the doors find; omit it"
            )
        if self.grpc_guard is not None:
            return self.grpc_guard
        return self.access.needs_doors or has_versions or not is_loopback(self.host)

    @property
    def serves_page(self) -> bool:
        """Whether the gateway serves the chat page."""
        return is_loopback(self.host) if self.page is None else self.page

    def check(self) -> None:
        """Raises ConfigError: options do not go together, or a file cannot be used."""
        parse_compat(self.metrics_compat, "--metrics-compat")
        if self.access.needs_doors and self.grpc_guard is False:
            raise ConfigError(
                "--no-grpc-guard: cannot be combined with --keys or TLS, which tritonserver would "
                "not check; omit it"
            )
        self.access.check()
