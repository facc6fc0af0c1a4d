"""Triton's request parameters as options, as in vLLM's backend: a tensor takes precedence.

Over HTTP they are the members of a request that are not inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inflight.errors import RequestError, did_you_mean
from inflight.triton.dialects import guides, option_values
from inflight.triton.dialects.option_values import IGNORED, KEYS, Key, reader_of
from inflight.triton.request_options import OPTIONS

WHERE = "parameters"

_TRITONS = frozenset(
    {"id", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "headers"}
)
_TRITONS_PREFIXES = ("triton_", "binary_data")
HARMLESS = frozenset(
    {"accumulate_tokens", "model", "pad_id", "traceparent", "tracestate", "user", "x-request-id"}
)
"""Ignored: switches of other backends, OpenAI's names of what the request has elsewhere, and
headers that a proxy may have the server forward."""

# Options under the names of their tensors, and under vLLM's keys: an option in several tensors has
# one key there.
_KEYS: dict[str, Key] = {
    name: (field.name, reader_of(field))
    for field in OPTIONS
    if not field.option.tensors
    for name, _ in field.tensors
} | KEYS
NAMES = frozenset({*_KEYS, *IGNORED, *guides.KEYS})
"""All parameters that are options."""


def decode(text: str) -> dict[str, Any]:
    """Triton's request parameters, which its Python API provides as JSON."""
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def read(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The options among the request parameters, under the names of our tensors.

    Raises:
        RequestError: a parameter is unknown, or its value is not allowed.
    """
    options = {name: value for name, value in parameters.items() if not _is_ignored(name)}
    for name in options:
        if name not in NAMES:
            raise RequestError(
                f"is neither an input nor a parameter{did_you_mean(name, sorted(NAMES))}", name
            )
    return option_values.read(options, WHERE, _KEYS) if options else {}


def _is_ignored(name: str) -> bool:
    return name in _TRITONS or name in HARMLESS or name.startswith(_TRITONS_PREFIXES)
