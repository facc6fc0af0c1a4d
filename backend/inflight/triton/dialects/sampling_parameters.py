"""The tensor `sampling_parameters`: options as a JSON object, as vLLM's backend has it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from inflight.errors import RequestError
from inflight.triton.dialects import option_values
from inflight.triton.dialects.json_values import shown

PARAM = "sampling_parameters"
MAX_BYTES = 1 << 16


def parse(text: str) -> dict[str, Any]:
    """Options of a JSON object, under the names of our tensors.

    Raises:
        RequestError: not JSON, an unknown key, or a value of the wrong type.
    """
    if len(text) > MAX_BYTES:
        raise RequestError(f"{len(text)} characters are too many; allowed: {MAX_BYTES}", PARAM)
    return option_values.read(_object(text), PARAM)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise RequestError("is nested too deeply", PARAM) from None
    except json.JSONDecodeError as error:
        raise RequestError(f"is not valid JSON ({error.msg} at {error.pos})", PARAM) from None
    except ValueError:  # an integer of thousands of digits
        raise RequestError("holds a number that is too long", PARAM) from None
    if not isinstance(value, dict):
        raise RequestError(f"must be a JSON object, not {shown(value)}", PARAM)
    return value


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"{name} is not a number in JSON", PARAM)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RequestError("a key occurs twice", PARAM)
    return found
