"""Measures how late the event loop is: a busy load generator sees answers late."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

INTERVAL_S = 0.01
WARN_ABOVE_MS = 5.0


class LagMeter:
    """Samples the lag while its `async with` block runs.

    Attributes:
        samples_s: by how much a timer of INTERVAL_S fired late, one per interval.
    """

    def __init__(self) -> None:
        self.samples_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LagMeter:
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _sample(self) -> None:
        while True:
            due = time.perf_counter() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.samples_s.append(max(0.0, time.perf_counter() - due))
