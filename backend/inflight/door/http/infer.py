"""The body of an infer request: JSON, then the binary data of its tensors.

What passes is rebuilt from what was parsed, so Triton reads what was checked and nothing else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from inflight.door.http.refusal import Refusal
from inflight.door.http.values import (
    DATATYPES,
    NOTHING,
    check_elements,
    check_name,
    check_parameters,
    check_unique,
    flatten,
    parse,
    title,
)
from inflight.door.limits import Limits

MAX_RANK = 8
MAX_ELEMENTS = 1 << 31
_OUTPUT_PARAMETERS = {"binary_data"}


def rebuild(
    body: bytes, json_length: int, limits: Limits, own: Mapping[str, str] = NOTHING
) -> tuple[bytes, int]:
    """A checked request, as Triton gets it.

    Args:
        json_length: bytes of the body that are JSON; binary data follows.
        own: request parameters of the door.

    Returns:
        The body, and how much of it is JSON.

    Raises:
        Refusal: with the field at fault.
    """
    request = parse(body[:json_length], limits.max_json_depth)
    _check_fields("body", request, {"id", "parameters", "inputs", "outputs"}, {"inputs"})
    if type(request.get("id", "")) is not str:
        raise Refusal(f"id: is {title(request['id'])}; allowed: a string")
    if request.get("id"):
        check_name("id", request["id"])
    check_parameters("parameters.", _object("parameters", request.get("parameters", {})))
    if "binary_data_output" in request.get("parameters", {}):
        _boolean("parameters.binary_data_output", request["parameters"]["binary_data_output"])
    offset = json_length
    for index, tensor in enumerate(_list("inputs", request["inputs"], limits.max_inputs)):
        offset = _check_input(f"inputs[{index}]", tensor, body, offset)
    if offset != len(body):
        raise Refusal(
            f"body: has {len(body) - offset} bytes after the tensors; allowed: as many as their "
            "binary_data_size say"
        )
    check_unique("inputs", (tensor["name"] for tensor in request["inputs"]))
    for index, output in enumerate(_list("outputs", request.get("outputs", []), limits.max_inputs)):
        _check_output(f"outputs[{index}]", output)
    check_unique("outputs", (output["name"] for output in request.get("outputs", [])))
    if own:
        request["parameters"] = {**request.get("parameters", {}), **own}
    head = msgspec.json.encode(request)
    return head + body[json_length:], len(head)


def _check_input(where: str, tensor: Any, body: bytes, offset: int) -> int:
    """Check a tensor whose binary data would begin at `offset`; returns where the next begins."""
    fields = {"name", "datatype", "shape", "data", "parameters"}
    _check_fields(where, tensor, fields, {"name", "datatype", "shape"})
    check_name(where, tensor["name"])
    where = tensor["name"]
    datatype = DATATYPES.get(tensor["datatype"]) if type(tensor["datatype"]) is str else None
    if datatype is None:
        raise Refusal(f"{where}: datatype is unknown; allowed: {', '.join(DATATYPES)}")
    count = _num_elements(where, tensor["shape"])
    parameters = _object(f"{where}.parameters", tensor.get("parameters", {}))
    check_parameters(f"{where}.parameters.", parameters)
    if "binary_data_size" in parameters:
        if "data" in tensor:
            raise Refusal(f"{where}: has both data and binary_data_size; allowed: one of them")
        size = parameters["binary_data_size"]
        _check_binary(where, (size, datatype.size, count), body, offset)
        return offset + int(size)
    if "data" not in tensor:
        raise Refusal(f"{where}: data is missing; allowed: an array, or binary_data_size")
    elements = flatten(f"{where}.data", tensor["data"], MAX_RANK)
    if len(elements) != count:
        raise Refusal(f"{where}: data has {len(elements)} elements; allowed: {count}, as in shape")
    check_elements(f"{where}.data", datatype, elements)
    tensor["data"] = elements
    return offset


def _check_binary(where: str, sizes: tuple[Any, int, int], body: bytes, offset: int) -> None:
    """Check the binary data of a tensor: its size, bytes per element, number of elements."""
    size, element_size, count = sizes
    at = f"{where}.parameters.binary_data_size"
    if type(size) is not int or not 0 <= size <= len(body) - offset:
        raise Refusal(f"{at}: does not fit the body; allowed: up to {len(body) - offset}")
    if element_size:
        if size != count * element_size:
            raise Refusal(f"{at}: is {size}; allowed: {count * element_size}, as in shape")
        return
    end, found = offset + size, 0
    while offset < end:
        if offset + 4 > end:
            raise Refusal(f"{where}: the length of string {found} is cut off")
        offset += 4 + int(struct.unpack_from("<I", body, offset)[0])
        found += 1
    if offset != end:
        raise Refusal(f"{where}: string {found - 1} is longer than the tensor's data")
    if found != count:
        raise Refusal(f"{where}: has {found} strings; allowed: {count}, as in shape")


def _check_output(where: str, output: Any) -> None:
    _check_fields(where, output, {"name", "parameters"}, {"name"})
    check_name(where, output["name"])
    where = output["name"]
    parameters = _object(f"{where}.parameters", output.get("parameters", {}))
    for name, value in parameters.items():
        if name not in _OUTPUT_PARAMETERS:
            raise Refusal(f"{where}.parameters: {_named(name)} is closed; allowed: binary_data")
        _boolean(f"{where}.parameters.{name}", value)


def _num_elements(where: str, shape: Any) -> int:
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise Refusal(f"{where}.shape: is wrong; allowed: an array of up to {MAX_RANK} integers")
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_ELEMENTS:
            raise Refusal(f"{where}.shape: has a size out of range; allowed: 0 to {MAX_ELEMENTS}")
    count = math.prod(shape)
    if count > MAX_ELEMENTS:
        raise Refusal(f"{where}.shape: has too many elements; allowed: {MAX_ELEMENTS}")
    return count


def _check_fields(where: str, value: Any, allowed: set[str], required: set[str]) -> None:
    for name in _object(where, value):
        if name not in allowed:
            listed = ", ".join(sorted(allowed))
            raise Refusal(f"{where}: {_named(name)} is no field; allowed: {listed}")
    for name in sorted(required):
        if name not in value:
            raise Refusal(f"{where}: {name} is missing")


def _object(where: str, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise Refusal(f"{where}: is {title(value)}; allowed: an object")
    return value


def _list(where: str, value: Any, most: int) -> list[Any]:
    if type(value) is not list:
        raise Refusal(f"{where}: is {title(value)}; allowed: an array")
    if len(value) > most:
        raise Refusal(f"{where}: has {len(value)} entries; allowed: {most}")
    return value


def _boolean(where: str, value: Any) -> None:
    if type(value) is not bool:
        raise Refusal(f"{where}: is {title(value)}; allowed: true or false")


def _named(name: str) -> str:
    return f"'{name}'" if len(name) <= 64 and name.isprintable() else "a name"
