"""Whether a client has left before it got its whole response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class DisconnectWatch:
    """Waits for the end of a client's connection, until `end`.

    The request's body has been read: the next message is that the client has left.

    Args:
        on_left: called once it has.
    """

    def __init__(self, receive: Receive, on_left: Callable[[], None]) -> None:
        self._waiting = asyncio.ensure_future(receive())
        self._on_left = on_left
        self._waiting.add_done_callback(self._leave)

    @property
    def has_left(self) -> bool:
        return self._waiting.done() and not self._waiting.cancelled()

    def end(self) -> None:
        """Stop waiting: `on_left` is not called any more."""
        self._waiting.remove_done_callback(self._leave)
        if not self._waiting.done():
            self._waiting.cancel()

    def _leave(self, waiting: object) -> None:
        self._on_left()
