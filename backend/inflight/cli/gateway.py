"""`inflight gateway`: OpenAI's API in front of Triton servers that run already."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import typer

from inflight.access import tls
from inflight.access.options import AccessOptions
from inflight.cli.options import GatewayProcess
from inflight.deploy.ports import is_loopback
from inflight.door import gateway_door
from inflight.errors import ConfigError


def run(tritons: Sequence[str], options: GatewayProcess) -> int:
    """Serve until Ctrl-C or SIGTERM, which drain; a second one stops immediately.

    Args:
        tritons: host:port of each server's HTTP endpoint.

    Returns:
        The exit status.

    Raises:
        ConfigError: an option is not valid, or the address cannot be used.
    """
    cert, key = (
        str(path) if path is not None else None for path in (options.tls_cert, options.tls_key)
    )
    access = AccessOptions(tls=tls.chosen(cert, key, None))
    access.check()
    words = [word for triton in tritons for word in ("--upstream", _checked(triton))]
    with _held(options.host, options.port) as held:
        bound, port = held.getsockname()[:2]
        address = f"{options.host}:{port}"
        has_page = is_loopback(bound) if options.page is None else options.page
        scheme = "http" if access.tls is None else "https"
        typer.echo(f"OpenAI   {scheme}://{address}/v1", err=True)
        if has_page:
            typer.echo(f"chat     {scheme}://{address}/", err=True)
        return gateway_door.main(
            [
                *("--listen", address, "--drain", str(options.drain), "--parent", "0"),
                *(("--strict-params",) if options.strict_params else ()),
                *(("--page",) if has_page else ()),
                *access.arguments(),
                *words,
            ]
        )


def _checked(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--triton: {address!r} is not an address; allowed: HOST:PORT")
    return address


def _held(host: str, port: int) -> socket.socket:
    """A socket that keeps the address free until the gateway listens there. Raises ConfigError."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except (OSError, OverflowError) as error:
        held.close()
        raise ConfigError(
            f"--port: {host}:{port} cannot be used ({error}); choose another one, or 0 for a free "
            "one"
        ) from None
    return held
