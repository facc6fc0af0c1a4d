"""Tool calls as JSON objects: {"name": "f", "arguments": {...}}.

A call begins when its name and the start of its arguments have been read. Until then it is
withheld, and returned as text if it is malformed. From then on its arguments are passed on as they
arrive. If they turn out not to be JSON, the rest of the call is passed on unchanged: the client
gets what the model wrote, and its JSON parser refuses it, as with OpenAI's API.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from inflight.door.gateway.parsers.json_scanner import is_json, read_json
from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.writer import Writer

MAX_NAME = 256
"""Characters of a name or a key."""

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")
_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")


class JsonCall:
    """Reads one call.

    Args:
        reader: at the opening brace, recording.
        writer: gets the call.
        names: allowed; None for any.
        is_bare: only the text itself shows that it is a call. An object with other keys is none.
        end: marker before which a broken call ends; "" for the end of the output.

    Attributes:
        has_begun: whether the call has been passed on; if not, what was recorded is text.
        is_broken: it has begun, but its arguments were no JSON and have been read up to its end.
    """

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        names: Collection[str] | None,
        *,
        is_bare: bool = False,
        end: str = "",
    ) -> None:
        self.has_begun = False
        self.is_broken = False
        self._reader = reader
        self._writer = writer
        self._names = names
        self._is_bare = is_bare
        self._end = end
        self._name: str | None = None
        self._held: str | None = None  # arguments that precede the name

    def read(self) -> Steps[bool]:
        """Read the object; returns `has_begun`."""
        reader = self._reader
        if not (yield from reader.accept("{")):
            return False
        is_complete = yield from self._members()
        if is_complete and not self.has_begun and self._name is not None:
            self._begin(self._name)
            self._writer.arguments(self._held or "{}")
        if not is_complete and self.has_begun and not self.is_broken:
            yield from self._discard()
        return self.has_begun

    def _members(self) -> Steps[bool]:
        """Read up to and including the closing brace; False if there is none."""
        reader = self._reader
        while True:
            yield from reader.skip()
            if (yield from reader.accept("}")):
                return True
            key = yield from self._short_string()
            if key is None:
                return False
            yield from reader.skip()
            if not (yield from reader.accept(":")):
                return False
            yield from reader.skip()
            if not (yield from self._member(key)):
                return False
            yield from reader.skip()
            if (yield from reader.accept("}")):
                return True
            if not (yield from reader.accept(",")):
                return False

    def _member(self, key: str) -> Steps[bool]:
        if key == "name" and self._name is None:
            self._name = yield from self._short_string()
            is_known = self._names is None or self._name in self._names
            if self._name is None or not self._name or not is_known:
                return False
            if self._held is not None:
                self._begin(self._name)
                self._writer.arguments(self._held)
            return True
        if key in _ARGUMENTS and self._held is None and not self.has_begun:
            return (yield from self._arguments())
        if self._is_bare and not self.has_begun:
            return key in _OTHERS and (yield from self._short_string()) is not None
        return (yield from self._value([]))

    def _arguments(self) -> Steps[bool]:
        first = yield from self._reader.peek()
        if first == "{" and self._name is not None:
            self._begin(self._name)
            return (yield from self.stream())
        parts: list[str] = []
        if not (yield from self._value(parts)):
            return False
        held = "".join(parts)
        if first == '"':
            # A JSON text inside a string, as in the API.
            held = _decoded(held).strip()
        held = "{}" if held in ("null", "") else held
        if not held.startswith("{") or not is_json(held):
            return False
        self._held = held
        if self._name is not None:
            self._begin(self._name)
            self._writer.arguments(held)
        return True

    def begin(self, name: str) -> Steps[bool]:
        """Begin a call whose name was not in the object, and pass on its arguments.

        Returns:
            Whether they are complete.
        """
        self._begin(name)
        return (yield from self.stream())

    def stream(self) -> Steps[bool]:
        """Pass on the arguments, from their opening brace on; False if they are incomplete."""
        if (yield from read_json(self._reader, self._writer.arguments)):
            return True
        yield from self._break()
        return False

    def _begin(self, name: str) -> None:
        self._reader.recorded()
        self._writer.begin(name)
        self.has_begun = True

    def _break(self) -> Steps[None]:
        """Pass on the rest of the call as it is."""
        self.is_broken = True
        yield from read_rest(self._reader, self._writer, self._end)

    def _discard(self) -> Steps[None]:
        """Read the rest of a call whose arguments are complete."""
        if self._end:
            yield from self._reader.before((self._end,), lambda _: None)

    def _short_string(self) -> Steps[str | None]:
        """A string of at most MAX_NAME characters without escapes; None if there is none."""
        reader = self._reader
        if not (yield from reader.accept('"')):
            return None
        text = yield from reader.run(_STRING, MAX_NAME)
        return text if (yield from reader.accept('"')) else None

    def _value(self, parts: list[str]) -> Steps[bool]:
        """Read a JSON value into a list of its parts."""
        first = yield from self._reader.peek()
        if first and first in '{["':
            return (yield from read_json(self._reader, parts.append))
        word = yield from self._reader.run(_WORD, MAX_NAME)
        parts.append(word)
        return bool(word)


def read_rest(reader: Reader, writer: Writer, end: str) -> Steps[None]:
    """Pass on the rest of a broken call as arguments, up to its end marker, if it has one."""
    if end:
        yield from reader.before((end,), writer.arguments)
        return
    while (yield from reader.more()):
        writer.arguments(reader.advance(len(reader.text)))


def read_calls(
    reader: Reader, writer: Writer, names: Collection[str] | None, separators: re.Pattern[str]
) -> Steps[bool]:
    """Read calls in sequence, separated by characters that match `separators`.

    The reader records. What follows the last call is left unread, separators apart.

    Returns:
        Whether there was a call; if not, what was recorded is text.
    """
    num_calls = 0
    while (yield from reader.peek()) == "{":
        if num_calls:
            reader.record()
        call = JsonCall(reader, writer, names, is_bare=True)
        if not (yield from call.read()):
            if num_calls:
                writer.text(reader.recorded())
            break
        num_calls += 1
        yield from reader.skip(separators)
    return num_calls > 0


def _decoded(text: str) -> str:
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:  # an escape of half a surrogate pair
        return text
