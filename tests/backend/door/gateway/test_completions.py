"""POST /v1/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway import Gateway, delta, end


def place(*candidates: tuple[str, float, int]) -> dict[str, Any]:
    """The candidates of a token, itself first."""
    return {
        f"{i}{text}": {"logprob": logprob, "rank": rank, "decoded_token": text}
        for i, (text, logprob, rank) in enumerate(candidates)
    }


def test_a_response_has_the_text_and_the_usage(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), delta(" you"), end("length"))
    found = gateway.complete()
    assert found["id"].startswith("cmpl-")
    assert found["object"] == "text_completion"
    assert found["choices"] == [
        {"index": 0, "text": "Hi you", "logprobs": None, "finish_reason": "length"}
    ]
    assert found["usage"]["total_tokens"] == 7
    ((model, sent),) = gateway.triton.requests
    assert model == "generate"
    assert sent["text_input"] == "Hello"
    assert sent["max_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "tensors"),
    [
        ("a", [{"text_input": "a"}]),
        (["a", "b"], [{"text_input": "a"}, {"text_input": "b"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1, 2], [3]], [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]),
    ],
)
def test_prompts_are_texts_or_token_ids(
    gateway: Gateway, prompt: Any, tensors: list[dict[str, Any]]
) -> None:
    gateway.triton.plays(delta("x"), end())
    found = gateway.complete(prompt=prompt)
    assert [one["index"] for one in found["choices"]] == list(range(len(tensors)))
    sent = [
        {name: body[name] for name in ("text_input", "prompt_token_ids") if name in body}
        for _, body in gateway.triton.requests
    ]
    assert sorted(sent, key=str) == sorted(tensors, key=str)
    assert found["usage"]["prompt_tokens"] == 5 * len(tensors)
    assert found["usage"]["completion_tokens"] == len(tensors)


def test_choices_of_several_prompts_are_in_the_order_of_the_prompts(gateway: Gateway) -> None:
    gateway.triton.plays(delta("a"), delta("b", index=1), end(), end(index=1))
    found = gateway.complete(prompt=["x", "y"], n=2)
    assert [one["text"] for one in found["choices"]] == ["a", "b", "a", "b"]


def test_several_prompts_stream(gateway: Gateway) -> None:
    gateway.triton.plays(delta("a"), 0.05, delta("b"), end())
    *chunks, done = gateway.stream("completions", prompt=["x", "y"])
    assert done == "[DONE]"
    for index in range(2):
        own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert "".join(one["text"] for one in own) == "ab"
        assert own[-1]["finish_reason"] == "stop"


def test_logprobs_have_the_token_itself_with_the_identical_number(gateway: Gateway) -> None:
    report = json.dumps([place(("b", -1.25, 2), ("a", -0.75, 1))])
    gateway.triton.plays(delta("b", logprobs=report), end())
    found = gateway.complete(logprobs=1)["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["b"],
        "token_logprobs": [-1.25],
        "top_logprobs": [{"a": -0.75, "b": -1.25}],
        "text_offset": [0],
    }
    assert gateway.triton.sent["num_logprobs"] == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_echo_with_logprobs_scores_the_prompt(gateway: Gateway, is_streamed: bool) -> None:
    prompt = [None, place((" is", -2.0, 1)), place((" red", -3.0, 4), (" blue", -1.0, 1))]
    report = json.dumps([place(("!", -0.5, 1))])
    gateway.triton.plays(
        delta(prompt_logprobs=json.dumps(prompt[:2])),
        delta("Sky is red!", prompt_logprobs=json.dumps(prompt[2:]), logprobs=report),
        end("length"),
    )
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1}
    if is_streamed:
        *chunks, _ = gateway.stream("completions", **fields)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        (found,) = [one["logprobs"] for one in choices if one["logprobs"]]
    else:
        (choice,) = gateway.complete(**fields)["choices"]
        assert choice["text"] == "Sky is red!"
        found = choice["logprobs"]
    assert found["tokens"] == ["Sky", " is", " red", "!"]
    assert found["token_logprobs"] == [None, -2.0, -3.0, -0.5]
    top = [None, {" is": -2.0}, {" blue": -1.0, " red": -3.0}, {"!": -0.5}]
    assert found["top_logprobs"] == top
    assert found["text_offset"] == [0, 3, 6, 10]
    assert gateway.triton.sent["echo"] is True


def test_a_prompt_can_be_scored_without_generating(gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hello", num_output_tokens=0, finish_reason="length"))
    found = gateway.complete(echo=True, max_tokens=0)
    assert found["choices"][0]["text"] == "Hello"
    assert gateway.triton.sent["max_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["x"] * 300}, "prompt"),
        ({"prompt": ["x"] * 10_000}, "prompt"),
        ({"messages": []}, "messages"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"model": None}, "model"),
    ],
)
def test_what_is_not_allowed_is_named(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    gateway.triton.plays(delta("x"), end())
    status, error = gateway.error(**fields)
    assert (status, error["param"]) == (400, param)
    assert gateway.triton.requests == []


def test_one_prompt_of_several_that_fails_fails_the_request(gateway: Gateway) -> None:
    gateway.triton.plays({"error": "in ensemble 'generate', text_input: is empty"})
    status, error = gateway.error(prompt=["", "x"])
    assert status == 400
    assert error["message"] == "prompt: is empty"
