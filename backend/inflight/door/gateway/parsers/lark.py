"""Grammars in llguidance's variant of Lark's syntax.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from typing import Any

from inflight.door.gateway.parsers.tools import Schema, Tool

# Written between items and after keys: what models write, and no line of white space without end.
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Keywords without effect on what a schema allows.
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "$comment", "deprecated",
     "readOnly", "writeOnly", "strict")
)  # fmt: skip
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_VALUES = frozenset(("const", "enum", "required", "dependentRequired", "type"))


def literal(text: str) -> str:
    """A string of a grammar; nothing for ""."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def arguments(tool: Tool) -> str:
    """The arguments of a tool as an expression of a grammar.

    Of a tool that is not strict, keywords that the compiler does not support are ignored.
    """
    schema = _bare(tool.parameters)
    schema["x-guidance"] = _SEPARATORS | ({} if tool.strict else {"lenient": True})
    # "::=" would make it GBNF to the compiler.
    text = json.dumps(schema, ensure_ascii=False).replace("::=", "\\u003a:=")
    return f"%json {text}"


def _bare(schema: Schema) -> dict[str, Any]:
    """A schema without its annotations, which can be longer than the rest."""
    return {
        key: _named(value) if key in _NAMED else value if key in _VALUES else _inner(value)
        for key, value in schema.items()
        if key not in _ANNOTATIONS
    }


def _named(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _inner(schema) for name, schema in value.items()}


def _inner(value: Any) -> Any:
    if isinstance(value, dict):
        return _bare(value)
    return [_inner(one) for one in value] if isinstance(value, list) else value
