"""Anthropic's messages and their content blocks, as the messages of a chat."""

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

_ROLES = ("user", "assistant", "system")
_TEXT = 'a string, or an array of {"type": "text", "text": ...}'
_BLOCKS = "a string, or an array of content blocks"


def messages_of(
    system: str | Sequence[Mapping[str, Any]] | None, given: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The messages of a chat.

    Adjacent messages of a role are one. Each tool_result is a message of its own.

    Raises:
        Problem: naming the content block.
    """
    if not given:
        raise invalid("messages", "an array of at least one message")
    found: list[Message] = []
    if system:
        _add(found, "system", _texts(system, "system"))
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        role = message.get("role")
        if role not in _ROLES:
            raise invalid(f"{where}.role", ", ".join(_ROLES))
        content = message.get("content")
        if role == "system":
            _add(found, role, _texts(content, f"{where}.content"))
            continue
        for block, place in _blocks(content, f"{where}.content"):
            kind = block.get("type")
            readers = _READERS[role]
            if not isinstance(kind, str):
                raise invalid(f"{place}.type", ", ".join(readers))
            if kind not in readers:
                raise not_supported(f"{place}.type", kind, ", ".join(readers))
            readers[kind](found, block, place)
    for message in found:
        if message["role"] == "assistant" and isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
    return found


def _add(found: list[Message], role: str, parts: list[dict[str, str]]) -> None:
    if found and found[-1]["role"] == role:
        found[-1]["content"] += parts
    else:
        found.append({"role": role, "content": parts})


def _blocks(content: Any, where: str) -> list[tuple[Mapping[str, Any], str]]:
    """The blocks of a content, and their places."""
    if isinstance(content, str):
        return [(text_part(content), where)]
    if not isinstance(content, list) or not content:
        raise invalid(where, _BLOCKS)
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise invalid(f"{where}[{index}]", "a content block")
    return [(block, f"{where}[{index}]") for index, block in enumerate(content)]


def _texts(content: Any, where: str) -> list[dict[str, str]]:
    """The parts of a text. Raises Problem."""
    parts = []
    for block, place in _blocks(content, where):
        kind = block.get("type")
        if kind != "text":
            raise not_supported(f"{place}.type", str(kind), _TEXT)
        parts.append(text_part(string_at(block, "text", place)))
    return parts


def _user_text(found: list[Message], block: Mapping[str, Any], where: str) -> None:
    _add(found, "user", [text_part(string_at(block, "text", where))])


def _tool_result(found: list[Message], block: Mapping[str, Any], where: str) -> None:
    content = block.get("content")
    parts = _texts(content, f"{where}.content") if content else [text_part("")]
    name = string_at(block, "tool_use_id", where)
    found.append({"role": "tool", "tool_call_id": name, "content": parts})


def _assistant(found: list[Message]) -> Message:
    """The message of the assistant to add to."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": None})
    return found[-1]


def _assistant_text(found: list[Message], block: Mapping[str, Any], where: str) -> None:
    message = _assistant(found)
    message["content"] = [*(message["content"] or ()), text_part(string_at(block, "text", where))]


def _tool_use(found: list[Message], block: Mapping[str, Any], where: str) -> None:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.input", "an object")
    call = {
        "id": string_at(block, "id", where),
        "type": "function",
        "function": {
            "name": string_at(block, "name", where),
            "arguments": msgspec.json.encode(arguments).decode(),
        },
    }
    _assistant(found).setdefault("tool_calls", []).append(call)


def _thinking(found: list[Message], block: Mapping[str, Any], where: str) -> None:
    text = string_at(block, "thinking", where)
    if text:
        message = _assistant(found)
        message["reasoning_content"] = message.get("reasoning_content", "") + text


def _skip(found: list[Message], block: Mapping[str, Any], where: str) -> None:
    """Reasoning that another server has encrypted."""


_READERS = {
    "user": {"text": _user_text, "tool_result": _tool_result},
    "assistant": {
        "text": _assistant_text,
        "tool_use": _tool_use,
        "thinking": _thinking,
        "redacted_thinking": _skip,
    },
}
