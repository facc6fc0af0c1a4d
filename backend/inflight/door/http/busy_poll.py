"""Keeps the event loop awake while an answer is near.

On a host with power-saving cores it takes some 0.3 ms to wake a process that has slept for
milliseconds: its core, and what the caches have lost. A short request would pay that for its
answer, so the loop polls instead of sleeping for a bounded time after each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator

# Fewer cores are needed for the work itself.
MIN_CORES = 8
DEFAULT_S = 0.02
# More requests than this keep the loop awake anyway.
_MAX_REQUESTS = 16


def default_s() -> float:
    """How long to poll on this machine by default; 0 for not at all."""
    return DEFAULT_S if len(os.sched_getaffinity(0)) >= MIN_CORES else 0.0


class BusyPoll:
    """Polling of the running loop while requests are in flight.

    Args:
        seconds: after the latest request was sent; 0 to sleep always.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = 0.0
        self._num_requests = 0
        self._is_polling = False

    @contextlib.contextmanager
    def awaiting(self) -> Iterator[None]:
        """A request is in flight within the `with` block."""
        self._num_requests += 1
        if self._seconds:
            loop = asyncio.get_running_loop()
            self._until = loop.time() + self._seconds
            if not self._is_polling:
                self._is_polling = True
                loop.call_soon(self._poll, loop)
        try:
            yield
        finally:
            self._num_requests -= 1

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        # A callback that is due makes the loop look for events without waiting for them.
        self._is_polling = 0 < self._num_requests <= _MAX_REQUESTS and loop.time() < self._until
        if self._is_polling:
            loop.call_soon(self._poll, loop)
