from __future__ import annotations

import pytest

from model_outputs import Output, parse

CALL = '{"name": "now", "parameters": {"a": 1}}'
NOW = ("now", '{"a": 1}')


@pytest.mark.parametrize("separator", ["; ", ";", "\n", ", "])
def test_calls_in_sequence(separator: str) -> None:
    assert parse("llama3_json", f" {CALL}{separator}{CALL}") == Output("", (NOW, NOW))


def test_the_tag_marks_calls_anywhere_and_of_any_function() -> None:
    later = CALL.replace("now", "later")
    assert parse("llama3_json", f"Hi. <|python_tag|>{later}") == Output(
        "Hi.", (("later", '{"a": 1}'),)
    )
    assert parse("llama3_json", f"<|python_tag|>{CALL}; {CALL}") == Output("", (NOW, NOW))


@pytest.mark.parametrize(
    "text",
    [
        CALL.replace("now", "later"),
        '{"users": [{"name": "now"}]}',
        '{"name": "now", "age": 5}',
        f"Like this: {CALL}",
        '<|python_tag|>brave_search.call(query="a")',
        "{}",
        '{"name',
    ],
)
def test_other_json_is_text(text: str) -> None:
    assert parse("llama3_json", text) == Output(text)


def test_text_after_a_call_stays() -> None:
    assert parse("llama3_json", f"{CALL}\nDone; really.") == Output("Done; really.", (NOW,))
    assert parse("llama3_json", f'{CALL}; {{"a": 1}}') == Output('{"a": 1}', (NOW,))


def test_a_type_may_precede_the_name() -> None:
    assert parse("llama3_json", f'{{"type": "function", {CALL[1:]}') == Output("", (NOW,))
