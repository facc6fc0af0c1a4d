"""Counters of fixed windows, for the package `limits`."""

from __future__ import annotations

import time
from collections.abc import Callable

from limits.aio.storage import MemoryStorage


class WindowStorage(MemoryStorage):
    """The storage in memory of `limits`, with windows on the monotonic clock: it uses the wall
    clock, and one that is set back by an hour would keep a window open for that hour.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock

    async def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        """Add to a counter; its window of `expiry` seconds begins with the first addition."""
        if await self.get(key) == 0:
            self.expirations[key] = self._clock() + expiry
        self.storage[key] += amount
        return self.storage[key]

    async def get(self, key: str) -> int:
        """The counter in its current window; 0 outside of one."""
        if self.expirations.get(key, 0.0) <= self._clock():
            self.storage.pop(key, None)
            self.expirations.pop(key, None)
        return self.storage.get(key, 0)

    async def get_expiry(self, key: str) -> float:
        """When its window ends, by the clock; now if there is none."""
        return self.expirations.get(key, self._clock())
