"""Values to KServe tensors and back: little-endian bytes, strings with a length in front."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from inflight_client.errors import InvalidRequest, ServerError

_FORMATS = {"INT32": "<i", "UINT32": "<I", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?"}


def add_input(request: Any, name: str, datatype: str, value: Any) -> None:
    """Append an input of shape [1], or [N] where `value` is a list.

    Raises:
        InvalidRequest: the value does not fit the datatype.
    """
    many = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    values: Sequence[Any] = list(value) if many else [value]
    request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
    request.raw_input_contents.append(b"".join(_pack(name, datatype, item) for item in values))


def outputs(response: Any) -> dict[str, list[Any]]:
    """The values of each output, by name; outputs without any are left out.

    Raises:
        ServerError: an output is not what the contract says.
    """
    values: dict[str, list[Any]] = {}
    raws = response.raw_output_contents
    for output, raw in zip(response.outputs, raws, strict=False):
        if raw:
            values[output.name] = _unpack(output.name, output.datatype, raw)
    return values


def infer_request(model: str) -> Any:
    return service_pb2.ModelInferRequest(model_name=model)


def _pack(name: str, datatype: str, value: Any) -> bytes:
    try:
        if datatype == "BYTES":
            data: bytes = value.encode()
            return struct.pack("<I", len(data)) + data
        return struct.pack(_FORMATS[datatype], value)
    except (struct.error, OverflowError, AttributeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{name}: {value!r} is not a {datatype} ({error})") from None


def _unpack(name: str, datatype: str, raw: bytes) -> list[Any]:
    try:
        if datatype != "BYTES":
            return [value for (value,) in struct.iter_unpack(_FORMATS[datatype], raw)]
        texts = []
        first = 0
        while first < len(raw):
            (length,) = struct.unpack_from("<I", raw, first)
            first += 4 + length
            if first > len(raw):
                raise struct.error(f"{length} bytes are announced and {len(raw)} are there")
            texts.append(raw[first - length : first].decode())
        return texts
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ServerError(f"output {name} of {datatype} cannot be read ({error})") from None
