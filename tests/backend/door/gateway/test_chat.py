"""POST /v1/chat/completions: what Triton gets, and what its output becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway import Gateway, delta, end

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def logprobs(*candidates: tuple[str, float, int]) -> str:
    """Of one token: itself first."""
    return json.dumps(
        [
            {
                str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text}
                for token_id, (text, logprob, rank) in enumerate(candidates)
            }
        ]
    )


def test_a_response_has_the_text_and_the_usage(gateway: Gateway) -> None:
    stats = json.dumps({"timing": {"num_cached_tokens": 4}})
    gateway.triton.plays(delta("Hi"), delta(" you"), end("length", draft_stats=stats))
    found = gateway.chat()
    assert found["object"] == "chat.completion"
    assert found["model"] == "org/tiny-chat"
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hi you", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert found["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_defaults_are_those_of_openai(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), end())
    gateway.chat()
    ((model, sent),) = gateway.triton.requests
    assert model == "chat"
    assert json.loads(sent.pop("messages")) == HELLO
    assert sent == {"max_tokens": -1, "temperature": 1.0, "stream": True, "return_timing": True}


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 8, "max_tokens": 7}, {"max_tokens": 8}),
        ({"stop": "x"}, {"stop_words": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop_words": ["x", "y"]}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"temperature": 0, "top_p": 0.5}, {"temperature": 0.0, "top_p": 0.5}),
        (
            {"logit_bias": {"7": -100, "8": 1.5}},
            {"logit_bias_ids": [7, 8], "logit_bias_values": [-100.0, 1.5]},
        ),
        ({"logprobs": True}, {"num_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"num_logprobs": 3}),
        ({"response_format": {"type": "json_object"}}, {"guided_decoding_guide_type": "json"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
                }
            },
            {
                "guided_decoding_guide_type": "json_schema",
                "guided_decoding_guide": '{"type":"object"}',
            },
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["a","b"]'},
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"},
        ),
        (
            {
                "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [5],
                "min_tokens": 2, "ignore_eos": True, "bad_words": ["x"], "cache_salt": "s",
                "presence_penalty": 1, "frequency_penalty": -1, "allowed_token_ids": [1, 2],
            },
            {
                "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [5],
                "min_tokens": 2, "ignore_eos": True, "bad_words": ["x"], "cache_salt": "s",
                "presence_penalty": 1.0, "frequency_penalty": -1.0, "allowed_token_ids": [1, 2],
            },
        ),
        (
            {"chat_template_kwargs": {"x": [1]}, "add_generation_prompt": False},
            {"chat_template_kwargs": '{"x":[1]}', "add_generation_prompt": False},
        ),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False}, {}),
        (
            {"priority_class": "batch", "deadline_ms": 900},
            {"priority_class": "batch", "deadline_ms": 900},
        ),
        ({"service_tier": "flex"}, {"priority_class": "batch"}),
        (
            {"service_tier": "flex", "priority_class": "interactive"},
            {"priority_class": "interactive"},
        ),
        ({"service_tier": "priority", "priority": 0}, {}),
        (
            {"cache_priority": 100, "cache_ttl_s": 60},
            {"cache_priority": 100, "cache_ttl_s": 60.0},
        ),
        ({"prompt_cache_retention": "in_memory", "prompt_cache_key": "k"}, {}),
        ({"prompt_cache_retention": "24h"}, {"cache_priority": 60, "cache_ttl_s": 86400.0}),
        (
            {"prompt_cache_retention": "24h", "cache_priority": 80, "cache_ttl_s": 5},
            {"cache_priority": 80, "cache_ttl_s": 5.0},
        ),
        ({"no_such_field": 1, "stop": None, "n": None, "suffix": ""}, {}),
    ],
)  # fmt: skip
def test_fields_become_tensors(
    gateway: Gateway, fields: dict[str, Any], tensors: dict[str, Any]
) -> None:
    gateway.triton.plays(delta("Hi"), end())
    gateway.chat(**fields)
    sent = gateway.triton.sent
    defaults = {"max_tokens": -1, "temperature": 1.0, "stream": True, "return_timing": True}
    del sent["messages"]
    assert sent == defaults | tensors


def test_messages_pass_through_as_they_are(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), end())
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Grüße \u2028 🎉"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    gateway.chat(messages=messages)
    assert json.loads(gateway.triton.sent["messages"]) == messages


def test_several_outputs_are_choices(gateway: Gateway) -> None:
    gateway.triton.plays(
        delta("b", index=1), delta("a", index=0), end("length", index=0), end("stop", index=1)
    )
    found = gateway.chat(n=2)
    contents = [(one["index"], one["message"]["content"]) for one in found["choices"]]
    assert contents == [(0, "a"), (1, "b")]
    assert [one["finish_reason"] for one in found["choices"]] == ["length", "stop"]
    assert found["usage"]["completion_tokens"] == 2
    assert found["usage"]["prompt_tokens"] == 5
    assert gateway.triton.sent["n"] == 2


def test_logprobs_name_the_token_and_the_most_probable_ones(gateway: Gateway) -> None:
    report = logprobs(("ü", -2.5, 3), ("b", -0.5, 1), ("c", -1.5, 2))
    gateway.triton.plays(delta("ü", logprobs=report), end())
    found = gateway.chat(logprobs=True, top_logprobs=2)
    (entry,) = found["choices"][0]["logprobs"]["content"]
    top = entry.pop("top_logprobs")
    assert entry == {"token": "ü", "logprob": -2.5, "bytes": [0xC3, 0xBC]}
    assert [(one["token"], one["logprob"]) for one in top] == [("b", -0.5), ("c", -1.5)]


def test_a_logprob_of_minus_infinity_is_a_number(gateway: Gateway) -> None:
    report = logprobs(("a", float("-inf"), 9))
    gateway.triton.plays(delta("a", logprobs=report), end())
    found = gateway.chat(logprobs=True)
    assert found["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_streamed_logprobs_are_those_of_all_tokens(gateway: Gateway) -> None:
    gateway.triton.plays(
        delta("", logprobs=logprobs(("\ufffd", -1.0, 1))),
        delta("é", logprobs=logprobs(("\ufffd", -2.0, 1))),
        delta("!", logprobs=logprobs(("!", -3.0, 1))),
        end(),
    )
    *chunks, _ = gateway.stream(logprobs=True)
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    values = [[entry["logprob"] for entry in one["content"]] for one in found if one]
    assert [one for part in values for one in part] == [-1.0, -2.0, -3.0]


def test_a_call_is_a_message_without_content(gateway: Gateway) -> None:
    gateway.triton.plays(delta(CALL), end())
    (choice,) = gateway.chat(tools=[TOOL])["choices"]
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"
    sent = gateway.triton.sent
    assert json.loads(sent["tools"]) == [TOOL]
    assert "guided_decoding_guide" not in sent


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_required_call_is_guided(gateway: Gateway, choice: Any) -> None:
    gateway.triton.plays(delta(CALL), end())
    (found,) = gateway.chat(tools=[TOOL], tool_choice=choice)["choices"]
    assert len(found["message"]["tool_calls"]) == 1
    assert gateway.triton.sent["guided_decoding_guide_type"] == "ebnf_grammar"


def test_without_parallel_calls_there_is_one(gateway: Gateway) -> None:
    gateway.triton.plays(delta(CALL + CALL), end())
    (found,) = gateway.chat(tools=[TOOL], parallel_tool_calls=False)["choices"]
    assert len(found["message"]["tool_calls"]) == 1


def test_tools_that_may_not_be_called_are_not_offered(gateway: Gateway) -> None:
    gateway.triton.plays(delta(CALL), end())
    (found,) = gateway.chat(tools=[TOOL], tool_choice="none")["choices"]
    assert found["message"]["content"] == CALL
    assert "tools" not in gateway.triton.sent


def test_reasoning_is_not_content(gateway: Gateway) -> None:
    gateway.triton.plays(delta("<think>one</think>two"), end())
    message = gateway.chat(model="thinker")["choices"][0]["message"]
    assert message["content"] == "two"
    assert message["reasoning_content"] == message["reasoning"] == "one"


def test_a_guided_output_has_no_reasoning(gateway: Gateway) -> None:
    gateway.triton.plays(delta('{"a": 1}'), end())
    found = gateway.chat(model="thinker", response_format={"type": "json_object"})
    assert found["choices"][0]["message"]["content"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": {}}, "messages"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"store": True}, "store"),
        ({"guided_json": {}}, "guided_json"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream_options": 1}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"prompt": "x"}, "prompt"),
        ({"chat_template": "x"}, "chat_template"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        (
            {
                "tools": [TOOL], "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_named(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    gateway.triton.plays(delta("Hi"), end())
    status, error = gateway.error("chat/completions", **{"messages": HELLO, **fields})
    assert status == 400
    assert error["param"] == param
    assert error["message"].startswith(param.partition("[")[0].partition(".")[0])
    assert error["type"] == "invalid_request_error"
    assert gateway.triton.requests == []
