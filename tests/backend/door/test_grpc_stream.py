"""A stream that is drained delivers the responses of the requests that are in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from grpc_guard import READY, answered
from inflight.door.grpc.calls import Calls
from inflight.door.grpc.gate import Gate
from inflight.door.grpc.stream import Stream
from inflight.door.limits import Limits
from inflight.ipc.health import Health
from inflight.ipc.sockets.disconnects import DisconnectReporter
from kserve import request, text

REFUSED = b"not a request"


class Context:
    """A client whose requests are scripted; it reads a response each time `reads` is released."""

    def __init__(self, *requests: bytes) -> None:
        self.requests: asyncio.Queue[bytes] = asyncio.Queue()
        for data in requests:
            self.requests.put_nowait(data)
        self.reads = asyncio.Semaphore(0)
        self.responses: list[bytes] = []
        self.status: tuple[Any, str] | None = None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    def time_remaining(self) -> None:
        return None

    async def read(self) -> bytes:
        return await self.requests.get()

    async def write(self, data: bytes) -> None:
        await self.reads.acquire()
        self.responses.append(data)

    async def abort(self, code: Any, details: str, trailing_metadata: Any = ()) -> None:
        self.status = (code, details)


class Triton:
    """A stream to Triton that returns what the test puts into it."""

    def __init__(self) -> None:
        self.responses: asyncio.Queue[Any] = asyncio.Queue()
        self.num_received = 0

    def stream(self, *arguments: Any) -> Triton:
        return self

    async def write(self, data: bytes) -> None:
        self.num_received += 1

    async def read(self) -> Any:
        return await self.responses.get()

    def cancel(self) -> None:
        self.responses.put_nowait(grpc.aio.EOF)


class Ready:
    def check_ready(self) -> None:
        pass

    def current(self) -> Health:
        return READY


async def settle() -> None:
    """Run all tasks until each waits."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("refused", [0, 1, 3])
def test_a_last_response_behind_refusals_is_delivered(refused: int) -> None:
    async def run() -> tuple[list[bytes], tuple[Any, str] | None]:
        message = request("generate", text("x"), id="1").SerializeToString()
        context, triton = Context(message, *[REFUSED] * refused), Triton()
        disconnects = DisconnectReporter(Path("/nonexistent"))
        calls = Calls(Limits())
        served = asyncio.create_task(
            calls.run(
                context,
                lambda call: Stream(
                    call, calls, Ready(), triton, Limits(), Gate(None), disconnects
                ).run(),
            )
        )
        await settle()
        assert triton.num_received == 1
        drained = asyncio.create_task(calls.drain(5.0))
        await settle()
        triton.responses.put_nowait(answered("1", True, b"the output"))
        await settle()
        for _ in range(refused + 1):
            context.reads.release()
            await settle()
        await drained
        await served
        return context.responses, context.status

    responses, status = asyncio.run(run())
    assert sum(b"the output" in response for response in responses) == 1
    assert status is not None and status[0] is grpc.StatusCode.UNAVAILABLE
