"""LlamaIndex's clients of servers like OpenAI's, and of TensorRT-LLM in Triton."""

from __future__ import annotations

import pytest
from conftest import Server
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.nvidia_triton import NvidiaTriton
from llama_index.llms.openai_like import OpenAILike


def on(route: str) -> pytest.MarkDecorator:
    return pytest.mark.client("LlamaIndex", route, package="llama-index-llms-openai-like")


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


@on("/v1/chat/completions")
def test_a_stream_is_the_whole_answer(llm: OpenAILike) -> None:
    messages = [ChatMessage(role="user", content="Say hello.")]
    whole = llm.chat(messages).message.content
    assert whole
    assert "".join(part.delta or "" for part in llm.stream_chat(messages)) == whole


@on("/v1/completions")
def test_a_prompt_is_completed(llm: OpenAILike) -> None:
    completing = llm.model_copy(update={"is_chat_model": False})
    assert "Paris" in completing.complete("The capital of France is").text


@on("/v1/chat/completions")
def test_a_tool_is_called(llm: OpenAILike) -> None:
    def add(a: int) -> int:
        """Add one."""
        return a + 1

    response = llm.chat_with_tools(
        [FunctionTool.from_defaults(add)], user_msg="Add one to 2.", tool_required=True
    )
    call = llm.get_tool_calls_from_response(response)[0]
    assert call.tool_name == "add" and "a" in call.tool_kwargs


@pytest.mark.parametrize("model_name", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.client(
    "LlamaIndex, NvidiaTriton",
    "tensorrtllm",
    package="llama-index-llms-nvidia-triton",
    lacking="the client discards a response after max_tokens - 1, which has the last token",
)
def test_triton_streams_what_it_completes(tensorrtllm: Server, model_name: str) -> None:
    """But for the last token, which the client discards unless it came with an earlier one."""
    llm = NvidiaTriton(server_url=tensorrtllm.grpc, model_name=model_name, tokens=12)
    whole = llm.complete("The capital of France is").text
    parts = list(llm.stream_complete("The capital of France is"))
    streamed = "".join(part.delta or "" for part in parts)
    assert len(parts) > 3
    assert streamed == parts[-1].text
    shorter, longer = sorted((whole, streamed), key=len)
    assert "Paris" in shorter and longer.startswith(shorter)
