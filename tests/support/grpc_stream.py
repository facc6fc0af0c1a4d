"""Streams and refusals of the gRPC door, as its clients see them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kserve import request, text

PROMPT = text("A prompt")


class Stream:
    """An open ModelStreamInfer."""

    def __init__(self, stub: Any, *metadata: tuple[str, str]) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self.call = stub.ModelStreamInfer(iter(self._requests.get, None), metadata=metadata)

    def ask(self, model: str = "generate", *inputs: Any, **fields: Any) -> Any:
        """Send a request; its first response."""
        self.send(request(model, *(inputs or (PROMPT,)), **fields))
        return next(self.call)

    def send(self, message: Any) -> None:
        self._requests.put(message)

    def close(self) -> list[Any]:
        """End the client's part; the remaining responses."""
        self._requests.put(None)
        return list(self.call)

    def status(self) -> tuple[grpc.StatusCode, str]:
        """Code and details with which the server ends the stream."""
        with pytest.raises(grpc.RpcError) as caught:
            while True:
                next(self.call)
        self._requests.put(None)
        return caught.value.code(), caught.value.details()


def refused(
    function: Callable[..., Any], *arguments: Any, **named: Any
) -> tuple[grpc.StatusCode, str]:
    """Code and details with which the server refuses a call."""
    with pytest.raises(grpc.RpcError) as caught:
        function(*arguments, **named)
    return caught.value.code(), caught.value.details()
