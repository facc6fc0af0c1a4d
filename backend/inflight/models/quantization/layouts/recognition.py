"""Recognises layouts of codes with scales of groups by a folder's quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.models.quantization.layouts.layout import ROW, Layout

FORMATS = ("pack-quantized",)
"""Of compressed-tensors."""
_BITS = (4, 8)


def compressed(weights: Mapping[str, Any], stored: str) -> Layout | None:
    """Of one group of compressed-tensors.

    Args:
        weights: of the group.
        stored: its format, one of FORMATS.
    """
    kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    if weights.get("dynamic"):
        return None
    group = ROW if strategy == "channel" else _group(weights.get("group_size"))
    if kind != "int" or bits not in _BITS or strategy not in ("group", "channel") or group is None:
        return None
    return Layout(
        "packed",
        f"int{bits}",
        frozenset({bits}),
        frozenset({group}),
        symmetric=bool(weights.get("symmetric", True)),
        has_order=weights.get("actorder") not in (None, False, "weight", "static"),
    )


def _group(size: Any) -> int | None:
    """Columns of a group; None if it is no size of one."""
    if isinstance(size, bool) or not isinstance(size, int):
        return None
    if size == -1:
        return ROW
    return size if size > 0 else None
