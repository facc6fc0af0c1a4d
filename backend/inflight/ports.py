"""The three ports of a tritonserver."""

from __future__ import annotations

import contextlib
import socket

from inflight.errors import ConfigError


def choose_ports(host: str, ports: tuple[int, int, int]) -> tuple[int, int, int]:
    """The same ports, with a free one for each 0.

    Raises:
        ConfigError: a port is taken, or the host is not an address of this machine.
    """
    flags = ("--http-port", "--grpc-port", "--metrics-port")
    chosen = []
    with contextlib.ExitStack() as held:
        for port, flag in zip(ports, flags, strict=True):
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # As tritonserver does: a port whose last connections are still closing is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                raise ConfigError(
                    f"{host}:{port} cannot be used ({error.strerror}); stop what listens there or "
                    f"choose another port with {flag}"
                ) from None
            chosen.append(probe.getsockname()[1])
    return chosen[0], chosen[1], chosen[2]
