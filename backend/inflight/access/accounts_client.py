"""A door's connection to the accountant."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import msgspec

from inflight.access.key import Key
from inflight.access.messages import Begin, End, Metrics, ReadMetrics, Verdict, to_line
from inflight.errors import CapacityError, LimitExceeded

TIMEOUT_S = 5.0
_LOST = "the server cannot check the limits of the key now; retry later"


Question = Begin | ReadMetrics
Reply = Verdict | Metrics


class Lease:
    """A request in flight, until `end`."""

    def __init__(self, link: _Link, account: str) -> None:
        self._link: _Link | None = link
        self._account = account

    def end(self) -> None:
        """The request is over. Idempotent."""
        if self._link is not None:
            self._link.send(End(self._account))
            self._link = None


class AccountsClient:
    """Has the accountant admit each request; connects when first used and after a loss.

    Without the accountant no request is admitted: its limits could not be checked.

    Args:
        path: of the accountant's socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()

    async def begin(self, key: Key) -> Lease:
        """Admit a request of a key.

        Raises:
            LimitExceeded: it exceeds a limit of the key.
            CapacityError: the accountant does not answer.
        """
        link, verdict = await self._call(Begin(key.account, key.limits))
        assert isinstance(verdict, Verdict)
        if verdict.limit:
            raise LimitExceeded(verdict.limit, verdict.value, verdict.retry_after_s)
        return Lease(link, key.account)

    async def metrics(self) -> str:
        """By tenant, in Prometheus's text format.

        Raises:
            CapacityError: the accountant does not answer.
        """
        _, metrics = await self._call(ReadMetrics())
        assert isinstance(metrics, Metrics)
        return metrics.text

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    async def _call(self, question: Question) -> tuple[_Link, Reply]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                link = await self._connected()
                return link, await link.call(question)
        except (OSError, TimeoutError):
            raise CapacityError(_LOST) from None

    async def _connected(self) -> _Link:
        async with self._connecting:
            if self._link is None or self._link.is_closed:
                loop = asyncio.get_running_loop()
                _, self._link = await loop.create_unix_connection(_Link, str(self._path))
            return self._link


class _Link(asyncio.Protocol):
    """One connection. Replies come in the order of the questions."""

    def __init__(self) -> None:
        self.is_closed = False
        self._transport: asyncio.WriteTransport | None = None
        self._waiting: deque[tuple[asyncio.Future[Reply], Question]] = deque()
        self._decoder = msgspec.json.Decoder(Verdict | Metrics)
        self._rest = b""

    async def call(self, question: Question) -> Reply:
        """Raises ConnectionError."""
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, question))
        self.send(question)
        if self.is_closed:
            self._fail()
        try:
            return await answer
        except asyncio.CancelledError:
            # The verdict and the end of the client's request came together.
            if answer.done() and not answer.cancelled() and not answer.exception():
                self._give_back(answer.result(), question)
            raise

    def send(self, message: Question | End) -> None:
        if self._transport is not None and not self.is_closed:
            self._transport.write(to_line(message))

    def _give_back(self, reply: Reply, question: Question) -> None:
        """The request is gone by the time it is admitted."""
        if isinstance(question, Begin) and isinstance(reply, Verdict) and not reply.limit:
            self.send(End(question.account))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            answer, question = self._waiting.popleft()
            reply = self._decoder.decode(line)
            if not answer.done():
                answer.set_result(reply)
            else:
                self._give_back(reply, question)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._fail()

    def _fail(self) -> None:
        while self._waiting:
            answer, _ = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(ConnectionResetError())
