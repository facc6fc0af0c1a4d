"""Formats of tool calls and reasoning, from the text of a chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.door.gateway.parsers import reasoning
from inflight.door.gateway.parsers.formats.registry import FORMATS, find_format

# Of formats that are not supported, some with Hermes's tags: GLM 4.5, Hunyuan.
_OTHER_FORMATS = ("<arg_key>", "<tool_calls>")

_BLOCK = re.compile(r"\{[{%]-?(.*?)-?[%}]\}", re.DOTALL)
_CONDITION = re.compile(r"\s*(if|elif|else|endif)\b(.*)", re.DOTALL)
_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_NEGATED = re.compile(r"\bnot\b|\bfalse\b|\bFalse\b")
# The variables of chat templates that switch reasoning, with their defaults.
_SWITCHES = {"enable_thinking": True, "thinking": False}


@dataclass(frozen=True, slots=True)
class Formats:
    """What a model writes.

    Attributes:
        tools: name of the format of its tool calls; None if it is unknown, or there are none.
        reasoning: name of the format of its reasoning.
    """

    tools: str | None
    reasoning: str | None


def detect(chat_template: str) -> Formats:
    """The formats that a chat template shows to its model."""
    if any(text in chat_template for text in _OTHER_FORMATS):
        tools = None
    else:
        tools = next(
            (
                one.name
                for one in FORMATS.values()
                for texts in one.templates
                if all(text in chat_template for text in texts)
            ),
            None,
        )
    if tools is not None and FORMATS[tools].is_whole:
        return Formats(tools, tools)
    return Formats(tools, reasoning.FORMAT if reasoning.CLOSE in chat_template else None)


def markers(formats: Formats) -> tuple[str, ...]:
    """The markers of a model's formats. Calls and reasoning are only found where the text of an
    output contains them, even if they are special tokens."""
    tools = () if formats.tools is None else find_format(formats.tools).markers
    if formats.reasoning is None:
        return tools
    tags = (
        (reasoning.OPEN, reasoning.CLOSE)
        if formats.reasoning == reasoning.FORMAT
        else find_format(formats.reasoning).markers
    )
    return tuple(dict.fromkeys((*tools, *tags)))


def opens_reasoning(chat_template: str, variables: Mapping[str, Any] | None = None) -> bool:
    """Whether the generation prompt of a chat template ends inside of the reasoning.

    Reads the template instead of rendering it: the strings that follow the last use of
    `add_generation_prompt`, in the branches that `enable_thinking` or `thinking` select.

    Args:
        chat_template: Jinja.
        variables: chat_template_kwargs of the request.
    """
    _, found, prompt = chat_template.rpartition("add_generation_prompt")
    if not found:
        return False
    # Of each open `if`: whether its current branch is written, and whether one of them was.
    branches: list[tuple[bool, bool]] = []
    text = ""
    for block in _BLOCK.finditer(prompt):
        condition = _CONDITION.match(block[1])
        if condition is None:
            if block[0].startswith("{{") and all(is_written for is_written, _ in branches):
                text += "".join(one or other for one, other in _STRING.findall(block[1]))
        elif condition[1] == "if":
            holds = _holds(condition[2], variables or {})
            branches.append((holds, holds))
        elif branches and condition[1] == "endif":
            branches.pop()
        elif branches:
            holds = condition[1] == "else" or _holds(condition[2], variables or {})
            _, was_written = branches.pop()
            branches.append((holds and not was_written, holds or was_written))
    return text.rfind(reasoning.OPEN) > text.rfind(reasoning.CLOSE)


def reasoning_switches(chat_template: str) -> list[str]:
    """The variables of a chat template that switch reasoning on and off."""
    return [name for name in _SWITCHES if re.search(rf"(?<![.\w]){name}\b", chat_template)]


def unread_variables(chat_template: str, names: Iterable[str]) -> list[str]:
    """Those of the names that occur nowhere in a chat template: they have no effect on it."""
    return [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}\b", chat_template)]


def _holds(condition: str, variables: Mapping[str, Any]) -> bool:
    """Whether a condition on one of the switches holds; True for any other condition."""
    for name, default in _SWITCHES.items():
        if re.search(rf"\b{name}\b", condition):
            is_on = bool(variables.get(name, default))
            return is_on != bool(_NEGATED.search(condition))
    return True
