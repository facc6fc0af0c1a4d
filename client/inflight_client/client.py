"""The client: one gRPC stream per request."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from inflight_client import errors, tensors
from inflight_client.completion import Completion, Delta, joined, read_logprobs
from inflight_client.options import DATATYPES, Message, Options

DEFAULT_URL = "127.0.0.1:8001"
GENERATE = "generate"
CHAT = "chat"

# Lets Triton end a stream with the status code of an error, not with a message in a good stream.
_METADATA = (("triton_grpc_error", "true"),)
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


class TextStream:
    """The deltas of one request as they come. Closing it early, or leaving its `with` block,
    cancels the request; so does losing the last reference.

    Iterating raises ClientError and its kin, among them ServerError when the stream ends before
    its last response.

    Args:
        call: gRPC's.
        num_outputs: that were asked for.
    """

    def __init__(self, call: Any, num_outputs: int = 1) -> None:
        self._call = call
        self._num_outputs = num_outputs
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
                raise errors.from_rpc(error) from None
            if message.error_message:
                self.close()
                raise errors.from_message(message.error_message)
            # The next call reads on to the status, so that the call ends well on both sides.
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
        with contextlib.suppress(Exception):  # the interpreter may be going down
            self.close()

    def close(self) -> None:
        """Cancel what is still running. May be called twice, and from another thread."""
        self._ended = True
        self._call.cancel()

    def completion(self) -> Completion:
        """What is left of the stream, as one: of several outputs, the first."""
        return self.completions()[0]

    def completions(self) -> list[Completion]:
        """What is left of the stream: each of n outputs as one, in their order."""
        deltas = list(self)
        if not deltas:
            raise errors.ServerError("the stream was read to its end before")
        by_output: dict[int, list[Delta]] = {}
        for delta in deltas:
            by_output.setdefault(delta.index, []).append(delta)
        return [joined(own) for _, own in sorted(by_output.items())]


def _deltas(values: dict[str, list[Any]]) -> list[Delta]:
    """Of one response; none of the empty final one, where a server sends it."""
    texts = values.get("text_output", [])

    def of(name: str, otherwise: Any) -> list[Any]:
        return values.get(name) or [otherwise] * len(texts)

    (num_input_tokens, *_) = values.get("num_input_tokens", [0])
    (of_prompt, *_) = values.get("prompt_logprobs", [""])
    # There is one prompt, whatever the number of outputs.
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
    """Talks to one server. Threads may share it.

    Args:
        url: host:port of the server's gRPC endpoint.
        generate_model: name of the ensemble that takes a prompt.
        chat_model: name of the ensemble that takes messages.
        timeout: seconds for each request as a whole; None for no limit.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        generate_model: str = GENERATE,
        chat_model: str = CHAT,
        timeout: float | None = None,
    ) -> None:
        self.url = url
        self._generate_model = generate_model
        self._chat_model = chat_model
        self._timeout = timeout
        self._channel = grpc.insecure_channel(url, options=_CHANNEL_OPTIONS)
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
        """Close the connection; streams that are still open are cancelled."""
        self._channel.close()

    def is_ready(self) -> bool:
        """Whether the server answers and all its models are loaded.

        Raises:
            ClientError: no server answers.
        """
        try:
            answer = self._stub.ServerReady(
                service_pb2.ServerReadyRequest(), timeout=self._timeout or 5.0
            )
        except grpc.RpcError as error:
            raise errors.from_rpc(error) from None
        return bool(answer.ready)

    def generate(self, prompt: str, **options: Unpack[Options]) -> Completion:
        """Continue a prompt.

        Raises:
            ClientError: one of the tree in `inflight_client.errors`.
        """
        return self._send(self._generate_model, "text_input", prompt, False, options).completion()

    def generate_several(self, prompt: str, **options: Unpack[Options]) -> list[Completion]:
        """Continue a prompt in n ways; n is one of the options.

        Raises:
            ClientError: one of the tree in `inflight_client.errors`.
        """
        return self._send(self._generate_model, "text_input", prompt, False, options).completions()

    def stream(self, prompt: str, **options: Unpack[Options]) -> TextStream:
        """Continue a prompt; the request is on its way when this returns."""
        return self._send(self._generate_model, "text_input", prompt, True, options)

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Answer a chat.

        Raises:
            ClientError: one of the tree in `inflight_client.errors`.
        """
        text = _dump(messages)
        return self._send(self._chat_model, "messages", text, False, options).completion()

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[Options]) -> TextStream:
        """Answer a chat; the request is on its way when this returns."""
        return self._send(self._chat_model, "messages", _dump(messages), True, options)

    def _send(
        self, model: str, tensor: str, text: str, stream: bool, options: Options
    ) -> TextStream:
        request = tensors.infer_request(model)
        tensors.add_input(request, tensor, "BYTES", text)
        tensors.add_input(request, "stream", "BOOL", stream)
        tensors_of = dict(options)
        if (biases := tensors_of.pop("logit_bias", None)) is not None:
            if not isinstance(biases, Mapping):
                raise errors.InvalidRequest(
                    f"logit_bias: {biases!r} is not a mapping of token ids to numbers"
                )
            tensors_of |= {"logit_bias_ids": list(biases)}
            tensors_of |= {"logit_bias_values": list(biases.values())}
        for name, value in tensors_of.items():
            if name not in DATATYPES:
                raise errors.InvalidRequest(
                    f"{name} is not an option; allowed: {', '.join(Options.__annotations__)}"
                )
            tensors.add_input(request, name, DATATYPES[name], value)
        # The iterator of one request half-closes the stream: the server ends it after the answer.
        return TextStream(
            self._stub.ModelStreamInfer(iter([request]), timeout=self._timeout, metadata=_METADATA),
            options.get("n", 1),
        )


def _dump(messages: Sequence[Message]) -> str:
    return json.dumps(list(messages), ensure_ascii=False)
