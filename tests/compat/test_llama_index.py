"""LlamaIndex's client of servers like OpenAI's."""

from __future__ import annotations

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


@pytest.fixture(scope="module")
def llm(url: str, model: str) -> OpenAILike:
    return OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        temperature=0,
        max_tokens=32,
    )


def test_a_stream_is_the_whole_answer(llm: OpenAILike) -> None:
    messages = [ChatMessage(role="user", content="Say hello.")]
    whole = llm.chat(messages).message.content
    assert whole
    assert "".join(part.delta or "" for part in llm.stream_chat(messages)) == whole


def test_a_prompt_is_completed(llm: OpenAILike) -> None:
    completing = llm.model_copy(update={"is_chat_model": False})
    assert "Paris" in completing.complete("The capital of France is").text


def test_a_tool_is_called(llm: OpenAILike) -> None:
    def add(a: int) -> int:
        """Add one."""
        return a + 1

    response = llm.chat_with_tools(
        [FunctionTool.from_defaults(add)], user_msg="Add one to 2.", tool_required=True
    )
    call = llm.get_tool_calls_from_response(response)[0]
    assert call.tool_name == "add" and "a" in call.tool_kwargs
