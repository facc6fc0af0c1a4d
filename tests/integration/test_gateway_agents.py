"""The APIs of coding agents, with OpenAI's and Anthropic's own clients and SmolLM2."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from supervised import Serving
from waiting import wait_until

if TYPE_CHECKING:
    # Imported by the tests that need them: each process that collects these would take a second.
    from anthropic import Anthropic
    from openai import OpenAI

pytestmark = pytest.mark.integration

MODEL = "SmolLM2-135M-Instruct"
HELLO: Any = [{"role": "user", "content": "Say hello."}]
GREEDY = {"top_k": 1}  # the client has no parameter for it
QUESTION = "Name a city and its population, as JSON."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


class City(BaseModel):
    name: str
    population: int


@pytest.fixture(scope="module")
def client(gateway: Serving) -> Iterator[OpenAI]:
    from openai import OpenAI

    url = f"http://{gateway.gateway}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as found:
        yield found


def root(gateway: Serving) -> dict[str, Any]:
    """Arguments of Anthropic's clients, whose paths have the /v1."""
    url = f"http://{gateway.gateway}"
    return {"base_url": url, "api_key": "none", "max_retries": 0, "timeout": 120}


@pytest.fixture(scope="module")
def claude(gateway: Serving) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with Anthropic(**root(gateway)) as found:
        yield found


@pytest.mark.client("openai-python", "/v1/responses", package="openai")
def test_a_response_streams_what_it_answers_whole(client: OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": "Say hello.", "temperature": 0}
    whole = client.responses.create(**fields)
    assert whole.status == "completed"
    assert whole.output_text
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == whole.output_text
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert whole.usage is not None and final.usage is not None
    assert final.usage.input_tokens == whole.usage.input_tokens > 0
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    assert final.usage.input_tokens_details.cached_tokens > 0


def test_a_response_that_is_cut_off_is_incomplete(client: OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": "Count to 100.", "temperature": 0}
    found = client.responses.create(max_output_tokens=4, **fields)
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None and found.usage.output_tokens == 4


@pytest.mark.client("openai-python", "/v1/responses", package="openai")
def test_a_response_is_parsed(client: OpenAI) -> None:
    found = client.responses.parse(model=MODEL, input=QUESTION, text_format=City, temperature=0)
    assert isinstance(found.output_parsed, City)


@pytest.mark.client("openai-python", "/v1/responses", package="openai")
def test_a_call_and_its_result_are_a_conversation(client: OpenAI) -> None:
    tool: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
    items: list[Any] = [{"role": "user", "content": "Add one."}]
    fields: Any = {"model": MODEL, "tools": [tool], "temperature": 0, "max_output_tokens": 64}
    with client.responses.stream(input=items, tool_choice="required", **fields) as stream:
        found = stream.get_final_response()
    call = next(one for one in found.output if one.type == "function_call")
    assert call.name == "add"
    assert set(json.loads(call.arguments)) == {"a"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    # This model's chat template needs text beside calls.
    items += [{"role": "assistant", "content": "I add."}, call.to_dict(), result]
    answer = client.responses.create(input=items, tool_choice="none", **fields)
    assert answer.output_text


def test_responses_are_not_stored(client: OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="x", store=True)
    assert refused.value.param == "store"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


@pytest.mark.client("anthropic-sdk-python", "/v1/messages", package="anthropic")
def test_a_message_streams_what_it_answers_whole(claude: Anthropic) -> None:
    # More than the context has, as coding agents send it.
    fields: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 20_000, "extra_body": GREEDY}
    whole = claude.messages.create(**fields)
    (block,) = whole.content
    assert block.type == "text" and block.text
    assert whole.stop_reason == "end_turn"
    with claude.messages.stream(**fields) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed == final.content[0].text == block.text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    cached = [one.usage.cache_read_input_tokens or 0 for one in (whole, final)]
    assert final.usage.input_tokens + cached[1] == whole.usage.input_tokens + cached[0]
    assert cached[1] > 0


@pytest.mark.client("anthropic-sdk-python", "/v1/messages", package="anthropic")
def test_counted_tokens_are_those_of_the_message(claude: Anthropic) -> None:
    fields: Any = {"model": MODEL, "system": "Be kind.", "messages": HELLO}
    counted = claude.messages.count_tokens(**fields).input_tokens
    usage = claude.messages.create(max_tokens=1, **fields).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_is_reported(claude: Anthropic) -> None:
    found = claude.messages.create(
        model=MODEL, messages=HELLO, max_tokens=64, stop_sequences=["zz", "!"], extra_body=GREEDY
    )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "!")
    assert "!" not in found.content[0].text


@pytest.mark.client("anthropic-sdk-python", "/v1/messages", package="anthropic")
def test_a_tool_is_used_and_its_result_understood(claude: Anthropic) -> None:
    tool: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": "Add one."}]
    fields: Any = {"model": MODEL, "tools": [tool], "max_tokens": 64, "extra_body": GREEDY}
    with claude.messages.stream(messages=messages, tool_choice={"type": "any"}, **fields) as stream:
        found = stream.get_final_message()
    call = next(one for one in found.content if one.type == "tool_use")
    assert found.stop_reason == "tool_use"
    assert call.name == "add" and set(call.input) == {"a"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
    # This model's chat template needs text beside calls.
    text = {"type": "text", "text": "I add."}
    messages += [
        {"role": "assistant", "content": [text, call.to_dict()]},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(messages=messages, tool_choice={"type": "none"}, **fields)
    assert answer.content[0].type == "text"


@pytest.mark.client("anthropic-sdk-python", "/v1/messages", package="anthropic")
def test_a_message_is_parsed(claude: Anthropic) -> None:
    question: Any = [{"role": "user", "content": QUESTION}]
    found = claude.messages.parse(
        model=MODEL, messages=question, max_tokens=200, output_format=City, extra_body=GREEDY
    )
    assert isinstance(found.parsed_output, City)


def test_a_prefilled_answer_is_continued(claude: Anthropic) -> None:
    prefill: Any = {"role": "assistant", "content": "The capital of France is"}
    question: Any = {"role": "user", "content": "What is the capital of France?"}
    found = claude.messages.create(
        model=MODEL, messages=[question, prefill], max_tokens=8, extra_body=GREEDY
    )
    assert "Paris" in found.content[0].text


def test_errors_are_those_of_the_client(claude: Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="none", messages=HELLO, max_tokens=4)
    assert unknown.value.type == "not_found_error"
    long: Any = [{"role": "user", "content": "x " * 9000}]
    with pytest.raises(anthropic.BadRequestError) as too_long:
        claude.messages.create(model=MODEL, messages=long, max_tokens=4)
    assert "prompt is too long" in too_long.value.message
    with pytest.raises(anthropic.BadRequestError) as out_of_range:
        claude.messages.create(model=MODEL, messages=HELLO, max_tokens=4, extra_body={"top_p": 3})
    assert "top_p" in out_of_range.value.message


def test_a_client_that_leaves_frees_the_engine(gateway: Serving) -> None:
    from anthropic import AsyncAnthropic

    story: Any = [{"role": "user", "content": "Tell me a very long story about 1000 rivers."}]

    async def leave() -> None:
        async with AsyncAnthropic(**root(gateway)) as client:
            stream = await client.messages.create(
                model=MODEL, messages=story, max_tokens=4000, stream=True
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    wait_until(lambda: gateway.stats().num_running == 0)
