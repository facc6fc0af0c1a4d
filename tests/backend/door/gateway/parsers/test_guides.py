"""Whatever a guide allows is parsed into calls that satisfy the tools' schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

import json_schemas
from grammar_walk import Walker
from grammars import compile_here
from inflight.core.output_constraint import StructuredOutput
from inflight.door.gateway.parsers import FORMATS, Guide, guide_for, parser_for, schemas_of
from inflight.errors import ConfigError, RequestError
from inflight.structured.grammar import Grammar
from inflight.structured.matcher import Matcher
from inflight.structured.sandbox import Sandbox
from inflight.structured.vocabulary import Vocabulary
from model_outputs import Output, output, pieces
from thinned import thinned

WEATHER = {
    "type": "object",
    "description": 'root ::= "x"',
    "properties": {
        "city": {"type": "string", "description": "of the city"},
        "description": {"enum": ["<tool_call>", "</think>", "[TOOL_CALLS]", "a::=b"]},
        "days": {"$ref": "#/$defs/count"},
    },
    "required": ["city", "description"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 16}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
NAMES: list[str | None] = [None, *FORMATS]
EACH_NAME = [pytest.param(name, id=str(name)) for name in NAMES]
MARKED = ("hermes", "deepseek_v3", "deepseek_v31")

_LONGER = [b'"}', b'": ', b'": "', b"</think>", b"<think>", b"<tool_call>", b"null", b"<end>"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Each byte, and some longer tokens, as models have them for markers."""
    tokens = [bytes([byte]) for byte in range(256)] + _LONGER
    end = len(tokens) - 1
    return Vocabulary(tokens, [end], [end])


def compiled(vocabulary: Vocabulary, guide: Guide | None) -> Grammar:
    assert guide is not None
    StructuredOutput(guide.guide_type, guide.guide).check()
    return compile_here(vocabulary, guide.guide_type, guide.guide)


def walks(vocabulary: Vocabulary, guide: Guide | None, seeds: range) -> Iterator[str]:
    """Texts that a guide allows, each complete."""
    grammar = compiled(vocabulary, guide)
    walker = Walker(vocabulary)
    num_complete = 0
    for seed in seeds:
        rng = random.Random(seed)
        taken, is_complete = walker.walk(Matcher(grammar, vocabulary), rng, free_steps=30)
        if is_complete:
            num_complete += 1
            yield walker.text(taken).decode()
    assert num_complete >= len(seeds) // 2


def allows(vocabulary: Vocabulary, guide: Guide | None, text: str) -> bool:
    """Whether a text may be an output."""
    state = compiled(vocabulary, guide).start()
    data = list(text.encode())
    return state.try_consume_tokens(data) == len(data) and state.is_accepting()


def parse(guide: Guide | None, tools: list[dict[str, Any]], text: str, **options: Any) -> Output:
    assert guide is not None
    reasoning = options.get("reasoning_format")
    found = parser_for(
        guide.tool_format, reasoning, schemas_of(tools), options.get("in_reasoning", False)
    )
    return output(pieces(found, text))


def check(found: Output, tools: list[dict[str, Any]]) -> None:
    """Each call is one of a tool, with arguments of its schema."""
    schemas = schemas_of(tools)
    for name, arguments in found.calls:
        jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("num_texts", [12, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", NAMES)
def test_required_yields_valid_calls_and_nothing_else(
    vocabulary: Vocabulary, name: str | None, num_texts: int
) -> None:
    guide = guide_for(name, TOOLS, "required")
    counts = set()
    for text in walks(vocabulary, guide, range(num_texts)):
        found = parse(guide, TOOLS, text)
        assert found.calls and not found.text
        check(found, TOOLS)
        counts.add(len(found.calls))
    assert max(counts) > 1


@pytest.mark.parametrize(
    ("choice", "name"),
    thinned(["required", pytest.param(NAMED, id="named")], EACH_NAME, one_in=2),
)
def test_without_parallel_calls_there_is_exactly_one(
    vocabulary: Vocabulary, name: str | None, choice: Any
) -> None:
    guide = guide_for(name, TOOLS, choice, parallel=False)
    for text in walks(vocabulary, guide, range(20)):
        found = parse(guide, TOOLS, text)
        assert len(found.calls) == 1 and not found.text
        check(found, TOOLS)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_function_is_called_once(vocabulary: Vocabulary, name: str | None) -> None:
    guide = guide_for(name, TOOLS, NAMED)
    for text in walks(vocabulary, guide, range(20)):
        found = parse(guide, TOOLS, text)
        assert [call for call, _ in found.calls] == ["get_weather"] and not found.text


@pytest.mark.parametrize(
    ("in_reasoning", "name"),
    thinned(
        [pytest.param(False, id="before"), pytest.param(True, id="inside")], EACH_NAME, one_in=2
    ),
)
def test_reasoning_may_precede_the_calls(
    vocabulary: Vocabulary, name: str | None, in_reasoning: bool
) -> None:
    options = {"reasoning_format": "think", "in_reasoning": in_reasoning}
    guide = guide_for(name, TOOLS, "required", **options)
    calls = guide_for(name, TOOLS, "required")
    for text in walks(vocabulary, calls, range(5)):
        thoughts = text.replace("</think>", "") + " Hm."
        thought = f"{'' if in_reasoning else '<think>'}\n{thoughts}\n</think>\n\n{text}"
        assert allows(vocabulary, guide, thought)
        found = parse(guide, TOOLS, thought, **options)
        assert found.reasoning == thoughts
        assert found.calls == parse(calls, TOOLS, text).calls and not found.text
        assert allows(vocabulary, guide, text) != in_reasoning
        assert not allows(vocabulary, guide, f"Hm. {text}")
    assert not allows(vocabulary, guide, f"{'' if in_reasoning else '<think>'}Hm.</think>")


@pytest.mark.parametrize("name", MARKED)
def test_strict_tools_bind_calls_in_free_text(vocabulary: Vocabulary, name: str) -> None:
    guide = guide_for(name, TOOLS, "auto")
    calls = guide_for(name, TOOLS, "required")
    num_calls = 0
    for text in walks(vocabulary, guide, range(20)):
        check(parse(guide, TOOLS, text), TOOLS)
    for text in walks(vocabulary, calls, range(10)):
        free = f"Let me see: <tool\n\n{text}"
        assert allows(vocabulary, guide, free)
        found = parse(guide, TOOLS, free)
        assert found == Output("Let me see: <tool", parse(calls, TOOLS, text).calls)
        num_calls += len(found.calls)
        assert not allows(vocabulary, guide, free.replace('"city"', '"town"').replace("{}", "{ }"))
    assert num_calls
    assert allows(vocabulary, guide, "Only text: {} [1].")


@pytest.mark.parametrize("name", MARKED)
def test_one_call_at_most_in_free_text_without_parallel_calls(
    vocabulary: Vocabulary, name: str
) -> None:
    guide = guide_for(name, TOOLS, "auto", parallel=False)
    one = guide_for(name, TOOLS, "required", parallel=False)
    text = next(walks(vocabulary, one, range(5)))
    assert allows(vocabulary, guide, f"Hm. {text}")
    assert allows(vocabulary, guide, "Hm.")
    assert not allows(vocabulary, guide, f"Hm. {text}{text}")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_enforced_where_nothing_has_to_be(name: str | None) -> None:
    lenient = TOOLS[:1]
    assert guide_for(name, lenient, "auto") is None
    assert guide_for(name, lenient, "none") is None
    assert guide_for(name, TOOLS, "none") is None
    assert guide_for(name, [], "auto") is None
    assert (guide_for(name, TOOLS, "auto") is None) == (name not in MARKED)


@pytest.mark.parametrize("seed", range(12))
def test_schemas_of_many_kinds(vocabulary: Vocabulary, seed: int) -> None:
    schema = json_schemas.schema(seed)
    if schema.get("type") != "object":
        schema = {
            "type": "object",
            "properties": {"value": schema},
            "$defs": schema.get("$defs", {}),
        }
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    for name in ("hermes", "llama3_json", "json"):
        guide = guide_for(name, tools, "required", parallel=False)
        for text in walks(vocabulary, guide, range(4)):
            found = parse(guide, tools, text)
            assert len(found.calls) == 1
            check(found, tools)


def test_keywords_that_are_not_supported_only_count_for_strict_tools(
    vocabulary: Vocabulary,
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for is_strict in (False, True):
        tool = {"name": "f", "strict": is_strict, "parameters": schema}
        guide = guide_for("hermes", [{"type": "function", "function": tool}], "required")
        assert guide is not None
        if is_strict:
            with pytest.raises(Exception, match="uniqueItems"):
                compiled(vocabulary, guide)
        else:
            compiled(vocabulary, guide)


def test_the_sandbox_takes_the_guides(vocabulary: Vocabulary) -> None:
    sandbox = Sandbox(vocabulary)
    sandbox.start()
    try:
        for name in NAMES:
            for choice in ("auto", "required"):
                guide = guide_for(name, TOOLS, choice)
                if guide is not None:
                    verdict = sandbox.examine(StructuredOutput(guide.guide_type, guide.guide))
                    assert verdict.source is not None, verdict.refusal
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (TOOLS, "any", "^tool_choice: 'any' is unknown; allowed: none, auto, required, or"),
        (TOOLS, {"type": "tool"}, "^tool_choice: not a function; allowed: none, auto"),
        ([], "required", "^tool_choice: required needs at least one tool"),
        (
            TOOLS,
            {"type": "function", "function": {"name": "nov"}},
            "^tool_choice.function.name: 'nov' is not in tools; did you mean 'now'",
        ),
        ([*TOOLS, TOOLS[0]], "auto", r"^tools\[2\].function.name: 'get_weather' is the name of"),
    ],
)
def test_errors_name_the_field(tools: list[Any], choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        guide_for("hermes", tools, choice)


def test_only_schemas_that_are_enforced_are_checked() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "http://b/c"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert guide_for("hermes", tools, NAMED) is not None
    assert guide_for("hermes", [tools[2]], "auto") is None
    with pytest.raises(RequestError, match=r"^tools\[2\].function.parameters: /properties/a/\$ref"):
        guide_for("hermes", tools, "required")


def test_schemas_that_are_too_long_are_refused() -> None:
    enum = {"enum": ["x" * 1000 + str(i) for i in range(70)]}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": enum}}}
    with pytest.raises(RequestError, match=r"^tools: their schemas have more than 65536 bytes"):
        guide_for("hermes", [{"type": "function", "function": tool}], "required")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="'herms' is unknown"):
        guide_for("herms", TOOLS, "required")
