"""The client for asyncio against a fake server in this process."""

from __future__ import annotations

import asyncio
import gc
import inspect
import struct
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import fake_triton
from fake_triton import WAIT_S, Call, answer, endless, two_words
from inflight_client import (
    AsyncClient,
    Cancelled,
    Client,
    Completion,
    ConnectionFailed,
    InvalidRequest,
    ServerError,
    TimedOut,
)

MESSAGES = [{"role": "user", "content": "Hi"}]


def run(
    url: str, use: Callable[[AsyncClient], Awaitable[Any]], timeout: float | None = None
) -> Any:
    """What `use` returns, with a client of its own."""

    async def main() -> Any:
        async with AsyncClient(url, timeout=timeout) as client:
            return await use(client)

    return asyncio.run(main())


async def has_ended(call: Call) -> bool:
    return await asyncio.to_thread(call.ended.wait, WAIT_S)


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    """close, which has to wait in asyncio, is aclose there."""

    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {
            name.replace("aclose", "close"): list(inspect.signature(one).parameters)
            for name, one in found
            if not name.startswith("_")
        }

    assert methods(AsyncClient) == methods(Client)
    assert "chat_stream" in methods(AsyncClient)


def test_generate_joins_the_deltas() -> None:
    async def use(client: AsyncClient) -> list[Completion]:
        return [
            await client.generate("Hi", max_tokens=7),
            *await client.generate_several("Hi"),
            await client.chat(MESSAGES),
        ]

    with fake_triton.serve(two_words) as server:
        assert run(server.url, use) == [Completion("Hello wörld", "stop", 5, 5)] * 3
    assert [call.request.model_name for call in server.calls] == ["generate", "generate", "chat"]
    assert server.calls[0].input("text_input") == ("BYTES", [1], b"\2\0\0\0Hi")
    assert server.calls[0].input("stream") == ("BOOL", [1], b"\0")
    assert server.calls[0].input("max_tokens") == ("INT32", [1], struct.pack("<i", 7))
    assert all(call.half_closed for call in server.calls)
    assert server.calls[0].metadata["triton_grpc_error"] == "true"


def test_streams_yield_deltas_with_and_without_a_block() -> None:
    async def use(client: AsyncClient) -> list[list[str]]:
        async with client.stream("Hi") as stream:
            first = [delta.text async for delta in stream]
        async with client.chat_stream(MESSAGES) as stream:
            second = [delta.text async for delta in stream]
        return [first, second, [delta.text async for delta in client.stream("Hi")]]

    with fake_triton.serve(two_words) as server:
        assert run(server.url, use) == [["Hello", " wörld"]] * 3
    assert [call.input("stream")[2] for call in server.calls] == [b"\1"] * 3


def test_requests_of_one_client_run_concurrently() -> None:
    arrived = [0]

    def together(call: Call) -> Iterator[Any]:
        arrived[0] += 1
        while arrived[0] < 4 and not call.ended.wait(0.01):
            pass
        yield answer(call.input("text_input")[2][4:].decode(), "stop")

    async def use(client: AsyncClient) -> list[str]:
        found = await asyncio.gather(*(client.generate(str(number)) for number in range(4)))
        return [completion.text for completion in found]

    with fake_triton.serve(together) as server:
        assert run(server.url, use, timeout=WAIT_S) == ["0", "1", "2", "3"]


def test_several_outputs_are_told_apart_by_their_index() -> None:
    def mixed(call: Call) -> Iterator[Any]:
        yield answer("a", index=1)
        yield answer("x")
        yield answer("b", "stop", index=1)
        yield answer("y", "stop")

    async def use(client: AsyncClient) -> Any:
        async with client.stream("Hi", n=2) as stream:
            deltas = [(delta.index, delta.text) async for delta in stream]
        completions = await client.stream("Hi", n=2).completions()
        return deltas, [completion.text for completion in completions]

    with fake_triton.serve(mixed) as server:
        deltas, texts = run(server.url, use)
    assert deltas == [(1, "a"), (0, "x"), (1, "b"), (0, "y")]
    assert texts == ["xy", "ab"]


def test_one_completion_does_not_drop_the_others() -> None:
    for use in (
        lambda client: client.generate("Hi", n=2),
        lambda client: client.chat(MESSAGES, n=2),
    ):
        with pytest.raises(InvalidRequest, match="n: 2 outputs requested"):
            run("127.0.0.1:1", use)


def test_leaving_the_block_of_a_stream_cancels_the_request() -> None:
    with fake_triton.serve(endless) as server:

        async def use(client: AsyncClient) -> None:
            async with client.stream("Hi") as stream:
                assert (await anext(stream)).text == "Hello"
                assert not server.calls[0].ended.is_set()
            assert await has_ended(server.calls[0])
            assert [delta async for delta in stream] == []

        run(server.url, use)


def test_cancelling_the_task_cancels_the_request() -> None:
    with fake_triton.serve(endless) as server:

        async def use(client: AsyncClient) -> None:
            task = asyncio.create_task(client.generate("Hi"))
            while not server.calls:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await has_ended(server.calls[0])

        run(server.url, use)


def test_a_timeout_of_asyncio_cancels_the_request() -> None:
    with fake_triton.serve(endless) as server:

        async def use(client: AsyncClient) -> None:
            async def expire(limit: asyncio.Timeout) -> None:
                while not server.calls:
                    await asyncio.sleep(0.01)
                limit.reschedule(asyncio.get_running_loop().time() + 0.2)

            with pytest.raises(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    expiring = asyncio.create_task(expire(limit))
                    await client.stream("Hi").completion()
            await expiring
            assert await has_ended(server.calls[0])

        run(server.url, use)


def test_losing_a_stream_cancels_the_request() -> None:
    with fake_triton.serve(endless) as server:

        async def use(client: AsyncClient) -> None:
            stream = client.stream("Hi")
            await anext(stream)
            del stream
            gc.collect()
            assert await has_ended(server.calls[0])

        run(server.url, use)


def test_closing_from_another_task_ends_a_waiting_reader() -> None:
    async def use(client: AsyncClient) -> None:
        stream = client.stream("Hi")
        await anext(stream)
        reader = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        await stream.aclose()
        with pytest.raises(Cancelled, match="was closed"):
            await reader

    with fake_triton.serve(endless) as server:
        run(server.url, use)


def test_closing_the_client_ends_waiting_tasks_without_cancelling_them() -> None:
    async def main(url: str) -> None:
        client = AsyncClient(url)
        stream = client.stream("Hi")
        await anext(stream)
        waiting = [
            asyncio.create_task(anext(stream)),  # type: ignore[arg-type]
            asyncio.create_task(client.detokenize([1])),
        ]
        while len(server.calls) < 2:
            await asyncio.sleep(0.01)
        await client.aclose()
        for task in waiting:
            with pytest.raises(Cancelled, match="was closed"):
                await task
            assert not task.cancelled()

    with fake_triton.serve(endless) as server:
        asyncio.run(main(server.url))


def test_a_closed_stream_sends_nothing() -> None:
    async def use(client: AsyncClient) -> list[Any]:
        stream = client.stream("Hi")
        await stream.aclose()
        return [delta async for delta in stream]

    with fake_triton.serve(two_words) as server:
        assert run(server.url, use) == []
        assert server.calls == []


def test_the_timeout_bounds_the_whole_request() -> None:
    async def use(client: AsyncClient) -> str:
        """When it timed out."""
        async with client.stream("Hi") as stream:
            try:
                assert (await anext(stream)).text == "Hello"
            except TimedOut:
                return "before the first response"
            with pytest.raises(TimedOut, match=r"within the timeout of \d+\.5 s"):
                await anext(stream)
        return "after it"

    with fake_triton.serve(endless) as server:
        # Until it is enough for the first response.
        found = (run(server.url, use, timeout=timeout) for timeout in (1.5, 20.5))
        assert "after it" in found


def test_an_error_inside_a_stream_that_ends_well_is_raised() -> None:
    def script(call: Call) -> Iterator[Any]:
        yield fake_triton.error("Request for unknown model: 'nope' is not found")

    with (
        fake_triton.serve(script) as server,
        pytest.raises(InvalidRequest, match="unknown model"),
    ):
        run(server.url, lambda client: client.generate("Hi"))


def test_a_stream_that_ends_without_a_last_response_is_an_error() -> None:
    def script(call: Call) -> Iterator[Any]:
        yield answer("Hello")

    with (
        fake_triton.serve(script) as server,
        pytest.raises(ServerError, match="before its last response"),
    ):
        run(server.url, lambda client: client.generate("Hi"))


def test_no_server_is_a_failed_connection() -> None:
    with fake_triton.serve(two_words) as server:
        url = server.url
    for use in (lambda client: client.generate("Hi"), lambda client: client.is_ready()):
        with pytest.raises(ConnectionFailed, match="it must be gRPC's host:port"):
            run(url, use, timeout=60)


def test_readiness_is_queried_from_the_server() -> None:
    async def use(client: AsyncClient) -> list[bool]:
        return [
            await client.is_ready(),
            await client.is_model_ready("chat"),
            await client.is_model_ready("nope"),
        ]

    with fake_triton.serve(two_words) as server:
        assert run(server.url, use) == [True, True, False]


def test_a_client_is_made_outside_of_an_event_loop() -> None:
    with fake_triton.serve(two_words) as server:
        client = AsyncClient(server.url)

        async def main() -> str:
            async with client:
                return (await client.generate("Hi")).text

        assert asyncio.run(main()) == "Hello wörld"


def test_a_client_without_requests_closes() -> None:
    asyncio.run(AsyncClient().aclose())
