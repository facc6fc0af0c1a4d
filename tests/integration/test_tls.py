"""`inflight serve` with keys and TLS."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest

import certificates
from inflight.access import keys_file
from inflight.access.key import issue
from inflight_client import Client, ConnectionFailed, Unavailable
from supervised import serve

pytestmark = pytest.mark.integration


def test_both_doors_serve_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = certificates.make(tmp_path / "tls")
    key, secret = issue("acme")
    keys_file.add(tmp_path / "keys.json", key)
    options = (*made.options, "--keys", str(tmp_path / "keys.json"))
    with serve(tmp_path / "server", "echo", *options) as server:
        assert f"https://{server.http}" in server.shown.read_text()
        connection = http.client.HTTPSConnection(server.http, context=made.context(), timeout=60)
        connection.request("GET", "/v2/health/ready")
        assert connection.getresponse().read() == b""
        body = json.dumps({"text_input": "Hello", "max_tokens": 4})
        headers = {"X-Api-Key": secret}
        connection.request("POST", "/v2/models/generate/generate", body, headers)
        assert json.loads(connection.getresponse().read())["text_output"] == "Hello"
        connection.close()
        with (
            Client(server.grpc, api_key=secret, ca_file=str(made.ca)) as client,
            client.stream("Hello", max_tokens=4) as stream,
        ):
            assert "".join(delta.text for delta in stream) == "Hello"
        with (
            Client(server.grpc, api_key=secret) as client,
            pytest.raises((ConnectionFailed, Unavailable)),
        ):
            client.generate("Hello", max_tokens=4)
