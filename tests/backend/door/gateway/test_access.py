"""A gateway of a server with keys."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

from control_server import FakeServer
from gateway import UNTIL_LEFT, Gateway, a_gateway, delta, end
from inflight.access.key import KeyLimits
from inflight.ipc.control import SOCKET, LoadModel, Models, ModelStatus, UnloadModel
from keys import KeyDesk
from waiting import PATIENCE_S, wait_until

BODY = {"model": "llm", "prompt": "x"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, keys: KeyDesk) -> Iterator[Gateway]:
    options = (*keys.options, "--gateway-metrics", "127.0.0.1:{triton}")
    with a_gateway(tmp_path_factory.mktemp("gateway"), *options) as running:
        yield running


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
        ("GET", "/v1/models/llm"), ("POST", "/v1/models/llm/load"), ("POST", "/tokenize"),
        ("POST", "/detokenize"), ("GET", "/tokenizer_info"), ("GET", "/metrics"),
        ("GET", "/version"), ("GET", "/nothing"), ("GET", "/health/"), ("POST", "/v1/embeddings"),
    ],
)  # fmt: skip
def test_each_route_needs_a_key(gateway: Gateway, method: str, path: str) -> None:
    for headers in ({}, bearer("sk-no"), {"x-api-key": "no"}):
        status, found, body = gateway.ask(
            method, path, BODY if method == "POST" else None, **headers
        )
        assert status == 401
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert json.loads(body)["error"]["type"] == "authentication_error"
        assert found["www-authenticate"].startswith("Bearer")
        assert found["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_none(gateway: Gateway, path: str) -> None:
    assert gateway.ask("GET", path)[0] == 200


def test_a_request_runs_on_the_account_of_its_key(gateway: Gateway, keys: KeyDesk) -> None:
    key, secret = keys.issue_key("acme")
    for headers in (bearer(secret), {"x-api-key": secret}):
        gateway.triton.plays(delta("x"), end())
        status, _, _ = gateway.ask("POST", "/v1/completions", BODY, **headers)
        assert status == 200
        assert gateway.triton.sent["inflight_account"] == key.account


def test_a_client_cannot_choose_the_account(gateway: Gateway, keys: KeyDesk) -> None:
    key, secret = keys.issue_key("acme")
    gateway.triton.plays(delta("x"), end())
    body = BODY | {"inflight_account": "other", "inflight_ticket": "0" * 16}
    assert gateway.ask("POST", "/v1/completions", body, **bearer(secret))[0] == 200
    assert gateway.triton.sent["inflight_account"] == key.account


def test_other_models_do_not_exist_for_a_key(gateway: Gateway, keys: KeyDesk) -> None:
    secret = bearer(keys.issue(models=("base_generate",)))
    _, _, body = gateway.ask("GET", "/v1/models", **secret)
    assert [one["id"] for one in json.loads(body)["data"]] == ["base"]
    for method, path, request in (
        ("GET", "/v1/models/thinker", None),
        ("POST", "/v1/completions", {"model": "thinker", "prompt": "x"}),
        ("POST", "/tokenize", {"model": "thinker", "prompt": "x"}),
    ):
        status, _, body = gateway.ask(method, path, request, **secret)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (404, "model_not_found")
        assert error["message"] == "model: there is no model 'thinker'; allowed: base"


def test_a_limit_says_when_to_retry(gateway: Gateway, keys: KeyDesk) -> None:
    secret = bearer(keys.issue(limits=KeyLimits(requests_per_minute=1)))
    gateway.triton.plays(delta("x"), end())
    assert gateway.ask("POST", "/v1/completions", BODY, **secret)[0] == 200
    status, headers, body = gateway.ask("POST", "/v1/completions", BODY, **secret)
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert "x-should-retry" not in headers
    assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"


def test_a_request_counts_until_its_client_has_left(gateway: Gateway, keys: KeyDesk) -> None:
    secret = bearer(keys.issue(limits=KeyLimits(concurrent_requests=1)))
    gateway.triton.plays(delta("x"), UNTIL_LEFT)
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps(BODY | {"stream": True}), secret)
    connection.getresponse().fp.readline()
    gateway.triton.plays(delta("x"), end())
    assert gateway.ask("POST", "/v1/completions", BODY, **secret)[0] == 429
    connection.close()
    wait_until(lambda: gateway.ask("POST", "/v1/completions", BODY, **secret)[0] == 200)


def test_admins_read_metrics(gateway: Gateway, keys: KeyDesk) -> None:
    status, _, body = gateway.ask("GET", "/metrics", **bearer(keys.issue()))
    assert status == 403
    assert json.loads(body)["error"]["code"] == "permission_denied"
    status, _, body = gateway.ask("GET", "/metrics", **bearer(keys.issue(role="admin")))
    assert status == 200
    assert b"inflight_server_ready 1" in body


def test_an_admin_loads_and_unloads_models(
    keys: KeyDesk, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("control")
    ready = Models("127.0.0.1:8000", [ModelStatus(name="two_llm", models=[], state="ready")])
    server = FakeServer(folder / SOCKET, ready)
    options = (*keys.options, "--counts", str(folder / "gateway.requests"))
    with a_gateway(folder, *options) as gateway:
        admin, user = bearer(keys.issue(role="admin")), bearer(keys.issue())
        status, _, body = gateway.ask("POST", "/v1/models/two_llm/load", **admin)
        assert (status, json.loads(body)) == (
            200,
            {"models": [{"id": "two_llm", "state": "ready"}]},
        )
        assert gateway.ask("POST", "/v1/models/two_llm/unload", **admin)[0] == 200
        assert gateway.ask("POST", "/v1/models/two_llm/load", **user)[0] == 403
        assert gateway.ask("POST", "/v1/models/a..b/load", **admin)[0] == 400
    assert server.requests == [LoadModel("two_llm"), UnloadModel("two_llm")]
    server.close()


def test_without_model_control_an_admin_loads_nothing(gateway: Gateway, keys: KeyDesk) -> None:
    admin = bearer(keys.issue(role="admin"))
    for change in ("load", "unload"):
        assert gateway.ask("POST", f"/v1/models/llm/{change}", **admin)[0] == 404
