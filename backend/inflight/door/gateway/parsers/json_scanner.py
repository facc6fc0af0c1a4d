"""Validates a JSON value (RFC 8259) while it arrives, in time linear in its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import msgspec

from inflight.door.gateway.parsers.reader import Reader, Steps

_State = Literal["value", "item", "first key", "key", "colon", "next", "string", "escape", "word"]

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class JsonScanner:
    """The state after a prefix of a JSON value.

    A control character inside a string, which models write although JSON requires an escape, is
    escaped. Nesting is not limited.

    Attributes:
        done: the value is complete.
        broken: the next character cannot continue it.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._state: _State = "value"
        self._open: list[str] = []
        self._is_key = False
        self._escape = ""
        self._word: list[str] = []

    def scan(self, text: str, at: int) -> tuple[str, int]:
        """Read on at a position.

        Returns:
            What was read, and the position after it: the end of `text` unless done or broken.
        """
        out: list[str] = []
        while at < len(text) and not self.done and not self.broken:
            if self._state == "string":
                at = self._string(text, at, out)
            elif self._state == "escape":
                at = self._escaped(text, at, out)
            elif self._state == "word":
                at = self._in_word(text, at, out)
            elif match := _SPACE.match(text, at):
                out.append(match[0])
                at = match.end()
            else:
                at = self._structural(text[at], at, out)
        return "".join(out), at

    def _structural(self, char: str, at: int, out: list[str]) -> int:
        state = self._state
        if state in ("value", "item") and char in '{["':
            self._begin(char)
        elif state in ("value", "item") and _WORD.match(char):
            self._state = "word"
            return at
        elif state in ("first key", "key") and char == '"':
            self._state, self._is_key = "string", True
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state == "next" and char == ",":
            self._state = "key" if self._open[-1] == "{" else "value"
        elif char in "]}" and self._may_close(char):
            self._close()
        else:
            self.broken = True
            return at
        out.append(char)
        return at + 1

    def _begin(self, char: str) -> None:
        if char == '"':
            self._state, self._is_key = "string", False
            return
        self._open.append(char)
        self._state = "first key" if char == "{" else "item"

    def _may_close(self, char: str) -> bool:
        if char == "}":
            return self._state == "first key" or (self._state == "next" and self._open[-1] == "{")
        return self._state == "item" or (self._state == "next" and self._open[-1] == "[")

    def _close(self) -> None:
        self._open.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._state = "next"
        self.done = not self._open

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if match := _PLAIN.match(text, at):
            out.append(match[0])
            return match.end()
        char = text[at]
        if char == "\\":
            self._state, self._escape = "escape", "\\"
            out.append(char)
        elif char == '"':
            out.append(char)
            if self._is_key:
                self._state = "colon"
            else:
                self._end_value()
        else:
            out.append(_CONTROL.get(char, f"\\u{ord(char):04x}"))
        return at + 1

    def _escaped(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if len(self._escape) == 1:
            is_allowed, is_last = char in '"\\/bfnrtu', char != "u"
        else:
            is_allowed, is_last = char in _HEX, len(self._escape) == 5
        if not is_allowed:
            self.broken = True
            return at
        self._escape += char
        if is_last:
            self._state = "string"
        out.append(char)
        return at + 1

    def _in_word(self, text: str, at: int, out: list[str]) -> int:
        if match := _WORD.match(text, at):
            self._word.append(match[0])
            out.append(match[0])
            return match.end()
        word = "".join(self._word)
        self._word.clear()
        if word in ("true", "false", "null") or _NUMBER.fullmatch(word):
            self._end_value()
        else:
            self.broken = True
        return at


def read_json(reader: Reader, emit: Callable[[str], None]) -> Steps[bool]:
    """Read a JSON object, array or string, and emit it while it arrives.

    Returns:
        Whether it is complete. If not, the next character does not fit, or the output ended.
    """
    scanner = JsonScanner()
    while not scanner.done and not scanner.broken and (yield from reader.more()):
        text, end = scanner.scan(reader.text, reader.at)
        reader.advance(end)
        emit(text)
    return scanner.done


def is_json(text: str) -> bool:
    """Whether a text is one whole value."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
