"""Values to KServe tensors and back: little-endian bytes, strings with a length in front."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from inflight_client.errors import InvalidRequest, ServerError

_FORMATS = {"INT32": "<i", "UINT32": "<I", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?"}


def add_input(request: Any, name: str, datatype: str, value: Any) -> None:
    """Append an input of shape [1], or [N] where `value` is a list of strings.

    Raises:
        InvalidRequest: the value does not fit the datatype.
    """
    many = datatype == "BYTES" and not isinstance(value, str)
    values: Sequence[Any] = list(value) if many else [value]
    request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
    request.raw_input_contents.append(b"".join(_pack(name, datatype, item) for item in values))


def outputs(response: Any) -> dict[str, Any]:
    """The first element of each output, by name; outputs without elements are left out.

    Raises:
        ServerError: an output is not what the contract says.
    """
    values: dict[str, Any] = {}
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


def _unpack(name: str, datatype: str, raw: bytes) -> Any:
    try:
        if datatype == "BYTES":
            (length,) = struct.unpack_from("<I", raw)
            return raw[4 : 4 + length].decode()
        return struct.unpack_from(_FORMATS[datatype], raw)[0]
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ServerError(f"output {name} of {datatype} cannot be read ({error})") from None
