"""Outputs of gpt-oss: every message is found, no text is lost, and no marker is shown."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.door.gateway.parsers import CallArguments, CallBegun, Reasoning, Text
from inflight.door.gateway.parsers.formats.harmony import FORMAT, MAX_HEADER
from model_outputs import Output, harmony, joined, output, parse, parser, pieces

ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes."
CALL = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'
NOW = ("now", '{"a": 1}')
LONG = "x" * MAX_HEADER

# Output -> what it consists of.
TABLE: dict[str, Output] = {
    # Well-formed.
    "": Output(""),
    "<|channel|>final<|message|>Yes.<|return|>": Output("Yes."),
    "<|channel|>final <|constrain|>json<|message|>{}": Output("{}"),
    f"{ANALYSIS}{FINAL}<|return|>": Output("Yes.", (), "Hm."),
    f"{ANALYSIS}<|start|>assistant{CALL}": Output("", (NOW,), "Hm."),
    f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{CALL}": Output(
        "Let me see.", (NOW,)
    ),
    f"{ANALYSIS}<|start|>assistant{ANALYSIS}{FINAL}": Output("Yes.", (), "Hm.\nHm."),
    f"<|channel|>commentary<|message|>One.\n<|end|>{FINAL}": Output("One.\n\nYes."),
    # Recipients.
    ' to=functions.now<|channel|>commentary <|constrain|>json<|message|>{"a": 1}': Output(
        "", (NOW,)
    ),
    'to=functions.now<|channel|>commentary json<|message|>{"a": 1}': Output("", (NOW,)),
    '<|start|>assistant to=functions.now<|channel|>commentary<|message|>{"a": 1}': Output(
        "", (NOW,)
    ),
    CALL.replace("commentary", "analysis"): Output("", (NOW,)),
    CALL.replace("functions.", ""): Output("", (NOW,)),
    CALL.replace("now", "later"): Output("", (("later", '{"a": 1}'),)),
    CALL.replace("functions.now", "python"): Output('{"a": 1}'),
    CALL.replace("functions.now", "functions."): Output('{"a": 1}'),
    "<|channel|>analysis to=python code<|message|>1 + 1<|call|>": Output("", (), "1 + 1"),
    # Several calls, which models write without <|call|> in between.
    f"{CALL}<|start|>assistant{CALL}": Output("", (NOW, NOW)),
    CALL.replace("<|call|>", "<|end|>") + CALL: Output("", (NOW, NOW)),
    # Arguments.
    CALL.replace('{"a": 1}', ""): Output("", (("now", "{}"),)),
    CALL.replace('{"a": 1}', " \n"): Output("", (("now", "{}"),)),
    CALL.replace("<|call|>", "}} \n<|call|>"): Output("", (NOW,)),
    CALL.replace("<|call|>", "} x<|call|>"): Output("", (("now", '{"a": 1}} x'),)),
    CALL.replace("1}", '"b\n"}'): Output("", (("now", '{"a": "b\\n"}'),)),
    CALL.replace("1}", "x}"): Output("", (("now", '{"a": x}'),)),
    CALL.replace("1}", "<|end|>Hi."): Output("Hi.", (("now", '{"a": '),)),
    CALL.replace("1}", "<|message|>Hi."): Output("Hi.", (("now", '{"a": '),)),
    # Cut.
    "<|channel|>analysis<|message|>Hm": Output("", (), "Hm"),
    "<|channel|>ana": Output(""),
    f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=func": Output("", (), "Hm."),
    f"{ANALYSIS}<|start|>assistant<|channel|>final<|mess": Output("", (), "Hm."),
    # Without a header.
    "Yes.": Output("Yes."),
    " to be <|end|>": Output(" to be "),
    " to=be or <|end|>not": Output(" to=be or not"),
    f"{ANALYSIS}Yes.": Output("Yes.", (), "Hm."),
    # Malformed headers.
    "<|channel|>Hi there.<|end|>": Output("Hi there."),
    f"<|channel|>{LONG} there.": Output(f"{LONG} there."),
    "<|channel|>thoughts<|message|>Yes.": Output("Yes."),
    "<|channel|><|message|>Yes.": Output("Yes."),
    "<|message|>Yes.": Output("Yes."),
    "<|start|>assistant<|message|>Yes.": Output("Yes."),
    "<|start|>assistant<|start|>assistant<|channel|>final<|message|>Yes.": Output("Yes."),
    "<|channel|>commentary<|channel|>analysis<|message|>Hm.": Output("", (), "Hm."),
    "<|channel|>analysis<|end|>": Output(""),
    "<|start|>user<|message|>Why?<|end|>": Output("Why?"),
    # Markers inside of a text.
    "<|channel|>analysis<|message|>a<|message|>b<|constrain|>c": Output("", (), "abc"),
    "<|channel|>analysis<|message|>a<|channel|>b c<|end|>d": Output("d", (), "ab c"),
    f"<|channel|>analysis<|message|>Hm.{FINAL}": Output("Yes.", (), "Hm."),
    "<|channel|>final<|message|>a < b <| c <|end": Output("a < b <| c <|end"),
    "<|channel|>final<|message|><|chan<|message|>nel|>": Output(""),
}


def show(found: Output) -> list[str]:
    return [found.text, found.reasoning, *(part for call in found.calls for part in call)]


@pytest.mark.parametrize("text", TABLE)
def test_an_output_consists_of_its_messages(text: str) -> None:
    assert parse("harmony", text, reasoning="harmony") == TABLE[text]


@pytest.mark.parametrize("text", TABLE)
def test_pieces_do_not_depend_on_where_an_output_is_split(text: str) -> None:
    whole = joined(pieces(parser("harmony", "harmony"), [text]))
    for i in range(len(text)):
        assert joined(pieces(parser("harmony", "harmony"), [text[:i], text[i:]])) == whole
    assert joined(pieces(parser("harmony", "harmony"), text)) == whole


@pytest.mark.parametrize("text", TABLE)
def test_without_tools_the_text_of_a_call_is_that_of_its_channel(text: str) -> None:
    found = parse(None, text, reasoning="harmony")
    assert found.calls == ()
    expected = TABLE[text]
    if not expected.calls:
        assert found == expected
    if text == f"{ANALYSIS}<|start|>assistant{CALL}":
        assert found == Output('{"a": 1}', (), "Hm.")


def test_a_name_comes_before_its_arguments_and_these_as_they_arrive() -> None:
    found = parser("harmony", "harmony")
    header, text = CALL.split("{")
    assert found.feed(header) == [CallBegun(0, "now")]
    assert found.feed("{" + text[:2]) == [CallArguments(0, '{"a')]
    assert found.feed(text[2:]) == [CallArguments(0, '": 1}')]
    assert found.finish() == []


def test_texts_arrive_with_their_parts() -> None:
    found = parser("harmony", "harmony")
    assert found.feed("<|channel|>analysis<|message|>Hm") == [Reasoning("Hm")]
    assert found.feed(", a <") == [Reasoning(", a ")]
    assert found.feed("|b") == [Reasoning("<|b")]
    assert found.feed(f"<|end|>{FINAL}") == [Text("Yes.")]


def test_a_header_is_held_back_up_to_its_limit() -> None:
    found = parser("harmony", "harmony")
    assert found.feed("<|channel|>" + "x" * (MAX_HEADER - 12)) == []
    assert output(found.feed("xyz")).text.endswith("xyz")


MESSAGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["analysis", "commentary", "final"]), st.text("ab <|>\né")),
        st.tuples(
            st.sampled_from(["now", "get_weather", "x.y-z"]),
            st.dictionaries(st.text("ab"), st.none() | st.text() | st.floats(0, 9), max_size=3),
        ),
    ),
    max_size=5,
)


@st.composite
def written(draw: st.DrawFn, name: str, text: Any) -> str:
    """A message, in one of the forms that models write."""
    if isinstance(text, str):
        return f"<|channel|>{name}<|message|>{text}<|end|>"
    to = f" to=functions.{name}"
    kind = draw(st.sampled_from(["", " json", " <|constrain|>json", "<|constrain|>json"]))
    role, channel = draw(st.sampled_from([(to, ""), ("", to)]))
    end = draw(st.sampled_from(["<|call|>", "<|end|>", ""]))
    return f"{role}<|channel|>commentary{channel}{kind}<|message|>{json.dumps(text)}{end}"


@settings(max_examples=300, deadline=None)
@given(data=st.data(), messages=MESSAGES, cuts=st.lists(st.integers(0, 400), max_size=8))
def test_any_messages_are_found_however_they_are_written(
    data: st.DataObject, messages: list[tuple[str, Any]], cuts: list[int]
) -> None:
    text = "<|start|>assistant".join(data.draw(written(*one)) for one in messages)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = output(pieces(parser("harmony", "harmony"), [text[a:b] for a, b in pairwise(bounds)]))
    texts = [(name, one) for name, one in messages if isinstance(one, str) and one]
    assert found.reasoning == "\n".join(one for name, one in texts if name == "analysis")
    assert found.text == "\n".join(one for name, one in texts if name != "analysis")
    calls = [one for one in messages if isinstance(one[1], dict)]
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls


FRAGMENTS = st.sampled_from(
    [
        *(
            *FORMAT.markers,
            *(one[:5] for one in FORMAT.markers),
            *(one[5:] for one in FORMAT.markers),
        ),
        *("analysis", "commentary", "final", "assistant", "user", "json", " ", "\n", "<", "|", ">"),
        *(
            "to=",
            " to=functions.now",
            "functions.",
            "now",
            "{",
            '{"a": 1}',
            '"',
            "}",
            "1",
            "Hi. é😀",
        ),
        *(ANALYSIS, FINAL, CALL, LONG),
    ]
)


@settings(max_examples=800, deadline=None)
@given(
    has_tools=st.booleans(),
    parts=st.lists(st.lists(FRAGMENTS, max_size=6).map("".join), max_size=6),
)
def test_any_text_splits_anywhere_and_shows_no_marker(has_tools: bool, parts: list[str]) -> None:
    name = "harmony" if has_tools else None
    text = "".join(parts)
    whole = pieces(parser(name, "harmony"), [text])
    output(whole)
    assert joined(pieces(parser(name, "harmony"), parts)) == joined(whole)
    assert joined(pieces(parser(name, "harmony"), text)) == joined(whole)
    shown = [one.name if isinstance(one, CallBegun) else one.text for one in joined(whole)]
    assert not any(marker in one for one in shown for marker in FORMAT.markers)


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.sampled_from([*FORMAT.markers, "Alpha ", "Beta ", " Gamma"]), max_size=12))
def test_no_text_is_lost_outside_of_headers(words: list[str]) -> None:
    """None of these words belongs to a header, except to one that has a <|message|>."""
    found = parse("harmony", "".join(words), reasoning="harmony")
    kept = [word for word in words if word not in FORMAT.markers]
    shown = "".join(show(found)).replace("\n", "")
    if "<|message|>" not in words:
        assert shown == "".join(kept)
    assert not found.calls


def test_calls_are_written_as_one_message_each() -> None:
    assert parse("harmony", harmony([("now", {"a": 1}), ("now", {"a": 1})])) == Output(
        "", (NOW, NOW)
    )
