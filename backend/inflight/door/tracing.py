"""A span for each request, exported by OTLP over HTTP. OpenTelemetry is imported only with an
endpoint.

Attributes follow OpenTelemetry's semantic conventions for generative AI. A span is a child of the
client's (W3C Trace Context: `traceparent`, `tracestate`). It holds no prompt and no output.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from inflight.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_TRACES = "/v1/traces"
_CONTEXT = frozenset({"traceparent", "tracestate"})
_CHAT = "chat"
MAX_BUFFERED_BYTES = 1 << 20


class RequestSpan:
    """The span of one request, until `end`."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._begun = time.monotonic()
        self._has_response = False

    def requested(self, model: str) -> None:
        """The request is for a model, by Triton's name."""
        operation = _CHAT if model.endswith(_CHAT) else "text_completion"
        self._span.update_name(f"{operation} {model}")
        self._span.set_attribute("gen_ai.operation.name", operation)
        self._span.set_attribute("gen_ai.request.model", model)

    def responded(self) -> None:
        """A response is sent to the client; only the first one counts."""
        if not self._has_response:
            self._has_response = True
            seconds = time.monotonic() - self._begun
            self._span.set_attribute("gen_ai.server.time_to_first_token", seconds)

    def used(self, usage: Usage) -> None:
        """The tokens and ends that the responses reported."""
        self._span.set_attribute("gen_ai.usage.input_tokens", usage.num_input_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", usage.num_output_tokens)
        if usage.finish_reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", usage.finish_reasons)

    def end(self, status: str, *, is_error: bool) -> None:
        """The request has ended; status: HTTP's number or gRPC's name."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("inflight.status", status)
        if is_error:
            self._span.set_attribute("error.type", status)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class Tracing:
    """Creates spans and hands them to a processor.

    Args:
        processor: exports what has ended.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "inflight")
        resource = Resource.create({SERVICE_NAME: name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("inflight.door")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Iterable[tuple[str, str]], request_id: str) -> RequestSpan:
        """The span of a request; headers: of HTTP or gRPC, with lower-case names."""
        from opentelemetry.trace import SpanKind

        carrier = {name: value for name, value in headers if name in _CONTEXT}
        span = self._tracer.start_span(
            "request",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"gen_ai.provider.name": "inflight", "inflight.request_id": request_id},
        )
        return RequestSpan(span)

    def close(self) -> None:
        """Export what has ended."""
        self._provider.shutdown()


def check_endpoint(endpoint: str) -> str:
    """The URL that spans are sent to.

    Raises:
        ConfigError: it is not an http or https URL, or OpenTelemetry is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-endpoint: {endpoint!r} is not a URL; allowed: http or https, such as "
            "http://127.0.0.1:4318"
        )
    if not _is_installed():
        raise ConfigError(
            "--otlp-endpoint: OpenTelemetry is not installed; run: "
            "pip install 'inflight-triton[otel]'"
        )
    return endpoint if parts.path.endswith(_TRACES) else endpoint.rstrip("/") + _TRACES


def connect(endpoint: str) -> Tracing:
    """Tracing to an endpoint; spans are exported in batches, on a thread of its own.

    Raises:
        ConfigError: see `check_endpoint`.
    """
    url = check_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter: SpanExporter = OTLPSpanExporter(endpoint=url)
    return Tracing(BatchSpanProcessor(exporter))


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


class _Answer(msgspec.Struct):
    """Token counts of a response to a generate request, of one output or of several."""

    num_input_tokens: int = 0
    num_output_tokens: int | list[int] = 0
    finish_reason: str | list[str] = ""


_ANSWER = msgspec.json.Decoder(_Answer)


class Usage:
    """Tokens and ends of a request, from the bodies of its responses over HTTP.

    Attributes:
        finish_reasons: of the outputs that have ended, in order.
    """

    def __init__(self) -> None:
        self.num_input_tokens = 0
        self.num_output_tokens = 0
        self.finish_reasons: list[str] = []
        self._rest = b""

    def feed(self, part: bytes) -> None:
        """Take a part of a body: server-sent events, or of one JSON object."""
        *events, self._rest = (self._rest + part).split(b"\n\n")
        for event in events:
            self._add(event.removeprefix(b"data: "))
        self._rest = self._rest[:MAX_BUFFERED_BYTES]

    def finish(self) -> None:
        """The body is complete."""
        rest, self._rest = self._rest, b""
        self._add(rest.removeprefix(b"data: "))

    def _add(self, text: bytes) -> None:
        try:
            answer = _ANSWER.decode(text)
        except msgspec.DecodeError:
            return  # an error, or not of these models
        counts, reasons = answer.num_output_tokens, answer.finish_reason
        self.num_input_tokens = answer.num_input_tokens or self.num_input_tokens
        self.num_output_tokens += counts if isinstance(counts, int) else sum(counts)
        ended = [reasons] if isinstance(reasons, str) else reasons
        self.finish_reasons += [reason for reason in ended if reason]


def model_of(path: str) -> str | None:
    """The model of an inference request over HTTP, by its path; None for other requests."""
    match path.split("/"):
        case ["", "v2", "models", model, *_, "generate" | "generate_stream" | "infer"]:
            return model
    return None
