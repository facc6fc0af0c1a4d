"""Both Python clients against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil
import pytest

import supervised
from inflight_client import AsyncClient, Client, InvalidRequest, Unavailable
from serving import Triton
from supervised import Serving

pytestmark = pytest.mark.integration

MESSAGES = [{"role": "user", "content": "Hi"}]
TEXT = "The quick brown fox jumps."
MODELS = ["chat", "chat_tokenizer", "detokenizer", "generate", "llm", "tokenizer"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """With the gRPC door."""
    with supervised.serve(tmp_path_factory.mktemp("clients"), "echo", "--grpc-guard") as server:
        yield server


def test_concurrent_async_requests_get_their_own_outputs(echo: Triton) -> None:
    async def main() -> None:
        async with AsyncClient(echo.grpc, timeout=120) as client:
            texts = [f"{TEXT} {number}" for number in range(16)]
            found = await asyncio.gather(
                *(client.generate(text, max_tokens=32) for text in texts),
                *(client.stream(text, max_tokens=32).completion() for text in texts),
            )
            assert [one.text for one in found] == texts * 2
            async with client.chat_stream(MESSAGES, max_tokens=4) as stream:
                deltas = [delta async for delta in stream]
            assert deltas[-1].finish_reason == "length"
            assert sum(delta.num_output_tokens for delta in deltas) == 4
            several = await client.stream(TEXT, max_tokens=32, n=2).completions()
            assert [one.text for one in several] == [TEXT, TEXT]

    asyncio.run(main())
    echo.wait_until_idle()


def test_leaving_an_async_stream_ends_its_request(echo: Triton) -> None:
    async def main() -> None:
        async with AsyncClient(echo.grpc, timeout=120) as client:
            async with client.stream(TEXT, max_tokens=8000, ignore_eos=True) as stream:
                assert (await anext(stream)).num_output_tokens
            task = asyncio.create_task(client.generate(TEXT, max_tokens=8000, ignore_eos=True))
            while not echo.stats().num_running:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    echo.wait_until_idle()


def test_tokens_and_text_convert_both_ways(echo: Triton) -> None:
    async def main() -> list[int]:
        async with AsyncClient(echo.grpc, timeout=120) as client:
            ids = await client.tokenize(TEXT)
            assert await client.detokenize(ids) == TEXT
            return ids

    with Client(echo.grpc, timeout=120) as client:
        ids = client.tokenize(TEXT)
        assert client.detokenize(ids) == TEXT
        assert client.generate(TEXT, max_tokens=1).num_input_tokens == len(ids)
        of_chat = client.tokenize(MESSAGES)
        assert client.chat(MESSAGES, max_tokens=1).num_input_tokens == len(of_chat)
        with pytest.raises(InvalidRequest, match="text_input: is empty"):
            client.tokenize("")
        with pytest.raises(InvalidRequest, match="is not a token id of this model"):
            client.detokenize([1 << 30])
    assert asyncio.run(main()) == ids


def test_a_server_that_closes_its_index_still_lists_its_models(echo: Triton) -> None:
    """tritonserver itself, without a door: its index is part of the closed model control."""
    with Client(echo.grpc, timeout=120) as client:
        assert client.is_live() and client.is_ready()
        found = client.models()
        assert [one.name for one in found] == MODELS
        assert all(one.is_ready and one.versions == (1,) for one in found)
        assert not client.is_model_ready("nope")
        about = client.model_metadata("generate")
        assert about.platform == "ensemble"
        assert "text_output" in [one.name for one in about.outputs]
        with pytest.raises(InvalidRequest, match="unknown model"):
            client.model_metadata("nope")


def test_the_layout_of_a_server_is_detected(echo: Triton) -> None:
    async def main() -> str:
        async with AsyncClient(echo.grpc, layout=None, timeout=120) as client:
            return (await client.generate(TEXT, max_tokens=32)).text

    assert asyncio.run(main()) == TEXT
    with Client(echo.grpc, layout=None, timeout=120) as client:
        assert client.generate(TEXT, max_tokens=32).text == TEXT


def test_the_calls_work_through_the_door(guarded: Serving) -> None:
    async def main() -> str:
        async with AsyncClient(guarded.grpc, layout=None, timeout=120) as client:
            assert [one.name for one in await client.models()] == MODELS
            return (await client.generate(TEXT, max_tokens=32)).text

    assert asyncio.run(main()) == TEXT
    with Client(guarded.grpc, timeout=120) as client:
        assert client.is_live() and client.is_ready()
        assert client.detokenize(client.tokenize(TEXT)) == TEXT
        assert client.model_metadata("chat").platform == "ensemble"
        several = client.stream(TEXT, max_tokens=32, n=2).completions()
        assert [one.text for one in several] == [TEXT, TEXT]
        with pytest.raises(InvalidRequest, match="unknown"):
            client.model_metadata("nope")


def test_retries_outlast_the_restart_of_an_engine(guarded: Serving) -> None:
    for _ in range(5):  # until it has not been replaced before it is asked
        before = psutil.Process(guarded.pid_of("engine"))
        before.kill()
        before.wait(60)
        with Client(guarded.grpc, timeout=120, max_retries=0) as client:
            try:
                client.generate(TEXT, max_tokens=32)
            except Unavailable:
                break
    else:
        raise AssertionError("the client retried")
    with Client(guarded.grpc, timeout=120, max_retries=20) as client:
        assert client.generate(TEXT, max_tokens=32).text == TEXT
    assert guarded.pid_of("engine") != before.pid
