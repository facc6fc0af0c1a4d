from __future__ import annotations

import json

import pytest

from model_outputs import Output, parse


def test_values_become_json() -> None:
    text = "[now(a='it\\'s', b=[True, None], c={'x': (1, -2.5)},d=\"\\n\"), get_weather()]"
    found = parse("pythonic", text)
    assert found.text == ""
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [
        ("now", {"a": "it's", "b": [True, None], "c": {"x": [1, -2.5]}, "d": "\n"}),
        ("get_weather", {}),
    ]


def test_the_marker_allows_any_function_anywhere() -> None:
    text = "Hi. <|python_start|>[later(a=1)]<|python_end|>"
    assert parse("pythonic", text) == Output("Hi.", (("later", '{"a": 1}'),))


@pytest.mark.parametrize(
    "text",
    [
        "[later(a=1)]",
        "[now(1)]",
        "[now(*a)]",
        "[]",
        "[1, now(a=1)]",
        "now(a=1)",
        "a [now(a=1)]",
        "[now",
        "[now (a=1)]",
    ],
)
def test_other_lists_are_text(text: str) -> None:
    assert parse("pythonic", text) == Output(text)


def test_a_call_of_an_unknown_function_in_the_list_is_text() -> None:
    assert parse("pythonic", "[now(), later()]") == Output("later()]", (("now", "{}"),))


def test_values_that_are_no_literals_reach_the_client() -> None:
    assert parse("pythonic", "[now(a=b, c=1)]") == Output("", (("now", '{"a": b, c=1)]'),))
    assert parse("pythonic", "[now(a=1, 5)]") == Output("", (("now", '{"a": 1, 5)]'),))


def test_text_after_the_list_stays() -> None:
    assert parse("pythonic", "[now()] bye") == Output("bye", (("now", "{}"),))
