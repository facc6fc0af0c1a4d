"""Requests generated from the OpenAPI document of a gateway, by schemathesis."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.failures import FailureGroup
from schemathesis.openapi.checks import UndefinedStatusCode

import supervised
from inflight.door.gateway.openapi.operations import OPERATIONS, Operation
from supervised import Serving

pytestmark = pytest.mark.integration

load_all_checks()
CONFORMANCE = CHECKS.get_by_names(
    ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)
# Bounds on the outputs, so that a request ends soon.
SHORT = {"max_tokens": 16, "max_completion_tokens": 16, "max_output_tokens": 16, "n": 4}
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
# Members of requests whose generated values are seldom accepted.
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": HELLO,
    "/v1/messages/count_tokens": HELLO,
    "/tokenize": {"prompt": "Hello"},
}
# Routes that are not found on a server without keys.
WITHOUT_KEYS = ("POST /v1/models/{model}/load", "POST /v1/models/{model}/unload")
LISTED = {f"{one.method.upper()} {one.path}": one for one in OPERATIONS}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("schema")
    with supervised.serve(folder, "echo", "--gateway-port", "0") as found:
        yield found


@pytest.fixture(scope="module")
def url(serving: Serving) -> str:
    return f"http://{serving.gateway}"


@pytest.fixture(scope="module")
def document(url: str) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(f"{url}/openapi.json", timeout=60).json()
    return found


@pytest.fixture(scope="module")
def schema(url: str, document: dict[str, Any]) -> schemathesis.BaseSchema:
    """The document, narrowed to the served model and to short outputs."""
    (model,) = requests.get(f"{url}/v1/models", timeout=60).json()["data"]
    narrowed = json.loads(json.dumps(document))
    for one in narrowed["components"]["schemas"].values():
        properties = one.get("properties", {})
        if "model" in properties:
            properties["model"] = {"enum": [model["id"]]}
        for name in SHORT.keys() & properties.keys():
            for kind in properties[name].get("anyOf", [properties[name]]):
                if "maximum" in kind:
                    kind["maximum"] = SHORT[name]
    (parameter,) = narrowed["paths"]["/v1/models/{model}"]["get"]["parameters"]
    parameter["schema"] = {"enum": [model["id"], "llm", "none"]}
    return schemathesis.openapi.from_dict(narrowed)


def ask(url: str, case: Case, document: dict[str, Any]) -> int:
    """The status of a response that conforms to the document."""
    response = case.call(base_url=url, timeout=60)
    status = response.status_code
    missed_deadline = status == 504 and "deadline_exceeded" in response.text
    assert status < 500 or status == 503 or missed_deadline, response.text
    if status in (429, 503):
        assert int(response.headers["retry-after"][0]) > 0
    kind = response.headers.get("content-type", [""])[0].partition(";")[0]
    if kind == "text/event-stream":
        check_events(document, case, response.text)
    else:
        case.validate_response(response, checks=CONFORMANCE)
    return status


def check_events(document: dict[str, Any], case: Case, text: str) -> None:
    operation = document["paths"][case.path][case.method.lower()]
    media = operation["responses"]["200"]["content"]["text/event-stream"]
    error = "AnthropicError" if case.path.startswith("/v1/messages") else "Error"
    schemas = [media["x-event-data"], {"$ref": f"#/components/schemas/{error}"}]
    validator = Draft202012Validator({"anyOf": schemas, "components": document["components"]})
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    assert lines
    for line in lines:
        data = line.removeprefix("data: ")
        if data != "[DONE]":
            validator.validate(json.loads(data))


def with_few(case: Case, required: Sequence[str], random: Random) -> Case:
    """With few optional fields, and a plain prompt: of all fields, some are out of range in most
    requests."""
    others = sorted(case.body.keys() - required)
    kept = {*required, *random.sample(others, min(len(others), random.randrange(4)))}
    case.body = {name: value for name, value in case.body.items() if name in kept}
    case.body |= PLAIN.get(case.path, {})
    return case


def run(
    url: str,
    document: dict[str, Any],
    schema: schemathesis.BaseSchema,
    operation: Operation,
    num_examples: int,
) -> set[int]:
    """The statuses of requests that conform to the document, and of some that do not."""
    found = schema[operation.path][operation.method.upper()]
    valid = found.as_strategy(generation_mode=GenerationMode.POSITIVE)
    strategy = valid
    if operation.request is not None:
        required = document["components"]["schemas"][operation.request.__name__]["required"]
        few = st.builds(with_few, valid, st.just(required), st.randoms(use_true_random=False))
        strategy = few | valid | found.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    statuses = set()

    @settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(case: Case) -> None:
        statuses.add(ask(url, case, document))

    each()
    return statuses


@pytest.mark.parametrize("name", LISTED)
def test_responses_conform_to_the_document(
    url: str, document: dict[str, Any], schema: schemathesis.BaseSchema, name: str
) -> None:
    statuses = run(url, document, schema, LISTED[name], 30)
    assert (200 in statuses) == (LISTED[name].succeeds and name not in WITHOUT_KEYS)
    if LISTED[name].request is not None:
        assert 400 in statuses


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, one in LISTED.items() if one.request is not None])
def test_many_responses_conform_to_the_document(
    url: str, document: dict[str, Any], schema: schemathesis.BaseSchema, name: str
) -> None:
    assert 200 in run(url, document, schema, LISTED[name], 500)


def test_a_response_that_does_not_conform_is_found(
    url: str, document: dict[str, Any], schema: schemathesis.BaseSchema
) -> None:
    raw = json.loads(json.dumps(schema.raw_schema))
    raw["components"]["schemas"]["Tokens"]["properties"]["count"] = {"type": "string"}
    changed = schemathesis.openapi.from_dict(raw)
    with pytest.raises(FailureGroup) as wrong_type:
        run(url, document, changed, LISTED["POST /tokenize"], 60)
    assert "/properties/count" in str(wrong_type.value.exceptions[0])
    del raw["paths"]["/detokenize"]["post"]["responses"]["400"]
    changed = schemathesis.openapi.from_dict(raw)
    with pytest.raises(FailureGroup) as undocumented:
        run(url, document, changed, LISTED["POST /detokenize"], 60)
    assert isinstance(undocumented.value.exceptions[0], UndefinedStatusCode)
