"""Work that the user can stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """
    Returns:
        The result of `work`; None if `stop` is set before its end, which cancels it.
    """
    running = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        for task in (running, stopping):
            task.cancel()
        await asyncio.wait({running, stopping})
