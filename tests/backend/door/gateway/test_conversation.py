"""Chats of all wire formats in OpenAI's terms."""

from __future__ import annotations

import pytest

from inflight.door.gateway.directory import Description, ServedModel
from inflight.door.gateway.openai.conversation import Conversation, Naming, reasoning_variables
from inflight.door.gateway.problem import Problem
from inflight.errors import RequestError

HELLO = [{"role": "user", "content": "Hello"}]
NAMING = Naming({}, ((r"^(tools\[\d+\])\.function", r"\1"),))


def served(template: str) -> ServedModel:
    return ServedModel("m", "llm", {}, Description("m", chat_template=template), (), 0)


def test_an_answer_that_is_continued_does_not_begin_with_reasoning() -> None:
    template = "{{ '<think></think>' }}{% if add_generation_prompt %}{{ '<think>' }}{% endif %}"
    for is_continued in (False, True):
        plan = Conversation(HELLO, is_continued=is_continued).plan(served(template), NAMING)
        assert plan.reasons
        assert plan.in_reasoning is not is_continued


def test_reasoning_has_the_switches_of_the_template() -> None:
    def variables(template: str, is_on: bool | None, effort: str | None = None) -> object:
        return reasoning_variables(Description("m", chat_template=template), is_on, effort)

    assert variables("{{ enable_thinking }}", False) == {"enable_thinking": False}
    assert variables("{% if thinking is defined and thinking %}", True) == {"thinking": True}
    assert variables("{{ enable_thinking }}", None, "low") == {}
    assert variables("{{ reasoning_effort }}", None, "low") == {"reasoning_effort": "low"}
    assert variables("{{ message.thinking }}{{ rethinking }}", True) == {}


def test_errors_have_the_names_of_the_format() -> None:
    def check() -> None:
        raise RequestError("is missing", "tools[3].function.name")

    with pytest.raises(Problem) as found:
        NAMING.apply(check)
    assert found.value.message == "tools[3].name: is missing"
    assert found.value.param == "tools[3].name"
