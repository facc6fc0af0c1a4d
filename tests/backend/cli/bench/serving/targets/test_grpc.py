"""Triton's gRPC as a target."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest

import fake_triton
from fake_triton import Call, answer
from inflight.cli.bench.serving.targets.grpc import GrpcTarget
from inflight.cli.bench.serving.targets.target import Arrival, Prompt
from inflight_client import AsyncClient, InvalidRequest
from waiting import PATIENCE_S


def target(url: str, model: str, is_chat: bool = False) -> GrpcTarget:
    return GrpcTarget(
        AsyncClient(url, generate_model=model, chat_model=model), model, is_chat=is_chat
    )


def ask(url: str, is_chat: bool) -> list[Arrival]:
    async def run() -> list[Arrival]:
        found = target(url, "one", is_chat)
        try:
            return [one async for one in found.send(Prompt("Hello", 7))]
        finally:
            await found.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize("is_chat", [False, True])
def test_responses_have_their_tokens_and_the_request_an_exact_length(is_chat: bool) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield answer("a", num_input=9, num_output=1)
        yield answer("bcd", "length", num_input=9, num_output=6)

    with fake_triton.serve(script) as server:
        found = ask(server.url, is_chat)
        (call,) = server.calls
    assert [one.num_tokens for one in found] == [1, 6]
    assert {one.num_input_tokens for one in found} == {9}
    assert call.request.model_name == "one"
    assert struct.unpack("<i", call.input("max_tokens")[2]) == (7,)
    assert call.input("ignore_eos")[2] == call.input("stream")[2] == b"\x01"
    if is_chat:
        assert json.loads(call.input("messages")[2][4:]) == [{"role": "user", "content": "Hello"}]
    else:
        assert call.input("text_input")[2][4:] == b"Hello"


def test_closing_the_generator_cancels_the_request() -> None:
    def script(call: Call) -> Iterator[Any]:
        yield answer("a")
        call.ended.wait(2 * PATIENCE_S)

    async def first(url: str) -> None:
        found = target(url, "one")
        arrivals = found.send(Prompt("Hello", 7))
        await anext(arrivals)
        await arrivals.aclose()
        await found.aclose()

    with fake_triton.serve(script) as server:
        asyncio.run(first(server.url))
        assert server.calls[0].ended.wait(PATIENCE_S)


def test_a_missing_model_is_named() -> None:
    async def describe(url: str, model: str) -> dict[str, str]:
        found = target(url, model)
        try:
            return await found.describe()
        finally:
            await found.aclose()

    with fake_triton.serve(lambda call: iter(())) as server:
        assert asyncio.run(describe(server.url, "one"))["model"] == "one"
        with pytest.raises(InvalidRequest, match="no model 'nope'"):
            asyncio.run(describe(server.url, "nope"))
