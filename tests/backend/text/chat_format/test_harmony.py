"""Chats with gpt-oss: what its template does not take arrives in another form, and none is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from family_chats import reference_of, tokenizer_of
from inflight.errors import RequestError
from inflight.text.chat import encode_chat
from inflight.text.chat_format.harmony import fitted, is_written_by
from inflight.text.messages import parse_messages, parse_tools
from inflight.text.template import Conversation

USER = {"role": "user", "content": "Now?"}
ANSWER = {"role": "assistant", "content": "Noon.", "reasoning_content": "Hm."}
TOOL = {"type": "function", "function": {"name": "now", "description": "The time."}}


def call(name: str, id_: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": '{"a": "ö"}'}}


def calling(*calls: dict[str, Any], **members: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **members}


def result(id_: str, content: str = "12:00") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


def conversation(messages: list[dict[str, Any]], *tools: dict[str, Any]) -> Conversation:
    parsed = parse_tools(json.dumps(tools)) if tools else None
    return Conversation(parse_messages(json.dumps(messages)), parsed)


def prompt(messages: list[dict[str, Any]], *tools: dict[str, Any]) -> str:
    """From the first message of the user on."""
    tokenizer = tokenizer_of("gpt-oss")
    ids = encode_chat(tokenizer, conversation(messages, *tools))
    text: str = tokenizer._backend.decode(ids, skip_special_tokens=False)
    return text[text.index("<|start|>user") :]


ASKED = "<|start|>user<|message|>Now?<|end|>"
CALLED = (
    '<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>{{"a": "ö"}}<|call|>'
)
GIVEN = '<|start|>functions.{} to=assistant<|channel|>commentary<|message|>"{}"<|end|>'
HM = "<|start|>assistant<|channel|>analysis<|message|>{}<|end|>"
OPEN = "<|start|>assistant"


@pytest.mark.parametrize(
    "messages",
    [
        [USER, ANSWER, USER],
        [USER, calling(call("now", "1")), result("1")],
        [USER, calling(call("now", "1"), content="Let me see."), result("1")],
        [USER, calling(call("now", "1"), reasoning_content="Hm."), result("1")],
        [USER, calling(call("now", "1"), reasoning_content="Hm."), result("1"), ANSWER, USER],
    ],
)
def test_what_the_template_takes_is_as_with_transformers(messages: list[dict[str, Any]]) -> None:
    given = conversation(messages, TOOL)
    expected = reference_of("gpt-oss").apply_chat_template(
        given.messages, [TOOL], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert encode_chat(tokenizer_of("gpt-oss"), given) == expected


def test_reasoning_is_written_before_a_call_until_there_is_an_answer() -> None:
    asked = [USER, calling(call("now", "1"), reasoning_content="Hm."), result("1")]
    called = CALLED.format("now") + GIVEN.format("now", "12:00")
    assert prompt(asked) == ASKED + HM.format("Hm.") + called + OPEN
    answered = "<|start|>assistant<|channel|>final<|message|>Noon.<|end|>"
    assert prompt([*asked, ANSWER, USER]) == ASKED + called + answered + ASKED + OPEN


def test_content_beside_reasoning_and_a_call_ends_the_reasoning() -> None:
    messages = [USER, calling(call("now", "1"), reasoning_content="Hm.", content="So.")]
    assert prompt(messages) == ASKED + HM.format("Hm.\nSo.") + CALLED.format("now") + OPEN


def test_each_of_several_calls_is_followed_by_its_results() -> None:
    message = calling(call("now", "1"), call("later", "2"), reasoning_content="Hm.")
    expected = (
        ASKED
        + HM.format("Hm.")
        + CALLED.format("now")
        + GIVEN.format("now", "a")
        + CALLED.format("later")
        + GIVEN.format("later", "b")
        + OPEN
    )
    assert prompt([USER, message, result("1", "a"), result("2", "b")]) == expected
    assert prompt([USER, message, result("2", "b"), result("1", "a")]) == expected
    bare = [{"role": "tool", "content": content} for content in ("a", "b")]
    assert prompt([USER, message, *bare]) == expected


def test_results_of_no_call_are_kept() -> None:
    message = calling(call("now", "1"), call("later", "2"))
    found = prompt([USER, message, result("3", "c"), result("1", "a")])
    assert found.endswith(CALLED.format("later") + GIVEN.format("later", "c") + OPEN)
    assert GIVEN.format("now", "a") in found


def test_an_answer_of_reasoning_alone_has_an_empty_content() -> None:
    found = prompt([USER, {"role": "assistant", "reasoning_content": "Hm."}, USER])
    assert "<|channel|>final<|message|><|end|>" in found


def test_a_tool_needs_no_description() -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    text = tokenizer_of("gpt-oss")._backend.decode(
        encode_chat(tokenizer_of("gpt-oss"), conversation([USER], bare, TOOL))
    )
    assert "// \ntype now\n// The time." in text


def test_the_last_message_is_continued_as_it_is() -> None:
    tokenizer = tokenizer_of("gpt-oss")
    given = Conversation([USER, {"role": "assistant", "content": "No"}], None, {}, False)
    ids = encode_chat(tokenizer, given, continue_final_message=True)
    text = tokenizer._backend.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>No")
    both = [*given.messages[:1], calling(call("now", "1"), thinking="Hm.", content="So.")]
    with pytest.raises(RequestError, match="Cannot pass both content and thinking"):
        encode_chat(tokenizer, Conversation(both, None, {}, False), continue_final_message=True)


def test_a_conversation_is_not_changed_in_place() -> None:
    message = calling(call("now", "1"), call("now", "2"), reasoning_content="Hm.", content="So.")
    given = conversation([USER, message, result("1")], TOOL)
    before = json.dumps([given.messages, given.tools])
    assert fitted(given) != given
    assert json.dumps([given.messages, given.tools]) == before
    assert fitted(fitted(given)) == fitted(given)


def test_only_templates_of_this_format_get_it() -> None:
    assert is_written_by(tokenizer_of("gpt-oss").chat_template or "")
    assert not is_written_by(tokenizer_of("qwen3").chat_template or "")
