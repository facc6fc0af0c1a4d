"""A scripted KServe gRPC server in this process, for the client's tests."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

Script = Callable[["Call"], Iterator[Any]]

WAIT_S = 60.0


class Call:
    """One request as the server sees it.

    Attributes:
        request: the ModelInferRequest.
        metadata: of the call.
        half_closed: whether the client has closed its side.
        ended: set when the call is over, cancelled or not.
    """

    def __init__(self, request: Any, context: Any) -> None:
        self.request = request
        self.context = context
        self.metadata = {item.key: item.value for item in context.invocation_metadata()}
        self.half_closed = False
        self.ended = threading.Event()
        context.add_callback(self.ended.set)

    def input(self, name: str) -> tuple[str, list[int], bytes]:
        """(datatype, shape, bytes) of an input."""
        for tensor, raw in zip(self.request.inputs, self.request.raw_input_contents, strict=True):
            if tensor.name == name:
                return tensor.datatype, list(tensor.shape), raw
        raise KeyError(name)

    def input_names(self) -> list[str]:
        return [tensor.name for tensor in self.request.inputs]


def two_words(call: Call) -> Iterator[Any]:
    """A script: two tokens, then three."""
    yield answer("Hello", num_output=2)
    yield answer(" wörld", "stop", num_output=3)


def endless(call: Call) -> Iterator[Any]:
    """A script: one token, and none until the call ends."""
    yield answer("Hello")
    call.ended.wait(WAIT_S)


def failing(num_failures: int, code: grpc.StatusCode, text: str, *trailing: Any) -> Script:
    """A script: the first calls fail with a status, later ones yield two words; trailing: metadata
    of the failures."""
    failed: list[Call] = []

    def script(call: Call) -> Iterator[Any]:
        if len(failed) < num_failures:
            failed.append(call)
            call.context.set_trailing_metadata(trailing)
            call.context.abort(code, text)
        yield from two_words(call)

    return script


MISSING = ("nope", "no[/b]pe", "no[/b]pe_chat")
"""Models that the server does not have."""
NATIVE_MODELS = ("chat", "chat_tokenizer", "detokenizer", "generate", "llm", "tokenizer")


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Attributes:
    script: yields the responses of a call.
    calls: all calls so far.
    models: of the server; None for all names but MISSING, with the native ones in the index.
    has_index: whether the index is open.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.models: tuple[str, ...] | None = None
        self.has_index = True
        self.url = ""

    def ServerLive(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        if not self.has_index:  # as Triton answers
            text = "This protocol is restricted, expecting header 'triton-grpc-protocol-x'"
            context.abort(grpc.StatusCode.UNAVAILABLE, text)
        index = service_pb2.RepositoryIndexResponse()
        for name in NATIVE_MODELS if self.models is None else self.models:
            ready = name not in MISSING
            index.models.add(
                name=name, version="1" if ready else "", state="READY" if ready else "UNAVAILABLE"
            )
        return index

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        if not self._has(request.name):
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: {request.name}")
        found = service_pb2.ModelMetadataResponse(
            name=request.name, versions=["1", "2"], platform="ensemble"
        )
        found.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        found.outputs.add(name="text_output", datatype="BYTES", shape=[-1])
        return found

    def ModelInfer(self, request: Any, context: Any) -> Any:
        call = Call(request, context)
        self.calls.append(call)
        (response,) = self.script(call)
        return response

    def _has(self, name: str) -> bool:
        return name not in MISSING and (self.models is None or name in self.models)

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self._has(request.name))

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        call = Call(next(requests), context)
        self.calls.append(call)
        call.half_closed = next(requests, None) is None
        yield from self.script(call)


@contextlib.contextmanager
def serve(script: Script, port: int = 0) -> Iterator[FakeTriton]:
    fake = FakeTriton(script)
    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    fake.url = f"127.0.0.1:{port}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(0).wait()


def answer(
    text: str,
    finish_reason: str = "",
    num_input: int = 5,
    num_output: int = 1,
    logprobs: str = "",
    index: int = 0,
    prompt_logprobs: str = "",
) -> Any:
    """One response of an ensemble, about one output."""
    outputs = [(index, text, finish_reason, num_output, logprobs)]
    return answers(outputs, num_input, prompt_logprobs)


def answers(
    outputs: list[tuple[int, str, str, int, str]], num_input: int = 5, prompt_logprobs: str = ""
) -> Any:
    """One response: (index, text, finish reason, tokens, logprobs) of each output."""
    infer = service_pb2.ModelInferResponse(model_name="generate")
    count = len(outputs)
    indexes, texts, reasons, counts, logprobs = zip(*outputs, strict=True)
    for name, datatype, size, raw in (
        ("text_output", "BYTES", count, b"".join(map(_string, texts))),
        ("index", "UINT32", count, struct.pack(f"<{count}I", *indexes)),
        ("finish_reason", "BYTES", count, b"".join(map(_string, reasons))),
        ("num_input_tokens", "UINT32", 1, struct.pack("<I", num_input)),
        ("num_output_tokens", "UINT32", count, struct.pack(f"<{count}I", *counts)),
        ("cumulative_logprob", "FP32", count, struct.pack(f"<{count}f", *[-0.5] * count)),
        ("logprobs", "BYTES", count, b"".join(map(_string, logprobs))),
        ("prompt_logprobs", "BYTES", 1, _string(prompt_logprobs)),
        ("draft_stats", "BYTES", count, _string("") * count),
    ):
        infer.outputs.add(name=name, datatype=datatype, shape=[size])
        infer.raw_output_contents.append(raw)
    infer.parameters["triton_final_response"].bool_param = all(reasons)
    return service_pb2.ModelStreamInferResponse(infer_response=infer)


def empty_final() -> Any:
    infer = service_pb2.ModelInferResponse(model_name="generate")
    infer.parameters["triton_final_response"].bool_param = True
    return service_pb2.ModelStreamInferResponse(infer_response=infer)


def error(message: str) -> Any:
    return service_pb2.ModelStreamInferResponse(error_message=message)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def inferred(*outputs: tuple[str, str, list[int], bytes]) -> Any:
    """A response of ModelInfer: (name, datatype, shape, bytes) of each output."""
    infer = service_pb2.ModelInferResponse(model_name="some")
    for name, datatype, shape, raw in outputs:
        infer.outputs.add(name=name, datatype=datatype, shape=shape)
        infer.raw_output_contents.append(raw)
    return infer


def streamed(*outputs: tuple[str, str, list[int], bytes]) -> Any:
    """The same as a message of a stream."""
    return service_pb2.ModelStreamInferResponse(infer_response=inferred(*outputs))


def strings(*texts: str) -> bytes:
    """As the elements of a tensor."""
    return b"".join(map(_string, texts))
