"""vLLM's keys for structured output: `structured_outputs`, and formerly `guided_decoding`.

The value is an object with one constraint; vLLM's backend for Triton takes it as JSON text, too.
"""

from __future__ import annotations

import json
from typing import Any

from inflight.core.output_constraint import GUIDE_FIELD, TYPE_FIELD, Kind
from inflight.errors import did_you_mean
from inflight.triton.dialects.json_values import Unreadable, shown

KEYS = ("structured_outputs", "guided_decoding")

_KINDS: dict[str, Kind] = {
    "json": "json_schema",
    "json_object": "json",
    "regex": "regex",
    "grammar": "ebnf_grammar",
    "choice": "choice",
}
# Choices of an implementation that is not ours, or options that hold here anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
    "disable_any_whitespace": (False, None),
    "disable_additional_properties": (False, None),
}
_HARMLESS = ("backend", "_backend", "_backend_was_auto", "disable_fallback")


def read(key: str, value: Any) -> dict[str, Any]:
    """The options that a value sets, under the names of our tensors.

    Raises:
        Unreadable: not an object, not exactly one constraint, or one that is not supported.
    """
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Unreadable(f"{key} is {shown(value)}; allowed: an object, or JSON") from None
    if value in (None, "", {}):
        return {}
    if not isinstance(value, dict):
        raise Unreadable(f"{key} is {shown(value)}; allowed: an object, or JSON of one")
    for name, item in value.items():
        if name in _NEUTRAL:
            if item not in _NEUTRAL[name]:
                raise Unreadable(f"{key}: {name} is not supported in this version; omit it")
        elif name not in _KINDS and name not in _HARMLESS:
            near = did_you_mean(name, [*_KINDS, *_NEUTRAL, *_HARMLESS])
            raise Unreadable(f"{key}: {name[:64]!r} is not a key{near}")
    found = [(name, value[name]) for name in _KINDS if value.get(name) not in (None, False)]
    if len(found) != 1:
        raise Unreadable(f"{key} has {len(found)} constraints; allowed: one of {', '.join(_KINDS)}")
    ((name, guide),) = found
    return {TYPE_FIELD: _KINDS[name], GUIDE_FIELD: _guide(f"{key}: {name}", name, guide)}


def _guide(where: str, name: str, guide: Any) -> str:
    if name == "json_object":
        if guide is not True:
            raise Unreadable(f"{where} is {shown(guide)}; allowed: true, false")
        return ""
    if isinstance(guide, str) and name != "choice":
        return guide
    if name == "json" and isinstance(guide, dict):
        return json.dumps(guide, ensure_ascii=False)
    if name == "choice" and isinstance(guide, list):
        return json.dumps(guide, ensure_ascii=False)
    allowed = {"json": "a schema, as an object or a string", "choice": "a list of strings"}
    raise Unreadable(f"{where} is {shown(guide)}; allowed: {allowed.get(name, 'a string')}")
