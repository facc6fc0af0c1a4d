"""Token counts by account, from the fronts to the server's accountant: datagrams on a unix socket.

An account is what the door that admitted a request names in the parameter `ACCOUNT`: a tenant and
the id of its key, with a slash between.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

ACCOUNT = "inflight_account"
"""A request parameter that doors set and refuse from clients."""
RESERVED = "inflight_"
"""Prefix of such parameters."""
# One datagram stays far below the smallest usual socket buffer.
MAX_ACCOUNTS = 200
MAX_REMEMBERED = 10_000
INTERVAL_S = 0.2


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """What an account has used since its last report.

    Attributes:
        num_prompt_tokens: of requests that were accepted, cached tokens included.
        num_output_tokens: of outputs that have ended.
    """

    account: str
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


def tenant_of(account: str) -> str:
    return account.partition("/")[0]


def usage_path(folder: Path) -> Path:
    """The accountant's socket.

    Args:
        folder: the server's runtime folder.
    """
    return folder / "usage.sock"


def encode(usages: list[Usage]) -> bytes:
    return msgspec.msgpack.encode(usages)


def decode(data: bytes) -> list[Usage]:
    """Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=list[Usage])


class UsageReporter:
    """Adds up usage and reports it. Thread-safe.

    Args:
        path: of the accountant's socket; there may be none.
        clock: seconds, monotonic.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = str(path)
        self._clock = clock
        self._reported_at = -INTERVAL_S
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._used: dict[str, list[int]] = {}

    def add(self, account: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        with self._lock:
            if account not in self._used and len(self._used) >= MAX_REMEMBERED:
                return  # nothing has been reported for long
            counts = self._used.setdefault(account, [0, 0])
            counts[0] += num_prompt_tokens
            counts[1] += num_output_tokens

    @property
    def is_unreported(self) -> bool:
        """Whether anything was added since the last report."""
        return bool(self._used)

    def report_if_due(self) -> None:
        """Report several times a second, if called often; costs nothing without accounts."""
        if self._used and self._clock() - self._reported_at >= INTERVAL_S:
            self._reported_at = self._clock()
            self.report()

    def report(self) -> None:
        """Send what was added; kept for the next time if there is no accountant."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        while self._used:
            with self._lock:
                chosen = list(self._used.items())[:MAX_ACCOUNTS]
                for account, _ in chosen:
                    del self._used[account]
            try:
                self._socket.sendto(encode([Usage(a, *counts) for a, counts in chosen]), self._path)
            except OSError:  # no accountant, or its buffer is full
                for account, counts in chosen:
                    self.add(account, *counts)
                return

    def close(self) -> None:
        """Report what is left."""
        if self._used:
            self.report()
        if self._socket is not None:
            self._socket.close()
