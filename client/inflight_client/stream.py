"""The deltas of one request as they arrive, with and without asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc

from inflight_client import errors
from inflight_client.calls.retries import Retries
from inflight_client.cancellation import cancelled_calls
from inflight_client.completion import Completion, Delta, joined
from inflight_client.reader import Reader

Opened = tuple[Any, Reader]
"""gRPC's call, and a reader of its messages."""
ToError = Callable[[grpc.RpcError], errors.ClientError]

_CLOSED = "the stream was closed while its next delta was awaited"


class TextStream:
    """The deltas of one request. Closing it early, leaving its `with` block, or dropping the last
    reference cancels the request.

    Iterating raises ClientError or a subclass; ServerError if the stream ends before its last
    response. A request that fails before its first delta may be sent again.

    Args:
        send: sends the request.
        retries: of this request.
        to_error: converts a failed call to a ClientError.
    """

    def __init__(self, send: Callable[[], Opened], retries: Retries, to_error: ToError) -> None:
        self._send = send
        self._retries = retries
        self._to_error = to_error
        self._ready: deque[Delta] = deque()
        self._has_begun = False
        self._ended = False
        self._closed = threading.Event()
        self._sending = threading.Lock()  # a call that another thread cannot see is not cancelled
        self._call, self._reader = send()

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> Delta:
        while not self._ready:
            if self._ended or self._closed.is_set():
                raise StopIteration
            self._receive()
        return self._ready.popleft()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be shutting down
            self.close()

    def close(self) -> None:
        """Cancel the request if it is still running. Idempotent and thread-safe; another thread
        that waits for a delta gets Cancelled."""
        self._closed.set()
        with self._sending:
            self._call.cancel()

    def completion(self) -> Completion:
        """Read the rest of the stream as one completion; with several outputs, the first."""
        return self.completions()[0]

    def completions(self) -> list[Completion]:
        """Read the rest of the stream as one completion per output, in order."""
        return joined(list(self))

    def _receive(self) -> None:
        """Wait for a message, or for the end. The end is read, too, so that the call ends cleanly
        on both sides."""
        try:
            message = next(self._call)
        except StopIteration:
            self._ended = True
            self._ready += self._reader.end()
        except grpc.RpcError as error:
            self._send_again(self._to_error(error))
        else:
            try:
                self._ready += self._reader.feed(message)
                self._has_begun = self._has_begun or bool(self._ready)
            except errors.ClientError as error:
                self._call.cancel()
                self._send_again(error)

    def _send_again(self, error: errors.ClientError) -> None:
        """Raises `error` if the request is not sent again."""
        delay = None if self._has_begun else self._retries.delay(error)
        if delay is None or self._closed.is_set():
            self._ended = True
            raise error from None
        self._closed.wait(delay)
        with self._sending:
            if self._closed.is_set():
                raise errors.Cancelled(_CLOSED)
            self._call, self._reader = self._send()


class AsyncTextStream:
    """The deltas of one request. Closing it early, leaving its `async with` block, cancelling the
    task that reads it, or dropping the last reference cancels the request.

    Iterating raises ClientError or a subclass; ServerError if the stream ends before its last
    response. A request that fails before its first delta may be sent again.

    Args:
        send: sends the request.
        retries: of this request.
        to_error: converts a failed call to a ClientError.
    """

    def __init__(
        self,
        send: Callable[[], Awaitable[Opened]],
        retries: Retries,
        to_error: ToError,
    ) -> None:
        self._send = send
        self._retries = retries
        self._to_error = to_error
        self._ready: deque[Delta] = deque()
        self._has_begun = False
        self._ended = False
        self._closed = asyncio.Event()
        self._call: Any = None
        self._reader: Reader

    def __aiter__(self) -> AsyncTextStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._ready:
            if self._ended or self._closed.is_set():
                raise StopAsyncIteration
            if self._call is None:
                await self._open()
            await self._receive()
        return self._ready.popleft()

    async def __aenter__(self) -> AsyncTextStream:
        """Send the request; without `async with`, awaiting the first delta sends it."""
        if self._call is None and not self._closed.is_set():
            await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the event loop may be closed
            self._cancel()

    async def aclose(self) -> None:
        """Cancel the request if it is still running. Idempotent; another task that waits for a
        delta gets Cancelled."""
        self._closed.set()
        self._cancel()

    async def completion(self) -> Completion:
        """Read the rest of the stream as one completion; with several outputs, the first."""
        return (await self.completions())[0]

    async def completions(self) -> list[Completion]:
        """Read the rest of the stream as one completion per output, in order."""
        async with self:
            return joined([delta async for delta in self])

    async def _open(self) -> None:
        self._retries.start()
        self._call, self._reader = await self._send()
        if self._closed.is_set():
            self._cancel()
            raise errors.Cancelled(_CLOSED)

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _receive(self) -> None:
        """Wait for a message, or for the end. The end is read, too, so that the call ends cleanly
        on both sides."""
        try:
            with cancelled_calls():
                message = await self._call.read()
        except grpc.RpcError as error:
            await self._send_again(self._to_error(error))
            return
        except (asyncio.CancelledError, errors.Cancelled):
            self._ended = True
            raise
        if message is grpc.aio.EOF:
            self._ended = True
            self._ready += self._reader.end()
            return
        try:
            self._ready += self._reader.feed(message)
            self._has_begun = self._has_begun or bool(self._ready)
        except errors.ClientError as error:
            self._cancel()
            await self._send_again(error)

    async def _send_again(self, error: errors.ClientError) -> None:
        """Raises `error` if the request is not sent again."""
        delay = None if self._has_begun else self._retries.delay(error)
        if delay is None or self._closed.is_set():
            self._ended = True
            raise error from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._closed.wait()
            raise errors.Cancelled(_CLOSED)
        await self._open()
