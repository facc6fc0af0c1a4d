"""The options of the gRPC door, for its first process and its workers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from inflight.access import options as access_options
from inflight.access.options import AccessOptions
from inflight.door.limits import Limits
from inflight.errors import ConfigError

DEFAULT_DRAIN_S = 30.0
MAX_WORKERS = 4


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a gRPC door.

    Attributes:
        listen, upstream: host:port of the clients' side and of Triton's gRPC.
        health: the file that the supervisor writes.
        heartbeat: a file that shows the supervisor that the first process works; or None.
        counts: a file for counts of requests by status, one per worker; or None.
        workers: processes that share the port.
        drain_s: how long requests in flight may take to end after SIGTERM.
        access: who may make calls, and TLS.
        otlp_endpoint: URL that spans are sent to; empty for none.
        parent: pid of the process with which this one ends.
    """

    listen: str
    upstream: str
    health: str
    heartbeat: str | None
    counts: str | None
    workers: int
    drain_s: float
    limits: Limits
    access: AccessOptions
    otlp_endpoint: str
    parent: int

    def address(self) -> tuple[str, int]:
        """Host and port to listen on.

        Raises:
            ConfigError: they are not.
        """
        host, colon, port = self.listen.rpartition(":")
        if not (host and colon and port.isdecimal() and int(port) < 2**16):
            raise ConfigError(f"--listen: {self.listen!r}; allowed: host:port")
        return host.strip("[]"), int(port)


def heartbeat_of(heartbeat: str, worker: int) -> Path:
    """The file of a worker's heartbeat, beside that of the first process."""
    return Path(f"{heartbeat}.{worker}")


def counts_of(counts: str, worker: int) -> str:
    """The file of a worker's counts; worker: its index, which its successor has, too."""
    path = Path(counts)
    return str(path.with_name(f"{path.stem}.{worker}{path.suffix}"))


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """The settings from a command line.

    Raises:
        ConfigError: the limits or the TLS files are not as they should be.
    """
    parser = argparse.ArgumentParser(description="Guards Triton's gRPC.")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT", help="Triton's gRPC")
    parser.add_argument("--health", required=True, metavar="FILE")
    parser.add_argument("--heartbeat", metavar="FILE")
    parser.add_argument("--counts", metavar="FILE")
    parser.add_argument("--workers", type=int, default=min(MAX_WORKERS, os.cpu_count() or 1))
    parser.add_argument("--drain", type=float, default=DEFAULT_DRAIN_S, metavar="S")
    parser.add_argument("--limits", default="{}", metavar="JSON", help="fields of Limits")
    parser.add_argument("--otlp-endpoint", default="", metavar="URL")
    parser.add_argument("--parent", type=int, default=os.getppid(), metavar="PID")
    access_options.add_to(parser)
    found = parser.parse_args(arguments)
    try:
        limits = msgspec.json.decode(found.limits, type=Limits)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--limits: {error}; allowed: a JSON object of limits") from None
    return Settings(
        listen=found.listen,
        upstream=found.upstream,
        health=found.health,
        heartbeat=found.heartbeat,
        counts=found.counts,
        workers=max(1, found.workers),
        drain_s=found.drain,
        limits=limits,
        access=access_options.chosen(found),
        otlp_endpoint=found.otlp_endpoint,
        parent=found.parent,
    )
