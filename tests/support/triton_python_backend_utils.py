"""A fake of the module that Triton's stub provides to a Python model: the parts that are used.

It is stricter than the real one where a mistake would crash or hang the server: a sender rejects
everything after its final response.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, ClassVar

import numpy as np

from waiting import PATIENCE_S, wait_until

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS = range(7)
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class InferenceResponse:
    def __init__(
        self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None
    ) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors or []}
        self._error = error

    def error(self) -> TritonError | None:
        return self._error


class ResponseSender:
    """Keeps what was sent, and when."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.sent_at: list[float] = []
        self.cancelled = False
        self.closed = threading.Event()
        self.misuses: list[str] = []
        self.failures = 0  # so many of the next sends fail

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.closed.is_set():
            self.misuses.append("send")
            raise TritonModelException("Response sender has been closed.")
        if self.failures > 0:
            self.failures -= 1
            raise TritonModelException("Failed to increase the shared memory pool size.")
        if response is not None:
            self.sent_at.append(time.monotonic())
            self.responses.append(response)
        if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.closed.set()

    def is_cancelled(self) -> bool:
        if self.closed.is_set():
            self.misuses.append("is_cancelled")
        return self.cancelled

    def wait(self, timeout: float = PATIENCE_S) -> list[InferenceResponse]:
        """The responses, once the final one is there."""
        assert self.closed.wait(timeout), "no final response came"
        return self.responses

    def wait_for(self, num_responses: int) -> list[InferenceResponse]:
        wait_until(
            lambda: len(self.responses) >= num_responses,
            lambda: f"only {len(self.responses)} responses came",
        )
        return self.responses


class InferenceRequest:
    def __init__(
        self,
        inputs: dict[str, np.ndarray[Any, Any]],
        parameters: dict[str, Any] | None = None,
        outputs: tuple[str, ...] = (),
        correlation_id: int = 0,
        request_id: str = "",
    ) -> None:
        self._request_id = request_id
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self._parameters = parameters or {}
        self._outputs = outputs
        self._correlation_id = correlation_id
        self.sender = ResponseSender()
        self.cancelled = False
        self.num_questions = 0
        self.answer_takes = 0.0

    def is_cancelled(self) -> bool:
        time.sleep(self.answer_takes)
        self.num_questions += 1
        return self.cancelled

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def requested_output_names(self) -> set[str]:
        return set(self._outputs)

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int:
        return self._correlation_id

    def get_response_sender(self) -> ResponseSender:
        return self.sender


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


class MetricFamily:
    """Series of one name. Families of all models and processes share the server's registry.

    Attributes:
        registry: values by name and labels.
        calls: calls of the metrics API so far: each is a message to the server.
    """

    COUNTER, GAUGE, HISTOGRAM = range(3)
    registry: ClassVar[dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    kinds: ClassVar[dict[str, int]] = {}
    calls: ClassVar[int] = 0

    def __init__(self, name: str, description: str, kind: int) -> None:
        if self.kinds.setdefault(name, kind) != kind:
            raise TritonModelException(f"the family {name} exists with another kind")
        assert description
        MetricFamily.calls += 1
        self.name = name
        self.kind = kind

    def Metric(self, labels: dict[str, str]) -> Metric:
        return Metric(self, labels)


class Metric:
    def __init__(self, family: MetricFamily, labels: dict[str, str]) -> None:
        self._family = family
        self._key = family.name, tuple(sorted(labels.items()))
        MetricFamily.calls += 1
        family.registry.setdefault(self._key, 0.0)

    def value(self) -> float:
        MetricFamily.calls += 1
        return self._family.registry[self._key]

    def increment(self, amount: float) -> None:
        MetricFamily.calls += 1
        if self._family.kind == MetricFamily.COUNTER and amount < 0:
            raise TritonModelException("a counter cannot be decremented")
        self._family.registry[self._key] += amount

    def set(self, value: float) -> None:
        MetricFamily.calls += 1
        if self._family.kind != MetricFamily.GAUGE:
            raise TritonModelException("only gauges can be set")
        self._family.registry[self._key] = value
