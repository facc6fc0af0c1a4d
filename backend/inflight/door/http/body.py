"""Bodies of requests: read within bounds, and checked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request

from inflight.door.http.refusal import Refusal, unavailable
from inflight.door.limits import Limits

T = TypeVar("T")

# A body of 4 MiB can take 0.4 s to check; this one takes some 10 ms at most. In bytes.
_LARGE_BODY = 128 << 10
_DIGITS = re.compile(r"[0-9]{1,12}")


class BodyReader:
    """Reads the bodies of all requests of a door.

    Args:
        types: media types that are allowed, in lower case; "" for none.
    """

    def __init__(self, limits: Limits, types: Sequence[str]) -> None:
        self._limits = limits
        self._types = types
        self._num_buffered = 0

    async def read(self, request: Request) -> bytes:
        """The body, once its headers have been checked. Raises Refusal."""
        headers, limits = request.headers, self._limits
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in self._types:
            allowed = " and ".join(one for one in self._types if one and "form" not in one)
            raise Refusal(f"Content-Type: is not supported; allowed: {allowed}", 415)
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise Refusal("Content-Encoding: is not supported; allowed: identity", 415)
        length = headers.get("content-length", "0")
        if not _DIGITS.fullmatch(length) or int(length) > limits.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                await self._receive(request, body)
        except TimeoutError:
            raise Refusal(f"body: took over {limits.body_timeout_s:g} s", 408) from None
        finally:
            self._num_buffered -= len(body)
        return bytes(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Append all of a body. Raises Refusal."""
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise Refusal("the client has closed the connection", 499)
            part = message.get("body", b"")
            body += part
            self._num_buffered += len(part)
            if len(body) > self._limits.max_body_bytes:
                raise self._too_large()
            if self._num_buffered > self._limits.max_buffered_bytes:
                raise unavailable("the server receives too many large requests; retry later")
            if not message.get("more_body", False):
                return

    def _too_large(self) -> Refusal:
        return Refusal(f"body: is too large; allowed: {self._limits.max_body_bytes} bytes", 413)


async def checked(body: bytes, check: Callable[[], T]) -> T:
    """The result of a check of this body; a large one is checked beside the event loop."""
    if len(body) <= _LARGE_BODY:
        return check()
    try:
        return await asyncio.to_thread(check)
    except RuntimeError:  # no further thread can be started
        raise unavailable("the server has too many threads; retry later") from None
