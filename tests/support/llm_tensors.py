"""Inputs of the llm model, and the requests that they become."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from inflight.errors import RequestError
from inflight.triton.protocol import Generation, Limits, parse

LIMITS = Limits(vocab_size=100, max_model_len=16)


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def floats(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def flags(*values: bool) -> npt.NDArray[np.bool_]:
    return np.array(values, bool)


def strings(*values: str) -> npt.NDArray[np.object_]:
    return np.array([value.encode() for value in values], object)


def generation(parameters: dict[str, Any] | None = None, **inputs: Any) -> Generation:
    """The request of a short prompt with these parameters and further tensors."""
    return parse({"input_ids": ints(1, 2, 3), **inputs}, parameters or {}, LIMITS)


def refusal(parameters: dict[str, Any] | None = None, **inputs: Any) -> str:
    """The error of such a request."""
    with pytest.raises(RequestError) as caught:
        generation(parameters, **inputs)
    return str(caught.value)
