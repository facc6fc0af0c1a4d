"""Anthropic's cache_control, which asks to cache a prompt up to a content block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inflight.door.gateway.openai.conversation import invalid, not_supported

_EPHEMERAL = "ephemeral"
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_SHORTEST = "5m"


def ttl_of(
    control: Mapping[str, Any] | None,
    system: str | Sequence[Mapping[str, Any]] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    messages: Sequence[Mapping[str, Any]],
) -> float | None:
    """How long to keep a prompt, in seconds from its last use; None without any cache_control.

    The whole prompt is kept for the longest time that is asked for: prefixes are cached by
    themselves, whatever blocks end them.

    Args:
        control: that of the request as a whole.

    Raises:
        Problem: naming the cache_control.
    """
    found = [] if control is None else [_ttl(control, "cache_control")]
    for block, where in _all_blocks(system, tools, messages):
        if block.get("cache_control") is not None:
            found.append(_ttl(block["cache_control"], f"{where}.cache_control"))
    return max(found, default=None)


def _all_blocks(
    system: str | Sequence[Mapping[str, Any]] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    messages: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Whatever may have a cache_control, and its place."""
    yield from _blocks(tools, "tools")
    yield from _blocks(system, "system")
    for index, message in enumerate(messages):
        for block, where in _blocks(message.get("content"), f"messages[{index}].content"):
            yield block, where
            yield from _blocks(block.get("content"), f"{where}.content")  # of a tool_result


def _blocks(content: Any, where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    if isinstance(content, list):
        for index, block in enumerate(content):
            if isinstance(block, dict):
                yield block, f"{where}[{index}]"


def _ttl(control: Any, where: str) -> float:
    if not isinstance(control, dict):
        raise invalid(where, f'{{"type": "{_EPHEMERAL}", "ttl": "5m" or "1h"}}')
    if control.get("type") != _EPHEMERAL:
        raise not_supported(f"{where}.type", str(control.get("type")), _EPHEMERAL)
    ttl = control.get("ttl") or _SHORTEST
    if not isinstance(ttl, str) or ttl not in _TTL_S:
        raise not_supported(f"{where}.ttl", str(ttl), ", ".join(_TTL_S))
    return _TTL_S[ttl]
