"""The calls in progress: how long each may wait, and how the door ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc

from inflight.access.key import Key
from inflight.door.grpc import status
from inflight.door.grpc.status import Code, Refused, Status
from inflight.door.http.refusal import RETRY_AFTER_S
from inflight.door.limits import Limits
from inflight.door.tracing import RequestSpan
from inflight.ipc.metrics.request_counts import RequestCounts

DRAINING = Status(Code.UNAVAILABLE, "the server is shutting down; send the request again later")
CHECK_S = 0.5
DRAIN_POLL_S = 0.05

logger = logging.getLogger(__name__)


class Call:
    """One call of a client.

    Attributes:
        context: gRPC's.
        request_id: this server's own name of the call; clients' ids are not unique.
        writing_since, reading_since, waiting_since: in time.monotonic(): since when it waits for
            the client to read, for the client's request, for Triton; infinity if it does not.
        idle_since: in time.monotonic(): since when it is without a request in flight; infinity if
            it has one. An idle call may end when the server drains.
        has_ended: its status or its only response is being sent.
        span: of the call, if it is traced.
        code: of its status; until it has one, that of a client that has left.
        key: of its client; None if the server has no keys, or for a probe.
    """

    def __init__(self, context: Any) -> None:
        self.context = context
        self.key: Key | None = None
        self.request_id = secrets.token_hex(8)
        self.writing_since = math.inf
        self.reading_since = math.inf
        self.waiting_since = math.inf
        self.idle_since = math.inf
        self.has_ended = False
        self.code = Code.CANCELLED
        self.span: RequestSpan | None = None
        self._task = asyncio.current_task()
        self._status: Status | None = None
        self._lock = asyncio.Lock()
        # Sent on their own: gRPC does not learn that they were if a write with them is interrupted,
        # and then cannot send a status.
        self._headers: asyncio.Future[None] | None = None

    async def read(self) -> bytes | None:
        """The client's next message; None at the end of its stream."""
        data = await self.context.read()
        return None if data is grpc.aio.EOF else data

    async def write(self, data: bytes) -> None:
        """Send a message; returns when the client's window has taken it.

        gRPC allows one message at a time, and a stream's errors come from another task than its
        responses.
        """
        async with self._lock:
            self.writing_since = time.monotonic()
            if self._headers is None:
                self._headers = asyncio.ensure_future(self.context.send_initial_metadata(()))
                self._headers.add_done_callback(_retrieve)
            await asyncio.shield(self._headers)
            if self.span is not None:
                self.span.responded()
            await self.context.write(data)
            self.writing_since = math.inf

    async def answer(self, data: bytes) -> None:
        """Send the only message of a unary call; not interrupted by its timeout."""
        self.has_ended = True
        if self.span is not None:
            self.span.responded()
        await self.context.write(data)

    def end(self, why: Status) -> None:
        """End the call with a status, from another task or the watch."""
        if self._status is None and not self.has_ended and self._task is not None:
            self._status = why
            self._task.cancel()

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the call's handler; an exception becomes the call's status."""
        request_id = ("x-request-id", self.request_id)
        self.context.set_trailing_metadata((request_id,))
        try:
            await work
            self.code = Code.OK
            return
        except asyncio.CancelledError:
            if self._status is None:  # the client has left
                raise
            why = self._status
        except grpc.aio.AioRpcError as error:
            why = status.of(error)
        except grpc.aio.BaseError:  # the client has left while a message was sent or read
            raise asyncio.CancelledError from None
        except Exception as error:
            why = status.of(error)
            if why.code is Code.INTERNAL:
                extra = {"request_id": self.request_id}
                logger.exception("call %s failed", self.request_id, extra=extra)
        self.has_ended = True
        self.code = why.code
        if self._headers is not None:
            await asyncio.wait([self._headers])
        await self.context.abort(why.code, why.text, (request_id, *why.metadata))


class Calls:
    """All calls of a worker.

    Args:
        counts: of calls by status; or None.
    """

    def __init__(self, limits: Limits, counts: RequestCounts | None = None) -> None:
        self.is_draining = False
        self._limits = limits
        self._counts = counts
        self._calls: set[Call] = set()
        self._num_streams: Counter[str] = Counter()  # by the key's id

    async def run(
        self,
        context: Any,
        work: Callable[[Call], Coroutine[Any, Any, None]],
        *,
        is_counted: bool = True,
    ) -> None:
        """Run a call until it ends; is_counted: whether its status is."""
        call = Call(context)
        self._calls.add(call)
        try:
            await call.run(work(call))
        finally:
            self._calls.discard(call)
            if call.span is not None:
                call.span.end(call.code.name, is_error=call.code is not Code.OK)
            if self._counts is not None and is_counted:
                self._counts.count(call.code.value[0])

    def became_idle(self, call: Call) -> None:
        """A call has no request in flight now."""
        call.idle_since = time.monotonic()
        if self.is_draining:
            call.end(DRAINING)

    @contextlib.contextmanager
    def open_stream(self, call: Call) -> Iterator[None]:
        """A stream is open within the `with` block.

        Raises:
            Refused: its key has too many.
        """
        key = call.key.id if call.key is not None else ""
        allowed = self._limits.max_streams_per_key
        if key and self._num_streams[key] >= allowed:
            raise Refused(
                Code.RESOURCE_EXHAUSTED,
                f"stream: the key has {allowed} open streams; allowed: {allowed}; close some, or "
                "send several requests on one",
                RETRY_AFTER_S,
            )
        self._num_streams[key] += 1
        try:
            yield
        finally:
            self._num_streams[key] -= 1
            if not self._num_streams[key]:
                del self._num_streams[key]

    async def drain(self, timeout: float) -> None:
        """End idle calls, and wait until the others have ended, for `timeout` seconds."""
        self.is_draining = True
        for call in tuple(self._calls):
            if not math.isinf(call.idle_since):
                call.end(DRAINING)
        deadline = time.monotonic() + timeout
        # A call that has ended stays if its client does not read the status.
        while any(not call.has_ended for call in self._calls) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)

    async def watch(self) -> None:
        """End calls that have waited for too long; runs as long as the worker."""
        limits = self._limits
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()
            for call in tuple(self._calls):
                if now - call.writing_since > limits.write_timeout_s:
                    call.end(_not_read(limits.write_timeout_s))
                elif now - call.reading_since > limits.body_timeout_s:
                    call.end(_not_sent(limits.body_timeout_s))
                elif now - call.waiting_since > limits.first_byte_timeout_s:
                    call.end(_not_answered(limits.first_byte_timeout_s))
                elif now - call.idle_since > limits.stream_idle_timeout_s:
                    call.end(_not_used(limits.stream_idle_timeout_s))


def _retrieve(future: asyncio.Future[None]) -> None:
    """Sending headers fails if the client has left."""
    if not future.cancelled():
        future.exception()


def _not_read(seconds: float) -> Status:
    return Status(
        Code.RESOURCE_EXHAUSTED,
        f"responses were not read for {seconds:g} s, and the request was cancelled; read them as "
        "they arrive",
    )


def _not_sent(seconds: float) -> Status:
    return Status(Code.DEADLINE_EXCEEDED, f"request: no complete message within {seconds:g} s")


def _not_used(seconds: float) -> Status:
    return Status(
        Code.UNAVAILABLE,
        f"the stream had no request for {seconds:g} s and is closed; open another one",
    )


def _not_answered(seconds: float) -> Status:
    return Status(Code.DEADLINE_EXCEEDED, f"no response to the request within {seconds:g} s")
