"""The ports of tritonserver and the supervisor: checked, chosen and held."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import weakref
from collections.abc import Sequence

from inflight.errors import ConfigError

# In this order; tritonserver has the first three.
_FLAGS = (
    *("--http-port", "--grpc-port", "--metrics-port", "--engine-metrics-port"),
    "--gateway-port",
)
_MAX_PORT = 65535


class HeldPorts:
    """Ports that are kept free for a server until it listens on them, which may be minutes later.

    Each is bound but does not listen, with SO_REUSEADDR: the kernel gives it neither to an outgoing
    connection nor to a process that asks for any free port, while a server that sets SO_REUSEADDR,
    too, can bind it and listen. tritonserver and the doors do.

    Args:
        host: of all, or one each.
        ports: 0 becomes a free one.

    Attributes:
        numbers: the same ports, none of them 0.

    Raises:
        ConfigError: a port is in use, duplicate or out of range, or a host is not an address of
            this machine.
    """

    def __init__(self, host: str | Sequence[str], ports: Sequence[int]) -> None:
        hosts = [host] * len(ports) if isinstance(host, str) else host
        flags = _FLAGS[: len(ports)]
        for one in dict.fromkeys(hosts):
            _check_host(one)
        _check_ports(ports, flags)
        self.numbers: tuple[int, ...] = ()
        taken = []
        with contextlib.ExitStack() as held:
            for one, port, flag in zip(hosts, ports, flags, strict=True):
                bound = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                # As in tritonserver: a port with connections in TIME_WAIT counts as free.
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    bound.bind((one, port))
                    self.numbers += (bound.getsockname()[1],)
                except OSError as error:
                    taken.append((flag, f"{one}:{port} cannot be used ({error.strerror})"))
            if taken:
                other = " ".join(f"{flag} 0" for flag, _ in taken)
                raise ConfigError(
                    f"{'; '.join(text for _, text in taken)}; stop the process that listens there "
                    f"or choose other ports; to pick free ones: {other}"
                )
            # Without `release`, as after a failed start, when the object is collected.
            self._release = weakref.finalize(self, held.pop_all().close)

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let other processes bind them."""
        self._release()


def _check_ports(ports: Sequence[int], flags: Sequence[str]) -> None:
    for port, flag in zip(ports, flags, strict=True):
        if not 0 <= port <= _MAX_PORT:
            raise ConfigError(
                f"{flag}: {port} is out of range; allowed: 1 to {_MAX_PORT}, or 0 for a free one"
            )
        if port and ports.count(port) > 1:
            named = [name for name, other in zip(flags, ports, strict=True) if other == port]
            raise ConfigError(f"{' and '.join(named)} are both {port}; each needs its own")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an IP address."""
    return ipaddress.ip_address(host).is_loopback


def _check_host(host: str) -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ConfigError(
            f"--host: {host} is not an address of this machine ({error.strerror}); allowed: "
            "127.0.0.1 (local only), 0.0.0.0 (all interfaces), or an address of this machine"
        ) from None
