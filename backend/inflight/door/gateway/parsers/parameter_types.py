"""Values written without quotes, as JSON of the types that a schema allows."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from inflight.door.gateway.parsers.json_scanner import is_json
from inflight.door.gateway.parsers.python_literal import literal_json
from inflight.door.gateway.parsers.tools import Schema

_MAX_REFERENCES = 8
_KINDS: dict[type, str] = {
    dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"
}  # fmt: skip


def types_of(key: str, schema: Schema) -> set[str]:
    """The JSON types that a schema allows for a property; {"string"} if it states none."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    return _types(found, schema, _MAX_REFERENCES) or {"string"}


def _types(found: Any, root: Schema, depth: int) -> set[str]:
    if not isinstance(found, dict) or depth == 0:
        return set()
    named = found.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {one for one in named if isinstance(one, str)}
    if "const" in found or isinstance(found.get("enum"), list):
        values = [found["const"]] if "const" in found else found["enum"]
        return {_KINDS.get(type(value), "null") for value in values}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/")):
        _, group, name = reference.split("/", 2)
        definitions = root.get(group)
        target = definitions.get(name) if isinstance(definitions, dict) else None
        return _types(target, root, depth - 1)
    union: set[str] = set()
    for keyword in ("anyOf", "oneOf", "allOf"):
        for branch in found.get(keyword) or ():
            union |= _types(branch, root, depth - 1)
    return union


def literal(text: str, types: Collection[str]) -> str:
    """A value as JSON: of one of the types if its text is, or else a string.

    Python's literals count, too, since chat templates show values in that form.
    """
    bare = text.strip()
    found = bare if is_json(bare) else literal_json(bare)
    if found is not None and _kind(found) & set(types):
        return found
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    return json.dumps(text, ensure_ascii=False)


def _kind(value: str) -> set[str]:
    """Names of the types of a JSON text; none for a string, whose quotes are part of the value."""
    if value[0] in '{["':
        return {"{": {"object"}, "[": {"array"}, '"': set()}[value[0]]
    if value in ("true", "false"):
        return {"boolean"}
    if value == "null":
        return {"null"}
    return {"number"} if set(value) & set(".eE") else {"number", "integer"}
