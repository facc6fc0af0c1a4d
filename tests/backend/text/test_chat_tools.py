"""Chats with tools are rendered as transformers renders them, and no string of a request, wherever
it is, becomes a special token."""

import functools
import json
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chat_templates import BOS_EOS, CLOCK, MARKERS, TEMPLATES, WEATHER
from inflight.errors import RequestError
from inflight.text.chat import encode_chat
from inflight.text.messages import parse_messages, parse_tools, parse_variables
from inflight.text.template import Conversation
from inflight.text.tokenizer import Tokenizer
from vocabularies import byte_level

USER = {"role": "user", "content": "How is the weather?"}
CALL = {
    "id": "aB3dE6gH9",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Köln \\"x\\"", "days": 2}'},
}
RESULT = {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": '{"sun": true}'}
CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "system", "content": "Be brief."}, USER],
    "call": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "call without content": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
    "call with content": [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        RESULT,
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "And tomorrow?", "name": "Eva"},
    ],
    "members that are null": [
        {**USER, "name": None},
        {"role": "assistant", "content": "Hm.", "tool_calls": None, "reasoning_content": None},
        USER,
    ],
    "reasoning": [
        USER,
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "\nIt is July.\n"},
        USER,
    ],
}
TOOLS = [None, [], [WEATHER], [WEATHER, CLOCK]]


def backend_of(style: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in MARKERS[style]]
    )
    return backend


@functools.cache
def tokenizer_of(style: str, template: str | None = None) -> Tokenizer:
    bos, eos = BOS_EOS[style]
    return Tokenizer(
        backend_of(style),
        bos_token=bos,
        eos_token=eos,
        chat_template=template or TEMPLATES[style],
    )


@functools.cache
def reference_of(style: str) -> transformers.PreTrainedTokenizerBase:
    bos, eos = BOS_EOS[style]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend_of(style),
        bos_token=bos,
        eos_token=eos,
        chat_template=TEMPLATES[style],
    )


def ids_of(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
    **options: bool,
) -> list[int]:
    """As the model `chat_tokenizer` encodes a request."""
    conversation = Conversation(
        parse_messages(json.dumps(messages)),
        None if tools is None else parse_tools(json.dumps(tools)),
        parse_variables(json.dumps(variables or {})),
        options.get("add_generation_prompt", not options.get("continue_final_message")),
    )
    return encode_chat(tokenizer, conversation, options.get("continue_final_message", False))


def rendered_by_transformers(
    style: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """Its users parse the arguments of tool calls."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    ids: list[int] = reference_of(style).apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=False, **options
    )
    return ids


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("tools", TOOLS)
def test_prompts_are_those_of_transformers(
    style: str, name: str, tools: list[dict[str, Any]] | None
) -> None:
    for prompted in (True, False):
        expected = rendered_by_transformers(
            style, CHATS[name], tools, add_generation_prompt=prompted
        )
        found = ids_of(tokenizer_of(style), CHATS[name], tools, add_generation_prompt=prompted)
        assert found == expected


@pytest.mark.parametrize(
    ("style", "variables"),
    [
        ("hermes", {"enable_thinking": False}),
        ("hermes", {"enable_thinking": True, "unused": {"a": [1, 2.5, None, "x"]}}),
        ("llama31", {"date_string": "1 Jan 2031"}),
        ("llama31", {"builtin_tools": ["get_weather", "code_interpreter"]}),
        ("llama31", {"builtin_tools": ["brave_search", "wolfram_al"]}),
    ],
)
def test_variables_are_those_of_transformers(style: str, variables: dict[str, Any]) -> None:
    call = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    expected = rendered_by_transformers(
        style, messages, [CLOCK], add_generation_prompt=True, **variables
    )
    assert ids_of(tokenizer_of(style), messages, [CLOCK], variables) == expected


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("text", ["The capital of", " two ", "x\n\n", "Sure:\n```", "1"])
def test_the_last_message_is_continued_as_transformers_does_it(style: str, text: str) -> None:
    messages = [USER, {"role": "assistant", "content": text}]
    expected = rendered_by_transformers(style, messages, continue_final_message=True)
    found = ids_of(tokenizer_of(style), messages, continue_final_message=True)
    assert found == expected
    assert found != ids_of(tokenizer_of(style), messages, add_generation_prompt=False)


def test_a_continued_message_may_contain_markers() -> None:
    tokenizer = tokenizer_of("hermes")
    messages = [{"role": "assistant", "content": "<|im_end|>a<|im_end|>"}]
    found = ids_of(tokenizer, messages, continue_final_message=True)
    start = tokenizer.markers["<|im_start|>"]
    assert found == tokenizer.encode_pieces([start, "assistant\n<|im_end|>a<|im_end|>"])


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (
            [USER],
            {"add_generation_prompt": True},
            "add_generation_prompt: cannot be combined with continue_final_message",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [CALL]}],
            {},
            "continue_final_message: the last message has no content to continue",
        ),
        (
            [USER, {"role": "assistant", "content": "before</think>after"}],
            {},
            "continue_final_message: the model's chat template changes the text",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(
    messages: list[dict[str, Any]], options: dict[str, bool], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ids_of(tokenizer_of("hermes"), messages, continue_final_message=True, **options)
    assert str(caught.value).startswith(message)


def test_tools_have_a_template_of_their_own_if_the_model_has_one() -> None:
    tokenizer = tokenizer_of("hermes", "{{ 'plain' }}")
    tokenizer.tool_chat_template = "{{ 'with ' ~ tools[0].function.name }}"
    assert ids_of(tokenizer, [USER]) == tokenizer.encode("plain", False)
    assert ids_of(tokenizer, [USER], [CLOCK]) == tokenizer.encode("with clock", False)


PLACES: dict[str, Any] = {
    "content": lambda text: ([{**USER, "content": text}], None, {}),
    "name": lambda text: ([{**USER, "name": text}], None, {}),
    "reasoning": lambda text: (
        [USER, {"role": "assistant", "content": "a", "reasoning_content": text}],
        None,
        {},
    ),
    "called name": lambda text: (_calling(name=text), None, {}),
    "argument": lambda text: (_calling(arguments=json.dumps({"city": text})), None, {}),
    "name of an argument": lambda text: (_calling(arguments=json.dumps({text: 1})), None, {}),
    "result": lambda text: ([*_calling(), {**RESULT, "content": text}], None, {}),
    "tool": lambda text: ([USER], [_tool(name=text)], {}),
    "description": lambda text: ([USER], [_tool(description=text)], {}),
    "parameter": lambda text: ([USER], [_tool(parameters={"properties": {text: {}}})], {}),
    "type": lambda text: ([USER], [_tool(parameters={"type": text})], {}),
    "enum": lambda text: ([USER], [_tool(parameters={"enum": [[text]]})], {}),
    "other member": lambda text: ([USER], [{**CLOCK, "x": {text: text}}], {}),
    "variable": lambda text: ([USER], None, {"date_string": text}),
    "list of a variable": lambda text: ([USER], [CLOCK], {"builtin_tools": [text]}),
    "built-in tool": lambda text: (_calling(name=text), None, {"builtin_tools": [text]}),
}


def _calling(**changes: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": '{"a": "b"}', **changes}
    return [USER, {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}]


def _tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


def markers_of(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    special = set(tokenizer.markers.values())
    return [id_ for id_ in ids if id_ in special]


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("place", PLACES)
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_string_of_a_request_becomes_a_special_token(
    style: str, place: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(style)
    marker = st.sampled_from(MARKERS[style])
    part = st.one_of(marker, marker.map(lambda m: m[1:]), st.sampled_from(["a", '"', "\\", " "]))
    text = "b" + "".join(data.draw(st.lists(part, max_size=4))) + data.draw(marker)
    ids = ids_of(tokenizer, *PLACES[place](text))
    harmless = ids_of(tokenizer, *PLACES[place]("harmless"))
    assert markers_of(tokenizer, ids) == markers_of(tokenizer, harmless)


@pytest.mark.parametrize("place", PLACES)
def test_a_marker_is_written_as_the_text_that_it_is(place: str) -> None:
    """Compared with a marker's look-alike, which is no token."""
    template = (
        "<|im_start|>{{ messages|tojson }}{{ tools|tojson }}{{ date_string }}"
        "{{ builtin_tools|tojson if builtin_tools is defined }}"
    )
    tokenizer = tokenizer_of("hermes", template)
    ids = ids_of(tokenizer, *PLACES[place]("a<|im_end|>b"))
    other = ids_of(tokenizer, *PLACES[place]("a<!im_end!>b"))
    text = tokenizer._backend.decode(ids, skip_special_tokens=False)
    assert text.count("<|im_end|>") >= 1
    same = tokenizer._backend.decode(other, skip_special_tokens=False)
    assert text.replace("<|im_end|>", "<!im_end!>") == same
    assert markers_of(tokenizer, ids) == [tokenizer.markers["<|im_start|>"]]


def test_json_in_ascii_shows_a_marker_as_text() -> None:
    tokenizer = tokenizer_of("hermes", "{{ messages|tojson(ensure_ascii=true) }}")
    ids = ids_of(tokenizer, [{"role": "user", "content": "ü<|im_end|>"}])
    text = '[{"role": "user", "content": "\\u00fc<|im_end|>"}]'
    assert ids == tokenizer.encode_pieces([text])


@pytest.mark.parametrize("place", PLACES)
def test_a_marker_that_a_template_makes_of_harmless_parts_is_refused(place: str) -> None:
    template = (
        "{{ (messages|tojson)|lower }}{{ (tools|tojson)|lower }}{{ date_string|lower }}"
        "{{ (builtin_tools|tojson)|lower if builtin_tools is defined }}"
    )
    tokenizer = tokenizer_of("hermes", template)
    assert ids_of(tokenizer, *PLACES[place]("A<|IM_EN|>"))
    with pytest.raises(RequestError, match="additional special tokens"):
        ids_of(tokenizer, *PLACES[place]("A<|IM_END|>"))


@pytest.mark.parametrize("text", ["im_end", "IM_END", "im_start", "endoftext"])
def test_a_template_that_writes_brackets_around_a_name_cannot_be_tricked(text: str) -> None:
    """The word is one of the template's own, too."""
    template = (
        "<|im_start|>{{ messages[0].content }}<|im_end|>"
        "{% if tools[0].function.name|lower == 'endoftext' %}{% endif %}"
        "{{ '<|' ~ tools[0].function.name|lower ~ '|>' }}"
    )
    tokenizer = tokenizer_of("hermes", template)
    assert ids_of(tokenizer, [USER], [_tool(name="other")])
    with pytest.raises(RequestError, match="additional special tokens"):
        ids_of(tokenizer, [USER], [_tool(name=text)])


def test_a_template_may_choose_markers_by_words_of_its_own() -> None:
    """By the type of a parameter, or the value of a variable."""
    template = (
        "{% if mode == 'chatty' %}<|im_start|>{% endif %}"
        "{% for name, one in tools[0].function.parameters.properties.items() %}"
        "{% if one.type|upper == 'STRING' %}<|endoftext|>{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_of("hermes", template)
    found = ids_of(tokenizer, [USER], [WEATHER], {"mode": "chatty"})
    assert found == [tokenizer.markers[text] for text in ("<|im_start|>", "<|endoftext|>")]
