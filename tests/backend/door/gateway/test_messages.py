"""POST /v1/messages and count_tokens: what Triton gets, and the events that its output becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway import DROP, Gateway, a_gateway, delta, end, named_events
from keys import desk

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
OTHER = {"name": "stop", "input_schema": {"type": "object"}, "type": "custom"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STATS = json.dumps({"timing": {"num_cached_tokens": 4}})


def create(gateway: Gateway, path: str = "messages", **fields: Any) -> dict[str, Any]:
    """A message that succeeds."""
    given = {"max_tokens": 64, "messages": HELLO, **fields}
    status, found = gateway.post(path, **given)
    assert status == 200, found
    return found


def stream(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    """The events of a message."""
    body = {"model": "llm", "max_tokens": 64, "messages": HELLO, "stream": True, **fields}
    status, headers, found = gateway.ask("POST", "/v1/messages", body)
    assert status == 200, found
    assert headers["content-type"].startswith("text/event-stream")
    return named_events(found)


def error(gateway: Gateway, path: str = "messages", **fields: Any) -> tuple[int, dict[str, Any]]:
    """Of a request that fails."""
    given = {"max_tokens": 64, "messages": HELLO, **fields}
    given = {name: value for name, value in given.items() if value is not None}
    status, found = gateway.post(path, **given)
    assert set(found) == {"type", "error"} and found["type"] == "error"
    assert set(found["error"]) == {"type", "message"}
    return status, found["error"]


def accumulate(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, whose events are in order."""
    start, ping, *inner, ended, stop = events
    assert [one["type"] for one in (start, ping)] == ["message_start", "ping"]
    assert [one["type"] for one in (ended, stop)] == ["message_delta", "message_stop"]
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    deltas = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    members = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
    rest = iter(inner)
    for index, begun in enumerate(rest):
        assert (begun["type"], begun["index"]) == ("content_block_start", index)
        block, kind = begun["content_block"], begun["content_block"]["type"]
        text = ""
        while (event := next(rest))["type"] == "content_block_delta":
            assert (event["index"], event["delta"]["type"]) == (index, deltas[kind])
            text += event["delta"][members[kind]]
        assert (event["type"], event["index"]) == ("content_block_stop", index)
        if kind == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(text)
        else:
            assert block[kind] == ""
            block[kind] = text
        message["content"].append(block)
    return message | ended["delta"] | {"usage": message["usage"] | ended["usage"]}


def test_a_message_has_the_text_and_the_usage(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), delta(" you"), end(draft_stats=STATS))
    found = create(gateway)
    assert found.pop("id").startswith("msg_")
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": "org/tiny-chat",
        "content": [{"type": "text", "text": "Hi you", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 2,
        },
    }


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_events_of_text_and_calls_are_in_order(gateway: Gateway, size: int) -> None:
    text = f"Let me see.\n{CALL}\n{CALL}\n"
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    gateway.triton.plays(*map(delta, parts), end())
    message = accumulate(stream(gateway, tools=[TOOL]))
    text_block, *calls = message["content"]
    assert text_block["text"].strip() == "Let me see."
    assert [(one["name"], one["input"]) for one in calls] == [("add", {"a": 1})] * 2
    assert len({one["id"] for one in calls}) == 2
    assert all(one["id"].startswith("toolu_") for one in calls)
    assert message["stop_reason"] == "tool_use"


def test_the_events_of_thinking_are_in_order(gateway: Gateway) -> None:
    gateway.triton.plays(delta("<think>one "), delta("two</think>"), delta("\n\nthree"), end())
    thinking, text = accumulate(stream(gateway, model="thinker"))["content"]
    assert thinking == {"type": "thinking", "thinking": "one two", "signature": ""}
    assert text["text"].strip() == "three"


def test_a_stream_agrees_with_the_whole_message(gateway: Gateway) -> None:
    gateway.triton.plays(delta("a"), delta(CALL), end("length", draft_stats=STATS))
    whole, streamed = create(gateway, tools=[TOOL]), accumulate(stream(gateway, tools=[TOOL]))
    for message in (whole, streamed):
        del message["id"], message["content"][1]["id"]
    assert whole == streamed
    assert whole["stop_reason"] == "max_tokens"


def test_a_call_that_is_cut_off_has_what_is_complete(gateway: Gateway) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2'
    gateway.triton.plays(delta(call), end("length"))
    found = create(gateway, tools=[TOOL])
    assert found["content"][0]["input"]["a"] == 1
    assert found["stop_reason"] == "max_tokens"


def test_a_stop_sequence_is_reported(gateway: Gateway) -> None:
    stats = json.dumps({"timing": {"num_cached_tokens": 0}, "stop_word": "x"})
    gateway.triton.plays(delta("Hi"), end(draft_stats=stats))
    for found in (create(gateway), accumulate(stream(gateway))):
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "x")
    gateway.triton.plays(delta(CALL), end(draft_stats=stats))
    assert create(gateway, tools=[TOOL])["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "thinking", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}]
)
def test_thinking_can_be_left_out(gateway: Gateway, thinking: dict[str, Any]) -> None:
    gateway.triton.plays(delta("<think>one</think>two"), end())
    (block,) = create(gateway, model="thinker", thinking=thinking)["content"]
    assert block["text"] == "two"


@pytest.mark.parametrize(("kind", "is_on"), [("enabled", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_template(gateway: Gateway, kind: str, is_on: bool) -> None:
    gateway.triton.plays(delta("Hi"), end())
    create(gateway, model="thinker", thinking={"type": kind, "budget_tokens": 1024})
    variables = json.loads(gateway.triton.sent["chat_template_kwargs"])
    assert variables == {"enable_thinking": is_on}
    gateway.triton.plays(delta("Hi"), end())
    create(gateway, thinking={"type": kind})  # its template has no such variable
    assert "chat_template_kwargs" not in gateway.triton.sent


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({}, {}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"stop_sequences": ["x", "y"]}, {"stop_words": ["x", "y"]}),
        ({"stop_sequences": []}, {}),
        (
            {"temperature": 0.5, "top_p": 0.5, "top_k": 3},
            {"temperature": 0.5, "top_p": 0.5, "top_k": 3},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "guided_decoding_guide_type": "json_schema",
                "guided_decoding_guide": '{"type":"object"}',
            },
        ),
        ({"metadata": {"user_id": "me"}, "service_tier": "auto", "no_such_field": 1}, {}),
        (
            {"cache_control": {"type": "ephemeral"}},
            {"cache_priority": 60, "cache_ttl_s": 300.0},
        ),
        ({"cache_control": None}, {}),
    ],
)
def test_fields_become_tensors(
    gateway: Gateway, fields: dict[str, Any], tensors: dict[str, Any]
) -> None:
    gateway.triton.plays(delta("Hi"), end())
    create(gateway, **fields)
    ((model, sent),) = gateway.triton.requests
    assert model == "chat"
    assert json.loads(sent.pop("messages")) == [{"role": "user", "content": parts("Hello")}]
    defaults = {"max_tokens": 64, "temperature": 1.0, "stream": True, "return_timing": True}
    assert sent == defaults | tensors


FIVE_MINUTES = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
ONE_HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("system", "tool", "block", "ttl_s"),
    [
        ({}, {}, {}, None),
        ({"cache_control": None}, {}, {}, None),
        (FIVE_MINUTES, {}, {}, 300.0),
        ({}, ONE_HOUR, {}, 3600.0),
        ({}, {}, FIVE_MINUTES, 300.0),
        (FIVE_MINUTES, ONE_HOUR, FIVE_MINUTES, 3600.0),
    ],
)
def test_a_prompt_is_cached_for_the_longest_time_of_its_blocks(
    gateway: Gateway,
    system: dict[str, Any],
    tool: dict[str, Any],
    block: dict[str, Any],
    ttl_s: float | None,
) -> None:
    gateway.triton.plays(delta("Hi"), end())
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "2", **block}],
    }
    create(
        gateway,
        system=[{"type": "text", "text": "You add.", **system}],
        tools=[TOOL | tool],
        messages=[{"role": "user", "content": [result, {"type": "text", "text": "And?"}]}],
    )
    sent = gateway.triton.sent
    assert sent.get("cache_ttl_s") == ttl_s
    assert sent.get("cache_priority") == (None if ttl_s is None else 60)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_content_blocks_become_messages(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), end())
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "user", "content": [{"type": "text", "text": "Quick.", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Well."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2", **cached},
                {
                    "type": "tool_result", "tool_use_id": "toolu_2", "is_error": True,
                    "content": [{"type": "text", "text": "no"}],
                },
                {"type": "tool_result", "tool_use_id": "toolu_3"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]  # fmt: skip
    system = [{"type": "text", "text": "You add.", **cached}, {"type": "text", "text": "Briefly."}]
    create(gateway, messages=messages, system=system)
    calls = [("toolu_1", '{"a":1}'), ("toolu_2", "{}")]
    assert json.loads(gateway.triton.sent["messages"]) == [
        {"role": "system", "content": parts("You add.", "Briefly.")},
        {"role": "user", "content": parts("1 + 1?", "Quick.")},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": name, "type": "function", "function": {"name": "add", "arguments": text}}
                for name, text in calls
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": parts("2")},
        {"role": "tool", "tool_call_id": "toolu_2", "content": parts("no")},
        {"role": "tool", "tool_call_id": "toolu_3", "content": parts("")},
        {"role": "user", "content": parts("And?")},
    ]


def test_the_last_message_of_the_assistant_is_continued(gateway: Gateway) -> None:
    gateway.triton.plays(delta(" Paris"), end())
    create(gateway, messages=[*HELLO, {"role": "assistant", "content": "The capital is"}])
    sent = gateway.triton.sent
    assert json.loads(sent["messages"])[-1] == {"role": "assistant", "content": "The capital is"}
    assert sent["continue_final_message"] is True
    assert sent["add_generation_prompt"] is False


def test_the_content_can_be_sent_back(gateway: Gateway) -> None:
    gateway.triton.plays(delta("<think>one</think>two"), delta(CALL), end())
    content = create(gateway, model="thinker", tools=[TOOL])["content"]
    gateway.triton.plays(delta("Hi"), end())
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "2"}
    answer = {"role": "assistant", "content": content}
    messages = [*HELLO, answer, {"role": "user", "content": [result]}]
    create(gateway, model="thinker", messages=messages)
    _, assistant, tool = json.loads(gateway.triton.sent["messages"])
    assert (assistant["reasoning_content"], assistant["content"]) == ("one", "two")
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"]
    assert "continue_final_message" not in gateway.triton.sent


@pytest.mark.parametrize(
    ("choice", "has_tools", "is_guided"),
    [
        (None, True, False),
        ({"type": "auto"}, True, False),
        ({"type": "none"}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "add"}, True, True),
    ],
)
def test_the_choice_of_a_tool_is_that_of_a_chat(
    gateway: Gateway, choice: Any, has_tools: bool, is_guided: bool
) -> None:
    gateway.triton.plays(delta("Hi"), end())
    create(gateway, tools=[TOOL, OTHER], tool_choice=choice)
    sent = gateway.triton.sent
    assert ("guided_decoding_guide" in sent) == is_guided
    assert ("tools" in sent) == has_tools
    if has_tools:
        function = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
        assert json.loads(sent["tools"])[0] == {"type": "function", "function": function}


def test_without_parallel_calls_there_is_one(gateway: Gateway) -> None:
    gateway.triton.plays(delta(CALL + CALL), end())
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(create(gateway, tools=[TOOL], tool_choice=choice)["content"]) == 1


def test_tokens_are_those_of_the_rendered_prompt(gateway: Gateway) -> None:
    """The tokenizer of the tests counts the characters of what it gets."""
    gateway.triton.plays()
    messages = [{"role": "user", "content": parts("Hello")}]
    fields = {"tools": [TOOL], "thinking": {"type": "disabled"}, "system": None}
    found = create(gateway, "messages/count_tokens", **fields)
    assert found == {"input_tokens": len(json.dumps(messages, separators=(",", ":")))}
    assert gateway.triton.requests == []


def test_tokens_of_a_model_without_a_chat_template_are_not_counted(gateway: Gateway) -> None:
    status, found = error(gateway, "messages/count_tokens", model="base")
    assert status == 400
    assert "no chat template" in found["message"]


def test_a_version_and_a_key_in_the_headers_are_accepted(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), end())
    body = {"model": "llm", "max_tokens": 4, "messages": HELLO}
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    status, _, _ = gateway.ask("POST", "/v1/messages?beta=true", body, **headers)
    assert status == 200


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": ["x"]}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_control": {"type": "ephemeral", "ttl": ["1h"]}}, "cache_control.ttl"),
        ({"cache_control": {"ttl": "1h"}}, "cache_control.type"),
        (
            {"system": [{"type": "text", "text": "x", "cache_control": "1h"}]},
            "system[0].cache_control",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x", "cache_control": {"type": "lasting"}}
                        ],
                    }
                ]
            },
            "messages[0].content[0].cache_control.type",
        ),
    ],
)
def test_what_is_not_allowed_is_named(gateway: Gateway, fields: dict[str, Any], place: str) -> None:
    gateway.triton.plays(delta("Hi"), end())
    status, found = error(gateway, **fields)
    assert status == 400
    assert found["message"].startswith(f"{place}: ")
    assert found["type"] == "invalid_request_error"
    assert gateway.triton.requests == []


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        ((400, "max_tokens: no"), "invalid_request_error"),
        ((404, "Request for unknown model"), "not_found_error"),
        ((429, "too many"), "rate_limit_error"),
        ((503, "too busy"), "overloaded_error"),
        ((500, "broken"), "api_error"),
    ],
)
def test_errors_have_the_kinds_of_anthropic(
    gateway: Gateway, refusal: tuple[int, str], kind: str
) -> None:
    gateway.triton.refusal = refusal
    status, found = error(gateway)
    assert (status, found["type"]) == (refusal[0], kind)
    gateway.triton.plays()


def test_a_prompt_that_is_too_long_is_called_so(gateway: Gateway) -> None:
    text = "messages: This model's maximum context length is 9 tokens. However, your prompt has 10"
    gateway.triton.refusal = (400, f"in ensemble 'chat', {text}")
    _, found = error(gateway)
    assert found["message"].startswith("prompt is too long: This model's maximum context length")
    gateway.triton.plays()


def test_unknown_models_paths_and_methods_are_errors_of_anthropic(gateway: Gateway) -> None:
    status, found = error(gateway, model="none")
    assert (status, found["type"]) == (404, "not_found_error")
    status, found = error(gateway, "messages/batches")
    assert (status, found["type"]) == (404, "not_found_error")
    status, _, body = gateway.ask("GET", "/v1/messages")
    assert (status, json.loads(body)["type"]) == (405, "error")


def test_an_error_after_the_first_token_is_the_last_event(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), DROP)
    *_, last = stream(gateway)
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    assert "send the request again" in last["error"]["message"]


def test_a_key_is_sent_as_anthropic_does(tmp_path: Path) -> None:
    with desk(tmp_path) as keys, a_gateway(tmp_path, *keys.options) as gateway:
        body = {"model": "llm", "max_tokens": 4, "messages": HELLO}
        status, _, refused = gateway.ask("POST", "/v1/messages", body)
        error = json.loads(refused)["error"]
        assert (status, error["type"]) == (401, "authentication_error")
        _, _, refused = gateway.ask("POST", "/v1/chat/completions", body)
        assert json.loads(refused)["error"]["code"] == "invalid_api_key"
        status, _, _ = gateway.ask("POST", "/v1/messages", body, x_api_key=keys.issue())
        assert status == 200
