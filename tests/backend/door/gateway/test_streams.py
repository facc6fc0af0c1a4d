"""The rules of streams in OpenAI's API."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

import pytest

from gateway import DROP, UNTIL_LEFT, Gateway, delta, end, events, sse
from waiting import PATIENCE_S, wait_until

MESSAGES = [{"role": "user", "content": "Hello"}]
USAGE = {"stream_options": {"include_usage": True}}


def test_1_events_are_data_and_end_with_one_done(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), delta("!"), end())
    body = {"model": "llm", "messages": MESSAGES, "stream": True}
    status, headers, found = gateway.ask("POST", "/v1/chat/completions", body)
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert found.count(b"[DONE]") == 1
    assert found.endswith(b"\n\ndata: [DONE]\n\n")
    for part in found.split(b"\n\n")[:-2]:
        json.loads(part.removeprefix(b"data: "))


def test_2_chunks_share_their_identity_and_the_first_has_the_role(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), delta("!"), end())
    *chunks, done = gateway.stream()
    assert done == "[DONE]"
    identities = {
        (chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks
    }
    ((name, _, model, kind),) = identities
    assert name.startswith("chatcmpl-")
    assert (model, kind) == ("org/tiny-chat", "chat.completion.chunk")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("delta" in choice for chunk in chunks for choice in chunk["choices"])
    assert chunks[-1]["choices"][0]["delta"] == {}


def test_3_the_finish_reason_has_a_chunk_of_its_own(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), delta("!", finish_reason="length"))
    *chunks, _ = gateway.stream()
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [one["finish_reason"] for one in choices] == [None, None, None, "length"]
    assert [one["delta"].get("content") for one in choices] == ["", "Hi", "!", None]


def test_4_the_usage_is_in_the_very_last_chunk(gateway: Gateway) -> None:
    stats = json.dumps({"timing": {"num_cached_tokens": 3}})
    gateway.triton.plays(delta("Hi"), delta("!"), end(draft_stats=stats))
    *chunks, last, done = gateway.stream(**USAGE)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert gateway.triton.sent["return_timing"] is True


def test_4_without_the_option_no_chunk_has_a_usage(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), end())
    *chunks, _ = gateway.stream()
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    assert "return_timing" not in gateway.triton.sent


def test_4_with_continuous_usage_each_chunk_has_the_usage_so_far(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), delta("!"), end())
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = gateway.stream(stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 or counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] == 2


def test_5_the_first_chunks_of_the_choices_come_in_the_order_of_their_indices(
    gateway: Gateway,
) -> None:
    gateway.triton.plays(
        delta("c", index=2), delta("a", index=0), end(index=2), delta("b", index=1),
        end(index=1), end(index=0),
    )  # fmt: skip
    *chunks, _ = gateway.stream(n=3)
    first: list[int] = []
    for chunk in chunks:
        index = chunk["choices"][0]["index"]
        if index not in first:
            first.append(index)
    assert first == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["a", "b", "c"]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def calls_of(chunks: list[Any]) -> list[dict[str, Any]]:
    """The deltas of tool calls, in order."""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    return [call for one in deltas for call in one.get("tool_calls", ())]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_6_to_8_tool_calls_have_one_name_an_id_and_valid_arguments(
    gateway: Gateway, size: int
) -> None:
    text = f"Let me see.{CALL}{CALL}"
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    gateway.triton.plays(*map(delta, parts), end())
    *chunks, done = gateway.stream(tools=TOOLS)
    assert done == "[DONE]"
    calls = calls_of(chunks)
    begun = [one for one in calls if "id" in one]
    assert [one["index"] for one in begun] == [0, 1]
    assert [one["function"]["name"] for one in begun] == ["add", "add"]
    assert {one["type"] for one in begun} == {"function"}
    assert len({one["id"] for one in begun}) == 2 and all(one["id"] for one in begun)
    for index in range(2):
        own = [one for one in calls if one["index"] == index]
        assert own[0] in begun
        assert all("name" not in one["function"] for one in own[1:])
        assert json.loads("".join(one["function"]["arguments"] for one in own)) == {"a": 1}
    content = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert content.strip() == "Let me see."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_7_without_a_call_the_finish_reason_is_stop(gateway: Gateway) -> None:
    gateway.triton.plays(delta("No need to."), end())
    *chunks, _ = gateway.stream(tools=TOOLS)
    assert calls_of(chunks) == []
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_7_calls_cut_off_by_the_length_are_not_complete(gateway: Gateway) -> None:
    gateway.triton.plays(delta(CALL[:45]), end("length"))
    *chunks, _ = gateway.stream(tools=TOOLS)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_9_text_that_may_begin_a_call_is_held_back_until_it_is_certain(gateway: Gateway) -> None:
    gateway.triton.plays(delta("a <tool"), delta("_box>"), end())
    *chunks, _ = gateway.stream(tools=TOOLS)
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert "a <tool" not in contents
    assert "".join(one or "" for one in contents) == "a <tool_box>"


def test_13_reasoning_has_fields_of_its_own(gateway: Gateway) -> None:
    gateway.triton.plays(delta("<think>one "), delta("two</think>"), delta("three"), end())
    *chunks, usage, _ = gateway.stream(model="thinker", **USAGE)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(one.get(name, "") for one in deltas) == "one two"
    assert "".join(one.get("content", "") for one in deltas) == "three"
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_13_reasoning_can_be_left_out(gateway: Gateway) -> None:
    gateway.triton.plays(delta("<think>one</think>"), delta("two"), end())
    *chunks, _ = gateway.stream(model="thinker", include_reasoning=False)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert not any("reasoning" in one or "reasoning_content" in one for one in deltas)
    assert "".join(one.get("content", "") for one in deltas) == "two"


def begin(gateway: Gateway, is_streamed: bool) -> http.client.HTTPConnection:
    """Send a request; its response is not read yet."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    body = {"model": "llm", "messages": MESSAGES, "stream": is_streamed}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    return connection


def test_10_an_error_in_mid_stream_is_the_last_event(gateway: Gateway) -> None:
    error = {"error": "the engine exited while it processed this request; retry it"}
    has_begun = threading.Event()
    gateway.triton.plays(delta("Hi"), has_begun, sse(error))
    connection = begin(gateway, is_streamed=True)
    response = connection.getresponse()
    assert response.status == 200
    has_begun.set()
    *chunks, last = events(response.read())
    connection.close()
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Hi"]
    assert last["error"]["message"] == error["error"]
    assert last["error"]["type"] == "server_error"
    assert set(last["error"]) == {"message", "type", "param", "code"}


def test_10_a_deadline_that_is_missed_in_mid_stream_is_the_last_event(gateway: Gateway) -> None:
    text = "deadline_ms: the request was not complete 50 ms after its arrival (it had 1 token)"
    gateway.triton.plays(delta("Hi"), 0.3, sse({"error": f"in ensemble 'chat', {text}"}))
    *_, last = gateway.stream()
    assert last["error"]["message"] == text
    assert (last["error"]["code"], last["error"]["param"]) == ("deadline_exceeded", "deadline_ms")


@pytest.mark.parametrize("script", [(delta("Hi"), 0.05, DROP), (delta("Hi"),)])
def test_10_a_stream_that_is_cut_off_ends_with_an_error(
    gateway: Gateway, script: tuple[object, ...]
) -> None:
    gateway.triton.plays(*script)  # type: ignore[arg-type]
    *_, last = gateway.stream()
    assert "the server stopped" in last["error"]["message"]


def test_an_error_before_the_first_token_has_its_status(gateway: Gateway) -> None:
    text = "messages: This model's maximum context length is 512 tokens. However, your prompt"
    gateway.triton.plays(sse({"error": f"in ensemble 'chat', {text}"}))
    status, error = gateway.error("chat/completions", messages=MESSAGES, stream=True)
    assert status == 400
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert error["message"].startswith("This model's maximum context length is 512 tokens. However")


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("script", [(UNTIL_LEFT,), (delta("Hi"), UNTIL_LEFT)])
def test_11_a_client_that_leaves_ends_its_request(
    gateway: Gateway, script: tuple[object, ...], is_streamed: bool
) -> None:
    gateway.triton.plays(*script)  # type: ignore[arg-type]
    num_lost = gateway.triton.num_lost
    connection = begin(gateway, is_streamed)
    wait_until(lambda: gateway.triton.requests)
    time.sleep(0.1)
    assert gateway.triton.num_lost == num_lost
    connection.close()
    wait_until(lambda: gateway.triton.num_lost == num_lost + 1)


def test_completions_stream_text(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), sse(delta("!")) + sse(delta(" you")), end("length"))
    *chunks, done = gateway.stream("completions", **USAGE)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [one["text"] for one in choices] == ["Hi", "!", " you", ""]
    assert [one["finish_reason"] for one in choices] == [None, None, None, "length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_an_event_may_arrive_in_parts(gateway: Gateway) -> None:
    event = sse(delta("Grüße 🎉"))
    place = event.index(b"\\u") + 3
    gateway.triton.plays(event[:place], 0.02, event[place:-1], 0.02, event[-1:] + sse(end()))
    *chunks, _ = gateway.stream()
    assert chunks[1]["choices"][0]["delta"] == {"content": "Grüße 🎉"}
