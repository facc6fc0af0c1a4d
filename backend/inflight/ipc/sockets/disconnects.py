"""Disconnected clients: reported by the doors to the fronts of engines, as datagrams.

Triton does not pass a disconnect on to a running step of an ensemble, so a request whose response
is not streamed would run to its end. A door gives each request a ticket, and reports the ticket
when the client has left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.ipc.sockets.private_socket import receive

if TYPE_CHECKING:
    import asyncio

TICKET = "inflight_ticket"
"""A request parameter that doors set and refuse from clients."""

# Tickets of requests that have not arrived yet, or never will.
_MAX_REMEMBERED = 4096
# In a datagram.
_MAX_TICKETS = 256
_MAX_BYTES = 1 << 16
_RETRY_S = 0.05
_SUFFIX = ".disconnects"

logger = logging.getLogger(__name__)


def new_ticket() -> str:
    return secrets.token_hex(8)


class DisconnectReporter:
    """The door's side, on an event loop.

    Args:
        folder: the server's runtime folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[Path, list[str]] = {}  # by front
        self._retry: asyncio.TimerHandle | None = None

    def report(self, ticket: str) -> None:
        """Report that the client of this ticket's requests has left. Never blocks: a front takes
        few datagrams at a time, and what it does not take is sent again soon."""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            self._pending.setdefault(path, []).append(ticket)
        if self._retry is None:
            self._send()

    def _send(self) -> None:
        self._retry = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            for path, tickets in list(self._pending.items()):
                try:
                    while tickets:
                        sender.sendto(" ".join(tickets[:_MAX_TICKETS]).encode(), str(path))
                        del tickets[:_MAX_TICKETS]
                except BlockingIOError:
                    del tickets[:-_MAX_REMEMBERED]
                    continue
                except OSError:  # the front has exited
                    pass
                del self._pending[path]
        if self._pending:
            import asyncio  # doors have imported it; the fronts need none

            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._send)


class DisconnectListener:
    """The front's side: listens on a thread of its own.

    Args:
        folder: the server's runtime folder.
        on_disconnect: called with tickets, on that thread.
    """

    def __init__(self, folder: Path, on_disconnect: Callable[[Sequence[str]], None]) -> None:
        self._on_disconnect = on_disconnect
        self._remembered: OrderedDict[str, None] = OrderedDict()
        self._path = folder / f"stub-{os.getpid()}{_SUFFIX}"
        self._socket: socket.socket | None = None
        try:
            self._socket = receive(self._path)
        except OSError as error:  # the disk is full: abandoned requests run to their ends
            logger.warning("disconnects are not noticed: %s", error)
            return
        arguments = (self._socket,)
        threading.Thread(
            target=self._listen, args=arguments, name="disconnects", daemon=True
        ).start()

    def has_left(self, ticket: str) -> bool:
        """Whether the client of a ticket was reported before."""
        return ticket in self._remembered

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _listen(self, receiver: socket.socket) -> None:
        while True:
            try:
                tickets = receiver.recv(_MAX_BYTES).decode("ascii", "replace").split()
            except OSError:  # closed
                return
            if not tickets:  # shut down
                return
            for ticket in tickets:
                self._remembered[ticket] = None
            while len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)
            self._on_disconnect(tickets)
