"""Strict JSON, and its values as elements of tensors and as request parameters.

Triton 2.51 reads JSON by recursion, and converts numbers that its tensors cannot hold to others.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jiter

from inflight.door.http.refusal import Refusal
from inflight.ipc.metrics.usage import RESERVED

NOTHING: Mapping[str, str] = MappingProxyType({})
MAX_FP32 = 3.4028234663852886e38
MAX_FP64 = sys.float_info.max
MAX_NAME = 256
MAX_TEXT_PARAMETER = 64 << 10
MAX_PARAMETERS = 64
_TITLES = {
    dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer",
    float: "a number with a fraction", type(None): "null",
}  # fmt: skip


class Datatype(NamedTuple):
    """A type of tensor elements.

    Attributes:
        size: bytes of an element; 0 if they vary.
        types: of Python, for its elements in JSON; none if JSON cannot express them.
        low, high: bounds of numbers.
        title: of its elements, for messages.
    """

    size: int
    types: frozenset[type]
    low: float = 0
    high: float = 0
    title: str = ""


def _integers(bits: int, is_signed: bool) -> Datatype:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed else (0, (1 << bits) - 1)
    return Datatype(bits // 8, frozenset({int}), low, high, f"integers from {low} to {high}")


DATATYPES = {
    "BOOL": Datatype(1, frozenset({bool}), title="true and false"),
    "FP16": Datatype(2, frozenset()),
    "BF16": Datatype(2, frozenset()),
    "FP32": Datatype(4, frozenset({int, float}), -MAX_FP32, MAX_FP32, "numbers within FP32"),
    "FP64": Datatype(8, frozenset({int, float}), -MAX_FP64, MAX_FP64, "finite numbers"),
    "BYTES": Datatype(0, frozenset({str}), title="strings"),
    **{f"INT{bits}": _integers(bits, True) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": _integers(bits, False) for bits in (8, 16, 32, 64)},
}
_PARAMETERS = {
    "timeout": (0, 2**63 - 1),
    "priority": (0, 2**32 - 1),
    "sequence_id": (0, 2**64 - 1),
}
_INT64 = (-(2**63), 2**63 - 1)
# The one that clients may set; Triton reserves the prefix.
_RESERVED, _OPEN = "triton_", "triton_enable_empty_final_response"


def parse(body: bytes, max_depth: int) -> dict[str, Any]:
    """A JSON object.

    Raises:
        Refusal: it is none, a key occurs twice, or it is nested deeper than `max_depth`.
    """
    if not body:
        raise Refusal("body: is empty; allowed: a JSON object")
    try:
        value = jiter.from_json(
            body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="keys"
        )
    except ValueError as error:
        what = str(error)
        if "recursion" in what:
            raise _too_deep(max_depth) from None
        raise Refusal(f"body: is not valid JSON ({what[:200]})") from None
    if type(value) is not dict:
        raise Refusal(f"body: is {title(value)}; allowed: a JSON object")
    _check_depth(value, max_depth)
    return value


def _check_depth(value: Any, max_depth: int) -> None:
    """Level by level, as the client controls how deep a recursion would go."""
    level = [value]
    for _ in range(max_depth):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise _too_deep(max_depth)


def _too_deep(max_depth: int) -> Refusal:
    return Refusal(f"body: is nested too deeply; allowed: {max_depth} levels")


def title(value: Any) -> str:
    """The kind of a JSON value, for errors."""
    return _TITLES.get(type(value), "a value")


def shown(value: Any) -> str:
    """A scalar, shortened for errors."""
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int or type(value) is float:
        text = repr(value) if abs(value) < 1e300 else "a number out of range"
        return text if len(text) <= 40 else "a number out of range"
    return title(value)


def check_elements(where: str, datatype: Datatype, elements: list[Any]) -> None:
    """Refuse elements of a tensor that its datatype cannot hold."""
    types = set(map(type, elements))
    if not types <= datatype.types:
        wrong = next(one for one in elements if type(one) not in datatype.types)
        raise Refusal(f"{where}: has {shown(wrong)}; allowed: {datatype.title or 'binary data'}")
    if int in types or float in types:
        # An infinity is out of bounds; JSON has no NaN.
        for number in (min(elements), max(elements)):
            is_wide = type(number) is int and not _INT64[0] <= number < 2**64
            if is_wide or not datatype.low <= number <= datatype.high:
                what = f"{where}: {shown(number)} is out of range"
                raise Refusal(f"{what}; allowed: {datatype.title}")


def flatten(where: str, data: Any, max_rank: int) -> list[Any]:
    """Elements of a tensor in row-major order, from arrays nested at most `max_rank` deep."""
    if type(data) is not list:
        raise Refusal(f"{where}: is {title(data)}; allowed: an array")
    elements: list[Any] = data
    for _ in range(max_rank):
        num_lists = sum(type(one) is list for one in elements)
        if num_lists == 0:
            return elements
        if num_lists != len(elements):
            raise Refusal(f"{where}: mixes arrays and values; allowed: arrays of one depth")
        elements = list(itertools.chain.from_iterable(elements))
    raise Refusal(f"{where}: is nested too deeply; allowed: as deep as the shape's rank")


def check_parameters(where: str, parameters: Mapping[str, Any]) -> None:
    """Refuse too many parameters, and those that are no scalars or out of bounds."""
    if len(parameters) > MAX_PARAMETERS:
        at = where.rstrip(".") or "body"
        raise Refusal(f"{at}: has {len(parameters)} parameters; allowed: up to {MAX_PARAMETERS}")
    for name, value in parameters.items():
        at = f"{where}{name}"
        check_name(at, name)
        if name.startswith(_RESERVED) and name != _OPEN:
            raise Refusal(f"{at}: is reserved; allowed: names without the prefix {_RESERVED}")
        if name.startswith(RESERVED):
            raise Refusal(f"{at}: is reserved for the server; allowed: other names")
        if name.startswith("shared_memory_"):
            raise Refusal(f"{at}: shared memory is closed; send the data in the body")
        if type(value) not in (str, bool, int):
            raise Refusal(f"{at}: is {title(value)}; allowed: a string, an integer or a boolean")
        if type(value) is str and len(value) > MAX_TEXT_PARAMETER:
            raise Refusal(f"{at}: is too long; allowed: {MAX_TEXT_PARAMETER} characters")
        if name in ("timeout", "priority") and type(value) is not int:
            raise Refusal(f"{at}: is {title(value)}; allowed: an integer")
        low, high = _PARAMETERS.get(name, _INT64)
        if type(value) is int and not low <= value <= high:
            raise Refusal(f"{at}: is out of range; allowed: integers from {low} to {high}")


def check_name(where: str, name: Any) -> None:
    """Refuse names that are empty, long, or not printable."""
    if type(name) is not str or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        where = where[:40] if where.isprintable() else "body"
        raise Refusal(f"{where}: has a bad name; allowed: 1 to {MAX_NAME} printable characters")


def check_unique(where: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise Refusal(f"{where}: '{name}' occurs twice; allowed: once")
        seen.add(name)
