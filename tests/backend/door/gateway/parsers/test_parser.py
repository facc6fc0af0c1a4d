"""What holds for the parsers of all formats."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model_outputs
from inflight.door.gateway.parsers import FORMATS, Text, parser_for, plain
from inflight.door.gateway.parsers.reader import Reader
from inflight.errors import ConfigError
from model_outputs import SCHEMAS, WRITERS, joined, output, parse, parser, pieces
from thinned import thinned

CALLS: list[tuple[str, Any]] = [
    ("get_weather", {"city": 'A "city"\\\n</tool_call> [é] 😀', "days": -3}),
    ("now", {}),
    ("get_weather", {"where": {"a": [1, 2.5e-3, None, True, {}], "": []}, "city": ""}),
]
BROKEN = {
    "harmony": model_outputs.harmony([("now", {})]).replace("{}", '{"a": tru}') + "end",
    "hermes": '<tool_call>\n{"name": "now", "arguments": {"a": tru}}\n</tool_call> end',
    "llama3_json": '{"name": "now", "parameters": {"a": ]}}',
    "json": '[{"name": "now", "arguments": {"a" 1}}]',
    "mistral": "[TOOL_CALLS]now[ARGS]{'a': 1}[TOOL_CALLS]now[ARGS]{} end",
    "deepseek_v3": model_outputs.deepseek_v3([("now", {})]).replace("{}", "{,}"),
    "deepseek_v31": model_outputs.deepseek_v31([("now", {})]).replace("{}", "{,}"),
    "pythonic": "[now(a=1, b=x.y)] end",
    "qwen3_coder": "<function=now>\n<parameter=a>\n1\n</parameter>\noops</tool_call> end",
}
TEXTS = {
    "harmony": " to=now or <| a <|chan",
    "hermes": "a <tool_call> b <tool_call>\n{} c <tool_cal",
    "llama3_json": ' {"answer": {"name": "now"}} <|python_ta',
    "json": '[{"name": "someone", "arguments": {}}]',
    "mistral": '[{"name": "someone"}] nowhere [TOOL_CALLS] {"x": 1} [TOOL_CALL',
    "deepseek_v3": "a <｜tool▁calls▁begin｜> b <｜tool▁call▁begin｜>c<｜tool▁sep",  # noqa: RUF001
    "deepseek_v31": "a <｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>",  # noqa: RUF001
    "pythonic": "[1, 2], [now(1)], [someone(a=1)]",
    "qwen3_coder": "a <tool_call> b <function=now> c <function= d> <function=now",
}


def sample(name: str) -> list[str]:
    calls = WRITERS[name](CALLS)
    return [calls, f"{calls} bye", f"Hello.\n\n{calls}", BROKEN[name], TEXTS[name], calls[:-9]]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_parsed(name: str) -> None:
    found = parse(name, WRITERS[name](CALLS))
    assert found.text == ""
    assert [(call, json.loads(arguments)) for call, arguments in found.calls] == CALLS


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_stays_as_it_is(name: str) -> None:
    assert parse(name, TEXTS[name]) == model_outputs.Output(TEXTS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_that_are_no_json_reach_the_client_and_not_its_text(name: str) -> None:
    found = parse(name, BROKEN[name])
    assert found.calls[0][0] == "now"
    assert found.text in ("", "end")
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(found.calls[0][1])


@pytest.mark.parametrize(
    ("reasoning", "name"),
    thinned([pytest.param(None, id="None"), "think"], FORMATS, one_in=2),
)
def test_pieces_do_not_depend_on_where_an_output_is_split(name: str, reasoning: str | None) -> None:
    for text in sample(name):
        if reasoning:
            text = f"<think>\nHm <tool_call>\n\n</think>\n\n{text}"
        whole = joined(pieces(parser(name, reasoning), [text]))
        output(whole)
        for i in range(len(text)):
            assert joined(pieces(parser(name, reasoning), [text[:i], text[i:]])) == whole
        assert joined(pieces(parser(name, reasoning), text)) == whole


FRAGMENTS = st.sampled_from(
    [
        *(part for name in FORMATS for part in (BROKEN[name], TEXTS[name])),
        *"<>[]{}()\"'\\:,;=` \n\ta1.-",
        *("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>"),
        *("</function>", "</function>\n</tool_call>", "<think>", "</think>", "[TOOL_CALLS]"),
        *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "analysis", " to=functions."),
        *("[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),  # noqa: RUF001
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```", "json"),  # noqa: RUF001
        *('{"name": "now", ', '"arguments": ', '"parameters": {', '"now"', "now", "now(", "true"),
        *("\\ud800", "\\u0041", "\\x4", "None", "1e5", "days", "get_weather", "é", "😀"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(list(FORMATS)),
    reasoning=st.sampled_from([None, "think"]),
    in_reasoning=st.booleans(),
    parts=st.lists(st.lists(FRAGMENTS, max_size=6).map("".join), max_size=6),
)
def test_any_text_splits_anywhere(
    name: str, reasoning: str | None, in_reasoning: bool, parts: list[str]
) -> None:
    text = "".join(parts)
    whole = pieces(parser(name, reasoning, in_reasoning), [text])
    found = output(whole)
    assert joined(pieces(parser(name, reasoning, in_reasoning), parts)) == joined(whole)
    assert joined(pieces(parser(name, reasoning, in_reasoning), text)) == joined(whole)
    if not found.calls and reasoning is None and not FORMATS[name].is_whole:
        assert found.text == text


KEYS = st.text("abcdefgh_", min_size=1, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, width=32)
    .filter(lambda value: abs(value) < 1e30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([name for name in FORMATS if name != "qwen3_coder"]),
    calls=st.lists(
        st.tuples(st.sampled_from(list(SCHEMAS)), st.dictionaries(KEYS, VALUES, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_arguments_of_any_value_are_parsed(
    name: str, calls: list[tuple[str, Any]], cuts: list[int]
) -> None:
    text = WRITERS[name](calls)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    found = output(pieces(parser(name), parts))
    assert found.text == ""
    assert [(call, json.loads(arguments)) for call, arguments in found.calls] == calls


VALUE = "x" * 64


@pytest.mark.parametrize("name", FORMATS)
def test_the_name_comes_whole_and_arguments_as_they_arrive(name: str) -> None:
    text = WRITERS[name]([("get_weather", {"city": VALUE})])
    end = text.index(VALUE) + len(VALUE)
    found = output(parser(name).feed(text[:end]))
    assert found.calls == (("get_weather", f'{{"city": "{VALUE}'),)


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_held_back_only_where_a_call_may_begin(name: str) -> None:
    """A letter is passed on with the part that it came with, at the start of an output, too,
    unless a function's name starts with it, which the format takes for a call."""
    found = parser(name)
    for part in ("The", " answer", " is 5 <", " 6 [", "x]"):
        given = "".join(piece.text for piece in found.feed(part) if isinstance(piece, Text))
        assert given.endswith(part[-1]) or part[-1] in "<["


def work(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls of functions, and characters copied, to parse a text character by character."""
    total = 0
    append = Reader.append

    def counting(self: Reader, part: str) -> None:
        nonlocal total
        append(self, part)
        total += len(self.text)

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal total
        total += 1

    found = parser_for(name, "think", SCHEMAS)
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "append", counting)
        previous = sys.getprofile()
        sys.setprofile(profile)
        try:
            for char in text:
                found.feed(char)
            found.finish()
        finally:
            sys.setprofile(previous)
    return total


def long_outputs(name: str, size: int) -> dict[str, str]:
    text = "ab {<[" * (size // 6)
    write = WRITERS[name]
    value = write([("get_weather", {"city": text})])
    return {
        "text": text,
        "white space": " " * size,
        "reasoning": f"<think>{text}",
        "a string": value,
        "an object": write([("get_weather", {"where": {"k": [text, 1] * 2, "n": [[]] * size}})]),
        "a broken call": BROKEN[name] + text,
        "a call without a name": f'<tool_call>{{"arguments": {{"a": "{text}"}}, ',
        "many calls": write([("now", {})] * (size // 40)),
    }


@pytest.mark.parametrize(("kind", "name"), thinned(long_outputs("hermes", 60), FORMATS, one_in=2))
def test_the_work_is_linear(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (long_outputs(name, size)[kind] for size in (1 << 10, 1 << 12))
    ratio = len(long) / len(short)
    assert work(long, name, monkeypatch) < 1.1 * ratio * work(short, name, monkeypatch)


@pytest.mark.parametrize(
    "name",
    [
        # Of headers, of JSON and of tags.
        pytest.param(
            name, marks=[pytest.mark.long] * (name not in ("harmony", "json", "qwen3_coder"))
        )
        for name in FORMATS
    ],
)
def test_64_kilobytes_of_arguments_character_by_character(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = WRITERS[name]([("get_weather", {"city": "ab {<[" * 10923})])
    assert len(text) > 1 << 16
    assert work(text, name, monkeypatch) < 150 * len(text)


def test_an_output_without_formats_is_text() -> None:
    assert pieces(plain(), ["a <tool_call>", "", "<think>"]) == [
        Text("a <tool_call>"),
        Text("<think>"),
    ]
    assert parse(None, "<think>a</think>").text == "<think>a</think>"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'herms' is unknown; allowed: .*; did you mean 'hermes'"
    ):
        parser_for("herms", None, [])
    with pytest.raises(ConfigError, match="'deepthink' is unknown; allowed: think"):
        parser_for(None, "deepthink", [])


def test_names_alone_suffice() -> None:
    found = pieces(parser_for("llama3_json", None, ["now"]), ['{"name": "now"}'])
    assert output(found).calls == (("now", "{}"),)
