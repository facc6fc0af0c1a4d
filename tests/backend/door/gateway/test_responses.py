"""POST /v1/responses: what Triton gets, and the events that its output becomes."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from gateway import DROP, UNTIL_LEFT, Gateway, delta, end, named_events
from waiting import PATIENCE_S, wait_until

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
OTHER = {"type": "function", "name": "stop"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STATS = json.dumps({"timing": {"num_cached_tokens": 4}})


def create(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    """A response that succeeds."""
    status, found = gateway.post("responses", **{"input": "Hello", **fields})
    assert status == 200, found
    return found


def stream(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    """The events of a response."""
    body = {"model": "llm", "input": "Hello", "stream": True, **fields}
    status, headers, found = gateway.ask("POST", "/v1/responses", body)
    assert status == 200, found
    assert headers["content-type"].startswith("text/event-stream")
    return named_events(found)


def check_order(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response of a stream, whose events are in order and agree with it."""
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    first, second, *inner, last = events
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    for one in (first, second):
        assert one["response"]["status"] == "in_progress"
        assert one["response"]["output"] == []
        assert one["response"]["usage"] is None
        assert one["response"]["id"] == last["response"]["id"]
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    rest = iter(inner)
    for index, item in enumerate(response["output"]):
        check_item(rest, index, item)
    assert next(rest, None) is None
    found: dict[str, Any] = response
    return found


def check_item(rest: Any, index: int, item: dict[str, Any]) -> None:
    """The events of an item are those that its kind has, and contain what it has at the end."""
    added = next(rest)
    assert added["type"] == "response.output_item.added"
    assert added["output_index"] == index
    assert added["item"]["id"] == item["id"]
    assert added["item"]["status"] == "in_progress"
    if item["type"] == "function_call":
        kind, text = "response.function_call_arguments", item["arguments"]
        assert added["item"]["arguments"] == ""
        assert (added["item"]["name"], added["item"]["call_id"]) == (item["name"], item["call_id"])
    else:
        assert added["item"]["content"] == []
        (part,) = item["content"]
        text = part["text"]
        kind = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
        begun = next(rest)
        assert begun["type"] == "response.content_part.added"
        assert begun["part"] == part | {
            name: type(part[name])() for name in ("text", "logprobs") if name in part
        }
        assert (begun["item_id"], begun["content_index"]) == (item["id"], 0)
    whole = ""
    while (event := next(rest))["type"] == f"{kind}.delta":
        assert (event["item_id"], event["output_index"]) == (item["id"], index)
        whole += event["delta"]
    assert event["type"] == f"{kind}.done"
    assert whole == text == event["arguments" if item["type"] == "function_call" else "text"]
    if item["type"] != "function_call":
        ended = next(rest)
        assert (ended["type"], ended["part"]) == ("response.content_part.done", part)
    done = next(rest)
    assert (done["type"], done["item"]) == ("response.output_item.done", item)


def test_a_response_has_a_message_and_the_usage(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), delta(" you"), end(draft_stats=STATS))
    found = create(gateway, metadata={"a": "b"}, instructions="Be kind.")
    assert found["object"] == "response"
    assert found["id"].startswith("resp_")
    assert (found["status"], found["model"]) == ("completed", "org/tiny-chat")
    (item,) = found["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hi you", "annotations": [], "logprobs": []}
    expected = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert item == expected
    assert found["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    assert (found["store"], found["error"], found["incomplete_details"]) == (False, None, None)
    assert (found["metadata"], found["instructions"]) == ({"a": "b"}, "Be kind.")


def test_a_response_that_reaches_the_limit_is_incomplete(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), end("length"))
    found = create(gateway, max_output_tokens=3)
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"
    assert gateway.triton.sent["max_tokens"] == 3
    assert check_order(stream(gateway))["status"] == "incomplete"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_events_of_text_and_calls_are_in_order(gateway: Gateway, size: int) -> None:
    text = f"Let me see.\n{CALL}\n{CALL}\n"
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    gateway.triton.plays(*map(delta, parts), end(draft_stats=STATS))
    response = check_order(stream(gateway, tools=[TOOL]))
    message, *calls = response["output"]
    assert message["content"][0]["text"].strip() == "Let me see."
    assert [json.loads(one["arguments"]) for one in calls] == [{"a": 1}, {"a": 1}]
    assert {one["name"] for one in calls} == {"add"}
    assert len({one["call_id"] for one in calls}) == len({one["id"] for one in calls}) == 2
    assert response["status"] == "completed"
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4


def test_the_events_of_reasoning_are_in_order(gateway: Gateway) -> None:
    gateway.triton.plays(delta("<think>one "), delta("two</think>"), delta("\n\nthree"), end())
    response = check_order(stream(gateway, model="thinker"))
    reasoning, message = response["output"]
    assert reasoning["type"] == "reasoning" and reasoning["id"].startswith("rs_")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "one two"}]
    assert message["content"][0]["text"].strip() == "three"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_stream_agrees_with_the_whole_response(gateway: Gateway) -> None:
    gateway.triton.plays(delta("a"), delta(CALL), end())
    whole, streamed = create(gateway, tools=[TOOL]), check_order(stream(gateway, tools=[TOOL]))

    def comparable(response: dict[str, Any]) -> dict[str, Any]:
        items = [
            {name: one[name] for name in one if name not in ("id", "call_id")}
            for one in response["output"]
        ]
        own = ("id", "created_at", "completed_at")
        return {name: response[name] for name in response if name not in own} | {"output": items}

    assert comparable(whole) == comparable(streamed)


LOGPROBS = {"include": ["message.output_text.logprobs"]}


def token(text: str, logprob: float) -> dict[str, Any]:
    """Of one token, among the two most probable ones."""
    return {
        "5": {"logprob": logprob, "rank": 2, "decoded_token": text},
        "6": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
        "7": {"logprob": -9.0, "rank": 3, "decoded_token": "y"},
    }


def entry(text: str, logprob: float, **others: Any) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), **others}


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_logprobs_are_those_of_the_tokens_of_the_texts(gateway: Gateway, size: int) -> None:
    """Those of reasoning, of calls and of markers are left out, however tokens are sent."""
    tokens = ["<think>", "one", "</think>", "\ufffd", "\ufffd", " bc", "<", " d"]
    tokens += ["<tool_call>", '\n{"name": "add", ', '"arguments": {}}\n</tool_call>', "end", "</s>"]
    texts = [*tokens[:3], "", "é", *tokens[5:-1], ""]
    numbered = [token(text, -1.0 - number) for number, text in enumerate(tokens)]
    deltas = []
    for at in range(0, len(tokens), size):
        found = json.dumps(numbered[at : at + size])
        deltas.append(delta("".join(texts[at : at + size]), logprobs=found))
    deltas[-1]["finish_reason"] = "stop"
    gateway.triton.plays(*deltas)
    events = stream(gateway, model="thinker", tools=[TOOL], top_logprobs=2, **LOGPROBS)
    assert gateway.triton.sent["num_logprobs"] == 2
    response = check_order(events)
    _, first, _, last = response["output"]
    (part,) = first["content"]
    assert part["text"] == "é bc< d"
    top = [entry("x", -0.5)]
    expected = [
        entry(tokens[place], -1.0 - place, top_logprobs=[*top, entry(tokens[place], -1.0 - place)])
        for place in (3, 4, 5, 6, 7)
    ]
    assert part["logprobs"] == expected
    assert [one["token"] for one in last["content"][0]["logprobs"]] == ["end", "</s>"]
    kinds = ("response.output_text.delta", "response.output_text.done")
    sent, done = ([one for one in events if one["type"] == kind] for kind in kinds)
    assert [one["logprobs"] for one in done] == [part["logprobs"], last["content"][0]["logprobs"]]
    own = [one for one in sent if one["output_index"] == 1]
    assert [found for one in own for found in one["logprobs"]] == expected
    assert response["top_logprobs"] == 2


def test_the_whole_response_has_the_logprobs(gateway: Gateway) -> None:
    report = json.dumps([token("a", -1.0), token("b", -2.0)])
    gateway.triton.plays(delta("ab", logprobs=report), end())
    (part,) = create(gateway, **LOGPROBS)["output"][0]["content"]
    assert gateway.triton.sent["num_logprobs"] == 0
    assert part["logprobs"] == [
        entry("a", -1.0, top_logprobs=[]),
        entry("b", -2.0, top_logprobs=[]),
    ]


def test_an_output_of_nothing_has_no_items(gateway: Gateway) -> None:
    gateway.triton.plays(end())
    assert check_order(stream(gateway))["output"] == []


def test_an_error_after_the_first_token_fails_the_response(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), DROP)
    *events, failed = stream(gateway)
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert "send the request again" in failed["response"]["error"]["message"]
    assert failed["response"]["id"] == events[0]["response"]["id"]
    assert failed["sequence_number"] == len(events)
    assert "error" not in failed


def test_a_client_that_leaves_ends_its_request(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), UNTIL_LEFT)
    before = gateway.triton.num_lost
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    body = json.dumps({"model": "llm", "input": "Hello", "stream": True})
    connection.request("POST", "/v1/responses", body)
    assert connection.getresponse().read(10)
    connection.close()
    wait_until(lambda: gateway.triton.num_lost > before)


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({}, {}),
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"temperature": 0, "top_p": 0.5}, {"temperature": 0.0, "top_p": 0.5}),
        ({"top_k": 3, "seed": 1, "stop": "x"}, {"top_k": 3, "seed": 1, "stop_words": ["x"]}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"guided_decoding_guide_type": "json"}),
        (
            {
                "text": {
                    "format": {
                        "type": "json_schema", "name": "x", "schema": {"type": "object"},
                        "strict": True,
                    }
                }
            },
            {
                "guided_decoding_guide_type": "json_schema",
                "guided_decoding_guide": '{"type":"object"}',
            },
        ),
        (
            {
                "store": False, "previous_response_id": None, "truncation": "disabled",
                "include": ["reasoning.encrypted_content"], "user": "me", "service_tier": "auto",
                "reasoning": {"effort": "low", "summary": "auto"}, "no_such_field": 1,
            },
            {},
        ),
        (
            {"service_tier": "flex", "deadline_ms": 900},
            {"priority_class": "batch", "deadline_ms": 900},
        ),
        ({"prompt_cache_retention": "24h"}, {"cache_priority": 60, "cache_ttl_s": 86400.0}),
    ],
)  # fmt: skip
def test_fields_become_tensors(
    gateway: Gateway, fields: dict[str, Any], tensors: dict[str, Any]
) -> None:
    gateway.triton.plays(delta("Hi"), end())
    response = create(gateway, **fields)
    is_flex = fields.get("service_tier") == "flex"
    assert response["service_tier"] == ("flex" if is_flex else "default")
    ((model, sent),) = gateway.triton.requests
    assert model == "chat"
    messages = json.loads(sent.pop("messages"))
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    defaults = {"max_tokens": -1, "temperature": 1.0, "stream": True, "return_timing": True}
    assert sent == defaults | tensors


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_items_become_messages(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), end())
    call = {"type": "function_call", "name": "add", "arguments": '{"a": 1}'}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        {
            "type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None,
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        {**call, "call_id": "call_1", "id": "fc_1", "status": "completed"},
        {**call, "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
        {
            "type": "function_call_output", "call_id": "call_2",
            "output": [{"type": "input_text", "text": "3"}],
        },
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "abc"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    create(gateway, input=items, instructions="You add.")
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert json.loads(gateway.triton.sent["messages"]) == [
        {"role": "system", "content": parts("You add.", "Be brief.")},
        {"role": "user", "content": parts("1 + 1?")},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": name, "type": "function", "function": function}
                for name in ("call_1", "call_2")
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": parts("2")},
        {"role": "tool", "tool_call_id": "call_2", "content": parts("3")},
        {"role": "user", "content": parts("And?")},
    ]


def test_the_output_can_be_sent_back(gateway: Gateway) -> None:
    gateway.triton.plays(delta("<think>one</think>two"), delta(CALL), end())
    output = create(gateway, model="thinker", tools=[TOOL])["output"]
    gateway.triton.plays(delta("Hi"), end())
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "2"}
    create(gateway, model="thinker", input=[{"role": "user", "content": "x"}, *output, result])
    _, assistant, tool = json.loads(gateway.triton.sent["messages"])
    assert assistant["reasoning_content"] == "one"
    assert assistant["content"] == "two"
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"]


def tools_sent(gateway: Gateway) -> list[str]:
    return [one["function"]["name"] for one in json.loads(gateway.triton.sent.get("tools", "[]"))]


@pytest.mark.parametrize(
    ("choice", "names", "is_guided"),
    [
        (None, ["add", "stop"], False),
        ("auto", ["add", "stop"], False),
        ("none", [], False),
        ("required", ["add", "stop"], True),
        ({"type": "function", "name": "add"}, ["add", "stop"], True),
        (
            {
                "type": "allowed_tools", "mode": "required",
                "tools": [{"type": "function", "name": "stop"}],
            },
            ["stop"],
            True,
        ),
    ],
)  # fmt: skip
def test_the_choice_of_a_tool_is_that_of_a_chat(
    gateway: Gateway, choice: Any, names: list[str], is_guided: bool
) -> None:
    gateway.triton.plays(delta("Hi"), end())
    create(gateway, tools=[TOOL, OTHER], tool_choice=choice)
    assert tools_sent(gateway) == names
    assert ("guided_decoding_guide" in gateway.triton.sent) == is_guided
    if names[:1] == ["add"]:
        function = {name: TOOL[name] for name in ("name", "description", "parameters")}
        (sent, _) = json.loads(gateway.triton.sent["tools"])
        assert sent == {"type": "function", "function": function}


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
BROKEN = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": IMAGE}, "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ({"input": [{"id": "x"}]}, "input[0].type"),
        ({"input": [BROKEN]}, "input[0].arguments"),
        ({"input": [BROKEN | {"arguments": '{"a":' + "[" * 9000}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        (
            {
                "tools": [TOOL], "tool_choice": "required",
                "text": {"format": {"type": "json_object"}},
            },
            "text.format",
        ),
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_named(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    gateway.triton.plays(delta("Hi"), end())
    status, error = gateway.error("responses", **{"input": "Hello", **fields})
    assert status == 400
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert error["type"] == "invalid_request_error"
    assert gateway.triton.requests == []


def test_errors_of_triton_name_the_fields(gateway: Gateway) -> None:
    gateway.triton.refusal = (400, "in ensemble 'chat', max_tokens: 0; allowed: 1")
    _, error = gateway.error("responses", input="Hello")
    assert error["param"] == "max_output_tokens"
    gateway.triton.refusal = (400, "in ensemble 'chat', num_logprobs: 21; allowed: 0 to 20")
    _, error = gateway.error("responses", input="Hello", top_logprobs=21, **LOGPROBS)
    assert error["param"] == "top_logprobs"
    gateway.triton.plays()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel"),
        ("GET", "resp_1/input_items"),
    ],
)  # fmt: skip
def test_responses_are_not_stored(gateway: Gateway, method: str, path: str) -> None:
    status, _, body = gateway.ask(method, f"/v1/responses/{path}")
    assert status == 404
    assert "are not stored" in json.loads(body)["error"]["message"]


def test_a_template_can_switch_reasoning_off(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), end())
    create(gateway, model="thinker", reasoning={"effort": "none"})
    sent = json.loads(gateway.triton.sent["chat_template_kwargs"])
    assert sent == {"enable_thinking": False}
    gateway.triton.plays(delta("Hi"), end())
    create(gateway, reasoning={"effort": "none"})
    assert "chat_template_kwargs" not in gateway.triton.sent
