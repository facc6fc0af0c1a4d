"""The self-test reports what a server does wrong; tests/integration runs it against a real one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import fake_triton
from fake_triton import Call, answer
from inflight.cli.doctor import self_test
from inflight.cli.doctor.check import Check
from inflight.cli.doctor.self_test import Requests
from inflight.deploy.metrics import render
from inflight.ipc.health import Health
from inflight.ipc.metrics.source import ModelMetrics
from metric_snapshots import empty, with_values

LABELS = {"model_name": "small", "engine": "0", "model": "llm", "version": "1"}
BAD = self_test.BAD_TEMPERATURE

Run = Callable[..., tuple[int, str, str]]


class Stub(BaseHTTPRequestHandler):
    """Answers as the server would, except for what a test has changed."""

    replies: dict[str, tuple[int, Any]] = {}  # noqa: RUF012  (replaced by each test)
    num_scrapes = 0

    def do_GET(self) -> None:
        if self.path == "/metrics":
            type(self).num_scrapes += 1
            values = {"request_success": {"abort": min(self.num_scrapes - 2, 1)}}
            metrics = with_values(empty(), **(values if self.num_scrapes > 2 else {}))
            self._send(200, render([ModelMetrics(LABELS, metrics)]))
        else:
            self._reply("version", 200, {"version": "2.51.0"})

    def do_POST(self) -> None:
        inputs = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "temperature" in inputs:
            self._reply("error", 400, {"error": "temperature: -1.0 is out of range"})
        elif self.path.endswith("generate_stream"):
            self._reply("stream", 200, b'data: {"text_output": "a"}\n\n')
        else:
            self._reply("unary", 200, {"text_output": "a", "num_output_tokens": 8})

    def _reply(self, name: str, status: int, body: Any) -> None:
        status, body = self.replies.get(name, (status, body))
        self._send(status, body if isinstance(body, bytes) else json.dumps(body).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def well_behaved(call: Call) -> Iterator[Any]:
    if "temperature" in call.input_names():
        yield fake_triton.error("temperature: must have another value")
    else:
        yield answer("Paris", "length", num_output=8)


@pytest.fixture
def address() -> Iterator[str]:
    Stub.replies, Stub.num_scrapes = {}, 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def checks(
    address: str,
    script: Callable[[Call], Iterator[Any]] = well_behaved,
    models: tuple[str, ...] = ("one_generate", "one_llm"),
    seconds: float = 10.0,
) -> dict[str, Check]:
    with fake_triton.serve(script) as triton:
        health = Health(
            is_live=True,
            is_ready=True,
            models=list(models),
            endpoints={"http": address, "grpc": triton.url, "engine_metrics": address},
        )
        requests = Requests(health, time.monotonic() + seconds)
        return {check.name: check for check in requests.checks(lambda name: None)}


def test_a_server_that_answers_as_it_should_passes(address: str) -> None:
    found = checks(address)
    assert list(found) == [
        *("Triton", "metrics", "HTTP", "HTTP stream", "HTTP error"),
        *("gRPC", "gRPC stream", "gRPC error", "cancel"),
    ]
    assert [check for check in found.values() if check.status != "ok"] == []


@pytest.mark.parametrize(
    ("reply", "status", "body", "check", "text"),
    [
        ("version", 200, {}, "Triton", "no version"),
        ("unary", 503, {"error": "not ready"}, "HTTP", "status 503"),
        ("unary", 200, {"text_output": "a", "num_output_tokens": 7}, "HTTP", "7 output tokens"),
        ("stream", 200, b'data: {"error": "lost"}\n\n', "HTTP stream", "lost"),
        ("stream", 200, b"", "HTTP stream", "no text in 0 events"),
        ("error", 500, {"error": "temperature: bad"}, "HTTP error", "status 500, expected 400"),
        ("error", 400, {"error": "bad request"}, "HTTP error", "does not name the tensor"),
    ],
)
def test_a_wrong_answer_over_http_is_broken(
    address: str, reply: str, status: int, body: Any, check: str, text: str
) -> None:
    Stub.replies = {reply: (status, body)}
    found = checks(address)
    assert text in found[check].found
    assert [name for name, one in found.items() if one.status == "broken"] == [check]


def test_a_request_that_is_not_refused_is_broken(address: str) -> None:
    found = checks(address, lambda call: iter([answer("Paris", "length", num_output=8)]))
    assert found["gRPC error"].status == "broken"
    assert "-1 was accepted" in found["gRPC error"].found


def test_a_cancelled_request_that_goes_on_is_broken(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stub, "num_scrapes", -1000)  # none of them shows an aborted request
    found = checks(address, seconds=5.0)
    assert found["cancel"].status == "broken"
    assert "did not abort" in found["cancel"].found


def test_a_model_without_a_tokenizer_gets_no_requests(address: str) -> None:
    found = checks(address, models=("llm",))
    assert list(found) == ["Triton", "metrics", "requests"]
    assert found["requests"].status == "note"


def test_a_server_that_does_not_start_is_broken_with_its_reason(tmp_path: Path) -> None:
    (check,) = self_test.examine([tmp_path / "missing"])
    assert (check.name, check.status) == ("start", "broken")
    assert "missing is not a folder" in check.found


def test_a_repository_is_for_the_self_test(inflight: Run) -> None:
    status, _, error = inflight("doctor", "--repository", "models")
    assert (status, "requires --self-test" in error) == (2, True)
