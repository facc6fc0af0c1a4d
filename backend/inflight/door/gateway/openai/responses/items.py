"""The input of a response: its items, as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from inflight.door.gateway.openai.conversation import (
    Message,
    invalid,
    not_supported,
    string_at,
    text_part,
)

_ROLES = ("user", "assistant", "system", "developer")
_SYSTEM = ("system", "developer")
_ITEMS = "message, function_call, function_call_output and reasoning"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_PARTS = 'a string, or an array of {"type": "input_text" or "output_text", "text": ...}'


def messages_of(
    instructions: str | None, given: str | Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The messages of a chat.

    The system messages at the beginning are one, as chat templates take one alone. A message of
    the assistant has the reasoning before it and the calls after it.

    Raises:
        Problem: naming the item.
    """
    found = _Messages()
    if instructions:
        found.add_system([text_part(instructions)])
    if isinstance(given, str):
        found.add("user", [text_part(given)])
        return found.all
    if not given:
        raise invalid("input", "a string, or an array of at least one item")
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(kind, str):
            raise invalid(f"{where}.type", _ITEMS)
        if kind not in _READERS:
            raise not_supported(f"{where}.type", kind, _ITEMS)
        _READERS[kind](found, item, where)
    return found.all


class _Messages:
    def __init__(self) -> None:
        self.all: list[Message] = []

    def add(self, role: str, parts: list[dict[str, str]]) -> None:
        self.all.append({"role": role, "content": parts})

    def add_system(self, parts: list[dict[str, str]]) -> None:
        last = self.all[-1] if self.all else None
        if last is not None and last["role"] == "system":
            last["content"] += parts
        else:
            self.add("system", parts)

    def assistant(self, *taken: str) -> Message:
        """The message of the assistant to add to: a new one if the last has one of the members."""
        last = self.all[-1] if self.all else None
        if last is None or last["role"] != "assistant" or any(last.get(name) for name in taken):
            last = {"role": "assistant", "content": None}
            self.all.append(last)
        return last


def _message(found: _Messages, item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", ", ".join(_ROLES))
    parts = _parts(item.get("content"), f"{where}.content")
    if role == "assistant":
        text = "".join(part["text"] for part in parts)
        found.assistant("content", "tool_calls")["content"] = text
    elif role in _SYSTEM:
        found.add_system(parts)
    else:
        found.add(role, parts)


def _reasoning(found: _Messages, item: Mapping[str, Any], where: str) -> None:
    # Without text it is encrypted by another server.
    parts = [
        part
        for name in ("content", "summary")
        if item.get(name) and not isinstance(item[name], str)
        for part in _parts(item[name], f"{where}.{name}")
    ]
    text = "\n".join(part["text"] for part in parts)
    if text:
        found.assistant("content", "tool_calls", "reasoning_content")["reasoning_content"] = text


def _function_call(found: _Messages, item: Mapping[str, Any], where: str) -> None:
    arguments = string_at(item, "arguments", where)
    try:
        if arguments.strip():
            msgspec.json.decode(arguments, type=dict[str, Any])
    except (ValueError, RecursionError):
        raise invalid(f"{where}.arguments", "JSON of an object") from None
    call = {
        "id": string_at(item, "call_id", where),
        "type": "function",
        "function": {"name": string_at(item, "name", where), "arguments": arguments},
    }
    found.assistant().setdefault("tool_calls", []).append(call)


def _function_call_output(found: _Messages, item: Mapping[str, Any], where: str) -> None:
    message = {
        "role": "tool",
        "tool_call_id": string_at(item, "call_id", where),
        "content": _parts(item.get("output"), f"{where}.output"),
    }
    found.all.append(message)


def _parts(content: Any, where: str) -> list[dict[str, str]]:
    """The parts of a text. Raises Problem."""
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list) or not content:
        raise invalid(where, _PARTS)
    parts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise invalid(place, _PARTS)
        if kind == "refusal":
            parts.append(text_part(string_at(part, "refusal", place)))
        elif kind in _TEXTS:
            parts.append(text_part(string_at(part, "text", place)))
        else:
            raise not_supported(f"{place}.type", kind, "input_text, output_text and refusal")
    return parts


_READERS = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
}
