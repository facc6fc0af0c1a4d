"""One request to a model of Triton that generates text, as a stream of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from inflight.door.gateway.problem import Problem, of_triton
from inflight.door.gateway.triton import Triton
from inflight.door.http.upstream import Exchange, UpstreamLost

_DATA = b"data: "
_EVENT_END = b"\n\n"
_ENDED = "the server stopped while it generated this response; send the request again"
_STALLED = "the server did not continue this response in time; send the request again"
_CANCELLED = "the server cancelled this request; send it again"


class Delta(msgspec.Struct, gc=False):
    """What a response of Triton adds to one output.

    Attributes:
        text_output: new text, whole characters only.
        index: of the output, below n.
        finish_reason: stop or length in the last delta of an output, else empty.
        num_input_tokens: of the prompt.
        num_output_tokens: new ones.
        logprobs, prompt_logprobs, draft_stats: JSON, or empty; see docs/reference/options.md.
        error: of the whole request.
    """

    text_output: str = ""
    index: int = 0
    finish_reason: str = ""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    logprobs: str = ""
    prompt_logprobs: str = ""
    draft_stats: str = ""
    error: str | None = None


_DECODER = msgspec.json.Decoder(Delta)


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a model.

    Attributes:
        model: of Triton, as clients name it.
        tensors: its inputs.
        fields: the client's names of tensors, for errors.
        num_outputs: how many outputs it has.
    """

    model: str
    tensors: dict[str, Any]
    fields: Mapping[str, str] = field(default_factory=dict)
    num_outputs: int = 1


class Generation:
    """The stream of a call: iterate over it for lists of deltas that arrived together.

    Args:
        parameters: request parameters of Triton.
        client: headers of the client's request.
        timeout_s: for Triton to begin a response, and to continue it.
    """

    def __init__(
        self,
        triton: Triton,
        call: Call,
        parameters: Mapping[str, str],
        client: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._headers = triton.headers_for(client)
        self._triton = triton
        self._timeout_s = timeout_s
        self._call = call
        self._own = triton.own_parameters()
        request = {**call.tensors, "stream": True, **parameters, **self._own}
        self._body = msgspec.json.encode(request)
        self._exchange: Exchange | None = None
        self._rest = b""
        self._num_open = call.num_outputs
        self._is_closed = False
        triton.num_in_flight += 1

    async def start(self) -> None:
        """Send the request, and wait for the head of the response. Raises Problem, UnknownModel."""
        try:
            path = f"{self._triton.path_of(self._call.model)}/generate_stream"
            exchange = self._exchange = await self._triton.connect()
            if self._is_closed:
                exchange.finish()
                raise Problem(_CANCELLED, 503)
            async with asyncio.timeout(self._timeout_s):
                await exchange.send("POST", path, self._headers, self._body)
            if exchange.status != 200:
                body = await exchange.read_all(self._timeout_s)
                problem = of_triton(exchange.status, body, self._call.fields)
                if "retry-after" in exchange.headers:
                    problem.headers["Retry-After"] = exchange.headers["retry-after"]
                raise problem
        except UpstreamLost:
            raise self._triton.lost() from None
        except TimeoutError:
            raise Problem("the server did not respond in time; retry later", 504) from None
        finally:
            self._body = b""

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        """Raises Problem, at which the response ends."""
        assert self._exchange is not None
        try:
            while True:
                part = await self._exchange.read(self._timeout_s)
                if not part:
                    break
                data = self._rest + part if self._rest else part
                end = data.rfind(_EVENT_END)
                if end < 0:
                    self._rest = data
                    continue
                self._rest = data[end + 2 :]
                return self._deltas(data[:end])
        except UpstreamLost:
            raise Problem(_ENDED, 503) from None
        except TimeoutError:
            raise Problem(_STALLED, 504) from None
        if self._num_open > 0:
            raise Problem(_ENDED, 503)
        raise StopAsyncIteration

    def _deltas(self, data: bytes) -> list[Delta]:
        events = data.split(_EVENT_END)
        try:
            deltas = [_DECODER.decode(event[len(_DATA) :]) for event in events]
        except msgspec.DecodeError:
            raise Problem(_ENDED, 503) from None
        for event, delta in zip(events, deltas, strict=True):
            if delta.error is not None:
                raise of_triton(200, event, self._call.fields)
            if not 0 <= delta.index < self._call.num_outputs:
                raise Problem(_ENDED, 503)
            if delta.finish_reason:
                self._num_open -= 1
                if delta.finish_reason == "cancelled":
                    raise Problem(_CANCELLED, 503)
        return deltas

    def close(self) -> None:
        """End it; cancel what has not been generated yet. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._triton.num_in_flight -= 1
        if self._exchange is not None:
            if self._num_open > 0:
                self._exchange.close()
            else:
                self._exchange.finish()
        if self._num_open > 0:
            self._triton.abandon(self._own)


class MergedGenerations:
    """Generations at the same time, as one: the outputs of call i have the indices from
    i * num_outputs on."""

    def __init__(self, generations: Sequence[Generation], num_outputs: int) -> None:
        self._generations = generations
        self._num_outputs = num_outputs
        self._queue: asyncio.Queue[list[Delta] | Problem | None] = asyncio.Queue(len(generations))
        self._tasks: list[asyncio.Task[None]] = []
        self._num_running = 0

    async def start(self) -> None:
        """Raises Problem, UnknownModel: one cannot be started."""
        await asyncio.gather(*(one.start() for one in self._generations))
        self._tasks = [
            asyncio.create_task(self._forward(generation, place * self._num_outputs))
            for place, generation in enumerate(self._generations)
        ]
        self._num_running = len(self._tasks)

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        """Raises Problem."""
        while self._num_running:
            found = await self._queue.get()
            if isinstance(found, Problem):
                raise found
            if found is not None:
                return found
            self._num_running -= 1
        raise StopAsyncIteration

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for generation in self._generations:
            generation.close()

    async def _forward(self, generation: Generation, offset: int) -> None:
        try:
            async for deltas in generation:
                for delta in deltas:
                    delta.index += offset
                await self._queue.put(deltas)
            await self._queue.put(None)
        except Problem as problem:
            await self._queue.put(problem)


class Stream(Protocol):
    """A generation, or several as one."""

    async def start(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[list[Delta]]: ...

    async def __anext__(self) -> list[Delta]: ...

    def close(self) -> None: ...
