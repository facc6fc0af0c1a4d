"""Maps errors to TritonError."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils
from inflight.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    InflightError,
    RequestError,
)

# CapacityError and EngineError are both retryable.
_CODES: dict[type[InflightError], str] = {
    RequestError: "INVALID_ARG",
    CapacityError: "UNAVAILABLE",
    EngineError: "UNAVAILABLE",
    ConfigError: "INTERNAL",
}


def triton_error(error: InflightError) -> Any:
    """The TritonError with the code of an error's class."""
    code = getattr(pb_utils.TritonError, _CODES.get(type(error), "INTERNAL"))
    return pb_utils.TritonError(str(error), code)
