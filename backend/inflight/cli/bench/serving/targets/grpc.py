"""Triton's gRPC: an ensemble of the server, through the bundled client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

from inflight.cli.bench.serving.targets.target import CONTEXT, Arrival, Prompt
from inflight_client import AsyncClient, ClientError, InvalidRequest
from inflight_client.option_table import Options

GENERATE, CHAT = "generate", "chat"


class GrpcTarget:
    """
    Args:
        client: whose models are the ensemble; closed with the target.
        model: name of the ensemble.
        is_chat: send prompts as the message of a user.
    """

    def __init__(self, client: AsyncClient, model: str, *, is_chat: bool) -> None:
        self._client = client
        self._model = model
        self._is_chat = is_chat

    async def send(self, prompt: Prompt) -> AsyncGenerator[Arrival, None]:
        """See `Target.send`."""
        options: Options = {
            "max_tokens": prompt.output_len,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        stream = (
            self._client.chat_stream([{"role": "user", "content": prompt.text}], **options)
            if self._is_chat
            else self._client.stream(prompt.text, **options)
        )
        async with stream:
            async for delta in stream:
                yield Arrival(time.perf_counter(), delta.num_output_tokens, delta.num_input_tokens)

    async def describe(self) -> dict[str, str]:
        """See `Target.describe`."""
        if not await self._client.is_model_ready(self._model):
            raise InvalidRequest(
                f"--model: the server has no model {self._model!r}, or it is not ready; set --model"
            )
        found = {"endpoint": "grpc", "url": self._client.url, "model": self._model}
        if self._model in (GENERATE, CHAT):  # the client knows their tokenizer only
            with contextlib.suppress(ClientError):
                described = await self._client.describe()
                found |= {"serves": described.model, CONTEXT: str(described.max_model_len)}
        return found

    async def aclose(self) -> None:
        await self._client.aclose()
