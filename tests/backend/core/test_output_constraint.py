"""Two strings are parsed to a constraint, or to an error with what is allowed."""

import json
import time

import pytest

from inflight.core.output_constraint import (
    KINDS,
    MAX_GUIDE_BYTES,
    MAX_REPEAT,
    StructuredOutput,
    parse,
)
from inflight.errors import RequestError

GOOD = {
    "json": "",
    "json_schema": '{"type": "object"}',
    "regex": "[0-9]{1,3}",
    "ebnf_grammar": 'root ::= "yes" | "no"',
    "choice": '["yes", "no"]',
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_parsed(kind: str) -> None:
    assert parse(kind, GOOD[kind]) == StructuredOutput(kind, GOOD[kind])  # type: ignore[arg-type]


@pytest.mark.parametrize(("guide_type", "guide"), [(None, None), ("", ""), (None, ""), ("", None)])
def test_no_guide_is_no_constraint(guide_type: str | None, guide: str | None) -> None:
    assert parse(guide_type, guide) is None


def test_json_needs_no_guide() -> None:
    assert parse("json", None) == parse("json", "") == StructuredOutput("json")


@pytest.mark.parametrize(
    ("guide_type", "guide", "message"),
    [
        ("jsn_schema", "{}", r"^guided_decoding_guide_type: 'jsn_schema' is unknown; allowed: json,"
         r" json_schema, .*; did you mean 'json_schema'\?$"),
        ("JSON", "", r"_guide_type: 'JSON' is unknown"),
        (None, "{}", r"^guided_decoding_guide_type: is missing, but guided_decoding_guide is set"),
        ("json", "{}", r"^guided_decoding_guide: .* use json_schema with a schema"),
        ("json_schema", "", r"^guided_decoding_guide: is missing; .* needs one: {"),
        ("regex", None, r"^guided_decoding_guide: is missing"),
        ("regex", "a\ud800", r"lone surrogate at character 1"),
        ("regex", "x" * (MAX_GUIDE_BYTES + 1), r"^guided_decoding_guide: 65537 bytes; allowed"),
        ("regex", "é" * (MAX_GUIDE_BYTES // 2 + 1), r"65538 bytes; allowed: 65536"),
        ("regex", "x{1,100000}", r"a repetition of 100000 is too many; allowed: 10000"),
        ("regex", "x{" + "9" * 5000 + "}", r"a number of 5000 digits is too many"),
        ("ebnf_grammar", 'root ::= "a"{20000}', r"repetition of 20000"),
        ("json_schema", "{", r"^guided_decoding_guide: not valid JSON: "),
        ("json_schema", "[" * 30_000, r"nested too deeply; allowed: 100"),
        ("json_schema", '{"a":' * 5000, r"nested too deeply|not valid JSON"),
        ("choice", "yes", r"not valid JSON"),
        ("choice", "[]", r'a choice is a JSON array of one or more strings: \["yes", "no"\]'),
        ("choice", '["a", 1]', r"JSON array of one or more strings"),
        ("choice", '{"a": 1}', r"JSON array of one or more strings"),
        ("choice", '["a", ""]', r"must not be empty"),
    ],
)  # fmt: skip
def test_problems_are_reported(guide_type: str | None, guide: str | None, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse(guide_type, guide)


def test_the_longest_guide_passes() -> None:
    assert parse("regex", "x" * MAX_GUIDE_BYTES) is not None


@pytest.mark.parametrize(
    "expression",
    [r"\{100000\}", r"[{100000}]", r"[\]{100000}]", f"x{{{MAX_REPEAT}}}", "x{100000", "{,100000}"],
)
def test_braces_that_are_no_count_pass(expression: str) -> None:
    assert parse("regex", expression) is not None


@pytest.mark.alone
@pytest.mark.parametrize("unit", ["[", '"', "{", "{ ", "{1,", "\\", "(a+)+", "{1" + " " * 40])
@pytest.mark.parametrize("kind", ["regex", "ebnf_grammar"])
def test_checking_is_linear(kind: str, unit: str) -> None:
    """Expressions that make a backtracking matcher read the text over and over."""
    text = (unit * MAX_GUIDE_BYTES)[:MAX_GUIDE_BYTES]
    started = time.perf_counter()
    parse(kind, text)
    assert time.perf_counter() - started < 0.5


def test_choices_are_deduplicated() -> None:
    assert StructuredOutput("choice", json.dumps(["b", "a", "b"])).choices() == ["b", "a"]
