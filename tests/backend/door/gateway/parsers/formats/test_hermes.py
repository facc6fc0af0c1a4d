from __future__ import annotations

import pytest

from model_outputs import Output, parse

CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
NOW = ("now", '{"a": 1}')


def test_text_around_calls_stays_without_the_white_space_next_to_them() -> None:
    assert parse("hermes", f"Hi. \n\n{CALL}\n{CALL} \nbye \n") == Output("Hi.bye \n", (NOW, NOW))


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"name": "now", "arguments": {"a": 1}}',
        '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 1}}}\n</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 1}, "x": }</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>',
        '<tool_call>{"id": [{}], "name": "now", "parameters": {"a": 1}, "b": -1}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
    ],
)
def test_common_mistakes_are_calls(call: str) -> None:
    assert parse("hermes", call) == Output("", (NOW,))


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": ""'])
def test_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    text = f'<tool_call>{{"name": "now"{arguments}}}</tool_call>'
    assert parse("hermes", text) == Output("", (("now", "{}"),))


def test_an_unknown_function_is_a_call() -> None:
    assert parse("hermes", CALL.replace("now", "later")).calls == (("later", '{"a": 1}'),)


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>now()</tool_call>",
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "no JSON"}</tool_call>',
        f'<tool_call>{{"name": "{"x" * 300}", "arguments": {{}}}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": ',
    ],
)
def test_a_call_that_is_malformed_before_its_arguments_is_text(call: str) -> None:
    assert parse("hermes", f"Hi. \n{call} bye") == Output(f"Hi. \n{call} bye")
    assert parse("hermes", f"{call}{CALL}").calls == (NOW,)


def test_arguments_that_are_cut_stay_cut() -> None:
    text = CALL[: CALL.index("1")]
    assert parse("hermes", text) == Output("", (("now", '{"a": '),))


def test_arguments_that_are_no_json_end_with_the_call() -> None:
    text = CALL.replace("1}}", "x}}")
    assert parse("hermes", f"{text}{CALL}bye") == Output("bye", (("now", '{"a": x}}\n'), NOW))
