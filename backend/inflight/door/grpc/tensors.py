"""Checks of a tensor on the wire: its datatype, its shape, and that its data fits both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight.errors import RequestError

ITEM_BYTES = {
    "BOOL": 1,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}
DATATYPES = (*ITEM_BYTES, "BYTES")
# The field of typed contents by datatype; FP16 and BF16 exist in raw contents only.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
MAX_RANK = 8
# Walking through their lengths takes 0.1 us for each.
MAX_STRINGS = 1 << 16


def num_elements(name: str, shape: Sequence[int], max_elements: int) -> int:
    """The product of the dimensions.

    Raises:
        RequestError: too many dimensions, a negative one, or too many elements.
    """
    if len(shape) > MAX_RANK:
        raise RequestError(f"has {len(shape)} dimensions; allowed: up to {MAX_RANK}", name)
    count = 1
    for size in shape:
        if not 0 <= size <= max_elements:
            raise RequestError(
                f"a dimension is {size}; allowed: from 0 to {max_elements}", f"{name}: shape"
            )
        count *= size
    if count > max_elements:
        raise RequestError(f"has {count} elements; allowed: up to {max_elements}", f"{name}: shape")
    return count


def check_raw(name: str, datatype: str, count: int, raw: bytes) -> None:
    """Whether raw contents are `count` elements.

    Raises:
        RequestError: they are not.
    """
    if datatype == "BYTES":
        _check_strings(name, count, raw)
        return
    wanted = count * ITEM_BYTES[datatype]
    if len(raw) != wanted:
        raise RequestError(
            f"raw_input_contents has {len(raw)} bytes; allowed: {wanted}, for {count} elements of "
            f"{datatype}",
            name,
        )


def _check_strings(name: str, count: int, raw: bytes) -> None:
    """Whether `raw` is `count` strings, each after its length as a little-endian uint32."""
    if count > MAX_STRINGS:
        raise RequestError(f"has {count} strings; allowed: up to {MAX_STRINGS}", name)
    offset, end = 0, len(raw)
    for index in range(count):
        start = offset + 4
        offset = start + int.from_bytes(raw[offset:start], "little")
        if start > end or offset > end:
            raise RequestError(
                f"raw_input_contents ends within string {index} of {count}; allowed: the length "
                "of each string in 4 bytes, then its bytes",
                name,
            )
    if offset != end:
        raise RequestError(
            f"raw_input_contents has {end - offset} bytes after its last string; allowed: "
            f"{count} strings, as in the shape",
            name,
        )


def check_typed(name: str, datatype: str, count: int, contents: Any) -> None:
    """Whether typed contents are `count` elements, in the field of the datatype and in no other.

    Raises:
        RequestError: they are not.
    """
    field = _CONTENTS.get(datatype)
    if field is None:
        raise RequestError(f"{datatype} in contents; allowed: in raw_input_contents", name)
    for other, _ in contents.ListFields():
        if other.name != field:
            raise RequestError(f"contents has {other.name}; allowed for {datatype}: {field}", name)
    found = len(getattr(contents, field))
    if found != count:
        raise RequestError(
            f"contents has {found} elements; allowed: {count}, as in the shape", name
        )
    if datatype in ("INT8", "INT16", "UINT8", "UINT16"):
        _check_range(name, datatype, getattr(contents, field))


def _check_range(name: str, datatype: str, values: Any) -> None:
    """Small integers are sent as 32 bits."""
    bits = 8 * ITEM_BYTES[datatype]
    low, high = (
        (0, 2**bits - 1) if datatype[0] == "U" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    )
    if values and not (low <= min(values) and max(values) <= high):
        raise RequestError(f"a value does not fit {datatype}; allowed: [{low}, {high}]", name)
