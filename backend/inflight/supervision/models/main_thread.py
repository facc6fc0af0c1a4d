"""Calls from other threads that the supervisor's main thread makes between two of its polls: only
that thread changes what is supervised."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from inflight.errors import EngineError

T = TypeVar("T")


class MainThread:
    """`run` from any thread, `make_calls` on the main one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._is_closed = False

    def run(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises.

        Raises:
            EngineError: the server is stopping.
        """
        future: Future[T] = Future()
        self._calls.put((call, future))
        if self._is_closed:
            self.close()
        return future.result()

    def make_calls(self) -> None:
        while not self._calls.empty():
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except Exception as error:  # for the thread that waits for it
                future.set_exception(error)

    def close(self) -> None:
        """Refuse calls from now on."""
        self._is_closed = True
        while True:
            try:
                _, future = self._calls.get_nowait()
            except queue.Empty:
                return
            future.set_exception(EngineError("the server is stopping"))
