"""The client for asyncio: one gRPC stream per request."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
from tritonclient.grpc import service_pb2_grpc

from inflight_client import credentials
from inflight_client.base import BaseClient, Build, T, refuse_several
from inflight_client.calls.flow import Flow, Pause, Query
from inflight_client.calls.server import Model, ModelMetadata
from inflight_client.calls.tokens import ModelDescription
from inflight_client.cancellation import cancelled_calls
from inflight_client.completion import Completion
from inflight_client.errors import ClientError
from inflight_client.layouts.layout import Prompt
from inflight_client.options import ChatOptions, Message, PromptOptions, TokenizeOptions
from inflight_client.stream import AsyncTextStream, Opened


class AsyncClient(BaseClient):
    """A connection to one server, made with the first request, for the event loop of that request.
    Its methods and arguments are those of `Client`.

        async with AsyncClient("127.0.0.1:8001") as client:
            print((await client.generate("The capital of France is", max_tokens=8)).text)
            async with client.stream("Once upon a time") as stream:
                async for delta in stream:
                    print(delta.text, end="", flush=True)
    """

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; open streams are cancelled."""
        if "_channel" in self.__dict__:
            await self._channel.close()

    async def is_live(self) -> bool:
        """Whether the server runs.

        Raises:
            ClientError: the server does not respond.
        """
        return await self._run(self._server_live())

    async def is_ready(self) -> bool:
        """Whether the server is ready and all its models are loaded.

        Raises:
            ClientError: the server does not respond.
        """
        return await self._run(self._server_ready())

    async def is_model_ready(self, name: str) -> bool:
        """Whether the server has a model of this name and it is loaded.

        Raises:
            ClientError: the server does not respond.
        """
        return await self._run(self._model_ready(name))

    async def models(self) -> list[Model]:
        """The server's models, by name. A server that closes its index is asked for the models of
        the known layouts, of which those that are ready are found.

        Raises:
            ClientError: the server does not respond.
        """
        return await self._run(self._models())

    async def model_metadata(self, name: str) -> ModelMetadata:
        """A model's inputs and outputs.

        Raises:
            InvalidRequest: there is no such model.
            ClientError: the server does not respond.
        """
        return await self._run(self._model_metadata(name))

    async def describe(self) -> ModelDescription:
        """The model that the ensembles run: its name, context length and special tokens.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        return await self._run(self._describe())

    async def tokenize(
        self, prompt: str | Sequence[Message], **options: Unpack[TokenizeOptions]
    ) -> list[int]:
        """The token ids of a text, or of a chat through its template.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        return await self._run(self._tokenize(prompt, options))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        return await self._run(self._detokenize(ids))

    async def generate(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Completion:
        """Complete a prompt, with one output; see `generate_several` for n.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        refuse_several(options, "generate_several(...)")
        return await self._start(lambda: self._generation(prompt, False, options)).completion()

    async def generate_several(
        self, prompt: Prompt, **options: Unpack[PromptOptions]
    ) -> list[Completion]:
        """Complete a prompt with n outputs; n is one of the options.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        return await self._start(lambda: self._generation(prompt, False, options)).completions()

    def stream(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> AsyncTextStream:
        """Complete a prompt, streaming; entering its `async with` block sends the
        request."""
        return self._start(lambda: self._generation(prompt, True, options))

    async def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Completion:
        """Complete a chat, with one output; see `chat_stream(...).completions()` for n.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        refuse_several(options, "chat_stream(...).completions()")
        return await self._start(lambda: self._chat(messages, False, options)).completion()

    def chat_stream(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> AsyncTextStream:
        """Complete a chat, streaming; entering its `async with` block sends the
        request."""
        return self._start(lambda: self._chat(messages, True, options))

    # gRPC binds a channel to the event loop that runs when it is made.
    @functools.cached_property
    def _channel(self) -> Any:
        return credentials.channel(grpc.aio, self.url, self._credentials)

    @functools.cached_property
    def _stub(self) -> Any:
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _start(self, build: Build) -> AsyncTextStream:
        # An invalid request raises here, unless the layout has to be found first.
        built = build() if self._layout is not None else None
        retries = self._retries()

        async def send() -> Opened:
            nonlocal built
            if built is None:
                await self._run(self._detect())
                built = build()
            # The iterator of one request half-closes the stream: the server ends it after the
            # response.
            call = self._stub.ModelStreamInfer(
                iter([built.request]), timeout=retries.remaining(), metadata=self._metadata
            )
            return call, built.reader()

        return AsyncTextStream(send, retries, self._to_error)

    async def _run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                try:
                    outcome = await self._do(step)
                except ClientError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as end:
            value: T = end.value
            return value

    async def _do(self, step: Query | Pause) -> Any:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            with cancelled_calls():
                return await getattr(self._stub, step.method)(
                    step.request, timeout=step.timeout, metadata=self._authorization
                )
        except grpc.RpcError as error:
            raise self._to_error(error, step.timeout) from None
