"""Outputs of models with tool calls, their parsing, and what it must yield."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.door.gateway.parsers import (
    CallArguments,
    CallBegun,
    OutputParser,
    Piece,
    Reasoning,
    Text,
    parser_for,
)
from inflight.door.gateway.parsers.tools import Schemas

Call = tuple[str, str]
"""Name and arguments as text."""

Write = Callable[[Sequence[tuple[str, Any]]], str]
"""Calls with their arguments as values -> the output of a model."""

SCHEMAS: Schemas = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "object"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Output:
    """All pieces of an output, each kind concatenated."""

    text: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


def parser(
    tool_format: str | None, reasoning: str | None = None, in_reasoning: bool = False
) -> OutputParser:
    return parser_for(tool_format, reasoning, SCHEMAS, in_reasoning)


def pieces(found: OutputParser, parts: Iterable[str]) -> list[Piece]:
    out: list[Piece] = []
    for part in parts:
        out += found.feed(part)
    return out + found.finish()


def joined(parsed: Sequence[Piece]) -> list[Piece]:
    """Adjacent pieces of a kind as one, which is what does not depend on the parts."""
    out: list[Piece] = []
    for piece in parsed:
        last = out[-1] if out else None
        if isinstance(piece, CallArguments) and isinstance(last, CallArguments):
            assert piece.index == last.index
            out[-1] = CallArguments(piece.index, last.text + piece.text)
        elif isinstance(piece, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + piece.text)
        else:
            out.append(piece)
    return out


def output(parsed: Sequence[Piece]) -> Output:
    """Check the order of pieces, and concatenate each kind."""
    calls: list[Call] = []
    for piece in parsed:
        if isinstance(piece, CallBegun):
            assert piece.index == len(calls)
            assert piece.name
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert piece.index == len(calls) - 1
            assert piece.text
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
        else:
            assert piece.text
    return Output(
        "".join(piece.text for piece in parsed if isinstance(piece, Text)),
        tuple(calls),
        "".join(piece.text for piece in parsed if isinstance(piece, Reasoning)),
    )


def parse(tool_format: str | None, text: str, **options: Any) -> Output:
    """Parse an output given as a whole; every split of it must give the same."""
    return output(pieces(parser(tool_format, **options), [text]))


def hermes(calls: Sequence[tuple[str, Any]]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def llama3_json(calls: Sequence[tuple[str, Any]]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": args}) for name, args in calls)


def json_list(calls: Sequence[tuple[str, Any]]) -> str:
    return json.dumps([{"name": name, "arguments": args} for name, args in calls])


def mistral(calls: Sequence[tuple[str, Any]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls)


def mistral_list(calls: Sequence[tuple[str, Any]]) -> str:
    return f"[TOOL_CALLS] {json_list(calls)}" if calls else ""


def deepseek_v3(calls: Sequence[tuple[str, Any]]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(args)}\n```"  # noqa: RUF001
        "<｜tool▁call▁end｜>"  # noqa: RUF001
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>" if calls else ""  # noqa: RUF001


def deepseek_v31(calls: Sequence[tuple[str, Any]]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(args)}<｜tool▁call▁end｜>"  # noqa: RUF001
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>" if calls else ""  # noqa: RUF001


def pythonic(calls: Sequence[tuple[str, Any]]) -> str:
    written = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})"
        for name, args in calls
    )
    return f"[{written}]" if calls else ""


def qwen3_coder(calls: Sequence[tuple[str, Any]]) -> str:
    def parameter(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f"<parameter={key}>\n{text}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        f"{''.join(parameter(*one) for one in args.items())}</function>\n</tool_call>"
        for name, args in calls
    )


def harmony(calls: Sequence[tuple[str, Any]]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(args)}<|call|>"
        for name, args in calls
    )


WRITERS: dict[str, Write] = {
    "harmony": harmony,
    "hermes": hermes,
    "llama3_json": llama3_json,
    "json": json_list,
    "mistral": mistral,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
}
"""How models write calls, by format."""
