"""Responses made of a stream of deltas: as server-sent events, or whole."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inflight.door.disconnect_watch import DisconnectWatch
from inflight.door.gateway.generation import Delta, Stream
from inflight.door.gateway.problem import Problem
from inflight.door.http.busy_poll import BusyPoll

# Clients and proxies take a long silence before the first token for a dead connection.
KEEP_ALIVE_S = 10.0
_KEEP_ALIVE = b": keep-alive\n\n"
_HEAD = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class Events(Protocol):
    """Writes the server-sent events of a response, in a wire format."""

    def feed(self, deltas: list[Delta]) -> bytes: ...

    def finish(self) -> bytes:
        """After the last deltas."""

    def error(self, problem: Problem) -> bytes:
        """The last event of a response that cannot be completed."""


class Whole(Protocol):
    """Writes a response at once, in a wire format."""

    def feed(self, deltas: list[Delta]) -> object: ...

    def result(self) -> bytes:
        """JSON, after the last deltas. Raises Problem."""


class _Reply(Response, ABC):
    """Runs a stream; ends it when its client leaves, also before the first delta.

    Args:
        stream: not started yet; closed at the end.
    """

    def __init__(self, stream: Stream, busy_poll: BusyPoll) -> None:
        self._stream = stream
        self._busy_poll = busy_poll
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = DisconnectWatch(receive, self._stream.close)
        try:
            with self._busy_poll.awaiting():
                await self._respond(scope, receive, send)
        except Problem:
            if not watch.has_left:
                raise
        finally:
            watch.end()
            self._stream.close()

    @abstractmethod
    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start the stream, and send what it becomes."""


class WholeReply(_Reply):
    """A response that is complete; the server generates in a stream, which ends when its client
    leaves."""

    def __init__(self, stream: Stream, whole: Whole, busy_poll: BusyPoll) -> None:
        super().__init__(stream, busy_poll)
        self._whole = whole

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._stream.start()
        async for deltas in self._stream:
            self._whole.feed(deltas)
        response = Response(self._whole.result(), media_type="application/json")
        await response(scope, receive, send)


class StreamedReply(_Reply):
    """Server-sent events, one message for all deltas that arrived together. Errors before the first
    delta have their own status; a later one is the last event."""

    def __init__(self, stream: Stream, events: Events, busy_poll: BusyPoll) -> None:
        super().__init__(stream, busy_poll)
        self._events = events

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def write(body: bytes, more_body: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more_body})

        first = asyncio.ensure_future(self._begin())
        try:
            while not (await asyncio.wait({first}, timeout=KEEP_ALIVE_S))[0]:
                if not has_begun:
                    await send(_start())
                    has_begun = True
                await write(_KEEP_ALIVE)
        finally:
            first.cancel()
        if not has_begun:
            first.result()  # an error becomes the response
            await send(_start())
        try:
            await write(self._events.feed(first.result()))
            async for deltas in self._stream:
                part = self._events.feed(deltas)
                if part:
                    await write(part)
            await write(self._events.finish(), more_body=False)
        except Problem as problem:
            await write(self._events.error(problem), more_body=False)

    async def _begin(self) -> list[Delta]:
        await self._stream.start()
        return await anext(self._stream)


def _start() -> dict[str, object]:
    return {"type": "http.response.start", "status": 200, "headers": list(_HEAD)}
