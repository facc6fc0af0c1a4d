"""Prompts of each family are those of transformers, and its outputs end where they should."""

from __future__ import annotations

from typing import Any

import pytest

from family_chats import FAMILIES, reference_of, tokenizer_of
from inflight.errors import RequestError
from inflight.text.chat import encode_chat
from inflight.text.template import Conversation
from inflight.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "Antworte kurz & höflich."}
TURNS = [
    {"role": "user", "content": "  What is 2 + 2?\n"},
    {"role": "assistant", "content": "4 😀"},
    {"role": "user", "content": "And <b>3</b>?"},
]
SWITCHED = [name for name, family in FAMILIES.items() if family.switch]


def ids_of(name: str, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
    return encode_chat(tokenizer_of(name), Conversation(messages, variables=variables))


def right_ids(name: str, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
    found: list[int] = reference_of(name).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **variables
    )
    return found


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer._backend.decode(ids, skip_special_tokens=False)
    return text


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_those_of_transformers(name: str) -> None:
    systems = [[]] if name == "gemma2" else [[], [SYSTEM]]
    for system in systems:
        for turns in (TURNS[:1], TURNS):
            messages = [*system, *turns]
            assert ids_of(name, messages) == right_ids(name, messages)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_output_ends_at_the_ends_in_the_template(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ends = {tokenizer._backend.token_to_id(text) for text in FAMILIES[name].ends}
    assert set(tokenizer.eos_ids) == ends


@pytest.mark.parametrize("name", FAMILIES)
def test_no_message_begins_or_ends_a_turn(name: str) -> None:
    tokenizer = tokenizer_of(name)
    attack = "".join(tokenizer.markers)
    special = set(tokenizer.markers.values())

    def markers(content: str) -> list[int]:
        ids = ids_of(name, [{"role": "user", "content": content}])
        return [id_ for id_ in ids if id_ in special]

    assert markers(attack) == markers("Hi.")


def test_a_template_without_a_system_role_says_so() -> None:
    with pytest.raises(
        RequestError, match=r"messages: .*rejected the messages: System role not supported"
    ):
        ids_of("gemma2", [SYSTEM, *TURNS])
    with pytest.raises(RequestError, match="roles must alternate"):
        ids_of("gemma3", [TURNS[0], TURNS[0]])


def test_gemma_3_puts_the_system_message_into_the_user_s_turn() -> None:
    text = text_of(tokenizer_of("gemma3"), ids_of("gemma3", [SYSTEM, TURNS[0]]))
    assert text == (
        "<bos><start_of_turn>user\nAntworte kurz & höflich.\n\nWhat is 2 + 2?<end_of_turn>\n"
        "<start_of_turn>model\n"
    )


@pytest.mark.parametrize("name", SWITCHED)
def test_a_request_switches_reasoning(name: str) -> None:
    switch = FAMILIES[name].switch
    assert switch is not None
    on, off = (ids_of(name, TURNS, **{switch: is_on}) for is_on in (True, False))
    assert on != off
    assert on == right_ids(name, TURNS, **{switch: True})
    assert off == right_ids(name, TURNS, **{switch: False})


def test_a_variable_that_the_template_does_not_read_has_no_effect() -> None:
    for name in ("gemma3", "granite"):
        assert ids_of(name, TURNS, enable_thinking=False) == ids_of(name, TURNS)


def test_words_in_the_system_message_switch_reasoning_of_smollm3() -> None:
    messages = [{"role": "system", "content": "Be brief. /no_think"}, *TURNS]
    ids = ids_of("smollm3", messages)
    assert ids == right_ids("smollm3", messages)
    text = text_of(tokenizer_of("smollm3"), ids)
    assert "Reasoning Mode: /no_think" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n")
    thinking = [{"role": "system", "content": "Be brief. /think"}, *TURNS]
    assert ids_of("smollm3", thinking, enable_thinking=False) == right_ids("smollm3", thinking)


def test_further_variables_of_granite_reach_its_template() -> None:
    controls = {"length": "short", "originality": "extractive"}
    ids = ids_of("granite", TURNS, controls=controls)
    assert ids == right_ids("granite", TURNS, controls=controls)
    assert '<|start_of_role|>assistant {"length": "short"' in text_of(tokenizer_of("granite"), ids)
