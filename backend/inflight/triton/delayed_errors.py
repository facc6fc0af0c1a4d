"""Errors that reach tritonserver no sooner than it can take them.

With the metadata `triton_grpc_error: true` an error ends its gRPC stream. Triton 2.51 hands a
request to the models first and asks gRPC for the stream's next request afterwards; an error that
comes in between has the stream's state freed twice, and the whole server dies (SIGSEGV). The gap
is a few microseconds, unless tritonserver's thread loses its core there. On one core, a server
that had just started died within 15 refusals; with 5 ms between request and error, none did.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils
from inflight.errors import InflightError
from inflight.triton.errors import triton_error

logger = logging.getLogger(__name__)

EARLIEST_ERROR_S = 0.02


class DelayedErrors:
    """Sends errors from a thread of its own, each EARLIEST_ERROR_S after its request arrived."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[float, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="errors", daemon=True)
        self._thread.start()

    def send(self, sender: Any, error: InflightError) -> None:
        """Answer a request that has just arrived with an error.

        Args:
            sender: the request's, in Triton's Python API.
        """
        response = pb_utils.InferenceResponse(error=triton_error(error))
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.when_due(time.monotonic(), lambda: sender.send(response, flags=final))

    def when_due(self, arrived: float, send: Callable[[], None]) -> None:
        """Call `send`, at once and on this thread where the request is old enough.

        Args:
            arrived: when the request did, in time.monotonic().
            send: must not block for long, as the next errors wait for it.
        """
        due = arrived + EARLIEST_ERROR_S
        if due <= time.monotonic():
            send()
        else:
            self._waiting.put((due, send))

    def close(self) -> None:
        """Send what waits, each error at its time, then end the thread."""
        self._waiting.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        # First come, first served: all wait for the same time.
        while (entry := self._waiting.get()) is not None:
            due, send = entry
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                send()
            except Exception:  # Triton's; the next errors still have to leave
                logger.exception("an error could not be sent")
