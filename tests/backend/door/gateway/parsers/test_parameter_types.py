from __future__ import annotations

import pytest

from inflight.door.gateway.parsers.parameter_types import literal, types_of

SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "either": {"type": ["integer", "null"]},
        "any of": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/flag"}]},
        "enum": {"enum": ["a", 1, None]},
        "const": {"const": [1]},
        "reference": {"$ref": "#/definitions/list"},
        "recursive": {"$ref": "#/$defs/self"},
        "elsewhere": {"$ref": "#/$defs/none"},
        "nothing": {},
        "true": True,
    },
    "$defs": {"flag": {"type": "boolean"}, "self": {"$ref": "#/$defs/self"}},
    "definitions": {"list": {"type": "array"}},
}


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("text", {"string"}),
        ("either", {"integer", "null"}),
        ("any of", {"number", "boolean"}),
        ("enum", {"string", "integer", "null"}),
        ("const", {"array"}),
        ("reference", {"array"}),
        *((key, {"string"}) for key in ("recursive", "elsewhere", "nothing", "true", "unknown")),
    ],
)
def test_types_follow_from_the_schema(key: str, types: set[str]) -> None:
    assert types_of(key, SCHEMA) == types
    assert types_of(key, {}) == {"string"}


@pytest.mark.parametrize(
    ("text", "types", "json_text"),
    [
        ("5", {"integer"}, "5"),
        ("5", {"number"}, "5"),
        ("5", {"string", "null"}, '"5"'),
        ("5.5", {"integer"}, '"5.5"'),
        (" 5.5\n", {"number"}, "5.5"),
        ("True", {"boolean"}, "true"),
        ("TRUE", {"boolean"}, "true"),
        ("None", {"string", "null"}, "null"),
        ("null", {"string", "null"}, "null"),
        ('"a"', {"string", "null"}, '"\\"a\\""'),
        (" a\nb", {"string", "null"}, '" a\\nb"'),
        ('{"a": [1]}', {"object"}, '{"a": [1]}'),
        ("{'a': (1,)}", {"object"}, '{"a": [1]}'),
        ("[1, 2", {"array"}, '"[1, 2"'),
        ("", {"integer"}, '""'),
    ],
)
def test_values_are_of_an_allowed_type_or_strings(
    text: str, types: set[str], json_text: str
) -> None:
    assert literal(text, types) == json_text
