"""A stream of deltas with a span, for a gateway that exports them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from inflight.door.gateway.generation import Delta, Stream
from inflight.door.gateway.problem import Problem
from inflight.door.tracing import RequestSpan, Usage

_OK, _LEFT = 200, 499


class TracedStream:
    """A stream as it is; its span ends when it is closed.

    Args:
        span: begun.
    """

    def __init__(self, stream: Stream, span: RequestSpan) -> None:
        self._stream = stream
        self._span = span
        self._usage = Usage()
        self._status = _LEFT
        self._is_closed = False

    async def start(self) -> None:
        """Raises Problem, UnknownModel."""
        try:
            await self._stream.start()
        except Problem as problem:
            self._status = problem.status
            raise

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        """Raises Problem."""
        try:
            deltas = await anext(self._stream)
        except Problem as problem:
            self._status = problem.status
            raise
        except StopAsyncIteration:
            self._status = _OK
            raise
        self._span.responded()
        for delta in deltas:
            self._usage.num_input_tokens = delta.num_input_tokens
            self._usage.num_output_tokens += delta.num_output_tokens
            if delta.finish_reason:
                self._usage.finish_reasons.append(delta.finish_reason)
        return deltas

    def close(self) -> None:
        self._stream.close()
        if not self._is_closed:
            self._is_closed = True
            self._span.used(self._usage)
            self._span.end(str(self._status), is_error=self._status != _OK)
