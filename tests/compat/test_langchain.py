"""LangChain's client of OpenAI's API: chats, streams, tools, schemas and responses."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    population: int


@tool
def add(a: int) -> int:
    """Add one."""
    return a + 1


def on(route: str) -> pytest.MarkDecorator:
    return pytest.mark.client("LangChain", route, package="langchain-openai")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, marks=on("/v1/chat/completions"), id="chat"),
        pytest.param(True, marks=on("/v1/responses"), id="responses"),
    ],
)
def chat(request: Any, url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=model,
        temperature=0,
        max_tokens=64,
        stream_usage=True,
        use_responses_api=request.param,
    )


def test_a_stream_is_the_whole_answer(chat: ChatOpenAI) -> None:
    whole = chat.invoke("Say hello.")
    assert whole.text
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0
    parts = list(chat.stream("Say hello."))
    merged = parts[0]
    for part in parts[1:]:
        merged = merged + part
    assert len(parts) > 3
    assert merged.text == whole.text
    assert merged.usage_metadata is not None
    assert merged.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_a_tool_is_called_and_its_result_sent_back(chat: ChatOpenAI) -> None:
    question = HumanMessage("Add one to 2.")
    forced = chat.bind_tools([add], tool_choice="required")
    (call,) = forced.invoke([question]).tool_calls[:1]
    assert call["name"] == "add" and "a" in call["args"]
    merged: Any = None
    for part in forced.stream([question]):
        merged = part if merged is None else merged + part
    assert merged.tool_calls[0]["args"] == call["args"]
    # This model's chat template needs text beside calls.
    asked = AIMessage("I add.", tool_calls=[call])
    answer = chat.invoke([question, asked, ToolMessage("3", tool_call_id=call["id"])])
    assert answer.text


def test_a_schema_is_enforced(chat: ChatOpenAI) -> None:
    found = chat.with_structured_output(City, method="json_schema").invoke("Name a city.")
    assert isinstance(found, City)
