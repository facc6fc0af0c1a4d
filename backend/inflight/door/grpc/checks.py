"""Checks of a client's messages before Triton reads them.

A message that passes is written anew from what was understood: Triton cannot read anything else
into the same bytes, and fields that the protocol does not know are left behind.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf.message import DecodeError

from inflight.door.grpc import messages, tensors
from inflight.door.grpc.status import Code, Refused
from inflight.door.limits import Limits
from inflight.errors import RequestError
from inflight.ipc.metrics.usage import RESERVED

EMPTY_FINAL = "triton_enable_empty_final_response"
MAX_NAME = 128
MAX_ID = 256
MAX_VERSION_DIGITS = 18
MAX_TIMEOUT_US = 2**53
MAX_PRIORITY = 2**32 - 1

_MODEL = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{MAX_NAME - 1}}}")
_VERSION = re.compile(rf"[0-9]{{0,{MAX_VERSION_DIGITS}}}")
_NAME = re.compile(rf"[!-~]([ -~]{{0,{MAX_NAME - 1}}})")
MAX_SEQUENCE_ID = 2**63 - 1


def infer_request(data: bytes, limits: Limits) -> Any:
    """A well-formed ModelInferRequest. Triton and the model check it against the model's inputs.

    Raises:
        RequestError: what is wrong.
    """
    request = _parse_infer_request(data, limits)
    check_model(request.model_name, request.model_version)
    if len(request.id) > MAX_ID or not request.id.isprintable():
        raise RequestError(f"allowed: up to {MAX_ID} printable characters", "id")
    _check_parameters(request.parameters)
    _check_inputs(request, limits.max_body_bytes)
    _check_outputs(request.outputs)
    return request


def written(message: Any) -> bytes:
    """The bytes of a message, without unknown fields."""
    message.DiscardUnknownFields()
    data: bytes = message.SerializeToString()
    return data


def model_request(data: bytes) -> bytes:
    """A request for a model's metadata, configuration or readiness.

    Raises:
        RequestError: the name or the version is not one.
    """
    request = parse(messages.NameRequest, data)
    check_model(request.name, request.version)
    return written(request)


def statistics_request(data: bytes) -> bytes:
    """As `model_request`; without a name, for all models."""
    request = parse(messages.NameRequest, data)
    check_model(request.name or "all", request.version)
    return written(request)


def model_of(data: bytes) -> str:
    """The name in a request that `model_request` or `statistics_request` has checked."""
    name: str = parse(messages.NameRequest, data).name
    return name


def index_request(data: bytes) -> None:
    """A request for the list of models."""
    if parse(messages.IndexRequest, data).repository_name:
        raise RequestError("allowed: no name", "repository_name")


def empty_request(data: bytes) -> bytes:
    """A request without fields."""
    return written(parse(messages.EmptyRequest, data))


def parse(message_class: Any, data: bytes) -> Any:
    """A message from its bytes.

    Raises:
        RequestError: they are not such a message, or a string is not valid UTF-8.
    """
    try:
        return message_class.FromString(data)
    except DecodeError:
        raise RequestError(
            "is not a message of the protocol; allowed: protocol buffers with strings in UTF-8",
            "request",
        ) from None


def check_model(name: str, version: str) -> None:
    """Check the form of a model's name and version."""
    if not _MODEL.fullmatch(name):
        raise RequestError(
            f"allowed: 1 to {MAX_NAME} letters, digits, '_', '-' and '.'", "model_name"
        )
    if not _VERSION.fullmatch(version):
        raise RequestError(
            f"allowed: up to {MAX_VERSION_DIGITS} digits, or nothing", "model_version"
        )


def _parse_infer_request(data: bytes, limits: Limits) -> Any:
    """Parsed only if the number of its parts is right, since parts take memory."""
    if len(data) > limits.max_body_bytes:
        raise Refused(
            Code.RESOURCE_EXHAUSTED,
            f"request: has {len(data)} bytes; allowed: up to {limits.max_body_bytes}",
        )
    outline = parse(messages.Outline, data)
    for field in ("inputs", "raw_input_contents", "outputs", "parameters"):
        found = len(getattr(outline, field))
        if found > limits.max_inputs:
            raise RequestError(f"has {found} entries; allowed: up to {limits.max_inputs}", field)
    return parse(messages.InferRequest, data)


def _check_parameters(parameters: Any) -> None:
    for key in parameters:
        value = _parameter(parameters[key], key)
        if key == "sequence_id" and not isinstance(value, str):
            _check_number(key, value, MAX_SEQUENCE_ID)
        elif key in ("sequence_start", "sequence_end") and not isinstance(value, bool):
            raise RequestError("allowed: a bool_param", key)
        elif key == "timeout":
            _check_number(key, value, MAX_TIMEOUT_US)
        elif key == "priority":
            _check_number(key, value, MAX_PRIORITY)
        elif key == EMPTY_FINAL:
            if not isinstance(value, bool):
                raise RequestError("allowed: a bool_param", key)
        elif key.startswith("triton_"):
            raise RequestError(
                f"is reserved for the server; allowed with this prefix: {EMPTY_FINAL}", key
            )
        elif key.startswith(RESERVED):
            raise RequestError("is reserved for the server; allowed: other names", key)


def _parameter(value: Any, key: str) -> bool | int | float | str:
    if not _NAME.fullmatch(key):
        raise RequestError(f"allowed: keys of 1 to {MAX_NAME} characters of ASCII", "parameters")
    choice = value.WhichOneof("choice")
    if choice is None:
        raise RequestError("has no value", f"parameters: {key}")
    found: bool | int | float | str = getattr(value, choice)
    return found


def _check_number(key: str, value: bool | int | float | str, maximum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise RequestError(f"allowed: an integer from 0 to {maximum}", key)


def _check_inputs(request: Any, max_elements: int) -> None:
    raw = request.raw_input_contents
    inputs = request.inputs
    if raw and len(raw) != len(inputs):
        raise RequestError(
            f"has {len(raw)} entries for {len(inputs)} inputs; allowed: one for each input, or "
            "contents in all of them",
            "raw_input_contents",
        )
    names: set[str] = set()
    for index, tensor in enumerate(inputs):
        name = tensor.name
        _check_name(name, names, "inputs")
        if tensor.parameters:
            _refuse_tensor_parameters(name, tensor.parameters)
        datatype = tensor.datatype
        if datatype not in tensors.DATATYPES:
            raise RequestError(
                f"datatype is unknown; allowed: {', '.join(tensors.DATATYPES)}", name
            )
        count = tensors.num_elements(name, tensor.shape, max_elements)
        if raw:
            if tensor.HasField("contents"):
                raise RequestError("has contents and raw_input_contents; allowed: one", name)
            tensors.check_raw(name, datatype, count, raw[index])
        else:
            tensors.check_typed(name, datatype, count, tensor.contents)


def _check_outputs(outputs: Any) -> None:
    names: set[str] = set()
    for output in outputs:
        _check_name(output.name, names, "outputs")
        if output.parameters:
            _refuse_tensor_parameters(output.name, output.parameters)


def _check_name(name: str, names: set[str], where: str) -> None:
    """Add a tensor's name to the ones before it."""
    if not _NAME.fullmatch(name):
        raise RequestError(f"allowed: names of 1 to {MAX_NAME} characters of ASCII", where)
    if name in names:
        raise RequestError(f"is twice in {where}; allowed: once", name)
    names.add(name)


def _refuse_tensor_parameters(name: str, parameters: Any) -> None:
    """Some crash Triton 2.51; the others belong to other protocols."""
    if any(key.startswith("shared_memory_") for key in parameters):
        raise RequestError("shared memory is closed; allowed: data in the message", name)
    if "classification" in parameters:
        raise RequestError("classification is not supported; allowed: whole outputs", name)
    raise RequestError("has parameters; allowed: none for a tensor", name)
