"""The process of an HTTP door or gateway: options, listeners and the event loop."""

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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from inflight import log
from inflight.access import options as access_options
from inflight.access.options import AccessOptions
from inflight.deploy.file_limit import raise_file_limit
from inflight.door.certificate import LiveCertificate, LiveContext
from inflight.door.http.protocol import BoundedProtocol
from inflight.door.limits import Limits
from inflight.door.tracing import Tracing, connect
from inflight.errors import ConfigError
from inflight.ipc.heartbeat import beat_from_loop
from inflight.ipc.processes import end_with

BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Site:
    """An application and the address that it is served at.

    Attributes:
        protocol: of its connections.
        tasks: started with the event loop, and cancelled at the end.
    """

    app: ASGIApp
    listener: socket.socket
    protocol: type[BoundedProtocol] = BoundedProtocol
    tasks: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()


@dataclass(frozen=True, slots=True)
class Common:
    """What all applications of a process share."""

    options: argparse.Namespace
    access: AccessOptions
    tracing: Tracing | None


class Server(uvicorn.Server):
    """uvicorn, without its signal handling: a process may have several."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
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


def run(options: argparse.Namespace, sites_of: Callable[[Common], Sequence[Site]]) -> int:
    """Serve until SIGTERM, which drains; returns the exit status.

    Args:
        options: of a parser with `add_options`.
        sites_of: what to serve; may raise ConfigError, or OSError for an address.
    """
    if options.parent:
        end_with(options.parent)
    limits: Limits = options.limits
    try:
        log.begin()
        access = access_options.chosen(options)
        tls = LiveContext.of(LiveCertificate(access.tls)) if access.tls is not None else None
        # The supervisor logs starts and stops.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        raise_file_limit()
        tracing = connect(options.otlp_endpoint) if options.otlp_endpoint else None
        BoundedProtocol.limits = limits
        sites = sites_of(Common(options, access, tracing))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"--listen: cannot listen there ({error.strerror})", file=sys.stderr)
        return 1
    servers = [(_server(site, options, tls), site.listener) for site in sites]
    tasks = [task for site in sites for task in site.tasks]
    if options.heartbeat is not None:
        tasks.append(lambda: beat_from_loop(options.heartbeat))
    uvloop.run(
        _serve(servers, tasks, is_child=bool(options.parent)),
        loop_factory=lambda: Loop(limits.header_timeout_s),
    )
    if tracing is not None:
        tracing.close()
    return 0


def _server(site: Site, options: argparse.Namespace, tls: LiveContext | None) -> Server:
    return Server(
        uvicorn.Config(
            site.app,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
            http=site.protocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(options.limits.idle_timeout_s),
            timeout_graceful_shutdown=math.ceil(options.drain),
        )
    )


async def _serve(
    servers: Sequence[tuple[Server, socket.socket]],
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    *,
    is_child: bool,
) -> None:
    def drain(number: int, frame: FrameType | None) -> None:
        for server, _ in servers:
            server.handle_exit(number, frame)

    # SIGINT, which a terminal sends to all, is for the supervisor if there is one.
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_child else drain)
    signal.signal(signal.SIGTERM, drain)
    running = [asyncio.create_task(task()) for task in tasks]
    await asyncio.gather(*(server.serve(sockets=[listener]) for server, listener in servers))
    for one in running:
        one.cancel()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of all such processes."""
    parser.add_argument("--listen", type=address, required=True, metavar="HOST:PORT")
    parser.add_argument("--heartbeat", type=Path, metavar="FILE")
    parser.add_argument("--counts", type=Path, metavar="FILE")
    parser.add_argument("--drain", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--limits", type=_limits, default=Limits(), metavar="JSON")
    parser.add_argument(
        "--parent", type=int, default=os.getppid(), metavar="PID", help="0: it needs none"
    )
    parser.add_argument("--otlp-endpoint", default="", metavar="URL")
    parser.add_argument("--access-log", action="store_true")
    access_options.add_to(parser)


def add_gateway_options(parser: argparse.ArgumentParser) -> None:
    """Those of all processes with a gateway."""
    parser.add_argument("--strict-params", action="store_true")
    parser.add_argument("--page", action="store_true", help="serve the chat page")
    parser.add_argument("--gateway-shared", action="store_true", help="listen with SO_REUSEPORT")
    parser.add_argument("--gateway-metrics", type=address, metavar="HOST:PORT")


def address(text: str) -> tuple[str, int]:
    """HOST:PORT. Raises argparse.ArgumentTypeError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A listening socket.

    Args:
        is_shared: several processes listen on the port; the kernel spreads connections.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server(
        (host, port), family=family, backlog=BACKLOG, reuse_port=is_shared
    )
    listener.setblocking(False)
    return listener


def _limits(text: str) -> Limits:
    try:
        return msgspec.json.decode(text, type=Limits)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
