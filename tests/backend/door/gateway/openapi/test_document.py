"""The document, against the routes and the responses of a gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway import Gateway, a_gateway, delta, end, events, named_events
from inflight.door.gateway import app
from inflight.door.gateway.gateway import Gateway as State
from inflight.door.gateway.gateway import Policy
from inflight.door.gateway.openai.chat import ChatRequest
from inflight.door.gateway.openapi.document import document
from inflight.sampling.params import MAX_TEMPERATURE
from keys import desk

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
LOGPROBS = json.dumps([{"1": {"logprob": -0.5, "rank": 1, "decoded_token": "Hi"}}])
# POST requests whose responses have as many members as possible.
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "thinker",
        "messages": HELLO,
        "tools": [TOOL],
        "logprobs": True,
        "top_logprobs": 1,
    },
    "/v1/completions": {"model": "llm", "prompt": ["a", "b"], "logprobs": 1},
    "/v1/responses": {"model": "thinker", "input": "Hello", "user": "me"},
    "/v1/messages": {"model": "thinker", "messages": HELLO, "max_tokens": 8},
}
OTHERS: list[tuple[str, str, str, dict[str, Any] | None]] = [
    ("GET", "/v1/models", "/v1/models", None),
    ("GET", "/v1/models/{model}", "/v1/models/llm", None),
    ("GET", "/tokenizer_info", "/tokenizer_info?model=llm", None),
    ("GET", "/version", "/version", None),
    ("POST", "/tokenize", "/tokenize", {"model": "llm", "prompt": "x", "return_token_strs": True}),
    ("POST", "/detokenize", "/detokenize", {"model": "llm", "tokens": [65]}),
    (
        *("POST", "/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        {"model": "llm", "messages": HELLO},
    ),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with a_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def check(found: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Members that the document lacks are errors, too."""
    components = json.loads(json.dumps(found["components"]))
    for one in components["schemas"].values():
        if "properties" in one:
            one["additionalProperties"] = False
    Draft202012Validator({**schema, "components": components}).validate(value)


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_document_is_valid(has_keys: bool) -> None:
    OpenAPIV31SpecValidator(document(has_keys)).validate()


def test_the_document_has_each_route_and_no_other() -> None:
    found = {
        (method.upper(), path)
        for path, operations in document(False)["paths"].items()
        for method in operations
    }
    routes = {
        (method, re.sub(r":\w+\}", "}", route.path))
        for route in app.routes(State((), Policy()))
        for method in route.methods or ()
        if method != "HEAD"  # Starlette's, beside GET
    }
    assert found == routes


def test_requests_are_the_structs_that_parse_them() -> None:
    schema = document(False)["components"]["schemas"]["ChatRequest"]
    assert set(schema["properties"]) == set(ChatRequest.__struct_fields__)
    assert schema["required"] == ["model", "messages"]
    assert schema["properties"]["n"]["anyOf"][0] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 64,
    }
    assert schema["properties"]["include_reasoning"]["description"].startswith("whether")


def test_sampling_options_have_the_bounds_that_the_models_check() -> None:
    schemas = document(False)["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        properties = schemas[name]["properties"]
        assert properties["temperature"]["anyOf"][0] == {
            "type": "number",
            "minimum": 0.0,
            "maximum": MAX_TEMPERATURE,
        }
        assert properties["top_p"]["anyOf"][0] == {
            "type": "number",
            "exclusiveMinimum": 0.0,
            "maximum": 1.0,
        }
        assert properties["top_k"]["anyOf"][0]["minimum"] == -1
        assert "most probable tokens" in properties["top_k"]["description"]


def test_keys_are_in_the_document_of_a_server_with_keys() -> None:
    without, found = document(False), document(True)
    assert "security" not in without and "securitySchemes" not in without["components"]
    assert set(found["components"]["securitySchemes"]) == {"bearer", "apiKey"}
    assert found["security"] == [{"bearer": []}, {"apiKey": []}]
    assert found["paths"]["/health"]["get"]["security"] == []
    chat = "/v1/chat/completions"
    assert {"401", "403", "429"} <= set(found["paths"][chat]["post"]["responses"])
    assert "401" not in without["paths"][chat]["post"]["responses"]
    assert "401" not in found["paths"]["/health"]["get"]["responses"]


def test_a_gateway_serves_its_document(served: Gateway, tmp_path: Path) -> None:
    for _ in range(2):
        status, headers, body = served.ask("GET", "/openapi.json")
        assert (status, headers["content-type"]) == (200, "application/json")
        assert json.loads(body) == document(False)
    with desk(tmp_path) as keys, a_gateway(tmp_path, *keys.options) as guarded:
        assert guarded.ask("GET", "/openapi.json")[0] == 401
        secret = keys.issue()
        status, _, body = guarded.ask("GET", "/openapi.json", Authorization=f"Bearer {secret}")
        assert (status, json.loads(body)) == (200, document(True))


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_generations_are_as_the_document_says(served: Gateway, path: str, stream: bool) -> None:
    asked = REQUESTS[path] | {"stream": stream}
    if stream and path.endswith("completions"):
        asked["stream_options"] = {"include_usage": True}
    is_chat = path != "/v1/completions"
    texts = ["<think>Well", "</think>", "Hi", *([CALL] if "tools" in asked else [])]
    script = [delta(text, logprobs=LOGPROBS) for text in texts if is_chat or text == "Hi"]
    served.triton.plays(*script, end())
    status, headers, body = served.ask("POST", path, asked)
    assert status == 200, body
    found = document(False)
    content = found["paths"][path]["post"]["responses"]["200"]["content"]
    if not stream:
        check(found, content["application/json"]["schema"], json.loads(body))
        return
    media = content[headers["content-type"].partition(";")[0]]
    is_named = path in ("/v1/responses", "/v1/messages")
    values = named_events(body) if is_named else events(body)[:-1]
    assert values
    for value in values:
        if is_named:  # of its kinds, the schema has the common members alone
            wrapped = {**media["x-event-data"], "components": found["components"]}
            Draft202012Validator(wrapped).validate(value)
        else:
            check(found, media["x-event-data"], value)


@pytest.mark.parametrize(("method", "name", "path", "body"), OTHERS)
def test_other_responses_are_as_the_document_says(
    served: Gateway, method: str, name: str, path: str, body: dict[str, Any] | None
) -> None:
    status, _, answer = served.ask(method, path, body)
    assert status == 200, answer
    found = document(False)
    responses = found["paths"][name][method.lower()]["responses"]
    schema = responses["200"]["content"]["application/json"]["schema"]
    check(found, schema, json.loads(answer))


@pytest.mark.parametrize("path", REQUESTS)
def test_errors_are_as_the_document_says(served: Gateway, path: str) -> None:
    found = document(False)
    responses = found["paths"][path]["post"]["responses"]
    served.triton.refusal = (503, "the server is overloaded; retry later")
    cases = [(b"[", 400), (REQUESTS[path], 503)]
    for body, expected in cases:
        status, headers, answer = served.ask("POST", path, body)
        assert status == expected, answer
        kind = responses[str(status)]["$ref"].rpartition("/")[2]
        component = found["components"]["responses"][kind]
        check(found, component["content"]["application/json"]["schema"], json.loads(answer))
        assert ("retry-after" in headers) == ("headers" in component)
