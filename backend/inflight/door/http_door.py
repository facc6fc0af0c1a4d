"""The process of the HTTP door: `python -m inflight.door.http_door`.

It stands between clients and a tritonserver that only this machine can reach. It ends with its
parent; SIGTERM ends it once the requests in flight have their answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from inflight import log
from inflight.access import options as access_options
from inflight.deploy.file_limit import raise_file_limit
from inflight.door.certificate import LiveCertificate, LiveContext
from inflight.door.http import app, busy_poll
from inflight.door.http.gate import Gate
from inflight.door.http.protocol import BoundedProtocol
from inflight.door.http.upstream import Upstream
from inflight.door.limits import Limits
from inflight.door.tracing import connect
from inflight.errors import ConfigError
from inflight.ipc.heartbeat import beat_from_loop
from inflight.ipc.metrics.request_counts import RequestCounts
from inflight.ipc.processes import end_with

BACKLOG = 1024


class Server(uvicorn.Server):
    """uvicorn, with the signal handling of inflight's processes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM drains; SIGINT, which a terminal sends to all, is for the supervisor."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self.handle_exit)
        yield


class Loop(uvloop.Loop):
    """Closes connections whose TLS handshake takes too long; uvicorn has no option for that.

    Args:
        handshake_timeout_s: for a TLS handshake.
    """

    def __init__(self, handshake_timeout_s: float) -> None:
        super().__init__()
        self._handshake_timeout_s = handshake_timeout_s

    async def create_server(self, *args: Any, **options: Any) -> Any:
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = self._handshake_timeout_s
        return await super().create_server(*args, **options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns the exit status."""
    options = _parser().parse_args(arguments)
    end_with(options.parent)
    limits = options.limits
    try:
        log.begin()
        access = access_options.chosen(options)
        admission = access.admission("http")
        tls = LiveContext.of(LiveCertificate(access.tls)) if access.tls is not None else None
        # The supervisor logs starts and stops.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        raise_file_limit()
        listener = _listen(*options.listen)
        tracing = connect(options.otlp_endpoint) if options.otlp_endpoint else None
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"--listen: cannot listen there ({error.strerror})", file=sys.stderr)
        return 1
    upstream = Upstream(*options.upstream)
    metrics = Upstream(*options.metrics) if options.metrics is not None else None
    door = app.Door(upstream, options.health, limits, metrics, options.busy_poll / 1e3)
    counts = RequestCounts(options.counts) if options.counts is not None else None
    BoundedProtocol.limits = limits
    server = Server(
        uvicorn.Config(
            app.make(
                door,
                has_access_log=options.access_log,
                gate=Gate(admission) if admission is not None else None,
                counts=counts,
                tracing=tracing,
            ),
            ssl_context_factory=None if tls is None else lambda config, default: tls,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(limits.idle_timeout_s),
            timeout_graceful_shutdown=math.ceil(options.drain),
        )
    )
    uvloop.run(
        _serve(server, listener, options.heartbeat),
        loop_factory=lambda: Loop(limits.header_timeout_s),
    )
    if tracing is not None:
        tracing.close()
    return 0


async def _serve(server: Server, listener: socket.socket, heartbeat: Path | None) -> None:
    beating = asyncio.create_task(beat_from_loop(heartbeat)) if heartbeat is not None else None
    await server.serve(sockets=[listener])
    if beating is not None:
        beating.cancel()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("inflight.door.http_door", description=__doc__)
    parser.add_argument("--listen", type=_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--upstream", type=_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--health", type=Path, required=True, metavar="FILE")
    parser.add_argument("--metrics", type=_address, metavar="HOST:PORT", help="for admins' keys")
    parser.add_argument("--heartbeat", type=Path, metavar="FILE")
    parser.add_argument("--counts", type=Path, metavar="FILE")
    parser.add_argument("--drain", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--limits", type=_limits, default=Limits(), metavar="JSON")
    parser.add_argument("--parent", type=int, default=os.getppid(), metavar="PID")
    parser.add_argument("--otlp-endpoint", default="", metavar="URL")
    parser.add_argument(
        "--busy-poll", type=float, default=busy_poll.default_s() * 1e3, metavar="MILLISECONDS"
    )
    parser.add_argument("--access-log", action="store_true")
    access_options.add_to(parser)
    return parser


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _limits(text: str) -> Limits:
    try:
        return msgspec.json.decode(text, type=Limits)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    sys.exit(main())
