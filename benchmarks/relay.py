"""A relay for gRPC streams between a load generator and a tritonserver, which measures requests.

perf_analyzer ends its run at the first error of a request, and does not report how long it took.
So the relay hands a refused request on as an empty final response, as a stream has anyway, and
keeps its error. All else passes as it is, in the event loop of the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
STOP_S = 1.0  # for streams of a client that has exited
_FINAL = "triton_final_response"


@dataclass(slots=True)
class Exchange:
    """A request with its responses; times are of time.monotonic().

    Attributes:
        sent: when the request left for the server.
        first, last: of the responses with outputs; None before.
        ended: when its final response or its error came.
        num_responses: with outputs.
        error: the server's text; empty if there was none.
    """

    sent: float
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    num_responses: int = 0
    error: str = ""

    @property
    def is_served(self) -> bool:
        return self.ended is not None and not self.error and self.num_responses > 0

    @property
    def ttft_s(self) -> float:
        assert self.first is not None
        return self.first - self.sent

    @property
    def itl_s(self) -> float:
        """Mean time between responses; they have a token each, unless the server is late."""
        assert self.first is not None and self.last is not None
        return (self.last - self.first) / max(1, self.num_responses - 1)

    @property
    def latency_s(self) -> float:
        assert self.ended is not None
        return self.ended - self.sent

    def share_within(self, start: float, end: float) -> float:
        """The share of its output that came from start to end, if tokens come evenly."""
        assert self.first is not None and self.last is not None
        if self.last <= self.first:
            return float(start <= self.first <= end)
        within = min(self.last, end) - max(self.first, start)
        return max(0.0, within) / (self.last - self.first)

    def receive(self, response: Any) -> bool:
        """Record a ModelStreamInferResponse; returns whether it was the final one."""
        now = time.monotonic()
        if response.error_message:
            self.error = response.error_message
        elif response.infer_response.outputs:
            self.first = self.first or now
            self.last = now
            self.num_responses += 1
        is_final = response.infer_response.parameters[_FINAL].bool_param
        if is_final or response.error_message:
            self.ended = now
        return bool(is_final)


def channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def ask(one: grpc.aio.Channel, message: Any) -> Exchange:
    """Send a request on a stream of its own; returns when it has ended."""
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    call = one.stream_stream(STREAM)()
    exchange = Exchange(time.monotonic())
    await call.write(message.SerializeToString())
    while exchange.ended is None:
        data = await call.read()
        if data is grpc.aio.EOF:
            exchange.error = exchange.error or "the stream ended"
            break
        exchange.receive(service_pb2.ModelStreamInferResponse.FromString(data))
    call.cancel()
    return exchange


class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Relays to a server.

    Attributes:
        exchanges: in order of the requests; a caller may clear them.
    """

    def __init__(self, upstream: grpc.aio.Channel) -> None:
        self.exchanges: list[Exchange] = []
        self._upstream = upstream

    def service(self, details: Any) -> Any:
        path = details.method
        if path == STREAM:
            return grpc.stream_stream_rpc_method_handler(self._stream)

        async def unary(data: bytes, context: Any) -> bytes:
            answer: bytes = await self._upstream.unary_unary(path)(data)
            return answer

        return grpc.unary_unary_rpc_method_handler(unary)

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        call = self._upstream.stream_stream(STREAM)()
        # perf_analyzer's ids are unique within a stream.
        open_ones: dict[str, Exchange] = {}

        async def forward() -> None:
            async for data in requests:
                message = service_pb2.ModelInferRequest.FromString(data)
                exchange = open_ones[message.id] = Exchange(time.monotonic())
                self.exchanges.append(exchange)
                await call.write(data)
            await call.done_writing()

        writer = asyncio.create_task(forward())
        try:
            async for data in call:
                response = service_pb2.ModelStreamInferResponse.FromString(data)
                request_id = response.infer_response.id
                exchange = open_ones[request_id]
                is_final = exchange.receive(response)
                if is_final:
                    del open_ones[request_id]
                if not response.error_message:
                    yield data
                elif is_final:
                    yield _empty_final(response.infer_response)
        finally:
            writer.cancel()
            call.cancel()


def _empty_final(response: Any) -> bytes:
    found = service_pb2.ModelStreamInferResponse()
    found.infer_response.model_name = response.model_name
    found.infer_response.id = response.id
    found.infer_response.parameters[_FINAL].bool_param = True
    data: bytes = found.SerializeToString()
    return data


@contextlib.asynccontextmanager
async def relay(address: str) -> AsyncIterator[tuple[str, Relay]]:
    """A relay to the server at `address`, on a free port of 127.0.0.1; yields its own address."""
    async with channel(address) as upstream:
        handler = Relay(upstream)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}", handler
        finally:
            await server.stop(STOP_S)
