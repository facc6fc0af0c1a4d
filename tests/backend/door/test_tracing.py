"""A span records a request and how it ended, without its texts."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from inflight.door import tracing
from inflight.door.http.middleware import Paths, RequestMiddleware
from inflight.door.tracing import Tracing, Usage, check_endpoint, connect, model_of
from inflight.errors import ConfigError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "The password is xyzzy."


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(exporter: InMemorySpanExporter) -> Any:
    found = Tracing(SimpleSpanProcessor(exporter))
    yield found
    found.close()


def answer(path: str, status: int, *parts: bytes, headers: Any = (), tracing: Any) -> None:
    """Send a request through `RequestMiddleware` around an application with this response."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if status:
            await send({"type": "http.response.start", "status": status, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})

    async def send(message: Any) -> None:
        pass

    scope = {"path": path, "raw_path": path.encode(), "method": "POST", "headers": headers}
    middleware = RequestMiddleware(app, Paths(re.compile(rb".*"), app), tracing=tracing)
    asyncio.run(middleware(scope, None, send))  # type: ignore[arg-type]


def event(num_tokens: int, reason: str = "") -> bytes:
    found = {
        "text_output": f'{SECRET} "num_output_tokens":1000',
        "num_input_tokens": 7,
        "num_output_tokens": num_tokens,
        "finish_reason": reason,
    }
    return b"data: " + json.dumps(found).encode() + b"\n\n"


def test_a_stream_is_one_span_of_its_clients_trace(
    traced: Tracing, exporter: InMemorySpanExporter
) -> None:
    headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"x", b"y")]
    stream = event(1) + event(2) + event(3, "length")
    parts = [stream[:90], stream[90:91], stream[91:]]  # cut anywhere
    path = "/v2/models/one_chat/generate_stream"
    answer(path, 200, *parts, headers=headers, tracing=traced)
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat one_chat"
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    found = dict(span.attributes or {})
    assert 0 <= found.pop("gen_ai.server.time_to_first_token") < 10
    assert len(found.pop("inflight.request_id")) == 16
    assert found == {
        "gen_ai.provider.name": "inflight",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "one_chat",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ("length",),
        "inflight.status": "200",
    }
    assert span.status.status_code is StatusCode.UNSET
    assert "xyzzy" not in span.to_json()


@pytest.mark.parametrize(("status", "shown"), [(400, "400"), (503, "503"), (0, "499")])
def test_an_error_is_one_of_the_span(
    traced: Tracing, exporter: InMemorySpanExporter, status: int, shown: str
) -> None:
    body = [b'{"error":"%s"}' % SECRET.encode()] if status else []
    answer("/v2/models/generate/generate", status, *body, tracing=traced)
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and span.name == "text_completion generate"
    assert (span.attributes or {})["error.type"] == shown
    assert span.status.status_code is StatusCode.ERROR
    assert "xyzzy" not in span.to_json()


def test_other_requests_have_no_span(traced: Tracing, exporter: InMemorySpanExporter) -> None:
    for path in ("/v2/health/ready", "/v2/models/generate", "/v2/models/generate/config"):
        answer(path, 200, b"{}", tracing=traced)
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v2/models/m/generate", "m"),
        ("/v2/models/m/versions/1/generate_stream", "m"),
        ("/v2/models/m/infer", "m"),
        ("/v2/models/generate", None),
        ("/v2/repository/index", None),
    ],
)
def test_the_model_is_that_of_the_path(path: str, model: str | None) -> None:
    assert model_of(path) == model


def test_usage_of_several_outputs_is_their_sum() -> None:
    usage = Usage()
    usage.feed(b'{"num_input_tokens":3,"num_output_tokens":[4,5],')
    usage.feed(b'"finish_reason":["stop","length"]}')
    usage.finish()
    assert (usage.num_input_tokens, usage.num_output_tokens) == (3, 9)
    assert usage.finish_reasons == ["stop", "length"]


def test_a_large_response_is_not_kept() -> None:
    usage = Usage()
    for _ in range(100):
        usage.feed(b"x" * (1 << 16))
    assert len(usage._rest) <= tracing.MAX_BUFFERED_BYTES


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("https://a/x/", "https://a/x/v1/traces"),
        ("http://a:4318/v1/traces", "http://a:4318/v1/traces"),
    ],
)
def test_the_endpoint_gets_the_path_of_traces(given: str, url: str) -> None:
    assert check_endpoint(given) == url


@pytest.mark.parametrize("given", ["a:4317", "grpc://a:4317", "http://", "/v1/traces"])
def test_an_endpoint_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-endpoint: .* allowed: http or https"):
        connect(given)


def test_without_the_packages_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'inflight-triton\[otel\]'"):
        connect("http://127.0.0.1:4318")


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys, inflight.door.http_door, inflight.door.grpc.worker; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
