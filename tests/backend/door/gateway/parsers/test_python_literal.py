from __future__ import annotations

import ast
import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.door.gateway.parsers.python_literal import literal_json, number

SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(
    SCALARS.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_a_literal_is_the_same_value_in_json(value: object) -> None:
    found = literal_json(repr(value))
    assert found is not None
    assert json.loads(found) == json.loads(json.dumps(value))


@given(st.text("'\"\\nxu04def gUdD8cC{}[],: ", max_size=12))
def test_what_python_takes_as_a_string_is_that_string(text: str) -> None:
    for quote in "'\"":
        literal = f"{quote}{text}{quote}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                value = ast.literal_eval(literal)
            except (ValueError, SyntaxError):
                continue
        found = literal_json(literal)
        # Two literals in a row are one in Python.
        is_plain = text.replace(f"\\{quote}", "").count(quote) == 0
        if is_plain and isinstance(value, str) and value.isprintable():
            assert found is not None
            assert json.loads(found) == value


@pytest.mark.parametrize(
    ("text", "json_text"),
    [
        ("5", "5"),
        ("-0.5e3", "-0.5e3"),
        ("+5", "5"),
        (".5", "0.5"),
        ("1_000", "1000"),
        ("0x10", "16"),
        ("inf", None),
        ("-inf", None),
        ("1e999", "1e999"),
        ("nan", None),
        ("1.2.3", None),
        ("", None),
    ],
)
def test_numbers(text: str, json_text: str | None) -> None:
    assert number(text) == json_text


@pytest.mark.parametrize(
    ("text", "json_text"),
    [
        ("[True, None, false,]", "[true, null, false]"),
        ("(1, 'a')", '[1, "a"]'),
        ("{'a': {}, \"b\": ()}", '{"a": {}, "b": []}'),
        (r"'\ud83d\ude00 \ud83d \x41'", '"😀 \ufffd A"'),
        (r"'\d\N'", r'"\\d\\N"'),
        ("[1 2]", None),
        ("{1: 2}", None),
        ("{'a' 1}", None),
        ("f(1)", None),
        ("'a", None),
        ("a", None),
        ("[1] + [2]", None),
        ("[" * 100 + "]" * 100, None),
    ],
)
def test_literals(text: str, json_text: str | None) -> None:
    assert literal_json(text) == json_text
