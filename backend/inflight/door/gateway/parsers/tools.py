"""The functions that a request offers to the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.core import json_schema
from inflight.core.output_constraint import check_regex
from inflight.errors import RequestError

Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]
"""Name of each function -> JSON schema of its parameters."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function.

    Attributes:
        name: letters, digits, `_`, `-` and `.`.
        parameters: JSON schema of an object.
        strict: whether a call has to satisfy the schema even if the model is free to call.
    """

    name: str
    parameters: Schema
    strict: bool = False


def tools_of(objects: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Validate OpenAI's tool objects.

    Args:
        objects: {"type": "function", "function": {"name", "parameters", "strict"}}; without
            parameters a function takes none.

    Raises:
        RequestError: naming the tool and what is allowed.
    """
    tools = [_tool(one, f"tools[{i}]") for i, one in enumerate(objects)]
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(
                f"{name!r} is the name of another tool, too; each name is allowed once",
                f"tools[{i}].function.name",
            )
    return tools


def schemas_of(objects: Sequence[Mapping[str, Any]]) -> dict[str, Schema]:
    """Name -> schema of the parameters of OpenAI's tool objects.

    Raises:
        RequestError: as `tools_of`.
    """
    return {tool.name: tool.parameters for tool in tools_of(objects)}


def _tool(found: Any, where: str) -> Tool:
    if not isinstance(found, Mapping) or found.get("type") != "function":
        raise RequestError('not a function; allowed: {"type": "function", "function": ...}', where)
    function = found.get("function")
    if not isinstance(function, Mapping):
        raise RequestError("is missing; allowed: an object with name", f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            "allowed: 1 to 64 letters, digits, underscores, hyphens and dots",
            f"{where}.function.name",
        )
    parameters = _parameters(function.get("parameters"), f"{where}.function.parameters")
    return Tool(name, parameters, function.get("strict") is True)


def _parameters(schema: Any, where: str) -> Schema:
    if schema is None:
        return _NO_PARAMETERS
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise RequestError('allowed: a JSON schema of "type": "object"', where)
    return {"type": "object", **schema}


def check_schema(tool: Tool, where: str) -> None:
    """Refuse a schema that no grammar can be made of.

    Args:
        where: the tool's place in the request.

    Raises:
        RequestError: naming the place in the schema and what is allowed.
    """
    try:
        json_schema.check(dict(tool.parameters), check_regex)
    except ValueError as error:
        raise RequestError(str(error), f"{where}.function.parameters") from None
