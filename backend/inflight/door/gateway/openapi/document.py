"""The gateway's OpenAPI document, from the structs that parse its requests."""

from __future__ import annotations

import re
from importlib.metadata import version
from inspect import cleandoc
from typing import Any

import msgspec

from inflight.door.gateway.openapi.bounds import add_bounds
from inflight.door.gateway.openapi.objects.errors import AnthropicError, Error
from inflight.door.gateway.openapi.operations import JSON, OPERATIONS, SSE, TEXT, Operation

_SCHEMAS = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")
_ATTRIBUTE = re.compile(r"^(?: {4})?(\w+(?:, \w+)*): (.*)$")
_ERRORS = {
    400: "The request is not valid.",
    401: "A key is missing or not valid.",
    403: "The key does not allow it.",
    404: "The model or the path is unknown.",
    408: "The body took too long.",
    413: "The body is too large.",
    415: "The Content-Type or Content-Encoding is not supported.",
    429: "A limit of the key is reached.",
    431: "The headers are too large.",
    500: "The server failed to process the request.",
    503: "The server is not ready or overloaded; retry later.",
    504: "The server did not respond in time, or not within the request's deadline_ms.",
}
_RETRIED = (429, 503)
_RETRY_AFTER = {
    "Retry-After": {
        "description": "In seconds.",
        "required": True,
        "schema": {"type": "integer", "minimum": 0},
    }
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# Messages are passed on as they are, so that no struct parses them.
_MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string"},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "object"}},
                    {"type": "null"},
                ]
            },
        },
        "required": ["role"],
    },
}


def document(has_keys: bool) -> dict[str, Any]:
    """The document, of OpenAPI 3.1.

    Args:
        has_keys: requests need an API key.
    """
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, has_keys)
    components: dict[str, Any] = {"schemas": _schemas(), "responses": _error_responses(has_keys)}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "inflight",
            "description": "OpenAI's and Anthropic's APIs in front of Triton's models.",
            "version": version("inflight-triton"),
        },
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = _SECURITY
        found["security"] = [{name: []} for name in _SECURITY]
    return found


def _schemas() -> dict[str, Any]:
    """Of all structs and those that they contain, by name."""
    kinds: dict[type[Any], None] = {Error: None, AnthropicError: None}
    for one in OPERATIONS:
        for kind in (one.request, one.response, one.event):
            if isinstance(kind, type):
                kinds[kind] = None
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    for schema in schemas.values():
        _describe(schema)
    for one in OPERATIONS:
        if one.request is not None:
            add_bounds(schemas[one.request.__name__]["properties"])
    schemas["ChatRequest"]["properties"]["messages"] |= _MESSAGES
    return dict(sorted(schemas.items()))


def _describe(schema: dict[str, Any]) -> None:
    """Move descriptions of attributes from a struct's docstring to its properties."""
    summary, _, attributes = cleandoc(schema.pop("description", "")).partition("Attributes:\n")
    if summary.strip():
        schema["description"] = " ".join(summary.split())
    texts: dict[str, str] = {}
    name = ""
    for line in attributes.splitlines():
        match = _ATTRIBUTE.match(line)
        if match is not None:
            name, texts[match[1]] = match[1], match[2]
        elif name:
            texts[name] += f" {line.strip()}"
    properties = schema.get("properties", {})
    for name, text in texts.items():
        if name in properties:
            properties[name]["description"] = text.strip().rstrip(",.") + "."


def _operation(one: Operation, has_keys: bool) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    if one.succeeds:
        responses["200"] = _success(one)
    kind = "Anthropic" if one.is_anthropic else ""
    for status in one.statuses(has_keys):
        responses[str(status)] = {"$ref": f"#/components/responses/{kind}Error{status}"}
    found: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.summary,
        "tags": [one.tag],
        "responses": responses,
    }
    parameters = _parameters(one)
    if parameters:
        found["parameters"] = parameters
    if one.request is not None:
        found["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": _reference(one.request)}},
        }
    if has_keys and one.is_probe:
        found["security"] = []
    return found


def _success(one: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if one.response in (JSON, TEXT):
        kind = "object" if one.response == JSON else "string"
        content[str(one.response)] = {"schema": {"type": kind}}
    elif isinstance(one.response, type):
        content[JSON] = {"schema": _reference(one.response)}
    text = "Success."
    if one.event is not None:
        text = (
            "An object, or with `stream` server-sent events, each with one "
            f"{one.event.__name__} as its data. {one.event_notes}"
        )
        content[SSE] = {"schema": {"type": "string"}, "x-event-data": _reference(one.event)}
    return {"description": text} | ({"content": content} if content else {})


def _parameters(one: Operation) -> list[dict[str, Any]]:
    string = {"type": "string"}
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": string}
        for name in _PARAMETER.findall(one.path)
    ]
    in_query = [
        {"name": name, "in": "query", "description": text, "schema": string}
        for name, text in one.query.items()
    ]
    return in_path + in_query


def _error_responses(has_keys: bool) -> dict[str, Any]:
    """Those that operations refer to, in both forms."""
    found = {}
    for one in OPERATIONS:
        prefix, kind = ("Anthropic", AnthropicError) if one.is_anthropic else ("", Error)
        for status in one.statuses(has_keys):
            found[f"{prefix}Error{status}"] = {
                "description": _ERRORS[status],
                "content": {JSON: {"schema": _reference(kind)}},
                **({"headers": _RETRY_AFTER} if status in _RETRIED else {}),
            }
    return dict(sorted(found.items()))


def _reference(kind: type[Any]) -> dict[str, str]:
    return {"$ref": _SCHEMAS.format(name=kind.__name__)}
