"""Messages and options, and the tensors that they travel as."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from inflight_client.errors import InvalidRequest
from inflight_client.option_table import DATATYPES, Options
from inflight_client.tensors import shown


class Message(TypedDict):
    """One turn of a chat. role: `system`, `user` or `assistant`."""

    role: str
    content: str


# Options whose values may be objects of these types, which are encoded as JSON.
_JSON: dict[str, tuple[type, ...]] = {
    "sampling_parameters": (Mapping,),
    "guided_decoding_guide": (Mapping, list, tuple),
}


def tensors_of(options: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, datatype, value or list of values) of each tensor that encodes options.

    Raises:
        InvalidRequest: there is no such option, or it cannot be encoded as tensors.
    """
    for name, value in options.items():
        if name == "logit_bias":
            yield from _biases(value, options)
        elif name not in DATATYPES:
            raise InvalidRequest(_no_option(name))
        elif isinstance(value, _JSON.get(name, ())):
            yield name, DATATYPES[name], as_json(name, value)
        else:
            yield name, DATATYPES[name], value


def num_outputs(options: Mapping[str, Any]) -> int:
    """The requested n, as an option or in sampling_parameters; 1 if it is not a number, which the
    server rejects."""
    asked = options.get("n")
    try:
        if asked is None and (parameters := options.get("sampling_parameters")):
            parsed = json.loads(parameters) if isinstance(parameters, str) else parameters
            asked = parsed.get("n")
        return 1 if asked is None else int(asked)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return 1


def as_json(name: str, value: Any) -> str:
    """`value` as JSON.

    Raises:
        InvalidRequest: it cannot be written so.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{name}: {shown(value)} cannot be written as JSON ({error})"
        ) from None


def _biases(biases: Any, options: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    names = ("logit_bias_ids", "logit_bias_values")
    if not isinstance(biases, Mapping):
        raise InvalidRequest(
            f"logit_bias: {shown(biases)} is not a mapping of token ids to numbers"
        )
    if any(name in options for name in names):
        raise InvalidRequest(f"logit_bias cannot be combined with {' and '.join(names)}")
    for name, values in zip(names, (list(biases), list(biases.values())), strict=True):
        yield name, DATATYPES[name], values


def _no_option(name: str) -> str:
    if name == "stream":
        return "stream is not an option: stream() and chat_stream() stream, the others do not"
    allowed = list(Options.__annotations__)
    close = difflib.get_close_matches(name, allowed, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{name} is not an option{meant} allowed: {', '.join(allowed)}"
