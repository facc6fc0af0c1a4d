"""Python literals converted to JSON while they arrive, in time linear in their text.

Strings, numbers, True, False, None, lists, tuples (as arrays) and dicts with string keys; JSON's
true, false and null, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial

from inflight.door.gateway.parsers.reader import Reader, Steps

MAX_DEPTH = 64
"""Nested lists and dicts."""

_MAX_WORD = 512
_WORD = re.compile(r"[-+.\w]+")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NAMES = {"True": "true", "False": "false", "None": "null"}
_NAMES |= {name: name for name in ("true", "false", "null")}
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
# Escape -> its value, and the number of hexadecimal digits of others.
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a",
            "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}  # fmt: skip
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")
_OCTAL = re.compile(r"[0-7]+")

Emit = Callable[[str], None]


def read_literal(reader: Reader, emit: Emit, depth: int = 0) -> Steps[bool]:
    """Read a literal and emit it as JSON.

    Returns:
        Whether it is complete. If not, the next character does not fit, or the output ended.
    """
    first = yield from reader.peek()
    if first and first in "'\"":
        reader.advance(reader.at + 1)
        return (yield from _string(reader, emit, first))
    if first and first in _CLOSING:
        if depth == MAX_DEPTH:
            return False
        reader.advance(reader.at + 1)
        return (yield from _items(reader, emit, first, depth + 1))
    # Not read if it is no word: it is then part of what does not fit.
    word = yield from reader.run(_WORD, _MAX_WORD)
    found = _NAMES.get(word) or number(word)
    emit(found or word)
    return found is not None


def literal_json(text: str) -> str | None:
    """A complete literal as JSON; None if it is none."""
    reader = Reader()
    reader.append(text)
    reader.ended = True
    parts: list[str] = []
    steps = read_literal(reader, parts.append)
    try:
        next(steps)
    except StopIteration as stop:
        return "".join(parts) if stop.value and reader.at == len(text) else None
    return None


def number(text: str) -> str | None:
    """A number of JSON or Python as JSON; None if it is neither, or not finite."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    if not text or text[0] not in "+-.0123456789":
        return None
    for convert in (partial(int, base=0), float):
        try:
            value = convert(text)
        except ValueError:
            continue
        return json.dumps(value) if math.isfinite(value) else None
    return None


def _string(reader: Reader, emit: Emit, quote: str) -> Steps[bool]:
    """Read a string after its opening quote."""
    emit('"')
    while (yield from reader.more()):
        match = _PLAIN[quote].match(reader.text, reader.at)
        if match is not None:
            emit(_escaped(reader.advance(match.end())))
        elif (yield from reader.accept(quote)):
            emit('"')
            return True
        else:
            reader.advance(reader.at + 1)
            emit(_escaped((yield from _escape(reader))))
    return False


def _escape(reader: Reader) -> Steps[str]:
    """Read an escape after its backslash. An unknown one is the text itself, as in Python."""
    char = yield from reader.peek()
    if not char:
        return "\\"
    reader.advance(reader.at + 1)
    if char in _ESCAPES:
        return _ESCAPES[char]
    if _OCTAL.match(char):
        digits = yield from reader.run(_OCTAL, 2)
        return chr(int(char + digits, 8))
    if char not in _DIGITS:
        return f"\\{char}"
    digits = yield from reader.run(_HEX, _DIGITS[char])
    if len(digits) < _DIGITS[char] or int(digits, 16) > 0x10FFFF:
        return f"\\{char}{digits}"
    point = int(digits, 16)
    if 0xD800 <= point < 0xDC00 and (yield from reader.accept("\\u")):
        low = yield from reader.run(_HEX, 4)
        if len(low) == 4 and 0xDC00 <= int(low, 16) < 0xE000:
            return chr(0x10000 + ((point - 0xD800) << 10) + int(low, 16) - 0xDC00)
        return f"\ufffd\\u{low}"
    return "\ufffd" if 0xD800 <= point < 0xE000 else chr(point)


def _items(reader: Reader, emit: Emit, opening: str, depth: int) -> Steps[bool]:
    """Read the items of a list, tuple or dict after its opening bracket."""
    is_dict = opening == "{"
    emit("{" if is_dict else "[")
    num_items = 0
    while True:
        yield from reader.skip()
        if (yield from reader.accept(_CLOSING[opening])):
            emit("}" if is_dict else "]")
            return True
        if num_items:
            if not (yield from reader.accept(",")):
                return False
            yield from reader.skip()
            if (yield from reader.accept(_CLOSING[opening])):
                emit("}" if is_dict else "]")
                return True
            emit(", ")
        if is_dict and not (yield from _key(reader, emit)):
            return False
        if not (yield from read_literal(reader, emit, depth)):
            return False
        num_items += 1


def _key(reader: Reader, emit: Emit) -> Steps[bool]:
    """Read a key and its colon."""
    quote = yield from reader.peek()
    if not quote or quote not in "'\"":
        return False
    reader.advance(reader.at + 1)
    if not (yield from _string(reader, emit, quote)):
        return False
    yield from reader.skip()
    if not (yield from reader.accept(":")):
        return False
    emit(": ")
    yield from reader.skip()
    return True


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
