"""A server with keys: tenants, limits and usage, through a real tritonserver."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from inflight.access import keys_file
from inflight.access.key import Key, KeyLimits, issue
from inflight_client import Client, InvalidRequest
from kserve import outputs, request, tensor, text
from supervised import Serving, serve
from waiting import wait_until

pytestmark = pytest.mark.integration

PROMPT = "The prefix cache has whole blocks only, so this prompt is longer. " * 4


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys_file.add(path, issue("nobody")[0])
    return path


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder / "inflight"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keys: Path, state: Path) -> Iterator[Serving]:
    options = ("--keys", str(keys), "--gateway-port", "0", "--gateway-workers", "2")
    with serve(tmp_path_factory.mktemp("server"), "echo", *options) as serving:
        yield serving


def new_key(keys: Path, tenant: str, **limits: int) -> tuple[Key, str]:
    key, secret = issue(tenant, limits=KeyLimits(**limits))
    keys_file.add(keys, key)
    time.sleep(0.4)
    return key, secret


def over_http(
    server: Serving, secret: str, body: dict[str, Any], path: str = "/v2/models/generate/generate"
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def over_gateway(server: Serving, secret: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(server.gateway, timeout=60)
    try:
        body = json.dumps({"model": "llm", "prompt": "Hello", "ignore_eos": True} | fields)
        headers = {"Authorization": f"Bearer {secret}"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def over_grpc(server: Serving, secret: str, model: str, *inputs: Any) -> list[dict[str, Any]]:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {secret}"), ("triton_grpc_error", "true"))
        sent = request(model, *inputs)
        call = stub.ModelStreamInfer(iter([sent]), metadata=metadata, timeout=60)
        return [outputs(one.infer_response) for one in call if one.infer_response.outputs]


def used(tenant: str) -> dict[str, int]:
    """From `inflight usage`."""
    command = [sys.executable, "-m", "inflight.cli.app", "usage", "--tenant", tenant, "--json"]
    days = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    names = ("requests", "refused", "prompt_tokens", "generated_tokens")
    return {name: sum(day[name] for day in days) for name in names}


def wait_for_usage(tenant: str, expected: dict[str, int]) -> None:
    until = time.monotonic() + 60
    while (found := used(tenant)) != expected and time.monotonic() < until:
        time.sleep(0.3)
    assert found == expected


def test_requests_of_openais_api_are_charged_and_limited(server: Serving, keys: Path) -> None:
    key, secret = new_key(keys, "openai", requests_per_minute=2)
    assert over_gateway(server, f"{secret}x")[0] == 401
    for _ in range(2):  # perhaps by both workers
        status, found = over_gateway(server, secret, max_tokens=5)
        assert status == 200, found
    counted = found["usage"]
    status, found = over_gateway(server, secret)
    assert (status, found["error"]["code"]) == (429, "rate_limit_exceeded")
    expected = {"requests": 2, "refused": 1}
    expected |= {"prompt_tokens": 2 * counted["prompt_tokens"], "generated_tokens": 10}
    wait_for_usage(key.tenant, expected)


def test_requests_are_served_with_a_key_alone(server: Serving, keys: Path) -> None:
    _, secret = new_key(keys, "acme")
    body = {"text_input": "Hello", "max_tokens": 4, "ignore_eos": True}
    status, reply = over_http(server, secret, body)
    assert status == 200, reply
    assert over_http(server, f"{secret}x", body)[0] == 401
    chat = {"messages": '[{"role": "user", "content": "Hi"}]', "max_tokens": 4}
    assert over_http(server, secret, chat, "/v2/models/chat/generate")[0] == 200
    assert over_grpc(server, secret, "generate", text("Hello"), tensor("max_tokens", "INT32", 4))
    with pytest.raises(grpc.RpcError) as refused:
        over_grpc(server, "inf-x", "generate", text("Hello"))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_tenants_share_no_cached_prefix(server: Serving, keys: Path) -> None:
    """Keys of one tenant do; a client's own salt changes nothing between tenants."""
    _, first = new_key(keys, "one")
    _, second = new_key(keys, "one")
    _, other = new_key(keys, "other")
    salts = ("", "one", "one/0")

    def num_cached(secret: str, salt: str = "") -> int:
        before = server.stats().num_cached_tokens
        body = {"text_input": PROMPT, "max_tokens": 1, "cache_salt": salt}
        assert over_http(server, secret, body)[0] == 200
        return server.stats().num_cached_tokens - before

    assert num_cached(first) == 0
    assert num_cached(first) > 0
    assert num_cached(second) > 0
    assert [num_cached(other, salt) for salt in salts] == [0, 0, 0]
    assert all(num_cached(other, salt) > 0 for salt in salts)


def test_usage_is_what_responses_report(server: Serving, keys: Path, state: Path) -> None:
    _, secret = new_key(keys, "counted")
    body = {"text_input": "Count these tokens", "max_tokens": 7, "ignore_eos": True}
    _, reply = over_http(server, secret, body)
    prompt, generated = reply["num_input_tokens"], reply["num_output_tokens"]
    assert generated == 7
    inputs = (text("Count these tokens"), tensor("max_tokens", "INT32", 7))
    more = (tensor("ignore_eos", "BOOL", True), tensor("stream", "BOOL", True))
    over_grpc(server, secret, "generate", *inputs, *more)
    body |= {"n": 2, "seed": 1, "temperature": 1.0}
    over_http(server, secret, body)
    expected = {"requests": 3, "refused": 0}
    tokens = {"prompt_tokens": 3 * prompt, "generated_tokens": 4 * generated}
    wait_for_usage("counted", {**expected, **tokens})
    assert (state / "usage.sqlite").stat().st_mode & 0o777 == 0o600


def test_a_token_limit_refuses_what_comes_after_it(server: Serving, keys: Path) -> None:
    _, secret = new_key(keys, "bounded", tokens_per_minute=50)
    body = {"text_input": "Hello", "max_tokens": 60, "ignore_eos": True}
    assert over_http(server, secret, body)[0] == 200

    def refused() -> dict[str, Any] | None:
        status, reply = over_http(server, secret, body)
        assert status in (200, 429), reply
        return reply if status == 429 else None

    # Usage is reported several times a second.
    reply = wait_until(refused)
    assert reply is not None
    assert "tokens_per_minute: the key has reached its limit of 50; retry in" in reply["error"]


def test_the_bundled_client_and_the_command_send_a_key(server: Serving, keys: Path) -> None:
    _, secret = new_key(keys, "bundled")
    with Client(server.grpc, api_key=secret) as client:
        assert client.is_ready() and client.is_model_ready("generate")
        assert client.generate("Hello", max_tokens=4).text == "Hello"
    with Client(server.grpc) as client, pytest.raises(InvalidRequest, match="no valid API key"):
        client.generate("Hello", max_tokens=4)
    command = [sys.executable, "-m", "inflight.cli.app", "generate", "Hello", "--max-tokens", "4"]
    for key, status in ((secret, 0), ("inf-x", 2)):
        ended = subprocess.run(
            [*command, "--url", server.grpc],
            env={**os.environ, "INFLIGHT_API_KEY": key},
            capture_output=True,
        )
        assert ended.returncode == status, ended.stderr


def test_admins_read_metrics(server: Serving, keys: Path) -> None:
    key, secret = issue("operator", role="admin")
    keys_file.add(keys, key)
    time.sleep(0.4)
    with contextlib.closing(http.client.HTTPConnection(server.http, timeout=60)) as connection:
        connection.request("GET", "/metrics", headers={"X-Api-Key": secret})
        response = connection.getresponse()
        assert response.status == 200
        text = response.read().decode()
    assert "inflight_num_requests_running" in text and "inflight_server_ready" in text
    name = "inflight_tenant_generation_tokens_total"
    found = re.search(rf'^{name}{{tenant="bundled"}} (.*)$', text, re.MULTILINE)
    assert found is not None and float(found[1]) > 0


def test_no_secret_is_in_any_file_of_the_server(server: Serving, keys: Path, state: Path) -> None:
    _, secret = new_key(keys, "hidden")
    over_http(server, secret, {"text_input": "Hello", "max_tokens": 1})
    over_http(server, f"{secret}x", {"text_input": "A secret prompt"})
    wait_until(lambda: '"reason": "malformed"' in (state / "audit.jsonl").read_text())
    assert "secret prompt" not in (state / "audit.jsonl").read_text()
    for path in (server.log, server.shown, state / "audit.jsonl", state / "usage.sqlite"):
        assert secret[4:].encode() not in path.read_bytes(), path


def test_the_accountant_is_replaced(server: Serving, keys: Path) -> None:
    _, secret = new_key(keys, "patient")
    os.kill(server.pid_of("accountant"), signal.SIGKILL)
    body = {"text_input": "Hello", "max_tokens": 1}

    def serves() -> bool:
        status, reply = over_http(server, secret, body)
        assert status in (200, 503), reply
        return status == 200

    server.wait_until(serves)
    assert server.health()[0] in (200, 503)
    server.wait_until(lambda: server.health()[0] == 200)
