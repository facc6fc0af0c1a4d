"""Faults between the doors and Triton other than its end: each request has one answer in bounded
time, the next one is served, and nothing internal is shown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from grpc_guard import Door, StandIn, opened
from http_door import EVENT, LIMITS, Running, a_door, ask
from inflight.door.grpc import status
from inflight.door.http import upstream
from inflight.door.http.upstream import Upstream, UpstreamLost
from kserve import request, text
from tcp_proxy import TcpProxy, proxied
from waiting import PATIENCE_S, wait_until

# The patience with Triton of the doors in question; far below each time limit of the tests.
GIVES_UP_S = 1.0
TIMEOUT_S = 2 * PATIENCE_S
BODY = {"text_input": "x"}
Code = grpc.StatusCode


# HTTP


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with a_door(tmp_path_factory.mktemp("http")) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = {**LIMITS, "first_byte_timeout_s": GIVES_UP_S}
    with a_door(tmp_path_factory.mktemp("impatient"), limits=limits) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def mute(door: Running) -> Iterator[Future[tuple[int, dict[str, str], bytes]]]:
    """What is asked of a model whose configuration is not answered: the door waits for it for ten
    seconds, during which other tests run."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask, door, "POST", "/v2/models/mute_config/generate", BODY)


@pytest.fixture(autouse=True)
def _serves_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"door", "impatient"} & set(request.fixturenames):
        running: Running = request.getfixturevalue(name)
        status, reply = ask_in_time(running, "echo/generate")
        assert (status, json.loads(reply)) == (200, BODY)
        assert ask(running, "GET", "/v2/health/ready")[0] == 200


def ask_in_time(door: Running, route: str) -> tuple[int, bytes]:
    """Status and body of an answer that Triton has begun: on a busy machine, it may have been given
    up before."""

    def begun() -> tuple[int, bytes] | None:
        status, _, reply = ask(door, "POST", f"/v2/models/{route}", BODY)
        return (status, reply) if status != 504 else None

    found = wait_until(begun)
    assert found is not None
    return found


def events(reply: bytes) -> list[dict[str, str]]:
    parts = [one for one in reply.split(b"\n\n") if one]
    return [json.loads(one.removeprefix(b"data: ")) for one in parts]


@pytest.mark.parametrize("route", ["generate", "generate_stream", "infer"])
@pytest.mark.parametrize("fault", ["garbage", "strange", "cut_head", "endless_head"])
def test_a_response_that_never_begins_is_503(door: Running, fault: str, route: str) -> None:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    body = {"inputs": [tensor]} if route == "infer" else BODY
    rss = door.rss()
    status, headers, reply = ask(door, "POST", f"/v2/models/{fault}/{route}", body)
    assert status == 503 and headers["retry-after"] == "1"
    assert "retry later" in json.loads(reply)["error"]
    assert door.rss() - rss < 16 << 20


@pytest.mark.parametrize("fault", ["bad_chunk", "reset"])
def test_a_stream_that_breaks_ends_with_an_error_event(door: Running, fault: str) -> None:
    status, _, reply = ask(door, "POST", f"/v2/models/{fault}/generate_stream", BODY)
    assert status == 200 and reply.startswith(EVENT)
    first, error = events(reply)
    assert first == {"text_output": "a"} and "send the request again" in error["error"]


@pytest.mark.parametrize("fault", ["short", "bad_chunk", "reset"])
def test_half_an_answer_is_no_answer(door: Running, fault: str) -> None:
    status, _, reply = ask(door, "POST", f"/v2/models/{fault}/generate", BODY)
    assert status == 503 and "text_output" not in reply.decode()


def test_a_stalled_stream_ends_with_an_error_event(impatient: Running) -> None:
    num_lost, started = impatient.triton.num_lost, time.monotonic()
    status, reply = ask_in_time(impatient, "stalled/generate_stream")
    assert time.monotonic() - started >= GIVES_UP_S
    assert status == 200
    first, error = events(reply)
    assert first == {"text_output": "a"} and "in time" in error["error"]
    wait_until(lambda: impatient.triton.num_lost > num_lost)


@pytest.mark.parametrize("model", ["stalled", "slow"])
def test_a_stalled_answer_is_504(impatient: Running, model: str) -> None:
    num_lost = impatient.triton.num_lost
    status, _, reply = ask(impatient, "POST", f"/v2/models/{model}/generate", BODY)
    assert status == 504 and "in time" in json.loads(reply)["error"]
    wait_until(lambda: impatient.triton.num_lost > num_lost)


def test_a_model_whose_configuration_is_not_understood_is_503(door: Running) -> None:
    status, _, reply = ask(door, "POST", "/v2/models/odd_config/generate", BODY)
    assert status == 503 and "retry later" in json.loads(reply)["error"]


def test_connecting_to_a_triton_that_accepts_nothing_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stopped Triton's queue of connections is full at some time: Linux then drops SYNs."""
    monkeypatch.setattr(upstream, "CONNECT_TIMEOUT_S", 0.3)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = listener.getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        started = time.monotonic()
        with pytest.raises(UpstreamLost):
            asyncio.run(Upstream("127.0.0.1", port).connect())
        assert 0.29 <= time.monotonic() - started < PATIENCE_S


# gRPC


@pytest.fixture(scope="module")
def triton() -> Iterator[StandIn]:
    triton = StandIn()
    yield triton
    triton.close()


@contextlib.contextmanager
def grpc_door(folder: Path, address: str, first_byte_timeout_s: float) -> Iterator[Door]:
    options = ("--workers", "1", "--drain", "1")
    with opened(folder, address, *options, first_byte_timeout_s=first_byte_timeout_s) as door:
        yield door


@pytest.fixture
def between(triton: StandIn) -> Iterator[TcpProxy]:
    with proxied(triton.address) as proxy:
        yield proxy


def begin(door: Door, model: str) -> grpc.Call:
    return door.stub.ModelStreamInfer(iter([request(model, text("x"), id="1")]), timeout=TIMEOUT_S)


def assert_serves(door: Door) -> None:
    def serves() -> bool:
        try:
            found = next(begin(door, "generate")).infer_response.raw_output_contents[0]
        except grpc.RpcError as error:  # until it has connected again, and Triton answers in time
            assert error.code() in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
            return False
        return bool(found == b"all")

    wait_until(serves)


def assert_is_clean(error: grpc.RpcError) -> None:
    assert "127.0.0.1" not in error.details() and "ipv4" not in error.details()


def test_a_connection_reset_in_mid_stream_ends_its_grpc_streams(
    tmp_path: Path, between: TcpProxy
) -> None:
    with grpc_door(tmp_path, between.address, TIMEOUT_S) as door:
        calls = [begin(door, "endless") for _ in range(3)]
        for call in calls:
            next(call)
        between.reset()
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                for _ in call:
                    pass
            assert caught.value.code() is Code.UNAVAILABLE
            assert "send the request again" in caught.value.details()
            assert_is_clean(caught.value)
        assert_serves(door)


def test_a_grpc_stream_that_stalls_ends_in_time(tmp_path: Path, between: TcpProxy) -> None:
    with grpc_door(tmp_path, between.address, GIVES_UP_S) as door:
        call = begun(door, "endless")
        started = time.monotonic()
        between.is_black_hole = True
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
        assert caught.value.code() is Code.DEADLINE_EXCEEDED
        assert time.monotonic() - started < PATIENCE_S
        between.is_black_hole = False
        between.reset()  # as when the supervisor replaces Triton
        assert_serves(door)


def begun(door: Door, model: str) -> grpc.Call:
    """A stream after its first response: on a busy machine, it may have been given up before."""

    def begin_once() -> grpc.Call | None:
        call = begin(door, model)
        try:
            next(call)
        except grpc.RpcError as error:
            assert error.code() is Code.DEADLINE_EXCEEDED
            return None
        return call

    return wait_until(begin_once)


class BrokenServer:
    """A TCP server that answers each connection with these bytes, and then closes it or not."""

    def __init__(self, answer: bytes, *, closes: bool) -> None:
        self._answer, self._closes = answer, closes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._kept: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    sock.sendall(self._answer)
                    if self._closes:
                        sock.close()
                    else:
                        self._kept.append(sock)

    def close(self) -> None:
        for sock in (self._listener, *self._kept):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


SETTINGS = frame(4, 0, 0, b"")
# :status 200 of HPACK's static table.
HEADERS = frame(1, 4, 1, b"\x88")
BROKEN = {
    "closed at once": (b"", True),
    "accepted without an answer": (b"", False),
    "garbage": (bytes(range(256)) * 4, True),
    "HTTP/1.1": (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", True),
    "settings and silence": (SETTINGS, False),
    "a head without gRPC": (SETTINGS + HEADERS, False),
    "a head that is no HPACK": (SETTINGS + frame(1, 4, 1, b"\xff" * 40), False),
    "half a frame": (SETTINGS + b"\x00\x40", True),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_triton_that_speaks_no_grpc_costs_each_request_one_error(
    tmp_path: Path, case: str
) -> None:
    answer, closes = BROKEN[case]
    server = BrokenServer(answer, closes=closes)
    try:
        with grpc_door(tmp_path, server.address, GIVES_UP_S) as door:
            started = time.monotonic()
            stub = service_pb2_grpc.GRPCInferenceServiceStub(door.channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(request("generate", text("x")), timeout=TIMEOUT_S)
            errors = [caught.value]
            with pytest.raises(grpc.RpcError) as caught:
                list(begin(door, "generate"))
            errors.append(caught.value)
            assert time.monotonic() - started < PATIENCE_S
            for error in errors:
                assert error.code() in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
                assert_is_clean(error)
                assert error.code() is not Code.UNAVAILABLE or error.details() == status.LOST
            assert door.process.poll() is None and len(door.workers()) == 1
    finally:
        server.close()


# Last: its request is as old as the first test.
def test_a_model_whose_configuration_is_not_answered_is_503(
    mute: Future[tuple[int, dict[str, str], bytes]],
) -> None:
    status, _, reply = mute.result()
    assert status == 503 and "retry later" in json.loads(reply)["error"]
