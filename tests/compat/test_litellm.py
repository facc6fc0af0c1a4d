"""LiteLLM, the library of a widespread proxy: both APIs, and the errors that it acts on."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def openai(url: str, model: str) -> dict[str, Any]:
    return {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 32,
    }


def test_a_stream_is_the_whole_answer(openai: dict[str, Any]) -> None:
    whole = litellm.completion(messages=HELLO, **openai)
    assert whole.choices[0].message.content
    parts = litellm.completion(messages=HELLO, stream=True, **openai)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content


def test_a_prompt_that_is_too_long_is_recognised(openai: dict[str, Any]) -> None:
    long = [{"role": "user", "content": "x " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=long, **openai)


def test_a_response_is_complete(openai: dict[str, Any]) -> None:
    fields = {name: openai[name] for name in ("model", "api_base", "api_key", "temperature")}
    found = litellm.responses(input="Say hello.", **fields)
    assert found.status == "completed"
    assert found.usage.output_tokens > 0


def test_anthropics_api_streams_what_it_answers_whole(url: str, model: str) -> None:
    fields = {
        "model": f"anthropic/{model}",
        "api_base": url,
        "api_key": "none",
        "max_tokens": 32,
        "top_k": 1,
        "messages": HELLO,
    }
    whole = litellm.completion(**fields).choices[0].message.content
    assert whole
    parts = litellm.completion(stream=True, **fields)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
