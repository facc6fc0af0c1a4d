"""Errors on their way to Triton: their codes, and when they may be sent."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils
from inflight.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    EngineError,
    InflightError,
    QuarantinedError,
    RequestError,
)

logger = logging.getLogger(__name__)

# With the metadata `triton_grpc_error: true` an error ends its gRPC stream. Triton 2.51 passes a
# request to the models first and requests the stream's next message from gRPC afterwards; an error
# in between frees the stream's state twice, and the server crashes (SIGSEGV). The gap is a few
# microseconds, unless tritonserver's thread is preempted there. On one core, a server that had just
# started crashed within 15 rejected requests; with 5 ms between request and error it never did.
EARLIEST_ERROR_S = 0.02

# CapacityError and EngineError are both retryable. Triton has no code for a deadline: of its codes,
# CANCELLED is the one that clients do not retry although the request is valid.
_CODES: dict[type[InflightError], str] = {
    RequestError: "INVALID_ARG",
    QuarantinedError: "INVALID_ARG",
    CapacityError: "UNAVAILABLE",
    DeadlineError: "CANCELLED",
    EngineError: "UNAVAILABLE",
    ConfigError: "INTERNAL",
}


def triton_error(error: InflightError) -> Any:
    """The TritonError with the code of an error's class."""
    code = getattr(pb_utils.TritonError, _CODES.get(type(error), "INTERNAL"))
    return pb_utils.TritonError(str(error), code)


class DelayedErrors:
    """Sends errors from its own thread, each EARLIEST_ERROR_S after its request arrived."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[float, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="errors", daemon=True)
        self._thread.start()

    def send(self, sender: Any, error: InflightError) -> None:
        """Respond to a request that has just arrived with an error.

        Args:
            sender: the request's, in Triton's Python API.
        """
        response = pb_utils.InferenceResponse(error=triton_error(error))
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.when_due(time.monotonic(), lambda: sender.send(response, flags=final))

    def when_due(self, arrived: float, send: Callable[[], None]) -> None:
        """Call `send`, immediately and on this thread if the request is old enough.

        Args:
            arrived: arrival time of the request, in time.monotonic().
            send: must not block for long, as the next errors wait for it.
        """
        due = arrived + EARLIEST_ERROR_S
        if due <= time.monotonic():
            send()
        else:
            self._waiting.put((due, send))

    def close(self) -> None:
        """Send the pending errors, each at its time, then end the thread."""
        self._waiting.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        # First come, first served: all wait for the same time.
        while (entry := self._waiting.get()) is not None:
            due, send = entry
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                send()
            except Exception:  # raised by Triton; the next errors must still be sent
                logger.exception("an error could not be sent")
