"""Anthropic's tools and their choice, in OpenAI's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.door.gateway.openai.conversation import (
    function_tool,
    invalid,
    not_supported,
    string_at,
)
from inflight.door.gateway.turns import AUTO, NONE, Tooling

_CHOICES = {"auto": AUTO, "any": "required", "none": NONE}
_CHOICE = '{"type": "auto", "any" or "none"} or {"type": "tool", "name": ...}'
_OWN = "tools with name, description and input_schema"


def tooling_of(tools: Sequence[Mapping[str, Any]], choice: Mapping[str, Any] | None) -> Tooling:
    """Raises Problem: naming the field."""
    names = [_check(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    converted = [function_tool(tool, "input_schema") for tool in tools]
    if choice is None:
        return Tooling(converted, AUTO if tools else NONE)
    kind = choice.get("type")
    is_parallel = choice.get("disable_parallel_tool_use") is not True
    if kind == "tool":
        name = string_at(choice, "name", "tool_choice")
        if name not in names:
            raise invalid("tool_choice.name", "the name of one of the tools")
        function = {"type": "function", "function": {"name": name}}
        return Tooling(converted, function, is_parallel)
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise invalid("tool_choice", _CHOICE)
    found = _CHOICES[kind]
    return Tooling(converted, NONE if found == AUTO and not tools else found, is_parallel)


def _check(tool: Mapping[str, Any], where: str) -> str:
    """The name of a tool. Raises Problem."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise not_supported(f"{where}.type", str(kind), _OWN)
    if tool.get("description") is not None:
        string_at(tool, "description", where)
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{where}.input_schema", 'a JSON schema of "type": "object"')
    return string_at(tool, "name", where)
