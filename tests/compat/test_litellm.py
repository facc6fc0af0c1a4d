"""LiteLLM, the library of a widespread proxy: both APIs, Triton's, and the errors it acts on."""

from __future__ import annotations

from typing import Any

import litellm
import pytest
from conftest import Server

HELLO = [{"role": "user", "content": "Say hello."}]


def on(provider: str, route: str) -> pytest.MarkDecorator:
    return pytest.mark.client(f"LiteLLM, {provider}/", route, package="litellm")


@pytest.fixture(scope="module")
def openai(url: str, model: str) -> dict[str, Any]:
    return {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 32,
    }


@on("openai", "/v1/chat/completions")
def test_a_stream_is_the_whole_answer(openai: dict[str, Any]) -> None:
    whole = litellm.completion(messages=HELLO, **openai)
    assert whole.choices[0].message.content
    parts = litellm.completion(messages=HELLO, stream=True, **openai)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content


@on("openai", "/v1/chat/completions")
def test_a_prompt_that_is_too_long_is_recognised(openai: dict[str, Any]) -> None:
    long = [{"role": "user", "content": "x " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=long, **openai)


@on("openai", "/v1/responses")
def test_a_response_is_complete(openai: dict[str, Any]) -> None:
    fields = {name: openai[name] for name in ("model", "api_base", "api_key", "temperature")}
    found = litellm.responses(input="Say hello.", **fields)
    assert found.status == "completed"
    assert found.usage.output_tokens > 0


@on("anthropic", "/v1/messages")
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


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, marks=on("triton", f"{layout}, {name}/generate"), id=name)
        for layout, name in (
            ("native", "generate"),
            ("vllm", "vllm_model"),
            ("tensorrtllm", "ensemble"),
        )
    ],
)
def test_triton_streams_what_it_generates(
    request: pytest.FixtureRequest, layout: str, name: str
) -> None:
    """In the other layouts, the whole has the prompt before the output."""
    server: Server = request.getfixturevalue(layout)
    fields = {
        "model": f"triton/{name}",
        "api_base": f"http://{server.http}/v2/models/{name}/generate",
        "messages": HELLO,
        "max_tokens": 12,
        "top_k": 1,
    }
    whole = litellm.completion(**fields).choices[0].message.content
    parts = litellm.completion(stream=True, **fields)
    streamed = [part.choices[0].delta.content or "" for part in parts]
    assert len(streamed) > 3
    assert "".join(streamed).strip()
    assert whole.endswith("".join(streamed))


@on("triton", "native --unary, completion/infer")
def test_triton_infers(native: Server) -> None:
    found = litellm.completion(
        model="triton/completion",
        api_base=f"http://{native.http}/v2/models/completion/infer",
        messages=[{"role": "user", "content": "The capital of France is"}],
        max_tokens=4,
        top_k=1,
    )
    assert "Paris" in found.choices[0].message.content
