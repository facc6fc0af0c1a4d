"""OpenAI's client, with SmolLM2 behind the gateway of `inflight serve`."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from pydantic import BaseModel

import supervised
from supervised import Serving
from waiting import wait_until

if TYPE_CHECKING:
    # Imported by the tests that need it: each process that collects these would take a second.
    from openai import OpenAI

pytestmark = pytest.mark.integration

MODEL = "SmolLM2-135M-Instruct"
COLOURS = ["red", "green", "blue", "white", "black", "yellow"]
HELLO = [{"role": "user", "content": "Say hello."}]


class City(BaseModel):
    name: str
    population: int


@pytest.fixture(scope="module")
def serving(gateway: Serving) -> Serving:
    return gateway


@pytest.fixture(scope="module")
def url(serving: Serving) -> str:
    return f"http://{serving.gateway}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as found:
        yield found


def test_the_model_has_its_own_name(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve("generate").id == MODEL


@pytest.mark.client("openai-python", "/v1/chat/completions", package="openai")
def test_a_chat_streams_what_it_answers_whole(client: OpenAI) -> None:
    # The helper for streams raises an error at an output that max_tokens cuts off.
    fields = {"model": MODEL, "messages": HELLO, "stop": "!", "temperature": 0}
    whole = client.chat.completions.create(**fields)
    text = whole.choices[0].message.content
    assert text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.completion_tokens > 4
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        streamed = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert streamed == text == final.choices[0].message.content
    assert final.usage is not None
    assert final.usage.prompt_tokens == whole.usage.prompt_tokens
    details = final.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None and details.cached_tokens > 0


@pytest.mark.client("openai-python", "/v1/chat/completions", package="openai")
def test_several_choices_stream(client: OpenAI) -> None:
    # So many, and so hot, that they differ on every CPU: on one, three were alike.
    with client.chat.completions.stream(
        model=MODEL,
        messages=HELLO,
        n=8,
        seed=1,
        temperature=2.0,
        extra_body={"structured_outputs": {"choice": COLOURS}},
    ) as stream:
        final = stream.get_final_completion()
    assert [choice.index for choice in final.choices] == list(range(8))
    assert all(choice.message.content in COLOURS for choice in final.choices)
    assert len({choice.message.content for choice in final.choices}) > 1


@pytest.mark.client("openai-python", "/v1/chat/completions", package="openai")
def test_a_schema_is_parsed(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Name a city and its population, as JSON."}]
    found = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=City, max_tokens=200, temperature=0
    )
    assert isinstance(found.choices[0].message.parsed, City)


def test_a_schema_that_is_cut_off_is_not_called_complete(client: OpenAI) -> None:
    import openai

    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=City, max_tokens=3
        )


@pytest.mark.client("openai-python", "/v1/chat/completions", package="openai")
def test_a_required_call_is_one_of_the_function(client: OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    choice = {"type": "function", "function": {"name": "add"}}
    found = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[tool], tool_choice=choice, max_tokens=64, temperature=0
    )
    (call,) = found.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "add"
    assert re.fullmatch(r'\{\s*"a"\s*:\s*-?\d+\s*\}', call.function.arguments)
    assert found.choices[0].finish_reason == "tool_calls"


def test_a_prompt_is_scored_as_lm_eval_does(client: OpenAI) -> None:
    prompt = "The capital of France is Paris"
    found = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    (choice,) = found.choices
    assert choice.text.startswith(prompt)
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens, values, top = logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs
    assert tokens is not None and values is not None and top is not None
    assert "".join(tokens) == choice.text
    assert values[0] is None and top[0] is None
    for token, value, others in zip(tokens[1:], values[1:], top[1:], strict=True):
        assert others is not None and others[token] == value
    assert values[-2] == max(top[-2].values())  # " Paris"


@pytest.mark.client("openai-python", "/v1/completions", package="openai")
def test_token_ids_are_a_prompt(client: OpenAI, url: str) -> None:
    def complete(prompt: str | list[int]) -> str:
        found = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
        return found.choices[0].text

    root = client.with_options(base_url=url.removesuffix("/v1"))
    text = "The capital of France is"
    ids = root.post("/tokenize", body={"model": MODEL, "prompt": text}, cast_to=object)["tokens"]
    assert complete(ids) == complete(text)
    back = root.post("/detokenize", body={"model": MODEL, "tokens": ids}, cast_to=object)
    assert back == {"prompt": text}


def test_errors_are_those_of_the_client(client: OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="none", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="x " * 9000)
    assert too_long.value.code == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in too_long.value.message
    with pytest.raises(openai.BadRequestError) as out_of_range:
        client.completions.create(model=MODEL, prompt="x", top_p=3)
    assert out_of_range.value.param == "top_p"


def test_a_client_that_leaves_frees_the_engine(serving: Serving, url: str) -> None:
    from openai import AsyncOpenAI

    async def leave() -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model=MODEL,
                prompt="Once upon a time",
                max_tokens=4000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            assert serving.stats().num_running == 1
            await stream.close()

    asyncio.run(leave())
    wait_until(lambda: serving.stats().num_running == 0)


def test_probes_and_metrics(client: OpenAI, url: str) -> None:
    root = client.with_options(base_url=url.removesuffix("/v1"))
    for path in ("/health", "/ready", "/version"):
        assert root.get(path, cast_to=str) is not None
    text = root.get("/metrics", cast_to=str)
    assert 'inflight_door_requests_total{door="gateway"' in text
    assert "inflight_generation_tokens_total" in text


def test_a_worker_that_dies_is_replaced(serving: Serving, client: OpenAI) -> None:
    def workers() -> list[psutil.Process]:
        found = []
        for child in serving.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "inflight.door.gateway_door" in child.cmdline():
                    found.append(child)
        return found

    (before,) = workers()
    before.kill()
    serving.wait_until(lambda: [one.pid for one in workers()] not in ([], [before.pid]))
    serving.wait_until(lambda: serving.health()[0] == 200)
    assert client.models.list().data


def test_keys_are_not_needed_without_a_file_of_them(url: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="whatever", max_retries=0) as client:
        assert client.models.list().data


def test_a_port_that_is_taken_is_an_error_with_the_option(serving: Serving, tmp_path: Path) -> None:
    port = serving.gateway.rpartition(":")[2]
    process = supervised.launch(tmp_path, "echo", "--gateway-port", port)
    assert process.wait(60) == 1
    shown = (tmp_path / "shown").read_text()
    assert f"127.0.0.1:{port} cannot be used" in shown
    assert "--gateway-port 0" in shown
