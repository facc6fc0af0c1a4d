"""Requests that the gateway refuses before Triton sees them.

The numbers are those of a catalogue of bad inputs for LLM servers.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bad_http import RAW
from gateway import Gateway, a_gateway, delta, end
from http_door import IMPATIENT, receive
from waiting import PATIENCE_S

HELLO = b'[{"role": "user", "content": "x"}]'
# route -> fields of a request that is served
ROUTES = {
    "/v1/completions": b'"model": "llm", "prompt": "x"',
    "/v1/chat/completions": b'"model": "llm", "messages": ' + HELLO,
    "/v1/responses": b'"model": "llm", "input": ' + HELLO,
    "/v1/messages": b'"model": "llm", "max_tokens": 5, "messages": ' + HELLO,
}
PATHS = (
    (b"/v2/models/echo/generate", b"/v1/completions"),
    (b"/v2/health/ready", b"/ready"),
    (b"/V2", b"/V1"),
    (b"/v2/", b"/v1/"),
    (b"/v2", b"/v1/models"),
)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that soon gives up slow clients."""
    with a_gateway(tmp_path_factory.mktemp("impatient"), limits=IMPATIENT) as running:
        yield running


def connect(gateway: Gateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S)


def reply_to(gateway: Gateway, request: bytes) -> bytes:
    """Up to the end of the connection, or of one answer."""
    with connect(gateway) as connection:
        sender = threading.Thread(target=_send, args=(connection, request), daemon=True)
        sender.start()
        found = receive(connection, 1, has_body=not request.startswith(b"HEAD "))
    sender.join(PATIENCE_S)
    return found


def _send(connection: socket.socket, request: bytes) -> None:
    with contextlib.suppress(OSError):  # it is refused while it comes
        connection.sendall(request)


def check_served(gateway: Gateway) -> None:
    gateway.triton.plays(delta("x"), end())
    assert gateway.complete()["choices"][0]["text"] == "x"


def check_error(body: bytes) -> None:
    """One sentence that names nothing of the server."""
    error = json.loads(body)["error"]["message"]
    assert not re.search(r"0x|Traceback|\.py|/tmp|127\.0|pid", error), error


@pytest.mark.parametrize("case", RAW)
def test_bad_http(gateway: Gateway, case: str) -> None:
    request, status = RAW[case]
    for theirs, ours in PATHS:
        request = request.replace(theirs, ours)
    gateway.triton.plays(delta("x"), end())
    top, _, body = reply_to(gateway, request).partition(b"\r\n\r\n")
    assert int(top.split(b" ", 2)[1]) == status, top
    if body:
        check_error(body)
    assert gateway.triton.requests == []
    check_served(gateway)


# case -> body, of which %s are the fields of a request that is served
JSON = {
    "02-trailing": b"{%s}x",
    "02-cut": b"{%s",
    "02-bad-utf8": b'{%s, "user": "\xff"}',
    "02-bad-utf8-unknown": b'{%s, "unknown": "\xff"}',
    "02-surrogate": b'{%s, "user": "\\ud800"}',
    "03-nested-1k": b'{%s, "metadata": ' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}",
    "03-nested-200k": b'{%s, "unknown": ' + b"[" * 200_000 + b"}",
    "05-duplicate": b'{%s, "model": "llm"}',
    "05-duplicate-escaped": b'{%s, "\\u006dodel": "llm"}',
    "05-duplicate-unknown": b'{%s, "unknown": 1, "unknown": 2}',
    "05-duplicate-inside": b'{%s, "metadata": {"a": 1, "a": 2}}',
    "42-4000-digits": b'{%s, "top_k": ' + b"9" * 4000 + b"}",
    "44-nan": b'{%s, "temperature": NaN}',
    "44-infinity": b'{%s, "temperature": -Infinity}',
    "44-1e999": b'{%s, "temperature": 1e999}',
    "57-surrogate": b'{%s, "stop": ["\\ud800"], "stop_sequences": ["\\ud800"]}',
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", JSON)
def test_bad_json(gateway: Gateway, case: str, route: str) -> None:
    gateway.triton.plays(delta("x"), end())
    status, _, body = gateway.ask("POST", route, JSON[case].replace(b"%s", ROUTES[route]))
    assert status == 400, body
    check_error(body)
    assert gateway.triton.requests == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "name",
    [
        "", "../../etc/passwd", "/etc/passwd", "a\0b", "x" * 4096, "llm@-1", "llm@abc",
        f"llm@{'9' * 30}", "lora", "llm:lora", "file:///etc/passwd", "\u001b[31m",
    ],
)  # fmt: skip
def test_23_24_94_an_unknown_model_is_not_found(gateway: Gateway, route: str, name: str) -> None:
    """Also names of versions and of adapters, which other servers have among the models."""
    gateway.triton.plays(delta("x"), end())
    body = ROUTES[route].replace(b'"llm"', json.dumps(name).encode())
    status, _, answer = gateway.ask("POST", route, b"{%s}" % body)
    assert status == 404, answer
    assert gateway.triton.requests == []


@pytest.mark.parametrize(
    ("path", "status"), [("..%2f..%2fetc/load", 400), ("file:%2f%2fx/load", 400), ("llm/load", 404)]
)
def test_107_models_are_not_loaded(gateway: Gateway, path: str, status: int) -> None:
    assert gateway.ask("POST", f"/v1/models/{path}", b"{}")[0] == status


IMAGES = ["http://169.254.169.254/latest", "file:///etc/passwd", "data:image/png;base64,AA=="]


@pytest.mark.parametrize("url", IMAGES)
@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages"])
def test_71_images_are_refused(gateway: Gateway, route: str, url: str) -> None:
    """Those of a chat are refused by Triton's model."""
    gateway.triton.plays(delta("x"), end())
    part = {"type": "input_image", "image_url": url}
    if route == "/v1/messages":
        part = {"type": "image", "source": {"type": "url", "url": url}}  # type: ignore[dict-item]
    content = json.dumps([{"role": "user", "content": [part]}]).encode()
    status, _, answer = gateway.ask("POST", route, b"{%s}" % ROUTES[route].replace(HELLO, content))
    assert status == 400, answer
    assert gateway.triton.requests == []


def test_08_a_flood_of_one_byte_chunks_is_refused(gateway: Gateway) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = reply_to(gateway, start + b"1\r\nx\r\n" * 1_200_000)
    assert reply.startswith(b"HTTP/1.1 413 ")
    check_served(gateway)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
    ],
    ids=["head", "body"],
)
def test_13_a_slow_request_gets_408(impatient: Gateway, sent: bytes) -> None:
    assert reply_to(impatient, sent).startswith(b"HTTP/1.1 408 ")


def test_18_pipelined_requests_are_answered_in_order(gateway: Gateway) -> None:
    gateway.triton.plays(delta("x"), end())
    names = ["llm", "nothing", "base"] * 4
    requests = b"".join(
        b"GET /v1/models/%s HTTP/1.1\r\nHost: x\r\n\r\n" % name.encode() for name in names
    )
    found = b""
    with connect(gateway) as connection:
        connection.sendall(requests)
        while found.count(b"HTTP/1.1 ") < len(names) or not found.endswith(b"}"):
            part = connection.recv(1 << 16)
            assert part, found
            found += part
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", found)]
    assert statuses == [200, 404, 200] * 4


@pytest.mark.parametrize("value", ["mine", "x" * 10_000])
def test_22_97_requests_have_ids_of_the_gateway(gateway: Gateway, value: str) -> None:
    """Also if two have the same id."""
    gateway.triton.plays(delta("x"), end())
    ids = set()
    for _ in range(2):
        body = {"model": "llm", "prompt": "x"}
        status, headers, _ = gateway.ask("POST", "/v1/completions", body, X_Request_Id=value)
        assert status == 200
        ids.add(headers["x-request-id"])
    assert len(ids) == 2
    assert value not in ids


@pytest.mark.parametrize("value", [b"a\x00b", b"a\x1b[31m", b"a\rb"])
def test_22_control_characters_in_a_header_are_refused(gateway: Gateway, value: bytes) -> None:
    start = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + value
    assert reply_to(gateway, start + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")


class Endless:
    """The script of a stream that only its peer ends.

    Attributes:
        left: set when the peer has left.
    """

    def __init__(self) -> None:
        self.left = threading.Event()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            while True:
                yield delta("x" * 60_000)
        finally:
            self.left.set()


def test_102_a_client_that_does_not_read_is_cut_off(impatient: Gateway) -> None:
    script = Endless()
    impatient.triton.plays()
    impatient.triton.script = script  # type: ignore[assignment]
    body = b'{"model": "llm", "prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connect(impatient) as connection:
        connection.sendall(head + body)
        started = time.monotonic()
        assert script.left.wait(PATIENCE_S), "Triton still generates"
        assert time.monotonic() - started > 0.5, "a slow client has some time"
    check_served(impatient)
