"""Calls that a client makes, as generators: they yield what to do next and are sent the outcome, so
that `Client` and `AsyncClient` share them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from inflight_client.calls.retries import Retries
from inflight_client.errors import ClientError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Query:
    """A unary call; a client sends its response back, or throws a ClientError.

    Attributes:
        method: of the service, such as ServerReady.
        request: its message.
        timeout: seconds; None for no limit.
    """

    method: str
    request: Any
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Pause:
    """A wait, in seconds."""

    seconds: float


Flow = Generator[Query | Pause, Any, T]


def retried(method: str, request: Any, retries: Retries) -> Flow[Any]:
    """The response to a call, sent again as `retries` allows.

    Raises:
        ClientError: the last attempt failed.
    """
    retries.start()
    while True:
        try:
            return (yield Query(method, request, retries.remaining()))
        except ClientError as error:
            delay = retries.delay(error)
            if delay is None:
                raise
        yield Pause(delay)
