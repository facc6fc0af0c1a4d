from __future__ import annotations

from typing import Any

import pytest

from inflight.door.gateway.parsers.tools import Tool, check_schema, schemas_of, tools_of
from inflight.errors import RequestError


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def test_a_function_without_parameters_takes_none() -> None:
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    assert tools_of([function(name="f")]) == [Tool("f", none)]


def test_parameters_are_an_object() -> None:
    tools = [function(name="f", parameters={"properties": {"a": {}}}, strict=True)]
    schema = {"type": "object", "properties": {"a": {}}}
    assert tools_of(tools) == [Tool("f", schema, strict=True)]
    assert schemas_of(tools) == {"f": schema}


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("f", r"^tools\[0\]: not a function; allowed: "),
        ({"type": "web_search"}, r"^tools\[0\]: not a function"),
        ({"type": "function"}, r"^tools\[0\].function: is missing"),
        (function(), r"^tools\[0\].function.name: allowed: 1 to 64 letters"),
        (function(name="a b"), r"^tools\[0\].function.name: allowed: 1 to 64 letters"),
        (function(name="a" * 65), r"^tools\[0\].function.name: allowed: 1 to 64 letters"),
        (function(name="f", parameters=[]), r"^tools\[0\].function.parameters: allowed: a JSON"),
        (
            function(name="f", parameters={"type": "string"}),
            r'^tools\[0\].function.parameters: allowed: a JSON schema of "type": "object"',
        ),
    ],
)
def test_errors_name_the_tool(tool: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tools_of([tool])


def test_schemas_are_only_checked_for_grammars() -> None:
    schema = {"properties": {"a": {"$ref": "http://b/c"}}}
    [tool] = tools_of([function(name="f", parameters=schema)])
    message = r"^tools\[3\].function.parameters: /properties/a/\$ref: .* is outside of the schema"
    with pytest.raises(RequestError, match=message):
        check_schema(tool, "tools[3]")
