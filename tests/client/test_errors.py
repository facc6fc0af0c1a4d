"""Every error of gRPC and Triton is mapped."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

import fake_triton
from fake_triton import Call, two_words
from inflight_client import (
    Cancelled,
    Client,
    ClientError,
    ConnectionFailed,
    InvalidRequest,
    ServerError,
    TimedOut,
    Unavailable,
)
from inflight_client.errors import BY_CODE, from_message

Use = Callable[..., Any]
MISSED = (
    "in ensemble 'generate', deadline_ms: the request was not complete 50 ms after its arrival (it "
    "had 3 output tokens); allow it more time, or send it when the load is lower"
)


def test_every_grpc_status_has_an_error_of_ours() -> None:
    assert set(BY_CODE) == set(grpc.StatusCode)
    assert all(issubclass(kind, ClientError) for kind in BY_CODE.values())


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Request for unknown model: 'llm' has no available versions", Unavailable),
        ("Server is stopping, scheduler for model has stopped accepting requests", Unavailable),
        ("Request for unknown model: 'nope' is not found", InvalidRequest),
        ("[request id: 1] expected 1 inputs but got 2 inputs for model 'llm'", InvalidRequest),
        ("unexpected inference input 'maxtokens' for model 'generate'", InvalidRequest),
        ("9 requests are waiting (max_waiting is 8); retry in 2 s", Unavailable),
        (MISSED, TimedOut),
        ("something else", ServerError),
    ],
)
def test_triton_messages_without_a_code_are_classified_by_text(
    message: str, kind: type[ClientError]
) -> None:
    assert type(from_message(message)) is kind


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, InvalidRequest),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.INTERNAL, ServerError),
    ],
)
def test_a_status_becomes_an_error_of_ours(
    use: Use, code: grpc.StatusCode, kind: type[Exception]
) -> None:
    def script(call: Call) -> Iterator[Any]:
        call.context.abort(code, "max_tokens: 0 is out of range")
        yield

    with (
        fake_triton.serve(script) as server,
        pytest.raises(kind, match="max_tokens: 0 is out of range"),
    ):
        use(server.url, lambda client: client.generate("Hi", max_tokens=0))


@pytest.mark.parametrize("code", [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED])
def test_a_deadline_that_the_server_missed_is_not_retried(use: Use, code: grpc.StatusCode) -> None:
    """Triton has no code for it, the doors of `inflight serve` do."""
    script = fake_triton.failing(1, code, MISSED)
    with fake_triton.serve(script) as server, pytest.raises(TimedOut, match="deadline_ms"):
        use(server.url, lambda client: client.generate("Hi", deadline_ms=50), timeout=30)


def test_no_server_is_a_failed_connection() -> None:
    with fake_triton.serve(two_words) as server:
        url = server.url
    with Client(url, timeout=60) as client, pytest.raises(ConnectionFailed):
        client.generate("Hi")


def test_a_server_that_dies_is_a_failed_connection() -> None:
    with (
        Client(_dying_server()) as client,
        pytest.raises(ConnectionFailed, match=f"url is {client.url}; it must be gRPC's host:port"),
    ):
        list(client.stream("Hi"))


def _dying_server() -> str:
    """The address of a server that takes one connection and drops it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def drop() -> None:
        connection, _ = listener.accept()
        connection.recv(100)
        connection.close()
        listener.close()

    threading.Thread(target=drop, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("trailing", "text", "seconds"),
    [
        ((("retry-after", "7"),), "full", 7.0),
        ((("grpc-retry-pushback-ms", "1500"),), "full", 1.5),
        ((), "concurrency: the key has reached its limit of 2; retry in 3 s", 3.0),
        ((("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT"),), "full", None),
        ((("grpc-retry-pushback-ms", "-1"),), "full", None),
        ((), "full", None),
    ],
)
def test_a_servers_wait_is_an_attribute_of_the_error(
    use: Callable[..., Any], trailing: tuple[Any, ...], text: str, seconds: float | None
) -> None:
    script = fake_triton.failing(1, grpc.StatusCode.RESOURCE_EXHAUSTED, text, *trailing)
    with fake_triton.serve(script) as server, pytest.raises(Unavailable) as raised:
        use(server.url, lambda client: client.generate("Hi"), max_retries=0)
    assert raised.value.retry_after == seconds


def test_a_method_that_an_operator_has_closed_is_an_invalid_request(
    use: Callable[..., Any],
) -> None:
    """Triton reports it as UNAVAILABLE, with the header that opens it."""
    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-x'"
    script = fake_triton.failing(1, grpc.StatusCode.UNAVAILABLE, text)
    with (
        fake_triton.serve(script) as server,
        pytest.raises(InvalidRequest, match=r"^the method is closed on this server$"),
    ):
        use(server.url, lambda client: client.generate("Hi"))
