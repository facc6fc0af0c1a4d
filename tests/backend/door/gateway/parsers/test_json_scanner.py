from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inflight.door.gateway.parsers.json_scanner import JsonScanner

CHARACTERS = st.text('{}[]",:\\u01e.-+ \ntrufalsn', max_size=16)
STARTS = ("{", "[", '"')


def scan(text: str, size: int = 1 << 20) -> tuple[str, bool, bool]:
    """What was read, done, broken; in parts of `size`."""
    scanner = JsonScanner()
    out = ""
    for start in range(0, len(text), size):
        part = text[start : start + size]
        read, end = scanner.scan(part, 0)
        out += read
        if scanner.done or scanner.broken:
            break
        assert end == len(part)
    return out, scanner.done, scanner.broken


@given(st.sampled_from(STARTS), CHARACTERS, st.integers(1, 3))
@example("{", '"a": [1, 2.5e-3, true, null, {}], "": "\\u00e9\\n"}', 1)
@example("[", "01]", 1)
@example("[", "1,]", 1)
def test_a_value_is_done_where_the_standard_library_ends_it(
    start: str, rest: str, size: int
) -> None:
    text = start + rest
    read, done, broken = scan(text, size)
    assert not (done and broken)
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError:
        assert not done
    else:
        assert done
        assert json.loads(read) == value
        assert end <= len(text)


@given(st.sampled_from(STARTS), CHARACTERS)
def test_the_parts_do_not_matter(start: str, rest: str) -> None:
    assert scan(start + rest, 1) == scan(start + rest)


def test_control_characters_in_strings_are_escaped() -> None:
    assert scan('{"a": "\n\t\x01"}') == ('{"a": "\\n\\t\\u0001"}', True, False)


def test_white_space_between_tokens_stays() -> None:
    assert scan('{\n "a" : [ ] }x') == ('{\n "a" : [ ] }', True, False)


@pytest.mark.parametrize(
    "text",
    [
        "{'a'", "{a", '{"a" 1', '{"a":1 "', "{,", '{"a":,', "[,", "[1,]", "[1 2", '["\\x', "[tru]",
        "[True]", "[01]", "[1.]", "[.5]", "[NaN]", '["\\u12g', "{}", "[+1]",
    ],
)  # fmt: skip
def test_what_is_no_json_is_broken(text: str) -> None:
    _, done, broken = scan(text)
    assert broken != (text == "{}")
    assert done == (text == "{}")


def test_nesting_is_not_limited() -> None:
    assert scan("[" * 100_000 + "]" * 100_000)[1]
