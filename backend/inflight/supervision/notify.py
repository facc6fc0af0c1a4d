"""Messages to systemd, for units with Type=notify (sd_notify(3))."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*assignments: str) -> None:
    """Send assignments such as READY=1; does nothing if systemd does not listen."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # in the abstract namespace
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
    ):
        sock.connect(address)
        sock.sendall("\n".join(assignments).encode())
