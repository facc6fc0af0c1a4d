"""Bounds and meanings of options, from the table that the models check them with."""

from __future__ import annotations

from typing import Any

from inflight.door.gateway.openai.fields import TENSORS
from inflight.sampling.options import Option
from inflight.triton.request_options import OPTIONS


def add_bounds(properties: dict[str, Any]) -> None:
    """Add them to the JSON schemas of a request's fields."""
    for one in OPTIONS:
        schema = properties.get(one.name)
        if schema is None or one.name not in TENSORS:
            continue
        schema.setdefault("description", one.option.meaning)
        for kind in schema.get("anyOf", []):
            if not one.is_list and kind.get("type") in ("integer", "number"):
                kind |= _bounds(one.option)


def _bounds(option: Option) -> dict[str, float]:
    names = {
        "exclusiveMinimum" if option.open_low else "minimum": option.low,
        "exclusiveMaximum" if option.open_high else "maximum": option.high,
    }
    return {name: bound for name, bound in names.items() if bound is not None}
