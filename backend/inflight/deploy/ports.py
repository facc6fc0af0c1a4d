"""Selection of the ports of tritonserver and the supervisor."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from inflight.errors import ConfigError

# In this order; tritonserver has the first three.
_FLAGS = ("--http-port", "--grpc-port", "--metrics-port", "--engine-metrics-port")
_MAX_PORT = 65535


def choose_ports(host: str | Sequence[str], ports: Sequence[int]) -> tuple[int, ...]:
    """The same ports, with a free one for each 0; host: of all, or one each.

    Raises:
        ConfigError: a port is in use, duplicate or out of range, or a host is not an address of
            this machine.
    """
    hosts = [host] * len(ports) if isinstance(host, str) else host
    flags = _FLAGS[: len(ports)]
    for one in dict.fromkeys(hosts):
        _check_host(one)
    for port, flag in zip(ports, flags, strict=True):
        if not 0 <= port <= _MAX_PORT:
            raise ConfigError(
                f"{flag}: {port} is out of range; allowed: 1 to {_MAX_PORT}, or 0 for a free one"
            )
        if port and ports.count(port) > 1:
            named = [name for name, other in zip(flags, ports, strict=True) if other == port]
            raise ConfigError(f"{' and '.join(named)} are both {port}; each needs its own")
    chosen, taken = [], []
    with contextlib.ExitStack() as held:
        for one, port, flag in zip(hosts, ports, flags, strict=True):
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # As in tritonserver: a port with connections in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((one, port))
                probe.listen(1)
                chosen.append(probe.getsockname()[1])
            except OSError as error:
                taken.append((flag, f"{one}:{port} cannot be used ({error.strerror})"))
    if taken:
        other = " ".join(f"{flag} 0" for flag, _ in taken)
        raise ConfigError(
            f"{'; '.join(text for _, text in taken)}; stop the process that listens there or "
            f"choose other ports; to pick free ones: {other}"
        )
    return tuple(chosen)


def _check_host(host: str) -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ConfigError(
            f"--host: {host} is not an address of this machine ({error.strerror}); allowed: "
            "127.0.0.1 (local only), 0.0.0.0 (all interfaces), or an address of this machine"
        ) from None
