"""The client: one gRPC stream per request."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from inflight_client import address, credentials, errors, tensors
from inflight_client.completion import Completion, Delta, joined, read_logprobs
from inflight_client.option_table import Options
from inflight_client.options import Message, as_json, num_outputs, tensors_of

DEFAULT_URL = address.DEFAULT_URL
GENERATE = "generate"
CHAT = "chat"

# Timeout of readiness queries if the client has none.
_READY_TIMEOUT_S = 5.0
# Makes Triton end a stream with an error status code instead of a message in a successful stream.
_METADATA = (("triton_grpc_error", "true"),)
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


class TextStream:
    """The deltas of one request as they arrive. Closing it early, leaving its `with` block, or
    dropping the last reference cancels the request.

    Iterating raises ClientError or a subclass; ServerError if the stream ends before its last
    response.

    Args:
        call: gRPC's.
        num_outputs: number of outputs requested.
        to_error: converts a failed call to a ClientError.
    """

    def __init__(
        self,
        call: Any,
        num_outputs: int = 1,
        to_error: Callable[[grpc.RpcError], errors.ClientError] = errors.from_rpc,
    ) -> None:
        self._call = call
        self._num_outputs = num_outputs
        self._to_error = to_error
        self._num_answered = 0
        self._ready: deque[Delta] = deque()
        self._ended = False

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> Delta:
        while not self._ready and not self._ended:
            try:
                message = next(self._call)
            except StopIteration:
                self._ended = True
                if self._num_answered >= self._num_outputs:
                    break
                raise errors.ServerError("the stream ended before its last response") from None
            except grpc.RpcError as error:
                self._ended = True
                raise self._to_error(error) from None
            if message.error_message:
                self.close()
                raise errors.from_message(message.error_message)
            # The next call reads the status, so that the call ends cleanly on both sides.
            self._ready += _deltas(tensors.outputs(message.infer_response))
        if not self._ready:
            raise StopIteration
        delta = self._ready.popleft()
        self._num_answered += delta.finish_reason is not None
        return delta

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
        """Cancel the request if it is still running. Idempotent and thread-safe."""
        self._ended = True
        self._call.cancel()

    def completion(self) -> Completion:
        """Read the rest of the stream as one completion; with several outputs, the first."""
        return self.completions()[0]

    def completions(self) -> list[Completion]:
        """Read the rest of the stream as one completion per output, in order."""
        deltas = list(self)
        if not deltas:
            raise errors.ServerError("the stream has already been read to its end")
        by_output: dict[int, list[Delta]] = {}
        for delta in deltas:
            by_output.setdefault(delta.index, []).append(delta)
        return [joined(own) for _, own in sorted(by_output.items())]


def _deltas(values: dict[str, list[Any]]) -> list[Delta]:
    """The deltas of one response; none for an empty final one."""
    texts = values.get("text_output", [])

    def of(name: str, otherwise: Any) -> list[Any]:
        return values.get(name) or [otherwise] * len(texts)

    (num_input_tokens, *_) = values.get("num_input_tokens", [0])
    (of_prompt, *_) = values.get("prompt_logprobs", [""])
    # There is one prompt for all outputs.
    of_prompts = [of_prompt] + [""] * (len(texts) - 1)
    return [
        Delta(
            text,
            reason or None,
            num_input_tokens,
            count,
            read_logprobs(logprobs),
            index,
            read_logprobs(prompt_logprobs, "prompt_logprobs"),
        )
        for text, reason, count, logprobs, index, prompt_logprobs in zip(
            texts,
            of("finish_reason", ""),
            of("num_output_tokens", 0),
            of("logprobs", ""),
            of("index", 0),
            of_prompts[: len(texts)],
            strict=True,
        )
    ]


class Client:
    """A connection to one server. Thread-safe.

    Args:
        url: host:port of the server's gRPC endpoint, optionally with `grpc://` or `http://`.
        generate_model: name of the ensemble for prompts.
        chat_model: name of the ensemble for messages.
        version: of the models, if the server has several; None for the highest.
        timeout: seconds for each request as a whole; None for no limit.
        api_key: of a server with keys.
        ca_file: connect with TLS, and trust the authorities of this PEM file.

    Raises:
        InvalidRequest: the url, the version, the timeout, the key or the file is invalid.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        generate_model: str = GENERATE,
        chat_model: str = CHAT,
        version: int | None = None,
        timeout: float | None = None,
        api_key: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        self.url = address.checked_url(url)
        self.generate_model = generate_model
        self.chat_model = chat_model
        self._version = _checked_version(version)
        self._timeout = address.checked_timeout(timeout)
        self._authorization = credentials.authorization(api_key)
        self._channel = credentials.channel(self.url, ca_file, _CHANNEL_OPTIONS)
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

    def is_ready(self) -> bool:
        """Whether the server is ready and all its models are loaded.

        Raises:
            ClientError: the server does not respond.
        """
        return self._is_ready(self._stub.ServerReady, service_pb2.ServerReadyRequest())

    def is_model_ready(self, name: str) -> bool:
        """Whether the server has a model of this name and it is loaded.

        Raises:
            ClientError: the server does not respond.
        """
        request = service_pb2.ModelReadyRequest(name=name, version=self._version)
        return self._is_ready(self._stub.ModelReady, request)

    def generate(self, prompt: str, **options: Unpack[Options]) -> Completion:
        """Complete a prompt, with one output; see `generate_several` for n.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        _refuse_several(options, "use generate_several(...)")
        return self._send(self.generate_model, "text_input", prompt, False, options).completion()

    def generate_several(self, prompt: str, **options: Unpack[Options]) -> list[Completion]:
        """Complete a prompt with n outputs; n is one of the options.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        return self._send(self.generate_model, "text_input", prompt, False, options).completions()

    def stream(self, prompt: str, **options: Unpack[Options]) -> TextStream:
        """Complete a prompt, streaming; the request has been sent when this returns."""
        return self._send(self.generate_model, "text_input", prompt, True, options)

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Complete a chat, with one output; see `chat_stream(...).completions()` for n.

        Raises:
            ClientError: see `inflight_client.errors`.
        """
        _refuse_several(options, "use chat_stream(...).completions()")
        text = _dump(messages)
        return self._send(self.chat_model, "messages", text, False, options).completion()

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[Options]) -> TextStream:
        """Complete a chat, streaming; the request has been sent when this returns."""
        return self._send(self.chat_model, "messages", _dump(messages), True, options)

    def _send(
        self, model: str, tensor: str, text: str, stream: bool, options: Options
    ) -> TextStream:
        request = tensors.infer_request(model, self._version)
        tensors.add_input(request, tensor, "BYTES", text)
        tensors.add_input(request, "stream", "BOOL", stream)
        for name, datatype, value in tensors_of(options):
            tensors.add_input(request, name, datatype, value)
        # The iterator of one request half-closes the stream: the server ends it after the response.
        return TextStream(
            self._stub.ModelStreamInfer(
                iter([request]), timeout=self._timeout, metadata=(*_METADATA, *self._authorization)
            ),
            num_outputs(options),
            functools.partial(errors.from_rpc, hint=self._hint, timeout=self._timeout),
        )

    def _is_ready(self, method: Any, request: Any) -> bool:
        timeout = self._timeout or _READY_TIMEOUT_S
        try:
            answer = method(request, timeout=timeout, metadata=self._authorization)
        except grpc.RpcError as error:
            raise errors.from_rpc(error, self._hint, timeout) from None
        return bool(answer.ready)

    @property
    def _hint(self) -> str:
        return f"url is {self.url}; it must be {address.WANTED}"


def _checked_version(version: int | None) -> str:
    """As it is sent. Raises InvalidRequest: it is not one."""
    if version is None:
        return ""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise errors.InvalidRequest(f"version: is {version!r}; allowed: 0 or more, or None")
    return str(version)


def _refuse_several(options: Options, remedy: str) -> None:
    if (n := num_outputs(options)) > 1:
        raise errors.InvalidRequest(
            f"n: {n} outputs requested, but this method returns one; {remedy}"
        )


def _dump(messages: Sequence[Message]) -> str:
    return as_json("messages", list(messages))
