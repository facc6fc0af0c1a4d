"""Values to KServe tensors and back: little-endian bytes, strings with a length in front."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from inflight_client.errors import InvalidRequest, ServerError

_FORMATS = {
    "INT32": "<i",
    "INT64": "<q",
    "UINT32": "<I",
    "UINT64": "<Q",
    "FP32": "<f",
    "BOOL": "<?",
}
_KINDS = {
    "INT32": f"an integer from {-(2**31)} to {2**31 - 1}",
    "INT64": f"an integer from {-(2**63)} to {2**63 - 1}",
    "UINT32": f"an integer from 0 to {2**32 - 1}",
    "UINT64": f"an integer from 0 to {2**64 - 1}",
    "FP32": "a number that fits 32 bits",
    "BOOL": "True or False",
    "BYTES": "a string",
}
# Of a value in an error: enough to find it.
_MAX_SHOWN = 80


def add_input(request: Any, name: str, datatype: str, value: Any, is_batched: bool = False) -> None:
    """Append an input of shape [1], or [N] if `value` is a list; with a batch of one, [1, 1] or
    [1, N].

    Raises:
        InvalidRequest: the value does not fit the datatype.
    """
    # A mapping is a single value, which is then rejected: its keys are not meant as values.
    many = isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping)
    values: Sequence[Any] = list(value) if many else [value]
    shape = [1, len(values)] if is_batched else [len(values)]
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(b"".join(_pack(name, datatype, item) for item in values))


def outputs(response: Any) -> dict[str, list[Any]]:
    """The values of each output, by name; outputs without any are left out.

    Raises:
        ServerError: an output does not match its datatype.
    """
    values: dict[str, list[Any]] = {}
    raws = response.raw_output_contents
    for output, raw in zip(response.outputs, raws, strict=False):
        if raw:
            values[output.name] = _unpack(output.name, output.datatype, raw)
    return values


def infer_request(model: str, version: str = "") -> Any:
    return service_pb2.ModelInferRequest(model_name=model, model_version=version)


def _pack(name: str, datatype: str, value: Any) -> bytes:
    try:
        if datatype == "BYTES":
            data: bytes = value.encode()
            return struct.pack("<I", len(data)) + data
        if datatype == "BOOL" and value not in (True, False):
            raise TypeError  # struct accepts any object, most of them as True
        return struct.pack(_FORMATS[datatype], value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name}: character {error.start + 1} is {error.object[error.start]!r}, a lone "
            "surrogate, which is no text; was it read from bytes that are not UTF-8?"
        ) from None
    except (struct.error, OverflowError, AttributeError, TypeError):
        bytes_ = isinstance(value, bytes | bytearray)
        raise InvalidRequest(
            f"{name}: {shown(value)} is not {_KINDS[datatype]}"
            + ("; decode the bytes first" if bytes_ and datatype == "BYTES" else "")
        ) from None


def shown(value: Any) -> str:
    """`repr` of a value for an error message, truncated if long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


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
