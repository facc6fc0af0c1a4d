"""Tells a cancelled call from a cancelled task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from inflight_client.errors import Cancelled


@contextlib.contextmanager
def cancelled_calls() -> Iterator[None]:
    """gRPC raises asyncio.CancelledError also if another task has cancelled the call or closed the
    channel. The current task is not cancelled then, and must not end as if it were.

    Raises:
        Cancelled: another task has cancelled the call.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled("the request or the client was closed while a task awaited it") from None
