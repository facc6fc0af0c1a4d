"""Seeded JSON schemas, as varied as clients' are, and each satisfiable."""

from __future__ import annotations

import random
import string
from typing import Any

_PATTERNS = (
    "^[a-z]{2,8}$",
    "^[0-9]{5}(-[0-9]{4})?$",
    "^(north|south|east|west)$",
    r"^\d{4}-\d{2}-\d{2}$",
    "^[A-Z][a-z]+ [A-Z][a-z]+$",
    "^#[0-9a-fA-F]{6}$",
    "^v[0-9]+(\\.[0-9]+){2}$",
)
_WORDS = ("red", "green", "blue", "Ærø", "naïve", "日本", "a b", 'say "x"', "back\\slash", "", "😀")

_DEFINITIONS = {
    "list": {
        "type": "object",
        "properties": {
            "value": {"type": "integer"},
            "next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]},
        },
        "required": ["value"],
        "additionalProperties": False,
    },
    "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 3},
}


def schema(seed: int) -> dict[str, Any]:
    """The schema of a seed: an object at the top, as most are, in one of ten something else."""
    rng = random.Random(f"schema {seed}")
    found = _object(rng, 0) if rng.random() < 0.9 else _any(rng, 0)
    return found | {"$defs": _DEFINITIONS} if "$ref" in repr(found) else found


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _integer, _number, _enum, _const, _boolean, _null]
    inner = [_object, _array, _tuple, _any_of, _reference, _map]
    kinds = leaves if depth >= 3 or rng.random() < 0.6 else inner
    return rng.choice(kinds)(rng, depth)


def _name(rng: random.Random) -> str:
    return rng.choice(["id", "name", "größe", "a-b", "x_1", "$v", "with space"]) + "".join(
        rng.choices(string.ascii_letters, k=rng.randint(0, 4))
    )


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = list(dict.fromkeys(_name(rng) for _ in range(rng.randint(0, 5))))
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    if rng.random() < 0.8:
        found["additionalProperties"] = False
    elif rng.random() < 0.5:
        found["additionalProperties"] = _integer(rng, depth)
    return found


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": _any(rng, depth + 1)}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    found = {"type": "array", "items": _any(rng, depth + 1), "maxItems": low + rng.randint(0, 3)}
    return found | ({"minItems": low} if low else {})


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_any(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    """Recursion with a way out; the definition goes to the top of the schema, see `schema`."""
    return {"$ref": f"#/$defs/{rng.choice(['list', 'tree'])}"}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    match rng.randint(0, 3):
        case 0:
            found["pattern"] = rng.choice(_PATTERNS)
        case 1:
            low = rng.randint(0, 5)
            found |= {"minLength": low, "maxLength": low + rng.randint(0, 20)}
        case 2:
            found["format"] = rng.choice(["date", "uuid", "ipv4", "email", "time"])
    return found


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    found: dict[str, Any] = {"type": "integer"}
    if rng.random() < 0.7:
        found[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.7:
        found[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(2, 5000)
    return found


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = round(rng.uniform(-100, 100), rng.randint(0, 3))
    found: dict[str, Any] = {"type": "number"}
    if rng.random() < 0.7:
        found["minimum"] = low
        found["maximum"] = round(low + rng.uniform(1, 100), 3)
    return found


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [*rng.sample(_WORDS, rng.randint(1, 5)), rng.randint(-9, 9), None, True]
    return {"enum": rng.sample(values, rng.randint(1, len(values)))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([*_WORDS, 0, -1.5, False, ["a", 1], {"k": "v"}])}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}
