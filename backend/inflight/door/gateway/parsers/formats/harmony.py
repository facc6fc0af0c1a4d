"""<|channel|>NAME<|message|>TEXT<|end|>, of gpt-oss: an output is a sequence of messages.

    <|channel|>analysis<|message|>Hm.<|end|>                                        reasoning
    <|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>            content
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>Yes.<|return|>                     content

A header is what precedes <|message|>. Its recipient, in the part of the role or of the channel,
decides first: `functions.NAME`, or the name of a function in `tools`, makes a call. Another one
means nothing. Otherwise the channel decides: `analysis` is reasoning, and any other is content.

No output is an error, and no marker is ever part of the content, the reasoning or the arguments:

    text outside of messages        content
    a message without an end        ends where the next header begins
    a header without <|message|>    dropped if it has header's words alone; else text of the message
                                    that it interrupts, or content
    other markers inside of a text  dropped; they end a call, and what follows is content

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from inflight.door.gateway.parsers.formats.tool_format import ToolFormat
from inflight.door.gateway.parsers.json_scanner import JsonScanner
from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.tools import Schemas
from inflight.door.gateway.parsers.writer import Writer

MAX_HEADER = 512
"""Characters of a header before its <|message|>."""

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_HEADERS = (_START, _CHANNEL)
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (*_HEADERS, _CONSTRAIN, _MESSAGE, *_ENDS)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_TO = "to="
_RECIPIENT = re.compile(r"(?<!\S)to=\s*([^\s<]+)")
_CHANNEL_NAME = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w+)")
_PLAIN = re.compile(r"[^<]+")
_FUNCTIONS = "functions."
_WORDS = ("assistant", "analysis", "commentary", "final", "json")
_PARTS = (*_WORDS, _TO, *_MARKERS)
# Models often close too many braces.
_CLOSING = re.compile(r"[\s}]*")


@dataclass(frozen=True, slots=True)
class _Header:
    """What precedes the text of a message.

    Attributes:
        text: as it was written.
        end: the marker after it: <|message|> if a message follows; one that ends messages; "" at
            the end of the output, or if the header is too long.
    """

    text: str
    end: str

    def function(self, schemas: Schemas) -> str:
        """The function that is called; "" for none."""
        found = _RECIPIENT.findall(_MARKER.sub(" ", self.text))
        name = found[-1] if found else ""
        if name.startswith(_FUNCTIONS) or name in schemas:
            return name.removeprefix(_FUNCTIONS)
        return ""

    @property
    def channel(self) -> str:
        """Name of the channel; of several, the last one."""
        found = _CHANNEL_NAME.findall(self.text)
        return found[-1] if found else ""

    @property
    def plain(self) -> str:
        """The text without markers; "" if it has header's words alone."""
        words = _MARKER.sub(" ", self.text).replace("<", " <").split()
        if not self.end and words and any(one.startswith(words[-1]) for one in _PARTS):
            words.pop()  # cut
        is_header = all(word in _WORDS or word.startswith(_TO) for word in words)
        return "" if is_header else _MARKER.sub("", self.text)


class _Kind:
    """Texts of a kind, content or reasoning; a line break separates those of two messages."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._has_text = False
        self._is_new = False

    def begin(self) -> None:
        self._is_new = self._has_text

    def emit(self, text: str) -> None:
        if self._is_new and text:
            self._write("\n")
            self._is_new = False
        self._has_text = self._has_text or bool(text)
        self._write(text)


class _Arguments:
    """The text of a call; further braces after the object are dropped."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._scanner = JsonScanner()
        self._has_text = False
        self._held = ""  # after the object: dropped if nothing else follows

    def emit(self, text: str) -> None:
        at = 0
        if not self._has_text:
            text = text.lstrip()
            self._has_text = bool(text)
        if not self._scanner.done and not self._scanner.broken:
            scanned, at = self._scanner.scan(text, 0)
            self._writer.arguments(scanned)
        rest = text[at:]
        if self._scanner.done:
            self._held += rest
            if _CLOSING.fullmatch(rest):
                return
            self._scanner.done, self._scanner.broken = False, True
            rest, self._held = self._held, ""
        self._writer.arguments(rest)

    def end(self) -> None:
        if not self._has_text:
            self._writer.arguments("{}")


def read(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[None]:
    """Read an output.

    Args:
        schemas: without any, there are no calls: the channels alone decide.
    """
    content, reasoning = _Kind(writer.text), _Kind(writer.reasoning)
    current = content
    header = yield from _opening(reader)
    if header is None:
        content.emit(reader.recorded())
    while True:
        if header is None:
            marker = yield from reader.before(_MARKERS, current.emit)
            if not marker:
                return
            if marker not in _HEADERS:
                reader.advance(reader.at + len(marker))
                current = content if marker in _ENDS else current
                continue
            header = yield from _header(reader)
        if header.end != _MESSAGE:
            current.emit(header.plain)
            current = content if header.end else current
        elif schemas and (name := header.function(schemas)):
            yield from _call(reader, writer, name)
            current = content
        else:
            current = reasoning if header.channel == "analysis" else content
            current.begin()
        header = None


def _opening(reader: Reader) -> Steps[_Header | None]:
    """Read the header of an output whose prompt ends with the role: it may go on with a recipient.

    Returns:
        None if there is none; what was read is recorded then.
    """
    reader.record()
    yield from reader.skip()
    if not (yield from reader.accept(_TO)):
        return None
    return (yield from _header(reader, reader.recorded()))


def _header(reader: Reader, text: str = "") -> Steps[_Header]:
    """Read a header, and the marker that ends it.

    Args:
        text: of it, which has been read.
    """
    while len(text) < MAX_HEADER:
        text += yield from reader.run(_PLAIN, MAX_HEADER - len(text))
        marker = ""
        for one in _MARKERS:
            if (yield from reader.accept(one)):
                marker = one
                break
        if marker == _MESSAGE or marker in _ENDS:
            return _Header(text, marker)
        if not marker and not (yield from reader.more()):
            break
        text += marker or reader.advance(reader.at + 1)
    return _Header(text, "")


def _call(reader: Reader, writer: Writer, name: str) -> Steps[None]:
    """Read the text of a call, up to the next marker."""
    writer.begin(name)
    arguments = _Arguments(writer)
    yield from reader.before(_MARKERS, arguments.emit)
    arguments.end()


FORMAT = ToolFormat(
    name="harmony",
    read=read,
    templates=((_CHANNEL,),),
    markers=_MARKERS,
    is_whole=True,
)
