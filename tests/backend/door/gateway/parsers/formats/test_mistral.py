from __future__ import annotations

import pytest

from model_outputs import Output, parse

CALL = '{"name": "now", "arguments": {"a": 1}, "id": "abcdefghi"}'
NOW = ("now", '{"a": 1}')


@pytest.mark.parametrize(
    "text",
    [
        f"[TOOL_CALLS] [{CALL}, {CALL}]",
        f"[TOOL_CALLS][{CALL}, {CALL}]",
        '[TOOL_CALLS]now[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{"a": 1}',
        '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]now{"a": 1}',
    ],
)
def test_marked_calls(text: str) -> None:
    assert parse("mistral", text) == Output("", (NOW, NOW))
    assert parse("mistral", f"Hi. {text}") == Output("Hi.", (NOW, NOW))
    later = text.replace("now", "later")
    assert [name for name, _ in parse("mistral", later).calls] == ["later", "later"]


@pytest.mark.parametrize("text", [f"[{CALL}, {CALL}]", 'now{"a": 1}now{"a": 1}'])
def test_calls_of_known_functions_need_no_marker_at_the_start(text: str) -> None:
    assert parse("mistral", text) == Output("", (NOW, NOW))
    for other in (text.replace("now", "later"), f"Hi. {text}"):
        assert parse("mistral", other) == Output(other)


def test_text_between_unmarked_and_marked_calls() -> None:
    text = f'now{{"a": 1}} and [TOOL_CALLS][{CALL}] bye'
    assert parse("mistral", text) == Output("andbye", (NOW, NOW))


@pytest.mark.parametrize("text", ["now", "nowhere", "now {x}", "[TOOL_CALLS]", "[TOOL_CALLS] 5"])
def test_other_text_is_text(text: str) -> None:
    assert parse("mistral", text) == Output(text)
