"""A bare KServe client for tests, which can also send invalid requests."""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

# Of a request with all its responses: far more than any takes, even on a busy machine.
TIMEOUT_S = 120.0
_NUMPY = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}

# (name, datatype, shape, raw bytes)
RawInput = tuple[str, str, list[int], bytes]


class Refused(Exception):
    """The server's error text."""


def tensor(name: str, datatype: str, values: Any, shape: list[int] | None = None) -> RawInput:
    """One input; the shape is that of the values unless said otherwise."""
    values = values if isinstance(values, list) else [values]
    if datatype == "BYTES":
        parts = [value.encode() if isinstance(value, str) else value for value in values]
        raw = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    else:
        raw = np.array(values, _NUMPY[datatype]).tobytes()
    return name, datatype, [len(values)] if shape is None else shape, raw


def text(value: str | bytes, name: str = "text_input") -> RawInput:
    return tensor(name, "BYTES", [value])


def request(model: str, *inputs: RawInput, **fields: Any) -> Any:
    """A ModelInferRequest. Fields: parameters (dict), id, version (str)."""
    message = service_pb2.ModelInferRequest(
        model_name=model, model_version=fields.get("version", ""), id=fields.get("id", "")
    )
    for name, datatype, shape, raw in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    for name, value in fields.get("parameters", {}).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    return message


def outputs(response: Any) -> dict[str, Any]:
    """A response's outputs: a Python value where the shape is [1], else a list."""
    found = {}
    for meta, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values = _strings(raw) if meta.datatype == "BYTES" else _numbers(meta.datatype, raw)
        found[meta.name] = values[0] if list(meta.shape) == [1] else values
    return found


def _numbers(datatype: str, raw: bytes) -> list[Any]:
    values: list[Any] = np.frombuffer(raw, _NUMPY[datatype]).tolist()
    return values


def _strings(raw: bytes) -> list[str]:
    found, offset = [], 0
    while offset < len(raw):
        (length,) = struct.unpack_from("<I", raw, offset)
        found.append(raw[offset + 4 : offset + 4 + length].decode())  # strict: invalid is a failure
        offset += 4 + length
    return found


class Stream:
    """One request on a gRPC stream of its own connection."""

    def __init__(self, address: str, message: Any) -> None:
        self.channel = grpc.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.call = stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT_S)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises Refused with the server's text, once the server has closed the stream."""
        error = None
        try:
            for response in self.call:
                if response.error_message:
                    error = Refused(response.error_message)
                else:
                    yield outputs(response.infer_response)
        except grpc.RpcError as broken:
            raise Refused(f"{broken.code().name}: {broken.details()}") from None
        finally:
            self.channel.close()
        if error is not None:
            raise error

    def next(self) -> dict[str, Any]:
        return outputs(next(self.call).infer_response)

    def cancel(self) -> None:
        self.call.cancel()
        self.channel.close()

    def hang_up(self) -> None:
        """Close the connection without a word about the call."""
        self.channel.close()


def ask(address: str, message: Any) -> list[dict[str, Any]]:
    """All responses to a request.

    Raises:
        Refused: with the server's text.
    """
    return list(Stream(address, message))


def post(address: str, model: str, route: str, body: Any) -> tuple[int, str]:
    """POST to /generate or /generate_stream; `body` is JSON text, or what to write as JSON."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        payload = body if isinstance(body, str) else json.dumps(body)
        connection.request("POST", f"/v2/models/{model}/{route}", payload.encode())
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def generate(address: str, model: str, **inputs: Any) -> dict[str, Any]:
    """/generate; raises Refused with the status and the server's text."""
    status, text = post(address, model, "generate", inputs)
    if status != 200:
        raise Refused(f"{status}: {json.loads(text)['error']}")
    answer: dict[str, Any] = json.loads(text)
    if "error" in answer:
        raise Refused(f"{status}: {answer['error']}")
    return answer


def generate_stream(address: str, model: str, **inputs: Any) -> list[dict[str, Any]]:
    """The events of /generate_stream."""
    _, text = post(address, model, "generate_stream", {"stream": True, **inputs})
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(event) for event in events]
