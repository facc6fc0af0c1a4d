"""Models, errors, probes and tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway import MODELS, Gateway, a_gateway, delta, end

HELLO = [{"role": "user", "content": "Hello"}]
MISSED = (
    "in ensemble 'generate', deadline_ms: the request was not complete 50 ms after its arrival (it "
    "had 3 output tokens); allow it more time, or send it when the load is lower"
)


def test_models_have_their_served_names(gateway: Gateway) -> None:
    status, _, body = gateway.ask("GET", "/v1/models")
    found = json.loads(body)
    assert (status, found["object"]) == (200, "list")
    assert [one["id"] for one in found["data"]] == ["base", "org/tiny-chat", "thinker"]
    entry = found["data"][1]
    assert entry["object"] == "model"
    assert type(entry["created"]) is int
    assert entry["owned_by"] == "inflight"
    assert entry["max_model_len"] == 512


@pytest.mark.parametrize(
    "name", ["org/tiny-chat", "org%2Ftiny-chat", "llm", "chat", "generate", "tokenizer"]
)
def test_a_model_is_found_by_its_name_and_those_of_triton(gateway: Gateway, name: str) -> None:
    status, _, body = gateway.ask("GET", f"/v1/models/{name}")
    assert (status, json.loads(body)["id"]) == (200, "org/tiny-chat")


@pytest.mark.parametrize("name", ["base", "base_generate", "base_llm"])
def test_models_of_a_prefix_are_a_model(gateway: Gateway, name: str) -> None:
    gateway.triton.plays(delta("x"), end())
    assert gateway.complete(model=name)["model"] == "base"
    assert gateway.triton.requests[0][0] == "base_generate"


def test_an_unknown_model_is_not_found(gateway: Gateway) -> None:
    for status, found in (
        gateway.post("completions", model="thinkr", prompt="x"),
        gateway.post("chat/completions", model="thinkr", messages=HELLO),
    ):
        assert status == 404
        assert found["error"]["code"] == "model_not_found"
        assert "did you mean 'thinker'" in found["error"]["message"]


def test_a_model_without_a_chat_template_has_no_chats(gateway: Gateway) -> None:
    status, error = gateway.error("chat/completions", model="base", messages=HELLO)
    assert (status, error["param"]) == (400, "model")
    assert "no chat template" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/audio/speech", 404),
        ("GET", "/v1//models", 404),
        ("GET", "/v1/models/../../metrics", 404),
    ],
)
def test_other_routes_have_errors_in_openais_form(
    gateway: Gateway, method: str, path: str, status: int
) -> None:
    found, headers, body = gateway.ask(method, path)
    assert found == status
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert headers["x-should-retry"] == "false"


def test_a_malformed_request_has_an_error_in_openais_form(gateway: Gateway) -> None:
    status, _, body = gateway.ask("GET", "/v1/models", Transfer_Encoding="gzip")
    assert status == 400
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[1]", 400),
        (b"{", 400),
        (b'{"model": "llm", "prompt": "\xff"}', 400),
        (b"[" * 100_000, 400),
        (b'{"model": "llm", "prompt": ' + b"[" * 100_000, 400),
        (b'{"model": "llm", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"model": "llm", "prompt": "' + b"x" * (2 << 20) + b'"}', 413),
    ],
)
def test_bodies_that_are_not_requests_are_refused(
    gateway: Gateway, body: bytes, status: int
) -> None:
    found, _, answer = gateway.ask("POST", "/v1/completions", body)
    assert found == status, answer
    assert json.loads(answer)["error"]["message"].startswith(("body", "seed"))


@pytest.mark.parametrize(
    ("status", "text", "found", "code", "can_retry"),
    [
        (400, "top_p: 3 is out of range", 400, "invalid_request", False),
        (400, "the queue of the model is full; retry later", 503, "server_overloaded", True),
        (400, "9 requests are waiting; retry in 17 s", 503, "server_overloaded", True),
        (400, MISSED, 504, "deadline_exceeded", False),
        (404, "Request for unknown model: 'x' is not found", 404, "not_found", False),
        (500, "Traceback in /usr/lib/x.py at 0xdeadbeef", 500, "internal_error", True),
    ],
)
def test_errors_of_triton_have_a_status_and_a_code(
    gateway: Gateway, status: int, text: str, found: int, code: str, can_retry: bool
) -> None:
    gateway.triton.refusal = status, text
    body = {"model": "llm", "prompt": "x"}
    got, headers, answer = gateway.ask("POST", "/v1/completions", body)
    error = json.loads(answer)["error"]
    assert (got, error["code"]) == (found, code)
    assert ("x-should-retry" not in headers) == can_retry
    assert "/usr/lib" not in error["message"] and "0xdead" not in error["message"]
    if found == 503:
        assert headers["retry-after"] == ("17" if "17" in text else "1")
    if found == 504:
        assert error["param"] == "deadline_ms"


def test_messages_that_are_not_text_are_refused(gateway: Gateway) -> None:
    gateway.triton.plays(delta("x"), end())
    body = b'{"model": "llm", "messages": [{"role": "user", "content": "\xff"}]}'
    status, _, answer = gateway.ask("POST", "/v1/chat/completions", body)
    assert status == 400
    assert json.loads(answer)["error"]["message"].startswith("body: is not valid JSON (invalid uni")
    assert gateway.triton.requests == []


def test_the_tensor_at_fault_has_the_clients_name(gateway: Gateway) -> None:
    gateway.triton.refusal = 400, "in ensemble 'generate', stop_words: 17 strings; allowed: 16"
    _, error = gateway.error()
    assert error["param"] == "stop"
    assert error["message"] == "stop: 17 strings; allowed: 16"
    for field, value in (
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "("}),
    ):
        gateway.triton.refusal = 400, "in ensemble 'chat', guided_decoding_guide: is not valid"
        _, error = gateway.error("chat/completions", messages=HELLO, **{field: value})
        assert error["message"] == f"{field}: is not valid"
    gateway.triton.refusal = 400, "in ensemble 'chat', messages[0].content: is null"
    _, error = gateway.error("chat/completions", messages=HELLO)
    assert error["param"] == "messages[0].content"


def test_a_server_that_is_not_ready_refuses(gateway: Gateway) -> None:
    gateway.set_ready(False)
    try:
        assert gateway.ask("GET", "/ready")[0] == 503
        assert gateway.ask("GET", "/health")[0] == 200
        status, headers, body = gateway.ask(
            "POST", "/v1/completions", {"model": "llm", "prompt": "x"}
        )
        assert status == 503
        assert headers["retry-after"]
        assert json.loads(body)["error"]["type"] == "server_error"
    finally:
        gateway.set_ready(True)
    assert gateway.ask("GET", "/ready")[0] == 200


def test_tokenize_and_detokenize(gateway: Gateway) -> None:
    status, _, body = gateway.ask(
        "POST", "/tokenize", {"model": "llm", "prompt": "aß", "add_special_tokens": False}
    )
    assert status == 200
    found = json.loads(body)
    assert found == {"count": 2, "max_model_len": 512, "tokens": [97, 223], "token_strs": None}
    status, _, body = gateway.ask("POST", "/detokenize", {"model": "llm", "tokens": [97, 223]})
    assert (status, json.loads(body)) == (200, {"prompt": "aß"})
    status, _, body = gateway.ask("POST", "/tokenize", {"model": "llm", "messages": [{"a": 1}]})
    assert json.loads(body)["count"] == len('[{"a":1}]')
    status, _, body = gateway.ask("GET", "/tokenizer_info?model=llm")
    assert json.loads(body)["eos_token"] == "</s>"


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": []}, {"tokens": "x"}])
def test_tokenize_refuses_what_is_neither_a_prompt_nor_messages(
    gateway: Gateway, body: dict[str, Any]
) -> None:
    status, _, found = gateway.ask("POST", "/tokenize", {"model": "llm", **body})
    assert status == 400, found


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
def test_there_are_no_embeddings(gateway: Gateway, path: str) -> None:
    status, _, body = gateway.ask("POST", path, {"model": "llm", "input": [1, 2]})
    error = json.loads(body)["error"]
    assert (status, error["param"], error["code"]) == (400, "model", "not_supported")
    assert "has no embeddings" in error["message"]


def test_models_are_not_loaded_without_keys(gateway: Gateway) -> None:
    status, _, body = gateway.ask("POST", "/v1/models/llm/load")
    assert status == 404
    assert "--model-control" in json.loads(body)["error"]["message"]


def test_strict_params_refuse_unknown_fields(tmp_path: Path) -> None:
    options = ("--strict-params", "--gateway-metrics", "127.0.0.1:{triton}")
    with a_gateway(tmp_path, *options, models=MODELS) as gateway:
        status, error = gateway.error(tempratur=1)
        assert (status, error["param"]) == (400, "tempratur")
        assert "did you mean 'temperature'" in error["message"]
        _check_strict_variables(gateway)
        for method, text in (("GET", b"inflight_server_ready 1\n"), ("HEAD", b"")):
            status, _, body = gateway.ask(method, "/metrics")
            assert (status, body) == (200, text)


def _check_strict_variables(gateway: Gateway) -> None:
    """A variable that the model's chat template does not read is an unknown field, too."""
    chat = "/v1/chat/completions"
    cases = ((chat, "think_llm", 200), (chat, "llm", 400), ("/tokenize", "llm", 400))
    for path, model, status in cases:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
        body["chat_template_kwargs"] = {"enable_thinking": False}
        found, _, answer = gateway.ask("POST", path, body)
        assert found == status, answer
        if status == 400:
            error = json.loads(answer)["error"]
            assert error["param"] == "chat_template_kwargs"
            assert "org/tiny-chat does not read 'enable_thinking'" in error["message"]


def test_a_server_elsewhere_is_asked_for_its_models(tmp_path: Path) -> None:
    with a_gateway(tmp_path, is_supervised=False) as gateway:
        gateway.triton.plays(delta("x"), end())
        assert gateway.complete()["choices"][0]["text"] == "x"
        assert "inflight_ticket" not in gateway.triton.sent


TEXTS = st.text('aZ0{}[]"\\ \x00ß\U0001f389', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "prompt", "messages", "n", "seed", "stop", "logprobs", "top_logprobs", "logit_bias",
        "max_tokens", "response_format", "tools", "tool_choice", "stream", "stream_options",
        "structured_outputs", "echo", "temperature", "user", "functions", "chat_template_kwargs",
    ]
)  # fmt: skip


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.sampled_from(["chat/completions", "completions"]), st.dictionaries(NAMES, VALUES))
def test_no_body_is_a_server_error(gateway: Gateway, path: str, fields: dict[str, Any]) -> None:
    n = fields.get("n")
    num_outputs = n if type(n) is int and 1 <= n <= 64 else 1
    gateway.triton.plays(delta("x"), *(end(index=index) for index in range(num_outputs)))
    body = {"model": "llm", "messages": HELLO, "prompt": "x", **fields}
    status, _, answer = gateway.ask("POST", f"/v1/{path}", json.dumps(body).encode())
    assert status in (200, 400), (status, answer)
    if status == 400:
        assert json.loads(answer)["error"]["message"]


def test_the_process_imports_no_heavy_packages() -> None:
    code = (
        "import sys, inflight.door.gateway_door, inflight.door.gateway.openai.chat\n"
        "print({'torch', 'numpy', 'grpc', 'transformers', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
