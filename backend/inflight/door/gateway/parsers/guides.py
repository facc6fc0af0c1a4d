"""Constraints of the output that guarantee tool calls.

An output that ends by itself is valid: its calls have known names, and arguments that satisfy the
schemas. One that reaches max_tokens may end inside of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.core.output_constraint import MAX_GUIDE_BYTES, Kind
from inflight.door.gateway.parsers import lark, reasoning
from inflight.door.gateway.parsers.formats import json_list
from inflight.door.gateway.parsers.formats.registry import find_format
from inflight.door.gateway.parsers.formats.tool_format import CallSyntax
from inflight.door.gateway.parsers.tools import Tool, check_schema, tools_of
from inflight.errors import RequestError, did_you_mean

ToolChoice = str | Mapping[str, Any]

_CHOICES = ("none", "auto", "required")
_ALLOWED = f'{", ".join(_CHOICES)}, or {{"type": "function", "function": {{"name": ...}}}}'


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint of a request's output.

    Attributes:
        guide_type: for guided_decoding_guide_type.
        guide: for guided_decoding_guide.
        tool_format: the format of calls in such an output.
        reasoning_format: of the reasoning before them; None if there cannot be any.
    """

    guide_type: Kind
    guide: str
    tool_format: str
    reasoning_format: str | None = None


def guide_for(
    tool_format: str | None,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice = "auto",
    parallel: bool = True,
    *,
    reasoning_format: str | None = None,
    in_reasoning: bool = False,
) -> Guide | None:
    """The constraint that a request's tools imply.

    required     one or more calls
    a function   one call of it
    auto         with a strict tool: text and calls, whose arguments satisfy the schemas of strict
                 tools; only for formats that mark the start of a call
    none         no constraint

    Args:
        tool_format: of the model; None for one that has none.
        tools: OpenAI's tool objects.
        choice: OpenAI's tool_choice.
        parallel: OpenAI's parallel_tool_calls: whether there may be several calls.
        reasoning_format, in_reasoning: as for `parser_for`. Reasoning may precede the calls, if
            its format is "think".

    Returns:
        None if there is nothing to enforce, or if it cannot be.

    Raises:
        RequestError: naming the tool or `tool_choice` and what is allowed.
        ConfigError: the format is unknown.
    """
    found = tools_of(tools)
    name = _chosen(choice, found)
    is_free = choice == "auto"
    if choice == "none" or not found or (is_free and not any(tool.strict for tool in found)):
        return None
    syntax = None if tool_format is None else find_format(tool_format).syntax
    if is_free and (syntax is None or not syntax.trigger):
        return None
    if syntax is None:
        tool_format, syntax = json_list.FORMAT.name, json_list.FORMAT.syntax
    assert tool_format is not None and syntax is not None
    called = [i for i, tool in enumerate(found) if name in (None, tool.name)]
    for i in called:
        check_schema(found[i], f"tools[{i}]")
    rules = _Rules(syntax, [found[i] for i in called], parallel and name is None)
    start = rules.free() if is_free else rules.calls()
    if reasoning_format != reasoning.FORMAT:
        reasoning_format = None
    elif in_reasoning or not is_free:
        start = f"{rules.reasoning(in_reasoning)} {start}"
    guide = rules.grammar(start)
    if len(guide.encode()) > MAX_GUIDE_BYTES:
        raise RequestError(
            f"their schemas have more than {MAX_GUIDE_BYTES} bytes; allowed: {MAX_GUIDE_BYTES}",
            "tools",
        )
    return Guide("ebnf_grammar", guide, tool_format, reasoning_format)


def _chosen(choice: ToolChoice, tools: Sequence[Tool]) -> str | None:
    """The function that the model has to call; None if any."""
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise RequestError(f"{choice!r} is unknown; allowed: {_ALLOWED}", "tool_choice")
        if choice == "required" and not tools:
            raise RequestError("required needs at least one tool in tools", "tool_choice")
        return None
    function = choice.get("function") if choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"not a function; allowed: {_ALLOWED}", "tool_choice")
    names = [tool.name for tool in tools]
    if name not in names:
        raise RequestError(
            f"{name!r} is not in tools{did_you_mean(name, names)}", "tool_choice.function.name"
        )
    return name


class _Rules:
    """The rules of a grammar.

    Args:
        syntax: of the calls.
        tools: that may be called.
        is_parallel: whether there may be several calls.
    """

    def __init__(self, syntax: CallSyntax, tools: Sequence[Tool], is_parallel: bool) -> None:
        self._syntax = syntax
        self._tools = tools
        self._is_parallel = is_parallel
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        names = [f"call_{i}" for i in range(len(self._tools))]
        return "\n".join(
            [
                "%llguidance {}",
                f"start: {start}",
                *self._rules,
                f"call: {' | '.join(names)}",
                *(
                    f"{name}: {self._call(self._syntax.before_name, tool)}"
                    for name, tool in zip(names, self._tools, strict=True)
                ),
                "",
            ]
        )

    def calls(self) -> str:
        """Calls and nothing else."""
        return " ".join([lark.literal(self._syntax.opening), f"call {self._more()}"])

    def free(self) -> str:
        """Text and calls. A lazy rule ends at the trigger, so that no text contains one."""
        syntax = self._syntax
        before_name = f"{syntax.opening}{syntax.before_name}".removeprefix(syntax.trigger)
        names = [f"first_{i}" for i in range(len(self._tools))]
        self._rules += [
            "text: /(.|\\n)*/",
            f"trigger[lazy]: /(.|\\n)*/ {lark.literal(syntax.trigger)}",
            # Without an opening, what follows a call is text or the next trigger.
            f"rest: ({' | '.join(names)}) {self._more() if syntax.opening else ''}",
            *(
                f"{name}: {self._call(before_name, tool)}"
                for name, tool in zip(names, self._tools, strict=True)
            ),
        ]
        return "((trigger rest)* text)" if self._is_parallel else "(text | trigger rest)"

    def reasoning(self, is_open: bool) -> str:
        """The reasoning before the calls."""
        self._rules.append(f"reasoning[lazy]: /(.|\\n)*/ {lark.literal(reasoning.CLOSE)}")
        end = '("\\n" | "\\n\\n")?'
        if is_open:
            return f"reasoning {end}"
        return f"({lark.literal(reasoning.OPEN)} reasoning {end})?"

    def _more(self) -> str:
        """What follows the first of a sequence of calls."""
        closing = lark.literal(self._syntax.closing)
        separator = lark.literal(self._syntax.separator)
        return f"({separator} call)* {closing}" if self._is_parallel else closing

    def _call(self, before_name: str, tool: Tool) -> str:
        before = lark.literal(f"{before_name}{tool.name}{self._syntax.before_arguments}")
        return f"{before} {lark.arguments(tool)} {lark.literal(self._syntax.after)}"
