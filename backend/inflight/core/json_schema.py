"""Validation of a JSON schema with errors in the client's terms, before any compiler runs.

Refuses what can never be served: external references (nothing is ever fetched), endless nesting,
and minimum counts that no output can hold. Keywords themselves are left to llguidance.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 100
"""Nesting depth of objects and arrays; llguidance reads 128, some of which it uses itself."""

MAX_MINIMUM = 10_000
"""For minItems, minLength and minProperties: more would exceed any context."""

_MINIMA = ("minItems", "minLength", "minProperties")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords whose values are schemas: one, a list of them, or named ones.
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check(schema: Any, check_regex: Callable[[str], None]) -> None:
    """Refuse a schema that could never be served.

    Args:
        schema: decoded JSON.
        check_regex: raises ValueError for an expression that is not supported.

    Raises:
        ValueError: naming the place and what is allowed.
    """
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("the schema false matches nothing; allowed: an object, or true")
        return
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object, or true")
    _check_depth(schema)
    for node, place in _nodes(schema):
        _check_node(node, place, schema, check_regex)
    _check_recursion(schema)


def _check_depth(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _values(value)]
        if not level:
            return
    raise ValueError(f"nested too deeply; allowed: {MAX_DEPTH} objects and arrays")


def _values(value: Any) -> Iterator[Any]:
    """The objects and arrays in an object or an array."""
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, dict | list):
            yield child


def _nodes(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """All subschemas of a schema, with their locations."""
    stack: list[tuple[Any, str]] = [(schema, "")]
    while stack:
        node, place = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node, place
        for key in _ONE:
            stack.append((node.get(key), f"{place}/{key}"))
        for key in _LISTS:
            found = node.get(key)
            if isinstance(found, list):
                stack += [(child, f"{place}/{key}/{i}") for i, child in enumerate(found)]
        for key in _NAMED:
            found = node.get(key)
            if isinstance(found, dict):
                stack += [(child, f"{place}/{key}/{name}") for name, child in found.items()]


def _check_node(
    node: dict[str, Any],
    place: str,
    schema: dict[str, Any],
    check_regex: Callable[[str], None],
) -> None:
    for key in _REFERENCES:
        target = node.get(key)
        if isinstance(target, str) and not target.startswith("#") and not _is_own(target, schema):
            raise ValueError(
                f"{place}/{key}: {_short(target)} is outside of the schema, and nothing is "
                "fetched; allowed: references that start with #"
            )
    for key in _MINIMA:
        minimum = node.get(key)
        if isinstance(minimum, int | float) and minimum > MAX_MINIMUM:
            raise ValueError(
                f"{place}/{key}: {_short(minimum)} is more than an output can hold; "
                f"allowed: {MAX_MINIMUM}"
            )
    patterns = node.get("patternProperties")
    expressions = list(patterns) if isinstance(patterns, dict) else []
    if isinstance(node.get("pattern"), str):
        expressions.append(node["pattern"])
    for expression in expressions:
        try:
            check_regex(expression)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None


def _is_own(target: str, schema: dict[str, Any]) -> bool:
    own = schema.get("$id")
    return isinstance(own, str) and bool(own) and target.split("#")[0] == own.split("#")[0]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_recursion(schema: dict[str, Any]) -> None:
    """Reject unconditional recursion: a value that must contain another one of its own schema.

    Recursion with an exit (an optional property, an empty array, another branch) is allowed. Only
    required parts are followed, so no schema with a finite value is refused; an anyOf whose
    branches all recurse passes and runs into max_tokens.
    """
    done: set[int] = set()
    open_: set[int] = {id(schema)}
    stack: list[tuple[dict[str, Any], str, Iterator[tuple[Any, str]]]] = [
        (schema, "#", _needed(schema, schema, "#"))
    ]
    while stack:
        node, place, children = stack[-1]
        for child, child_place in children:
            if not isinstance(child, dict) or id(child) in done:
                continue
            if id(child) in open_:
                raise ValueError(
                    f"{place}: the recursion has no end: each value must contain another one; "
                    "leave a way out, such as a property that is not required"
                )
            open_.add(id(child))
            stack.append((child, child_place, _needed(child, schema, child_place)))
            break
        else:
            stack.pop()
            open_.discard(id(node))
            done.add(id(node))


def _needed(node: dict[str, Any], schema: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """The schemas that every value of `node` has to satisfy, itself or in a part of it."""
    target = node.get("$ref")
    if isinstance(target, str):
        yield _resolve(schema, target), target
    for key in ("allOf", "anyOf", "oneOf"):
        branches = node.get(key)
        if isinstance(branches, list) and (key == "allOf" or len(branches) == 1):
            for i, branch in enumerate(branches):
                yield branch, f"{place}/{key}/{i}"
    if node.get("type") in ("object", ["object"]):
        properties, required = node.get("properties"), node.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            for name in required:
                if isinstance(name, str) and name in properties:
                    yield properties[name], f"{place}/properties/{name}"
    if node.get("type") in ("array", ["array"]):
        minimum, first = node.get("minItems"), node.get("prefixItems")
        if isinstance(minimum, int) and minimum >= 1 and not first:
            yield node.get("items"), f"{place}/items"


def _resolve(schema: dict[str, Any], target: str) -> Any:
    """The target of a JSON pointer such as #/$defs/node; None for one that is not followed."""
    _, _, pointer = target.partition("#")
    found: Any = schema
    for part in urllib.parse.unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdigit() and len(key) < 6 and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    # An anchor (#name) is not a path.
    return found if pointer == "" or pointer.startswith("/") else None
