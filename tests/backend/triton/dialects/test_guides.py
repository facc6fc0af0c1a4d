"""vLLM's structured outputs are equivalent to our two options, or rejected with the key's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.core.output_constraint import GUIDE_FIELD, TYPE_FIELD
from inflight.errors import RequestError
from inflight.triton.dialects import guides, sampling_parameters

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


def parse(value: Any, key: str = "structured_outputs") -> dict[str, Any]:
    return sampling_parameters.parse(json.dumps({key: value}))


@pytest.mark.parametrize("key", guides.KEYS)
@pytest.mark.parametrize(
    ("value", "kind", "guide"),
    [
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"json_object": True}, "json", ""),
        ({"regex": "a+", "backend": "xgrammar"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"', "choice": None}, "ebnf_grammar", 'root ::= "a"'),
        ({"choice": ["yes", "no"], "json_object": False}, "choice", '["yes", "no"]'),
    ],
    ids=str,
)
def test_a_constraint_becomes_our_options(
    key: str, value: dict[str, Any], kind: str, guide: str
) -> None:
    expected = {TYPE_FIELD: kind, GUIDE_FIELD: guide}
    assert parse(value, key) == expected
    assert parse(json.dumps(value), key) == expected, "JSON within JSON, as vLLM's backend reads it"


@pytest.mark.parametrize("value", [None, "", {}, "{}", "null"])
def test_nothing_constrains_nothing(value: Any) -> None:
    assert parse(value) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", 'structured_outputs is "{"; allowed: an object, or JSON'),
        ([1], "structured_outputs is [1]; allowed: an object, or JSON"),
        ({"regexp": "a"}, "structured_outputs: 'regexp' is not a key; did you mean 'regex'?"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs has 2 constraints; allowed: one of"),
        ({"backend": "guidance"}, "structured_outputs has 0 constraints; allowed: one of json,"),
        ({"regex": 5}, "structured_outputs: regex is 5; allowed: a string"),
        ({"json": [1]}, "structured_outputs: json is [1]; allowed: a schema, as an object or a"),
        ({"choice": "yes"}, 'structured_outputs: choice is "yes"; allowed: a list of strings'),
        ({"json_object": 2}, "structured_outputs: json_object is 2; allowed: true, false"),
        ({"structural_tag": "x", "regex": "a"}, "structural_tag is not supported in this version"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is not supported"),
    ],
    ids=str,
)
def test_what_is_no_constraint_is_refused(value: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(value)
    assert str(caught.value).startswith("sampling_parameters: structured_outputs")
    assert message in str(caught.value)
