"""The client: one gRPC stream per request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
from tritonclient.grpc import service_pb2_grpc

from inflight_client import credentials
from inflight_client.base import DEFAULT_URL, BaseClient, Build, Settings, T, refuse_several
from inflight_client.calls.flow import Flow, Pause, Query
from inflight_client.calls.server import Model, ModelMetadata
from inflight_client.calls.tokens import ModelDescription
from inflight_client.completion import Completion
from inflight_client.errors import ClientError
from inflight_client.layouts.layout import Prompt
from inflight_client.options import (
    ChatOptions,
    Message,
    PromptOptions,
    TokenizeOptions,
)
from inflight_client.stream import Opened, TextStream


class Client(BaseClient):
    """A connection to one server. Thread-safe.

    Args:
        url: host:port of the server's gRPC endpoint, optionally with `grpc://` or `http://`.
        settings: see `Settings`.

    Raises:
        InvalidRequest: the url or a setting is invalid.
    """

    def __init__(self, url: str = DEFAULT_URL, **settings: Unpack[Settings]) -> None:
        super().__init__(url, **settings)
        self._channel = credentials.channel(grpc, self.url, self._credentials)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; open streams are cancelled."""
        self._channel.close()

    def is_live(self) -> bool:
        """Whether the server runs.

        Raises:
            ClientError: the server does not respond.
        """
        return self._run(self._server_live())

    def is_ready(self) -> bool:
        """Whether the server is ready and all its models are loaded.

        Raises:
            ClientError: the server does not respond.
        """
        return self._run(self._server_ready())

    def is_model_ready(self, name: str) -> bool:
        """Whether the server has a model of this name and it is loaded.

        Raises:
            ClientError: the server does not respond.
        """
        return self._run(self._model_ready(name))

    def models(self) -> list[Model]:
        """The server's models, by name. A server that closes its index is asked for the models of
        the known layouts, of which those that are ready are found.

        Raises:
            ClientError: the server does not respond.
        """
        return self._run(self._models())

    def model_metadata(self, name: str) -> ModelMetadata:
        """A model's inputs and outputs.

        Raises:
            InvalidRequest: there is no such model.
            ClientError: the server does not respond.
        """
        return self._run(self._model_metadata(name))

    def describe(self) -> ModelDescription:
        """The model that the ensembles run: its name, context length and special tokens.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        return self._run(self._describe())

    def tokenize(
        self, prompt: str | Sequence[Message], **options: Unpack[TokenizeOptions]
    ) -> list[int]:
        """The token ids of a text, or of a chat through its template.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        return self._run(self._tokenize(prompt, options))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        return self._run(self._detokenize(ids))

    def generate(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Completion:
        """Complete a prompt, with one output; see `generate_several` for n.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        refuse_several(options, "generate_several(...)")
        return self._start(lambda: self._generation(prompt, False, options)).completion()

    def generate_several(
        self, prompt: Prompt, **options: Unpack[PromptOptions]
    ) -> list[Completion]:
        """Complete a prompt with n outputs; n is one of the options.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        return self._start(lambda: self._generation(prompt, False, options)).completions()

    def stream(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> TextStream:
        """Complete a prompt, streaming; the request has been sent when this returns."""
        return self._start(lambda: self._generation(prompt, True, options))

    def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Completion:
        """Complete a chat, with one output; see `chat_stream(...).completions()` for n.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        refuse_several(options, "chat_stream(...).completions()")
        return self._start(lambda: self._chat(messages, False, options)).completion()

    def chat_stream(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> TextStream:
        """Complete a chat, streaming; the request has been sent when this returns."""
        return self._start(lambda: self._chat(messages, True, options))

    def _start(self, build: Build) -> TextStream:
        retries = self._retries()
        retries.start()
        self._run(self._detect())
        generation = build()

        def send() -> Opened:
            # The iterator of one request half-closes the stream: the server ends it after the
            # response.
            call = self._stub.ModelStreamInfer(
                iter([generation.request]), timeout=retries.remaining(), metadata=self._metadata
            )
            return call, generation.reader()

        return TextStream(send, retries, self._to_error)

    def _run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                try:
                    outcome = self._do(step)
                except ClientError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as end:
            value: T = end.value
            return value

    def _do(self, step: Query | Pause) -> Any:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            return getattr(self._stub, step.method)(
                step.request, timeout=step.timeout, metadata=self._authorization
            )
        except grpc.RpcError as error:
            raise self._to_error(error, step.timeout) from None
