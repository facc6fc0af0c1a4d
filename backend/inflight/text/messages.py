"""The JSON of a chat request: messages, tools and template variables, checked.

The forms are those of OpenAI's API. What a chat template gets is what `apply_chat_template` of
`transformers` shows it, where the arguments of tool calls are parsed, as its users do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from inflight.errors import RequestError, did_you_mean
from inflight.text.tokenizer import check_unicode

MAX_MESSAGES = 512
MAX_TOOLS = 512
MAX_VARIABLES = 64
MAX_NESTING = 64
"""Of arrays and objects in tools, arguments and template variables."""

MAX_JSON_CHARACTERS = 4 << 20
_INTEGERS = (-(2**63), 2**64 - 1)
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MESSAGES = f"an array of 1 to {MAX_MESSAGES} objects with role and content"
_TOOLS = f"an array of up to {MAX_TOOLS} objects with type and function"
_TEXT = 'a string, or an array of {"type": "text", "text": string}'
_CALL = "an object with id, type and function"
_RESERVED = (
    "add_generation_prompt",
    "bos_token",
    "chat_template",
    "continue_final_message",
    "eos_token",
    "messages",
    "raise_exception",
    "strftime_now",
    "tokenize",
    "tools",
)
# Members of the messages that OpenAI's API returns, which clients send back: without content here.
_EMPTY_MEMBERS = ("annotations", "audio", "function_call", "refusal")


def parse_messages(text: str) -> list[dict[str, Any]]:
    """Parse and validate messages in JSON.

    Args:
        text: an array of message objects. role: system, developer (same as system), user, assistant
            or tool. content: a string, or an array of {"type": "text", "text"}, whose texts are
            joined by line breaks; an assistant's may be null beside tool_calls or
            reasoning_content. name: a string. tool_calls: of an assistant, an array of {"id",
            "type", "function": {"name", "arguments"}}, arguments as JSON text of an object.
            tool_call_id: of a tool. reasoning_content or reasoning: of an assistant, a string.

    Returns:
        The messages as templates get them: members that are null are left out, content is a string,
        arguments are objects, and reasoning is in reasoning_content and thinking.

    Raises:
        RequestError: with the place of what is invalid, and what is allowed.
    """
    parsed = _parse(text, "messages", _MESSAGES)
    if not isinstance(parsed, list):
        raise RequestError(f"{_kind(parsed)}; allowed: {_MESSAGES}", "messages")
    if not 1 <= len(parsed) <= MAX_MESSAGES:
        raise RequestError(f"{len(parsed)} messages; allowed: {_MESSAGES}", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(parsed)]


def parse_tools(text: str) -> list[dict[str, Any]]:
    """Parse and validate tools in JSON: an array of {"type": "function", "function": {"name",
    "description", "parameters"}}. Other members stay as they are.

    Raises:
        RequestError: with the place of what is invalid, and what is allowed.
    """
    parsed = _parse(text, "tools", _TOOLS)
    if not isinstance(parsed, list):
        raise RequestError(f"{_kind(parsed)}; allowed: {_TOOLS}", "tools")
    if len(parsed) > MAX_TOOLS:
        raise RequestError(f"{len(parsed)} tools; allowed: {_TOOLS}", "tools")
    for index, tool in enumerate(parsed):
        _check_tool(tool, f"tools[{index}]")
    return parsed


def parse_variables(text: str) -> dict[str, Any]:
    """Parse and validate further variables of the chat template, a JSON object.

    Raises:
        RequestError: with the place of what is invalid, and what is allowed.
    """
    where = "chat_template_kwargs"
    allowed = f"an object of up to {MAX_VARIABLES} template variables"
    parsed = _parse(text, where, allowed)
    if not isinstance(parsed, dict):
        raise RequestError(f"{_kind(parsed)}; allowed: {allowed}", where)
    if len(parsed) > MAX_VARIABLES:
        raise RequestError(f"{len(parsed)} variables; allowed: {allowed}", where)
    for name, value in parsed.items():
        if name in _RESERVED or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
            raise RequestError(
                f"{name[:64]!r} is not allowed; allowed: names of up to 64 letters, digits and _ "
                f"but {', '.join(_RESERVED)}",
                where,
            )
        _check_json(value, f"{where}.{name}")
    return parsed


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{_kind(message)}; allowed: an object with role and content", where)
    for key, value in message.items():
        if key not in _READERS and (key not in _EMPTY_MEMBERS or value not in (None, [])):
            hint = did_you_mean(key, _READERS)
            raise RequestError(
                f"unknown key {key[:64]!r}{hint}; allowed: {', '.join(_READERS)}", where
            )
    if "role" not in message:
        raise RequestError("role is missing; allowed: an object with role and content", where)
    found = {"role": _role(message["role"], f"{where}.role")}
    _check_members(message, found["role"], where)
    # In the order of the request, which a template may write as JSON.
    found = {
        key: _READERS[key](value, f"{where}.{key}")
        for key, value in message.items()
        if key in _READERS and (value is not None or key == "content")
    }
    if not found.get("tool_calls", True):
        del found["tool_calls"]
    if found.get("content", "") is None:
        del found["content"]
    reasoning = found.get("reasoning_content", found.get("reasoning"))
    if reasoning is not None:
        # The names by which templates read it; as in transformers.
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _check_members(message: dict[str, Any], role: str, where: str) -> None:
    """Check that the members belong to the role."""
    for key, owner in _OWNERS.items():
        if message.get(key) not in (None, []) and role != owner:
            raise RequestError(
                f"not of this role, {role}; allowed: in messages of the role {owner}",
                f"{where}.{key}",
            )
    may_be_empty = role == "assistant" and any(
        message.get(key) for key in ("tool_calls", "reasoning_content", "reasoning")
    )
    if message.get("content") is None and not may_be_empty:
        if "content" not in message:
            raise RequestError(
                "content is missing; allowed: an object with role and content", where
            )
        raise RequestError(
            f"null; allowed: {_TEXT}; null only of an assistant with tool_calls or "
            "reasoning_content",
            f"{where}.content",
        )


def _role(role: Any, where: str) -> str:
    if not isinstance(role, str) or role not in _ROLES:
        what = repr(role[:64]) if isinstance(role, str) else _kind(role)
        raise RequestError(f"{what}; allowed: {', '.join(_ROLES)}", where)
    return _ROLES[role]


def _content(content: Any, where: str) -> str | None:
    if content is None:
        return None
    if isinstance(content, str):
        check_unicode(content, where)
        return content
    if not isinstance(content, list):
        raise RequestError(f"{_kind(content)}; allowed: {_TEXT}", where)
    if not content:
        raise RequestError(f"an empty array; allowed: {_TEXT}", where)
    texts = []
    for number, part in enumerate(content):
        if (
            not isinstance(part, dict)
            or set(part) != {"type", "text"}
            or part["type"] != "text"
            or not isinstance(part["text"], str)
        ):
            raise RequestError(f"not a text part; allowed: {_TEXT}", f"{where}[{number}]")
        check_unicode(part["text"], f"{where}[{number}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{_kind(value)}; allowed: a string", where)
    check_unicode(value, where)
    return value


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{_kind(calls)}; allowed: an array of tool calls", where)
    return [_tool_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    # Streams number their calls, and clients send that back.
    members = {"id": _string, "type": _function_type, "function": _called, "index": _skip}
    _check_object(call, members, ("function",), where, _CALL)
    return {
        key: members[key](value, f"{where}.{key}")
        for key, value in call.items()
        if key != "index" and value is not None
    }


def _called(function: Any, where: str) -> dict[str, Any]:
    members: dict[str, Callable[[Any, str], Any]] = {"name": _name, "arguments": _arguments}
    _check_object(function, members, ("name", "arguments"), where, "an object of name, arguments")
    return {key: members[key](value, f"{where}.{key}") for key, value in function.items()}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """An object, from JSON text or as it is; empty text is none at all."""
    allowed = "JSON text of an object"
    if isinstance(arguments, str):
        # A model wrote them: a key may occur twice.
        arguments = _parse(arguments, where, allowed, dict) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{_kind(arguments)}; allowed: {allowed}", where)
    _check_json(arguments, where)
    return arguments


def _check_tool(tool: Any, where: str) -> None:
    allowed = "an object with type and function"
    if not isinstance(tool, dict):
        raise RequestError(f"{_kind(tool)}; allowed: {allowed}", where)
    for key in ("type", "function"):
        if key not in tool:
            raise RequestError(f"{key} is missing; allowed: {allowed}", where)
    _function_type(tool["type"], f"{where}.type")
    function = tool["function"]
    if not isinstance(function, dict):
        raise RequestError(
            f"{_kind(function)}; allowed: an object with name, description and parameters",
            f"{where}.function",
        )
    _name(function.get("name"), f"{where}.function.name")
    if function.get("description") is not None:
        _string(function["description"], f"{where}.function.description")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise RequestError(
            f"{_kind(function['parameters'])}; allowed: a JSON schema, an object",
            f"{where}.function.parameters",
        )
    for key, value in function.items():
        _check_json(value, f"{where}.function.{key[:64]}")
    _check_json({key: value for key, value in tool.items() if key != "function"}, where)


def _name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not name:
        what = "an empty string" if name == "" else _kind(name)
        raise RequestError(f"{what}; allowed: the name of a function", where)
    return _string(name, where)


def _function_type(kind: Any, where: str) -> str:
    if kind != "function":
        what = repr(kind[:64]) if isinstance(kind, str) else _kind(kind)
        raise RequestError(f"{what}; allowed: function", where)
    return "function"


def _skip(_: Any, __: str) -> None:
    """A member without meaning here."""


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "role": _role,
    "content": _content,
    "name": _string,
    "tool_calls": _tool_calls,
    "tool_call_id": _string,
    "reasoning_content": _string,
    "reasoning": _string,
}
_OWNERS = {
    "tool_calls": "assistant",
    "tool_call_id": "tool",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
}


def _check_object(
    value: Any, members: Any, required: tuple[str, ...], where: str, allowed: str
) -> None:
    if not isinstance(value, dict):
        raise RequestError(f"{_kind(value)}; allowed: {allowed}", where)
    for key in value:
        if key not in members:
            hint = did_you_mean(key, members)
            raise RequestError(f"unknown key {key[:64]!r}{hint}; allowed: {allowed}", where)
    for key in required:
        if key not in value:
            raise RequestError(f"{key} is missing; allowed: {allowed}", where)


def _check_json(value: Any, where: str, depth: int = 0) -> None:
    """Check that a JSON value can be sent to the template's sandbox."""
    if depth > MAX_NESTING:
        raise RequestError(f"nested too deeply; allowed: {MAX_NESTING} levels", where)
    if isinstance(value, str):
        check_unicode(value, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_unicode(key, where)
            _check_json(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, where, depth + 1)
    elif isinstance(value, int) and not _INTEGERS[0] <= value <= _INTEGERS[1]:
        raise RequestError("has an integer that is too large; allowed: 64 bits", where)
    elif isinstance(value, float) and value in (float("inf"), float("-inf")):
        raise RequestError("has a number that is too large; allowed: up to 1.8e308", where)


def _parse(text: str, where: str, allowed: str, make_object: Any = None) -> Any:
    """Parse JSON; `make_object` makes an object of its pairs, and by default rejects duplicates."""
    if len(text) > MAX_JSON_CHARACTERS:
        raise RequestError(f"{len(text)} characters; allowed: at most {MAX_JSON_CHARACTERS}", where)
    try:
        return json.loads(
            text, object_pairs_hook=make_object or _unique, parse_constant=_no_constant
        )
    except RecursionError:
        raise RequestError(f"nested too deeply; allowed: {allowed}", where) from None
    except ValueError as error:
        # The error quotes at most one key or a position.
        raise RequestError(f"not valid JSON ({error}); allowed: {allowed}", where) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {twice[:64]!r} in an object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
