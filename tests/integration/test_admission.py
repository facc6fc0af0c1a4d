"""Deadlines, priority classes, tenants and refusals of a real server, over all its doors."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from failpoint import failpoint
from inflight_client import Client, TimedOut, Unavailable
from kserve import RawInput, outputs, request, tensor, text
from supervised import Serving, serve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STEP_MS = 20
PROMPT = "one two three four five six seven eight nine"
FOREVER = 400  # tokens: 8 s
QUEUE_TIMEOUT_S = 6.0


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that runs two requests at a time and queues four, one step each STEP_MS."""
    settings = {"max_num_seqs": 2, "max_waiting": 4, "queue_timeout_s": QUEUE_TIMEOUT_S}
    with failpoint("slow", STEP_MS):
        folder = tmp_path_factory.mktemp("admission")
        doors = ("--gateway-port", "0", "--grpc-guard")
        with serve(folder, "echo", *doors, max_model_len=1024, **settings) as found:
            yield found


@pytest.fixture
def idle(serving: Serving) -> Iterator[Serving]:
    yield serving
    serving.wait_until_idle(30.0)


def over_http(
    address: str, path: str, body: dict[str, Any]
) -> tuple[int, http.client.HTTPMessage, dict[str, Any]]:
    """Status, headers and body of a response."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())
    finally:
        connection.close()


def over_grpc(server: Serving, *inputs: RawInput) -> list[dict[str, Any]]:
    """The responses of a stream, or RpcError with the code of the request's error."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        sent = request("generate", text(PROMPT), tensor("ignore_eos", "BOOL", True), *inputs)
        metadata = (("triton_grpc_error", "true"),)
        call = stub.ModelStreamInfer(iter([sent]), metadata=metadata, timeout=60)
        return [outputs(one.infer_response) for one in call if one.infer_response.outputs]


def max_tokens(number: int) -> RawInput:
    return tensor("max_tokens", "INT32", number)


def body(**fields: Any) -> dict[str, Any]:
    return {"text_input": PROMPT, "ignore_eos": True, **fields}


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.monotonic()
    found = call()
    return time.monotonic() - started, found


def test_a_deadline_ends_a_request_over_grpc(idle: Serving) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        over_grpc(idle, max_tokens(FOREVER), tensor("deadline_ms", "INT32", 300))
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED, raised.value
    assert "deadline_ms: the request was not complete 300 ms after" in raised.value.details()
    assert "retry-after" not in dict(raised.value.trailing_metadata())


def test_a_stream_has_what_was_generated_before_its_deadline(idle: Serving) -> None:
    inputs = [max_tokens(FOREVER), tensor("deadline_ms", "INT32", 600)]
    stream = tensor("stream", "BOOL", True)
    with grpc.insecure_channel(idle.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        sent = request(
            "generate", text(PROMPT), tensor("ignore_eos", "BOOL", True), stream, *inputs
        )
        found = list(stub.ModelStreamInfer(iter([sent]), timeout=60))
    assert "deadline_ms: the request was not complete 600 ms after" in found[-1].error_message
    counts = [outputs(one.infer_response).get("num_output_tokens", 0) for one in found[:-1]]
    # A step that was launched before the deadline may end after it.
    assert 0 < sum(counts) <= 600 / STEP_MS + 1


def test_a_deadline_is_504_over_http(idle: Serving) -> None:
    request = body(max_tokens=FOREVER, deadline_ms=300)
    took, (status, headers, reply) = seconds_of(
        lambda: over_http(idle.http, "/v2/models/generate/generate", request)
    )
    assert status == 504 and "retry-after" not in headers, reply
    assert "deadline_ms: the request was not complete 300 ms after" in reply["error"]
    assert took < 0.5 * FOREVER * STEP_MS / 1e3


def test_a_deadline_is_504_of_openais_api_and_not_retried(idle: Serving) -> None:
    request = {"model": "llm", "prompt": PROMPT, "ignore_eos": True, "max_tokens": FOREVER}
    status, headers, reply = over_http(
        idle.gateway, "/v1/completions", request | {"deadline_ms": 300}
    )
    assert (status, reply["error"]["code"]) == (504, "deadline_exceeded"), reply
    assert headers["x-should-retry"] == "false"


def test_the_client_raises_timed_out(idle: Serving) -> None:
    with Client(idle.grpc) as client, pytest.raises(TimedOut, match="deadline_ms"):
        client.generate(PROMPT, max_tokens=FOREVER, ignore_eos=True, deadline_ms=300)


def test_a_request_that_is_done_in_time_is_answered(idle: Serving) -> None:
    (answer,) = over_grpc(idle, max_tokens(4), tensor("deadline_ms", "INT32", 60_000))
    assert answer["num_output_tokens"] == 4


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("priority_class", "urgent", "priority_class: 'urgent' is unknown; allowed: interactive"),
        ("deadline_ms", 0, "deadline_ms: 0 is out of range; allowed: 1 to 86400000"),
        ("cache_priority", 101, "cache_priority: 101 is out of range; allowed: 0 to 100"),
        ("cache_ttl_s", -1.0, "cache_ttl_s: -1.0 is out of range; allowed: more than 0, up to"),
    ],
)
def test_other_values_are_refused_by_name(idle: Serving, name: str, value: Any, error: str) -> None:
    request = body(max_tokens=1, **{name: value})
    status, _, reply = over_http(idle.http, "/v2/models/generate/generate", request)
    assert status == 400 and error in reply["error"]


def test_a_request_may_say_how_long_it_is_cached(idle: Serving) -> None:
    kept = (tensor("cache_priority", "INT32", 100), tensor("cache_ttl_s", "FP32", 60.0))
    (answer,) = over_grpc(idle, max_tokens(4), *kept)
    assert answer["num_output_tokens"] == 4
    request = body(max_tokens=4, cache_priority=100, cache_ttl_s=60)
    status, _, _ = over_http(idle.http, "/v2/models/generate/generate", request)
    assert status == 200
    with Client(idle.grpc) as client:
        client.generate(PROMPT, max_tokens=4, cache_priority=0, cache_ttl_s=0.5)


def in_engine(server: Serving) -> int:
    """Requests that run or wait."""
    stats = server.stats()
    return stats.num_running + stats.num_waiting


class Filled:
    """A server whose seats and queue are taken for some seconds, within a `with` block."""

    _BODY = body(max_tokens=FOREVER, deadline_ms=5000)

    def __init__(self, server: Serving) -> None:
        self._server = server
        self._threads = ThreadPoolExecutor(6)

    def __enter__(self) -> None:
        for running, waiting in ((2, 0), (2, 4)):
            for _ in range(running + waiting - in_engine(self._server)):
                self._threads.submit(self._send)
            self._server.wait_until(lambda want=running + waiting: in_engine(self._server) == want)

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def _send(self) -> None:
        over_http(self._server.http, "/v2/models/generate/generate", self._BODY)


def test_a_full_queue_refuses_at_once_and_says_when_to_retry(idle: Serving) -> None:
    with Filled(idle):
        took, (status, headers, reply) = seconds_of(
            lambda: over_http(idle.http, "/v2/models/generate/generate", body(max_tokens=1))
        )
        assert status == 503 and took < 3.0, reply
        assert "4 requests are waiting (max_waiting is 4); retry in" in reply["error"]
        assert reply["error"].endswith(f"retry in {headers['retry-after']} s")
        with pytest.raises(grpc.RpcError) as raised:
            over_grpc(idle, max_tokens(1))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        seconds = dict(raised.value.trailing_metadata())["retry-after"]
        assert raised.value.details().endswith(f"retry in {seconds} s")
        assert 1 <= int(seconds) <= 60
        completion = {"model": "llm", "prompt": PROMPT, "max_tokens": 1}
        status, headers, reply = over_http(idle.gateway, "/v1/completions", completion)
        assert (status, reply["error"]["code"]) == (503, "server_overloaded")
        assert reply["error"]["message"].endswith(f"retry in {headers['retry-after']} s")
        with (
            Client(idle.grpc, max_retries=0) as client,
            pytest.raises(Unavailable) as refused,
        ):
            client.generate(PROMPT, max_tokens=1)
        assert refused.value.retry_after and refused.value.retry_after >= 1


def test_a_tenant_and_a_class_pass_those_that_wait_longer(idle: Serving) -> None:
    """Of those that wait, two came last, but nothing was computed for their tenant and class."""
    order: list[str] = []

    def send(name: str, **fields: Any) -> None:
        asked = body(**{"max_tokens": 30, **fields})
        status, _, reply = over_http(idle.http, "/v2/models/generate/generate", asked)
        order.append(name if status == 200 else str(reply))

    with ThreadPoolExecutor(6) as threads:
        for name, fields in (
            ("a1", {"cache_salt": "a", "max_tokens": 60}),
            ("a2", {"cache_salt": "a", "max_tokens": 120}),
            ("a3", {"cache_salt": "a"}),
            ("a4", {"cache_salt": "a"}),
            ("batch", {"cache_salt": "b", "priority_class": "batch"}),
            ("b1", {"cache_salt": "b"}),
        ):
            expected = in_engine(idle) + 1
            threads.submit(send, name, **fields)
            idle.wait_until(lambda want=expected: in_engine(idle) >= want)
    assert order[0] == "a1" and len(order) == 6, order
    assert order.index("b1") < order.index("a3") < order.index("a4"), order
    assert order.index("batch") < order.index("a4"), order


def test_a_request_is_not_queued_for_longer_than_the_model_allows(idle: Serving) -> None:
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            threads.submit(
                over_http, idle.http, "/v2/models/generate/generate", body(max_tokens=FOREVER)
            )
        idle.wait_until(lambda: idle.stats().num_running == 2)
        took, (status, headers, reply) = seconds_of(
            lambda: over_http(idle.http, "/v2/models/generate/generate", body(max_tokens=1))
        )
    assert status == 503 and headers["retry-after"], reply
    assert "queued for 6 s, the queue_timeout_s of this model; retry in" in reply["error"]
    assert QUEUE_TIMEOUT_S <= took < FOREVER * STEP_MS / 1e3


def metric(server: Serving, name: str, label: str = "") -> float:
    """The value of a series of the engine's metrics."""
    address, _, path = server.engine_metrics.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", f"/{path}")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    (found,) = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    return float(found.rpartition(" ")[2])


def test_metrics_count_missed_deadlines_and_what_is_queued(idle: Serving) -> None:
    started = "inflight_deadline_misses_total", 'state="started"'
    before = metric(idle, *started)
    request = body(max_tokens=FOREVER, deadline_ms=100)
    assert over_http(idle.http, "/v2/models/generate/generate", request)[0] == 504
    idle.wait_until(lambda: metric(idle, *started) == before + 1)
    for name in ("inflight_num_requests_queued", "inflight_num_prompt_tokens_queued"):
        assert metric(idle, name, 'priority_class="batch"') == 0
    for limit in ("max_waiting", "max_waiting_tokens"):
        assert metric(idle, "inflight_queue_refusals_total", f'limit="{limit}"') >= 0
    assert metric(idle, "inflight_queue_timeouts_total") >= 0
