"""The JSON of a chat request is parsed, or rejected with the place of the error."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import InflightError, RequestError
from inflight.text.messages import parse_messages, parse_tools, parse_variables


def test_roles_and_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "3 😀"},
    ]
    assert parse_messages(json.dumps(messages)) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "3 😀"},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "messages: not valid JSON"),
        ("nonsense", "messages: not valid JSON"),
        ("{}", "messages: an object; allowed: an array of 1 to 512"),
        ("null", "messages: null; allowed: an array"),
        ("1", "messages: a number; allowed: an array"),
        ("[]", "messages: 0 messages; allowed: an array of 1 to 512"),
        ("[1]", "messages[0]: a number; allowed: an object with role and content"),
        ("[" * 100_000, "messages: nested too deeply"),
        ('[{"a":' * 100_000, "messages: nested too deeply"),
        ("[NaN]", "messages: not valid JSON (NaN is not JSON)"),
        ("[" + "1" * 5000 + "]", "messages: not valid JSON"),
        ('[{"role":"user"}]', "messages[0]: content is missing"),
        ('[{"content":"x"}]', "messages[0]: role is missing"),
        ('[{"role":"user","content":null}]', "messages[0].content: null; allowed: a string"),
        ('[{"role":"user","content":7}]', "messages[0].content: a number; allowed: a string"),
        ('[{"role":"user","content":[]}]', "messages[0].content: an empty array"),
        ('[{"role":"user","content":["x"]}]', "messages[0].content[0]: not a text part"),
        (
            '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///"}}]}]',
            "messages[0].content[0]: not a text part; allowed: a string, or an array of",
        ),
        ('[{"role":"root","content":"x"}]', "messages[0].role: 'root'; allowed: system,"),
        ('[{"role":null,"content":"x"}]', "messages[0].role: null; allowed: system,"),
        ('[{"role":["user"],"content":"x"}]', "messages[0].role: an array; allowed: system,"),
        (
            '[{"role":"user","content":"x"},{"role":"user","contents":"x"}]',
            "messages[1]: unknown key 'contents'; did you mean 'content'?",
        ),
        (
            '[{"role":"user","content":"x","chat_template":"{{ 1 }}"}]',
            "messages[0]: unknown key 'chat_template'; allowed: role, content",
        ),
        (
            '[{"role":"user","role":"system","content":"x"}]',
            "messages: not valid JSON (duplicate key 'role' in an object)",
        ),
        ('[{"role":"user","content":"\\ud800"}]', "messages[0].content: lone surrogate"),
        (
            json.dumps([{"role": "user", "content": "x"}] * 513),
            "messages: 513 messages; allowed: an array of 1 to 512",
        ),
        (
            json.dumps([{"role": "user", "content": "x" * (5 << 20)}]),
            "characters; allowed: at most 4194304",
        ),
    ],
)
def test_invalid_messages_are_named(text: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner)
        ),
    )
)
def test_any_json_is_parsed_or_rejected(value: object) -> None:
    try:
        messages = parse_messages(json.dumps(value))
    except InflightError as error:
        assert str(error).startswith("messages")
    else:
        assert all({"role", "content"} == set(message) for message in messages)


def one_call(**changes: object) -> dict[str, object]:
    function = {"name": "f", "arguments": "{}"}
    return {"id": "1", "type": "function", "function": function, **changes}


def called(**changes: object) -> str:
    function = {"name": "f", "arguments": "{}", **changes}
    message = {"role": "assistant", "tool_calls": [one_call(), one_call(function=function)]}
    return json.dumps([{"role": "user", "content": "x"}, message])


def test_messages_of_openai_become_those_of_templates() -> None:
    messages = [
        {"role": "user", "content": "x", "name": "Eva"},
        {
            # As OpenAI's client returns it.
            "content": None,
            "refusal": None,
            "role": "assistant",
            "annotations": [],
            "audio": None,
            "function_call": None,
            "reasoning_content": None,
            "tool_calls": [
                {"index": 0, **one_call(function={"arguments": '{"a": [1]}', "name": "f"})},
                one_call(function={"name": "g", "arguments": ""}),
                one_call(function={"name": "g", "arguments": {"b": 1}}),
                one_call(function={"name": "g", "arguments": '{"b": 1, "b": 2}'}),
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "assistant", "content": "a", "reasoning": "b"},
        {"role": "assistant", "reasoning_content": "b"},
    ]
    functions = [
        {"arguments": {"a": [1]}, "name": "f"},
        {"name": "g", "arguments": {}},
        {"name": "g", "arguments": {"b": 1}},
        {"name": "g", "arguments": {"b": 2}},
    ]
    found = parse_messages(json.dumps(messages))
    assert found == [
        {"role": "user", "content": "x", "name": "Eva"},
        {"role": "assistant", "tool_calls": [one_call(function=one) for one in functions]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a"}
        | dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "b"),
        {"role": "assistant", "reasoning_content": "b", "thinking": "b"},
    ]
    assert list(found[1]["tool_calls"][0]["function"]) == ["arguments", "name"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            called(arguments="{"),
            "messages[1].tool_calls[1].function.arguments: not valid JSON (Expecting property",
        ),
        (
            called(arguments="[1]"),
            "messages[1].tool_calls[1].function.arguments: an array; allowed: JSON text of an",
        ),
        (
            called(arguments='{"a": ' + "[" * 70 + "]" * 70 + "}"),
            "messages[1].tool_calls[1].function.arguments: nested too deeply; allowed: 64 levels",
        ),
        (
            called(arguments="[" * 100_000),
            "messages[1].tool_calls[1].function.arguments: nested too deeply",
        ),
        (
            called(arguments='{"a": 1e999}'),
            "messages[1].tool_calls[1].function.arguments: has a number that is too large",
        ),
        (
            called(arguments='{"a": ' + "9" * 30 + "}"),
            "messages[1].tool_calls[1].function.arguments: has an integer that is too large",
        ),
        (
            called(arguments='{"a": NaN}'),
            "messages[1].tool_calls[1].function.arguments: not valid JSON (NaN is not JSON)",
        ),
        (
            called(arguments='{"\\ud800": 1}'),
            "messages[1].tool_calls[1].function.arguments: lone surrogate at character 0",
        ),
        (called(name=""), "messages[1].tool_calls[1].function.name: an empty string; allowed"),
        (called(argument="{}"), "messages[1].tool_calls[1].function: unknown key 'argument'; did"),
        (
            '[{"role":"assistant","tool_calls":[{"function":{"name":"f"}}]}]',
            "messages[0].tool_calls[0].function: arguments is missing; allowed",
        ),
        (
            '[{"role":"assistant","tool_calls":[{"id":"1"}]}]',
            "messages[0].tool_calls[0]: function is missing; allowed: an object with id, type",
        ),
        (
            '[{"role":"assistant","tool_calls":[{"type":"custom","function":{}}]}]',
            "messages[0].tool_calls[0].type: 'custom'; allowed: function",
        ),
        (
            '[{"role":"assistant","tool_calls":{"a":1}}]',
            "messages[0].tool_calls: an object; allowed",
        ),
        ('[{"role":"assistant","tool_calls":[1]}]', "messages[0].tool_calls[0]: a number; allowed"),
        ('[{"role":"assistant","content":null}]', "messages[0].content: null; allowed: a string"),
        ('[{"role":"assistant"}]', "messages[0]: content is missing"),
        (
            '[{"role":"user","content":"x","tool_calls":[1]}]',
            "messages[0].tool_calls: not of this role, user; allowed: in messages of the role assi",
        ),
        (
            '[{"role":"user","content":"x","tool_call_id":"1"}]',
            "messages[0].tool_call_id: not of this role, user",
        ),
        (
            '[{"role":"user","content":"x","name":7}]',
            "messages[0].name: a number; allowed: a string",
        ),
        (
            '[{"role":"assistant","content":"x","refusal":"No."}]',
            "messages[0]: unknown key 'refusal'; allowed: role, content, name, tool_calls",
        ),
    ],
)
def test_invalid_tool_calls_are_named(text: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(text)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400


def test_tools_stay_as_they_are() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2.5, None, "x"]}}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}},
        {"function": {"name": "g", "description": None}, "type": "function", "x-more": {"a": []}},
    ]
    found = parse_tools(json.dumps(tools))
    assert found == tools
    assert json.dumps(found) == json.dumps(tools)  # in the order of the request
    assert parse_tools("[]") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tools: not valid JSON"),
        ("{}", "tools: an object; allowed: an array of up to 512 objects"),
        (json.dumps([1] * 513), "tools: 513 tools; allowed: an array of up to 512"),
        ("[1]", "tools[0]: a number; allowed: an object with type and function"),
        ('[{"type":"function"}]', "tools[0]: function is missing; allowed"),
        ('[{"name":"f"}]', "tools[0]: type is missing; allowed"),
        ('[{"type":"web_search","function":{}}]', "tools[0].type: 'web_search'; allowed: function"),
        ('[{"type":"function","function":"f"}]', "tools[0].function: a string; allowed: an object"),
        ('[{"type":"function","function":{}}]', "tools[0].function.name: null; allowed: the name"),
        (
            '[{"type":"function","function":{"name":"f","description":7}}]',
            "tools[0].function.description: a number; allowed: a string",
        ),
        (
            '[{"type":"function","function":{"name":"f","parameters":[]}}]',
            "tools[0].function.parameters: an array; allowed: a JSON schema, an object",
        ),
        (
            '[{"type":"function","function":{"name":"f","parameters":'
            + '{"a":' * 70
            + "1"
            + "}" * 70
            + "}}]",
            "tools[0].function.parameters: nested too deeply; allowed: 64 levels",
        ),
        (
            '[{"type":"function","function":{"name":"f","parameters":{"\\udc00":1}}}]',
            "tools[0].function.parameters: lone surrogate",
        ),
        (
            '[{"type":"function","function":{"name":"f"},"x":18446744073709551616}]',
            "tools[0]: has an integer that is too large; allowed: 64 bits",
        ),
        ('[{"a":1,"a":2}]', "tools: not valid JSON (duplicate key 'a' in an object)"),
    ],
)
def test_invalid_tools_are_named(text: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tools(text)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400


def test_variables_are_any_json() -> None:
    variables = {"enable_thinking": False, "documents": [{"title": "a", "text": "b"}], "n": 1.5}
    assert parse_variables(json.dumps(variables)) == variables


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "chat_template_kwargs: an array; allowed: an object of up to 64 template variables"),
        ('{"a b":1}', "chat_template_kwargs: 'a b' is not allowed; allowed: names of up to 64"),
        ('{"_a":1}', "chat_template_kwargs: '_a' is not allowed"),
        ('{"a":"\\ud800"}', "chat_template_kwargs.a: lone surrogate at character 0"),
        ('{"a":' + "[" * 70 + "]" * 70 + "}", "chat_template_kwargs.a: nested too deeply"),
        (
            json.dumps({f"a{i}": 1 for i in range(65)}),
            "chat_template_kwargs: 65 variables; allowed: an object of up to 64",
        ),
        *(
            (json.dumps({name: 1}), f"chat_template_kwargs: '{name}' is not allowed")
            for name in ("messages", "tools", "bos_token", "strftime_now", "raise_exception")
        ),
    ],
)
def test_invalid_variables_are_named(text: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_variables(text)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400
