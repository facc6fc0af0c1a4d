"""An unsupported schema is rejected with the location of the problem."""

import itertools
import json
import time
from typing import Any

import pytest

from inflight.core import json_schema
from inflight.core.output_constraint import MAX_GUIDE_BYTES, check_regex
from json_schemas import schema as seeded


def check(value: Any) -> None:
    json_schema.check(value, check_regex)


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth - 1):
        found = {"not": found}
    return found


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}


@pytest.mark.parametrize(
    "value",
    [
        True,
        {},
        nested(json_schema.MAX_DEPTH),
        {"minItems": json_schema.MAX_MINIMUM, "maxItems": 10**9, "maxLength": 10**9},
        {"properties": {"$ref": {"type": "string"}, "minItems": {"minimum": 10**9}}},
        {"enum": [{"$ref": "http://example.com"}], "default": {"minItems": 10**9}},
        {"$id": "http://a.org/a", "$ref": "http://a.org/a#/$defs/b", "$defs": {"b": {}}},
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"$ref": "#/$defs/node", "$defs": {"node": NODE | {"required": ["other"]}}},
        {"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "type": ["object", "null"],
                                                   "required": ["next"]}}},
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}},
        {"$ref": "#/$defs/t", "$defs": {"t": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]}}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {}}},
        {"$ref": "#/nowhere/at/all"},
    ],
)  # fmt: skip
def test_supported_schemas_pass(value: Any) -> None:
    check(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "a schema is a JSON object, or true"),
        ("", "a schema is a JSON object"),
        (5, "a schema is a JSON object"),
        (None, "a schema is a JSON object"),
        (False, "false matches nothing"),
        (nested(json_schema.MAX_DEPTH + 1), "nested too deeply; allowed: 100"),
        ({"items": {"$ref": "http://example.com/x"}},
         r"^/items/\$ref: 'http://example.com/x' is outside of the schema, and nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, "outside of the schema"),
        ({"$ref": "other.json#/a"}, "outside of the schema"),
        ({"properties": {"a": {"minItems": 10**9}}},
         r"^/properties/a/minItems: 1000000000 is more than an output can hold; allowed: 10000$"),
        ({"minLength": 1e300}, "more than an output can hold"),
        ({"anyOf": [{"minProperties": 10_001}]}, r"^/anyOf/0/minProperties"),
        ({"properties": {"a": {"pattern": "x{1,100000}"}}}, "^/properties/a: a repetition"),
        ({"patternProperties": {"x{100000}": {}}}, "a repetition of 100000"),
        ({"$ref": "#"}, "the recursion has no end"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
         "no end"),
        ({"$ref": "#/$defs/node", "$defs": {"node": NODE | {"required": ["next"]}}},
         r"no end: each value must contain another one; leave a way out"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "no end"),
        ({"allOf": [{"anyOf": [{"$ref": "#"}]}]}, "no end"),
    ],
)  # fmt: skip
def test_unsatisfiable_requests_are_rejected(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(value)


@pytest.mark.parametrize("seed", range(200))
def test_seeded_schemas_pass(seed: int) -> None:
    check(seeded(seed))


@pytest.mark.alone
def test_checking_is_linear() -> None:
    """Many definitions that need each other in the order that is worst to follow."""
    count = 1500
    names = [f"d{i}" for i in range(count)]
    chain = {name: {"$ref": f"#/$defs/{after}"} for name, after in itertools.pairwise(names)}
    value = {"$ref": "#/$defs/d0", "$defs": {**dict(reversed(chain.items())), names[-1]: {}}}
    assert len(json.dumps(value)) < MAX_GUIDE_BYTES
    started = time.perf_counter()
    check(value)
    assert time.perf_counter() - started < 0.5
