from __future__ import annotations

import pytest

from inflight.door.gateway.parsers import Reasoning
from model_outputs import Output, parse, parser


@pytest.mark.parametrize("text", ["<think>\nHm.\n</think>\n\nYes.", " \n<think>Hm.</think>Yes."])
def test_reasoning_is_what_is_between_the_tags(text: str) -> None:
    assert parse(None, text, reasoning="think") == Output("Yes.", (), "Hm.")


def test_the_prompt_may_have_opened_the_tag() -> None:
    for text in ("Hm.\n</think>\n\nYes.", "<think>\nHm.</think>Yes."):
        assert parse(None, text, reasoning="think", in_reasoning=True) == Output("Yes.", (), "Hm.")


def test_empty_reasoning_is_none() -> None:
    assert parse(None, "<think>\n\n</think>\n\nYes.", reasoning="think") == Output("Yes.")


def test_tags_elsewhere_are_text() -> None:
    text = "The tag <think> opens, and </think> closes."
    assert parse(None, text, reasoning="think") == Output(text)
    text = "Yes: <think>a</think>"
    assert parse(None, f"<think>b</think>{text}", reasoning="think") == Output(text, (), "b")


def test_reasoning_that_does_not_end_is_reasoning() -> None:
    assert parse("hermes", "<think>Hm. </thi", reasoning="think") == Output("", (), "Hm. </thi")


def test_calls_in_reasoning_are_reasoning() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    found = parse("hermes", f"<think>{call}</think>\n\n{call}", reasoning="think")
    assert found == Output("", (("now", "{}"),), call)


def test_reasoning_arrives_with_its_part() -> None:
    found = parser("hermes", "think")
    assert found.feed("<thi") == []
    assert found.feed("nk>\nHm") == [Reasoning("Hm")]
    assert found.feed(", a <") == [Reasoning(", a")]
    assert found.feed("b") == [Reasoning(" <b")]
