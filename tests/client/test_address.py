"""Addresses and timeouts."""

from __future__ import annotations

from typing import Any

import pytest

from inflight_client import Client, InvalidRequest


@pytest.mark.parametrize("timeout", [-1, 0, float("nan"), float("inf"), "5"])
def test_a_timeout_that_cannot_be_one_is_refused(timeout: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=r"timeout: .* is not a valid number of seconds; allowed"
    ):
        Client(timeout=timeout)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("localhost:8001", "localhost:8001"),
        ("http://127.0.0.1:8001", "127.0.0.1:8001"),
        ("grpc://triton.example:1/", "triton.example:1"),
        ("[::1]:65535", "[::1]:65535"),
    ],
)
def test_a_url_is_host_and_port(url: str, address: str) -> None:
    with Client(url) as client:
        assert client.url == address


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost", ":8001", "localhost:", "localhost:0", "localhost:65536", "::1:8001"),
        *("https://localhost:8001", "http://localhost", "localhost:8001/v2", "a b:8001", None),
    ],
)
def test_an_invalid_grpc_url_is_rejected(url: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"url: .* is not host:port; .* 127\.0\.0\.1:8001"):
        Client(url)
