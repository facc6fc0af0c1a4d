"""Requests through the HTTP door, which a scripted Triton answers.

The numbers are those of a catalogue of bad inputs for LLM servers.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator

import pytest

from bad_http import BINARY, RAW, TENSORS, binary, infer, raw_tensor, tensor
from http_door import (
    BODY,
    EVENT,
    GENERATE,
    GET,
    IMPATIENT,
    Running,
    a_door,
    ask,
    head,
    post,
    receive,
    sized,
)
from waiting import wait_until


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with a_door(tmp_path_factory.mktemp("door")) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A door that soon gives up slow clients."""
    with a_door(tmp_path_factory.mktemp("impatient"), limits=IMPATIENT) as running:
        yield running


@pytest.mark.parametrize("case", RAW)
def test_bad_http(door: Running, case: str) -> None:
    request, status = RAW[case]
    before = len(door.triton.bodies)
    reply = door.answer(request)
    assert int(reply.split(b" ", 2)[1]) == status, reply
    check_error(reply)
    assert [path for path, _ in door.triton.bodies[before:] if "config" not in path] == []
    assert post(door, BODY)[0] == 200


def check_error(reply: bytes) -> None:
    """One JSON object with one sentence that names nothing of the server."""
    top, _, body = reply.partition(b"\r\n\r\n")
    assert b"application/json" in top
    if body:
        error = json.loads(body)["error"]
        assert not re.search(r"0x|Traceback|\.py|/tmp|127\.0|pid", error), error


@pytest.mark.parametrize("case", TENSORS)
def test_bad_http_tensor(door: Running, case: str) -> None:
    route, body, named = TENSORS[case]
    before = len(door.triton.bodies)
    status, reply = post(door, body, f"echo/{route}")
    assert status == 400, reply
    assert named in json.loads(reply)["error"]
    assert [path for path, _ in door.triton.bodies[before:] if "config" not in path] == []


@pytest.mark.parametrize("case", BINARY)
def test_bad_http_binary(door: Running, case: str) -> None:
    json_part, data, named = BINARY[case]
    body, length = binary(json_part, data)
    status, reply = post(door, body, "echo/infer", Inference_Header_Content_Length=length)
    assert status == 400
    assert named in json.loads(reply)["error"]


@pytest.mark.parametrize("length", ["-5", str(2**64), "abc", "0", "99999", "1e1", "0x5"])
def test_bad_http_header_length(door: Running, length: str) -> None:
    """Case 19."""
    body = json.dumps(infer()).encode()
    status, reply = post(door, body, "echo/infer", Inference_Header_Content_Length=length)
    assert status == 400
    assert "Inference-Header-Content-Length" in reply


@pytest.mark.parametrize("version", ["-1", "abc", "1.5", "9" * 30, "+1"])
def test_bad_http_version(door: Running, version: str) -> None:
    """Case 24."""
    assert ask(door, "GET", f"/v2/models/echo/versions/{version}")[0] == 404
    assert post(door, BODY, f"echo/versions/{version}/generate")[0] == 404


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_bad_http_23_unknown_model(door: Running, route: str) -> None:
    status, reply = post(door, BODY, f"unknown/{route}")
    assert status == 404
    assert "unknown model" in reply


@pytest.mark.parametrize(
    "path",
    [
        "/v2/systemsharedmemory/status",
        "/v2/systemsharedmemory/region/r/register",
        "/v2/cudasharedmemory/region/r/unregister",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/echo/trace/setting",
        "/v2/repository/models/echo/load",
        "/v2/repository/models/echo/unload",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_rest_of_triton_is_closed(door: Running, method: str, path: str) -> None:
    status, _, reply = ask(door, method, path, b"{}" if method == "POST" else None)
    assert status == 403
    assert "closed" in json.loads(reply)["error"]


# What is served


def test_a_body_is_rebuilt(door: Running) -> None:
    """Triton reads the bytes that were checked, however the client had written them."""
    body = b'{ "text_input" : "a\\u0062\\n\\u00e9", "max_tokens": 5, "temperature": 1e0 }'
    status, reply = post(door, body)
    assert status == 200
    assert reply == '{"text_input":"ab\\né","max_tokens":5,"temperature":1.0}'


def test_nested_data_reaches_triton_flat(door: Running) -> None:
    status, reply = post(door, tensor("INT32", [[1, 2], [3, 4]], (2, 2)), "echo/infer")
    assert status == 200
    assert json.loads(reply)["inputs"][0]["data"] == [1, 2, 3, 4]


def test_binary_data_is_passed_on(door: Running) -> None:
    data = b"\1\0\0\0a" + b"\2\0\0\0bc"
    body, length = binary(raw_tensor("BYTES", len(data), [2]), data)
    status, _, reply = ask(
        door, "POST", "/v2/models/echo/infer", body, Inference_Header_Content_Length=length
    )
    assert status == 200
    assert reply.endswith(data)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/octet-stream",
                                  "application/x-www-form-urlencoded"])  # fmt: skip
def test_content_types_of_json(door: Running, kind: str) -> None:
    """curl -d sends JSON as a form."""
    assert post(door, BODY, Content_Type=kind)[0] == 200


def test_chunked_bodies_and_expect_are_served(door: Running) -> None:
    chunks = b"5\r\n" + BODY[:5] + b"\r\n" + b"%x\r\n" % len(BODY[5:]) + BODY[5:] + b"\r\n0\r\n\r\n"
    assert b" 200 OK" in door.answer(head("Transfer-Encoding: chunked") + chunks)
    with door.connect() as sock:
        sock.sendall(head(f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert b" 200 OK" in receive(sock, 1)


def test_expect_with_a_large_body_is_refused_before_it_comes(door: Running) -> None:
    reply = door.raw(head("Content-Length: 99999999", "Expect: 100-continue"))
    assert reply.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in reply.lower()


def test_08_a_flood_of_one_byte_chunks_is_refused_in_flat_memory(door: Running) -> None:
    before = door.rss()
    with door.connect() as sock:
        sock.sendall(head("Transfer-Encoding: chunked"))
        with contextlib.suppress(OSError):
            for _ in range(60):
                sock.sendall(b"1\r\nx\r\n" * 30_000)
        reply = receive(sock)
    assert reply == b"" or b" 413 " in reply
    assert door.rss() - before < 16 << 20


@pytest.mark.parametrize("sent", [b"GET /", GENERATE.encode(), b"POST /v2 HTTP/1.1\r\nX-A: "])
def test_13_a_slow_head_gets_408(impatient: Running, sent: bytes) -> None:
    """Also if a byte comes again and again."""
    with impatient.connect() as sock:
        sock.sendall(sent)
        sock.settimeout(0.2)

        def reply() -> bytes:
            with contextlib.suppress(TimeoutError):
                return sock.recv(1000)
            with contextlib.suppress(OSError):
                sock.sendall(b"a")
            return b""

        assert b" 408 " in wait_until(reply)


def test_13_empty_lines_do_not_keep_a_connection(impatient: Running) -> None:
    with impatient.connect() as sock:

        def is_closed() -> bool:
            time.sleep(0.1)
            try:
                sock.sendall(b"\r\n")
            except OSError:
                return True
            return False

        wait_until(is_closed)


def test_13_a_slow_body_gets_408(impatient: Running) -> None:
    with impatient.connect() as sock:
        sock.sendall(head("Content-Length: 10") + b"{")
        assert b" 408 " in receive(sock)


def test_13_a_silent_connection_is_closed(impatient: Running) -> None:
    with impatient.connect() as sock, contextlib.suppress(ConnectionResetError):
        assert sock.recv(10) == b""


def test_18_pipelined_requests_are_answered_in_order(door: Running) -> None:
    requests = b"".join(sized(b'{"text_input": "%d"}' % i) for i in range(20))
    reply = door.answer(requests, 20)
    assert re.findall(rb'"text_input":"(\d+)"', reply) == [b"%d" % i for i in range(20)]


def test_18_what_follows_a_request_does_not_disturb_its_answer(door: Running) -> None:
    reply = door.raw(sized(BODY) + b"\x00garbage\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200 OK")
    assert b'{"text_input":"x"}' in reply
    assert b'"error"' not in reply.split(b'{"text_input":"x"}')[0]


def test_18_http_1_0_is_answered_and_closed(door: Running) -> None:
    reply = door.raw(
        head(f"Content-Length: {len(BODY)}", start=GENERATE.replace("1.1", "1.0")) + BODY
    )
    assert b" 200 OK" in reply
    assert b"connection: close" in reply.lower()


def test_head_has_no_body(door: Running) -> None:
    status, _, body = ask(door, "HEAD", "/v2")
    assert (status, body) == (200, b"")


@pytest.mark.parametrize("value", ["a" * 10_000, "other-user"])
def test_22_requests_have_ids_of_the_door(door: Running, value: str) -> None:
    _, headers, _ = ask(door, "GET", "/v2/health/ready", X_Request_Id=value)
    assert re.fullmatch("[0-9a-f]{16}", headers["x-request-id"])


@pytest.mark.parametrize("value", ["a\rX: b", "a\nX: b\x00", "\x1b[31mred", "a\x00b"])
def test_22_control_characters_in_a_header_are_refused(door: Running, value: str) -> None:
    reply = door.answer(head(f"X-Request-Id: {value}", start=GET.format("/v2")))
    assert b" 400 " in reply.split(b"\r\n")[0]


# Triton's answers


def test_events_are_passed_on(door: Running) -> None:
    status, headers, reply = ask(door, "POST", "/v2/models/stream/generate_stream", BODY)
    assert status == 200
    assert headers["content-type"] == "text/event-stream"
    assert reply == EVENT * 3


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Unable to parse 'data': attempt to access JSON non-number as double", 400),
        ("unexpected shape for input 'x' for model 'y'", 400),
        ("inference input 'x' data-type is 'INT32', but model expects 'BYTES'", 400),
        ("Request for unknown model: 'x' is not found", 404),
        ("5 requests are waiting (max_waiting is 4); retry in 1 s", 503),
        (
            "in ensemble 'generate', deadline_ms: the request was not complete 50 ms after its "
            "arrival (it had 3 output tokens); allow it more time, or send it when the load is "
            "lower",
            504,
        ),
        ("the engine exited while it processed this request; retry it", 503),
        ("Exceeds maximum queue size", 503),
        ("failed to allocate memory", 500),
    ],
)
def test_errors_of_triton_get_a_fitting_status(door: Running, text: str, status: int) -> None:
    found, headers, reply = ask(door, "POST", "/v2/models/blamed/generate", {"text_input": text})
    assert found == status
    assert json.loads(reply)["error"] == text
    assert ("retry-after" in headers) == (status == 503)


def test_an_error_may_say_when_to_retry(door: Running) -> None:
    text = "5 requests are waiting (max_waiting is 4); retry in 17 s"
    status, headers, _ = ask(door, "POST", "/v2/models/blamed/generate", {"text_input": text})
    assert (status, headers["retry-after"]) == (503, "17")


def test_errors_of_triton_name_nothing_of_the_server(door: Running) -> None:
    text = "failed at /opt/x/model.py:5, region triton_python_backend_shm_1, address 0x7f00aa11"
    _, reply = post(door, {"text_input": text}, "blamed/generate")
    assert not re.search(r"/opt|\.py|shm|0x", reply)


def test_full_shared_memory_is_503(door: Running) -> None:
    text = (
        "in ensemble 'chat', Failed to increase the shared memory pool size for key "
        "'triton_python_backend_shm_region_1a1f-47be' to 1048576 bytes. If you are running Triton "
        "inside docker, use '--shm-size' flag. Error: No space left on device"
    )
    status, headers, reply = ask(door, "POST", "/v2/models/blamed/generate", {"text_input": text})
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(reply)["error"] == (
        "the server has too little free shared memory for the request; retry later, or send a "
        "shorter request"
    )


def test_a_connection_lost_before_the_answer_is_503(door: Running) -> None:
    status, headers, _ = ask(door, "POST", "/v2/models/drop/generate", BODY)
    assert (status, headers["retry-after"]) == (503, "1")


def test_a_stream_whose_triton_is_lost_ends_with_an_error(door: Running) -> None:
    _, _, reply = ask(door, "POST", "/v2/models/half/generate_stream", BODY)
    first, last = reply.decode().strip().split("\n\n")
    assert first == EVENT.decode().strip()
    assert "error" in json.loads(last.removeprefix("data: "))


def test_half_an_answer_is_503(door: Running) -> None:
    assert post(door, {"text_input": "json"}, "half/generate")[0] == 503


def wait_for(door: Running, num_lost: int) -> None:
    wait_until(lambda: door.triton.num_lost >= num_lost)


@pytest.mark.parametrize("route", ["slow/generate", "slow/infer", "endless/generate_stream"])
@pytest.mark.parametrize("leave", ["close", "half-close", "pipelined"])
def test_a_client_that_leaves_closes_the_connection_to_triton(
    door: Running, route: str, leave: str
) -> None:
    before, asked = door.triton.num_lost, len(door.triton.bodies)
    with door.connect() as sock:
        body = json.dumps(infer()).encode() if "infer" in route else BODY
        request = sized(body).replace(b"echo/generate", route.encode(), 1)
        sock.sendall(request + (sized(BODY) if leave == "pipelined" else b""))
        wait_until(lambda: any(route in path for path, _ in door.triton.bodies[asked:]))
        if leave == "half-close":
            sock.shutdown(socket.SHUT_WR)
            wait_for(door, before + 1)
    wait_for(door, before + 1)


def test_a_client_that_does_not_read_is_cut_off_in_bounded_memory(impatient: Running) -> None:
    before, rss = impatient.triton.num_lost, impatient.rss()
    with impatient.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = b'{"text_input": "wide"}'
        sock.sendall(sized(body).replace(b"echo/generate", b"endless/generate_stream", 1))
        wait_for(impatient, before + 1)
        assert impatient.rss() - rss < 16 << 20
